// Text search in the turns of a session, and in the tokens of a trace.

import type { Turn } from "./recording";

/** Matches in the tokens of a trace that are found at most. */
const MOST = 20_000;

/** A text in lower case; it keeps its length, so that positions stay the same. */
export function lower(text: string): string {
  const whole = text.toLowerCase();
  if (whole.length === text.length) return whole;
  const chars = [...text].map((char) => {
    const low = char.toLowerCase();
    return low.length === char.length ? low : char;
  });
  return chars.join("");
}

export interface Part {
  text: string;
  match: boolean;
}

/** Split a text at the matches of a term in lower case. */
export function splitAtMatches(text: string, term: string): Part[] {
  if (!term) return [{ text, match: false }];
  const parts: Part[] = [];
  const low = lower(text);
  let at = 0;
  for (let hit = low.indexOf(term); hit >= 0; hit = low.indexOf(term, at)) {
    if (at < hit) parts.push({ text: text.slice(at, hit), match: false });
    at = hit + term.length;
    parts.push({ text: text.slice(hit, at), match: true });
  }
  parts.push({ text: text.slice(at), match: false });
  return parts;
}

/** The calls with a term, in lower case, in a message of the request or in the answer. */
export function findTurns(turns: readonly Turn[], term: string): number[] {
  const holds = ({ detail: { messages, answer } }: Turn): boolean =>
    [...messages, ...(answer ? [answer] : [])]
      .flatMap(({ content, reasoning, tool_calls }) => [
        content ?? "",
        reasoning ?? "",
        ...(tool_calls ?? []).map((tool) => `${tool.name}(${tool.arguments})`),
      ])
      .some((text) => lower(text).includes(term));
  return turns.filter(holds).map((turn) => turn.call);
}

export interface TokenMatches {
  /** First token of each match. */
  places: number[];
  /** 1 for each token with a part of a match. */
  marked: Uint8Array;
}

/** Find a term, in lower case, in the joined texts of tokens. */
export function findTokens(pieces: readonly string[], term: string): TokenMatches {
  const starts = new Int32Array(pieces.length + 1);
  pieces.forEach((piece, k) => (starts[k + 1] = starts[k]! + piece.length));
  const text = lower(pieces.join(""));
  const marked = new Uint8Array(pieces.length);
  const places: number[] = [];
  let k = 0;
  for (let at = text.indexOf(term); at >= 0 && places.length < MOST; at = text.indexOf(term, at + term.length)) {
    while (starts[k + 1]! <= at) k++;
    places.push(k);
    for (let i = k; i < pieces.length && starts[i]! < at + term.length; i++) marked[i] = 1;
  }
  return { places, marked };
}
