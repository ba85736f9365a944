/**
 * The token, from the fragment of a link (`/#token=...`), which is not sent to any server.
 *
 * It is moved from the address bar to the tab's session storage. A tab without a token requests it
 * from the other tabs of the same origin.
 */
const KEY = "token";
const tabs = new BroadcastChannel("tugline");

/** `role` is the role of the token, known after the first answer of the server. */
export const auth = $state({ token: take() ?? sessionStorage.getItem(KEY) ?? "", role: "", needed: "" });

/** Move a token from the address bar to the tab's storage; null if there is none. */
function take(): string | null {
  const given = new URLSearchParams(location.hash.slice(1)).get(KEY);
  if (given !== null) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return given;
}

// A link that is opened in a tab of the same server does not load the page again.
addEventListener("hashchange", () => {
  const given = take();
  if (given !== null) setToken(given);
});

export function setToken(token: string): void {
  sessionStorage.setItem(KEY, token);
  auth.token = token;
  auth.role = "";
  auth.needed = "";
}

/** Show the form for a token, with the reason. */
export function requireToken(reason: string): void {
  auth.needed = reason;
}

tabs.onmessage = ({ data }: MessageEvent<{ token?: string }>) => {
  if (data.token === undefined) {
    if (auth.token && !auth.needed) tabs.postMessage({ token: auth.token });
  } else if (!auth.token) setToken(data.token);
};
if (!auth.token) tabs.postMessage({});
