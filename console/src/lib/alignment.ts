// Where two traces diverge, and how their answers differ.

import { listCalls, type CallTokens, type Trace } from "./trajectory";

type Ids = ArrayLike<number>;

/** The first position with different ids; the shorter length if one begins with the other. */
export function firstDivergence(a: Ids, b: Ids): number {
  const most = Math.min(a.length, b.length);
  let k = 0;
  while (k < most && a[k] === b[k]) k++;
  return k;
}

/** For both sides: 1 for each token of the longest common subsequence. */
export interface Difference {
  a: Uint8Array;
  b: Uint8Array;
  common: number;
}

/** Largest table for a token-by-token comparison; a longer middle counts as different. */
const MOST = 4_000_000;

/** Compare two answers: common ends first, then the longest common subsequence of the middle. */
export function diffTokens(a: Ids, b: Ids): Difference {
  const result: Difference = { a: new Uint8Array(a.length), b: new Uint8Array(b.length), common: 0 };
  const keep = (i: number, j: number) => {
    result.a[i] = 1;
    result.b[j] = 1;
    result.common++;
  };
  const start = firstDivergence(a, b);
  for (let k = 0; k < start; k++) keep(k, k);
  let [m, n] = [a.length, b.length];
  while (m > start && n > start && a[m - 1] === b[n - 1]) keep(--m, --n);
  const [rows, columns] = [m - start, n - start];
  if ((rows + 1) * (columns + 1) > MOST) return result;
  const width = columns + 1;
  const table = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      const same = a[start + i] === b[start + j];
      table[i * width + j] = same
        ? table[(i + 1) * width + j + 1]! + 1
        : Math.max(table[(i + 1) * width + j]!, table[i * width + j + 1]!);
    }
  }
  for (let i = 0, j = 0; i < rows && j < columns; ) {
    if (a[start + i] === b[start + j]) keep(start + i++, start + j++);
    else if (table[(i + 1) * width + j]! >= table[i * width + j + 1]!) i++;
    else j++;
  }
  return result;
}

/** The n-th answers of two traces. */
export interface TurnPair {
  turn: number;
  a: CallTokens | null;
  b: CallTokens | null;
  same: boolean;
}

/** Pair the answers of two traces in their order. */
export function alignTurns(a: Trace, b: Trace): TurnPair[] {
  const [first, second] = [listCalls([a]), listCalls([b])];
  return Array.from({ length: Math.max(first.length, second.length) }, (_, turn) => {
    const pair = { turn, a: first[turn] ?? null, b: second[turn] ?? null };
    const same =
      pair.a !== null &&
      pair.b !== null &&
      isEqual(idsOf(a, pair.a), idsOf(b, pair.b));
    return { ...pair, same };
  });
}

/** The ids of an answer. */
export function idsOf(trace: Trace, call: CallTokens): Int32Array {
  return trace.ids.subarray(call.start, call.end);
}

function isEqual(a: Ids, b: Ids): boolean {
  return a.length === b.length && firstDivergence(a, b) === a.length;
}
