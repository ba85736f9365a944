// Types of charts, and the ticks and numbers of their axes.

export interface Point {
  at: number;
  value: number;
  low?: number;
  high?: number;
}

export interface Line {
  label: string;
  /** Name of a theme colour, without the dashes. */
  colour: string;
  /** Pattern of dashes, to tell lines apart without their colour. */
  dash?: string;
  /** In ascending order of `at`. */
  points: Point[];
}

/** A mark on the horizontal axis. */
export interface Mark {
  at: number;
  kind: "alarm" | "resumed" | "evaluation";
  text: string;
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

/** A number with three significant digits; commas separate thousands, and only whole numbers have any. */
export function showNumber(value: number): string {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1_000_000) return compact.format(value);
  if (size >= 1000) return grouped.format(value);
  if (Number.isInteger(value)) return value.toFixed(0);
  return size < 0.001 ? value.toExponential(1) : value.toPrecision(3);
}

/** The largest of 1, 2 and 5 times a power of ten that divides `length` into at least `parts`. */
function step(length: number, parts: number): number {
  const power = 10 ** Math.floor(Math.log10(length / parts));
  return [5, 2, 1].find((times) => length / (times * power) >= parts)! * power;
}

/** Round numbers from `low` to `high`, at least three unless `whole` numbers are fewer. */
export function makeTicks(low: number, high: number, whole = false): number[] {
  if (!(high > low)) return [low];
  const by = whole ? Math.max(1, step(high - low, 3)) : step(high - low, 3);
  const first = Math.ceil(low / by - 1e-9);
  const last = Math.floor(high / by + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * by).toPrecision(12)));
}

/** The range of numbers up to the ticks around it, for a vertical axis. */
export function round(low: number, high: number): [number, number] {
  const by = step(high - low, 3);
  return [Math.floor(low / by + 1e-9) * by, Math.ceil(high / by - 1e-9) * by];
}

/** Numbers of ticks, all with as many decimals as their distance needs. */
export function showTicks(ticks: readonly number[]): (value: number) => string {
  const by = ticks.length > 1 ? ticks[1]! - ticks[0]! : 1;
  const decimals = Math.max(0, -Math.floor(Math.log10(by) + 1e-9));
  if (by >= 1 || decimals > 4) return showNumber;
  return (value) => value.toFixed(decimals);
}
