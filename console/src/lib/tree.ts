// The order of traces in their tree.

import type { Trace } from "./trajectory";

/** A row of the tree. */
export interface Branch {
  index: number;
  trace: Trace;
  /** Steps to the right. */
  depth: number;
  /** Depths at which a line continues to a lower row. */
  through: ReadonlySet<number>;
}

/**
 * Arrange traces below their parents, forks before the trace that continues its parent, which has
 * the parent's depth.
 */
export function arrangeTraces(traces: readonly Trace[]): Branch[] {
  const children = new Map<number | null, number[]>();
  traces.forEach(({ parent }, index) => {
    const above = parent !== null && parent < index ? parent : null;
    const known = children.get(above);
    if (known) known.push(index);
    else children.set(above, [index]);
  });
  const continues = (index: number): boolean => {
    const { parent, shared } = traces[index]!;
    return parent !== null && shared === traces[parent]!.ids.length;
  };
  const order: { index: number; depth: number }[] = [];
  const waiting = (children.get(null) ?? []).map((index) => ({ index, depth: 0 })).reverse();
  for (let next = waiting.pop(); next; next = waiting.pop()) {
    const { index, depth } = next;
    order.push(next);
    const below = children.get(index) ?? [];
    const forks = below.filter((child) => !continues(child));
    const ordered = [...forks, ...below.filter(continues)].reverse();
    for (const child of ordered) waiting.push({ index: child, depth: depth + (continues(child) ? 0 : 1) });
  }
  const branches: Branch[] = [];
  let below = new Set<number>();
  for (const { index, depth } of order.reverse()) {
    const through = new Set([...below].filter((each) => each <= depth));
    branches.push({ index, depth, trace: traces[index]!, through });
    below = new Set([...through].filter((each) => each < depth)).add(depth);
  }
  return branches.reverse();
}
