// Exponential moving averages of lines, as TensorBoard and Weights & Biases draw them.

import type { Point } from "./chart";

export const WEIGHTS = [0, 0.6, 0.8, 0.9, 0.95, 0.99];

/** The weight of an address; 0 for none, or an unknown one. */
export const readWeight = (given: string | undefined): number =>
  WEIGHTS.find((weight) => String(weight) === given) ?? 0;

/** The average of each point and those before it, without a bias to 0 at the begin. */
export function smooth(points: readonly Point[], weight: number): Point[] {
  let last = 0;
  let debias = 1;
  return points.map(({ at, value }) => {
    last = weight * last + (1 - weight) * value;
    debias *= weight;
    return { at, value: last / (1 - debias) };
  });
}
