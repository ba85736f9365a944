/** The address holds all state of the console; pages read it here and change it with `go`. */
export const place = $state(read());

function read(): { path: string; query: Record<string, string> } {
  return {
    path: location.pathname,
    query: Object.fromEntries(new URLSearchParams(location.search)),
  };
}

export function go(address: string, { replace = false } = {}): void {
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  Object.assign(place, read());
}

/** Change parameters of the query; an empty value removes one. */
export function setQuery(changes: Record<string, string>, { replace = true } = {}): void {
  go(address(place.path, { ...place.query, ...changes }), { replace });
}

export function address(path: string, query: Record<string, string> = {}): string {
  const given = Object.entries(query).filter(([, value]) => value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Follow links within the console without a reload; the browser follows all others. */
function follow(event: MouseEvent): void {
  const link = (event.target as Element).closest?.("a");
  const plain = event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey);
  if (!link || !plain || event.defaultPrevented) return;
  if (link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  event.preventDefault();
  go(link.pathname + link.search);
}

addEventListener("popstate", () => Object.assign(place, read()));
addEventListener("click", follow);
