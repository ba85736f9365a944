/** Keys of one letter, unless somebody types text. */
export function isTyping(event: KeyboardEvent): boolean {
  const at = event.target as HTMLElement;
  return at.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName);
}

/** Run what stands beside a key while the caller's effect lasts; false leaves the key to others. */
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
