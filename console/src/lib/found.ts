/** Why a search has found a session: the server finds words by their beginning. */
import type { Result, Session } from "./api";

/** The longest word that is found as a whole only. */
const WHOLE = 2;

const split = (text: string): string[] => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];

/** Where the words that were searched for stand; empty, if the id itself shows it. */
export function foundIn(q: string, session: Session, result: Result | undefined): string {
  if (!q || session.id.includes(q)) return "";
  const wanted = split(q);
  const holds = (text: string): boolean => {
    const words = split(text);
    return wanted.every((one) =>
      words.some((word) => (one.length > WHOLE ? word.startsWith(one) : word === one)),
    );
  };
  const note = session.note ?? "";
  const message = result?.failure?.message ?? "";
  if (holds(note)) return "note";
  if (holds(message)) return "error";
  return holds(`${note} ${message}`) ? "note and error" : "task";
}
