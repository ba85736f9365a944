/** Formats of numbers, times and texts. */
const integer = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** A count with all digits. */
export const exact = (n: number): string => integer.format(n);

/** A count of large numbers in short, as "250K". */
export const count = (n: number): string => (n < 100_000 ? integer.format(n) : compact.format(n));

export const percent = (part: number, whole: number): string =>
  whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "–";

export const reward = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : value.toFixed(Number.isInteger(value) ? 0 : 3);

/** A difference of rewards with its sign. */
export const signed = (value: number): string => `${sign(value)}${Math.abs(value).toFixed(3)}`;

/** A difference of shares in percentage points, with its sign. */
export const points = (value: number): string =>
  `${sign(value)}${Math.abs(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)} pp`;

const sign = (value: number): string => (value < 0 ? "−" : value > 0 ? "+" : "");

export function seconds(s: number): string {
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172_800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86_400)} d`;
}

/** Seconds with decimals, for times within a session. */
export const decimals = (s: number | null): string =>
  s === null ? "–" : `${s.toFixed(s < 10 ? 2 : 1)} s`;

/** A log probability with a minus sign. */
export const logprob = (value: number): string =>
  (value === 0 ? 0 : value).toFixed(3).replace("-", "−");

export const ago = (moment: number, now: number): string =>
  now - moment < 10 ? "now" : seconds(Math.round(now - moment));

export const moment = (unix: number): string => new Date(1000 * unix).toLocaleString();

/** "1 node", "2 nodes". */
export const plural = (n: number, noun: string): string => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** "1 token", "250,000 tokens". */
export const tokens = (n: number): string => `${exact(n)} token${n === 1 ? "" : "s"}`;

/** Text of an agent without colour codes; characters that hide or reorder text are escaped. */
export const visible = (text: string): string =>
  text
    .replace(/\x1b\[[0-9;?]*[ -/]*[@-~]/g, "")
    .replace(/[^\P{C}\n\t]/gu, (sign) => `\\u{${sign.codePointAt(0)!.toString(16)}}`);

export const words = (name: string): string => name.replaceAll("_", " ");
