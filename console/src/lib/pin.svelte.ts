/** The session that others are compared with. */
const KEY = "pinned";

export const pin = $state({ session: localStorage.getItem(KEY) ?? "" });

export function setPin(session: string): void {
  pin.session = session;
  localStorage.setItem(KEY, session);
}
