/** A key, and what it does. */
export type KeyHelp = [key: string, does: string];

/** The keys of the viewer of a session. */
export const VIEWER_KEYS: readonly KeyHelp[] = [
  ["j / k", "next and previous turn, or row of a table"],
  ["[ / ]", "previous and next turn or row; in the tokens: previous and next answer"],
  ["↑ ↓ ← →", "move in the focused list or tokens"],
  ["t, 1, 2 …", "next colouring of tokens, or the one with this number"],
  ["f", "fold or unfold contexts"],
  ["v", "full height for the tokens, for the conversation, or for neither"],
];

/** Single-key shortcuts, inactive while the user types text. */
export function isTyping(event: KeyboardEvent): boolean {
  const at = event.target as HTMLElement;
  return at.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName);
}

/** Bind keys to functions until the returned function is called; a function returns false to ignore a key. */
export function onKeys(keys: Record<string, (event: KeyboardEvent) => unknown>): () => void {
  const press = (event: KeyboardEvent) => {
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    if (event.defaultPrevented || modified || isTyping(event)) return;
    const run = Object.hasOwn(keys, event.key) ? keys[event.key] : undefined;
    if (run === undefined || document.querySelector("dialog[open]")) return;
    if (run(event) !== false) event.preventDefault();
  };
  addEventListener("keydown", press);
  return () => removeEventListener("keydown", press);
}
