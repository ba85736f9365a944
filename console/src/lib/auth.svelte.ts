/**
 * The token, which a link brings in its fragment (`/#token=...`; no server sees that).
 *
 * It stays in this tab's storage and leaves the address bar at once. A tab that has none asks the
 * other tabs of the same origin.
 */
const KEY = "token";
const tabs = new BroadcastChannel("tugline");

/** `role` is what the token allows, once the server has said so. */
export const auth = $state({ token: take(), role: "", needed: "" });

function take(): string {
  const given = new URLSearchParams(location.hash.slice(1)).get(KEY);
  if (given !== null) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

export function setToken(token: string): void {
  sessionStorage.setItem(KEY, token);
  auth.token = token;
  auth.role = "";
  auth.needed = "";
}

/** Show the form that asks for a token, and say what it is needed for. */
export function requireToken(reason: string): void {
  auth.needed = reason;
}

tabs.onmessage = ({ data }: MessageEvent<{ token?: string }>) => {
  if (data.token === undefined) {
    if (auth.token && !auth.needed) tabs.postMessage({ token: auth.token });
  } else if (!auth.token) setToken(data.token);
};
if (!auth.token) tabs.postMessage({});
