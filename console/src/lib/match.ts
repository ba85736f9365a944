/** Why a session matches a search; the server matches prefixes of words. */
import type { Result, Session } from "./api";

/** Longest search word that only matches whole words. */
const WHOLE = 2;

const split = (text: string): string[] => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];

/** The text of a session that matches a search; empty if its id matches. */
export function findMatch(q: string, session: Session, result: Result | undefined): string {
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
