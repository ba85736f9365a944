// Colours of tokens: the class of each token, and how each class is drawn.

import type { Trace } from "./trajectory";

export const COLOURS = ["mask", "logprob", "entropy", "advantage", "version"] as const;
export type Colour = (typeof COLOURS)[number];

export interface Swatch {
  label: string;
  fill: string;
  ink: string;
  /** Colour in the bar of the whole trace, if other than `fill`. */
  bar?: string;
  /** A line below the token, so that trained and masked tokens differ not only in colour. */
  line?: "solid" | "dashed";
}

export interface Colouring {
  /** Swatch index of each token; 0 is context. */
  classes: Uint8Array;
  /** Swatches; the first is that of context. */
  swatches: Swatch[];
}

/** Upper bounds of -logprob of the classes; the last class has no bound. */
const SURPRISE = [0.01, 0.05, 0.2, 0.5, 1, 2];
/** Upper bounds of entropy of the classes, in nats. */
const ENTROPY = [0.02, 0.1, 0.25, 0.5, 1, 2];
/** Tokens on either side that are averaged to estimate a token's entropy. */
const AROUND = 8;
/** Colour steps of advantages on either side of 0. */
const STEPS = 4;

const LIGHT = {
  ink: "#1b2430",
  inverse: "#ffffff",
  muted: "#5d6b7c",
  off: "#e3e6eb",
  trained: "#c6e6cf",
  masked: "#fbe3b3",
  logprob: ["#f6f8d4", "#d9ec9a", "#8fd39a", "#4db3a0", "#2b7691", "#3f4f8e", "#440f5c"],
  logprobInverse: 4,
  advantage: [
    "#1d4ed8", "#6d95ea", "#9db8f0", "#d3def7", "#e3e6eb", "#fbe0c4", "#f6b878", "#e08a2e", "#b45309",
  ],
  version: [
    "#bcd7f5", "#f7d6a8", "#c3e6c0", "#f3c1cf", "#dccbf0", "#f0e6a0", "#b8e4e2", "#dcd3c6",
  ],
};
const DARK: typeof LIGHT = {
  ink: "#e6eaf0",
  inverse: "#0f1318",
  muted: "#94a1b2",
  off: "#2a323c",
  trained: "#1e4a30",
  masked: "#5a4410",
  logprob: ["#241a35", "#33305f", "#2f4a7a", "#1f6478", "#2a9d84", "#7cc95a", "#fde725"],
  logprobInverse: 4,
  advantage: [
    "#8fb4ff", "#5f8be0", "#33528f", "#22344f", "#2a323c", "#4a3620", "#80551f", "#cc8430", "#ffc078",
  ],
  version: [
    "#1f4a7a", "#6e4a12", "#22552f", "#75304a", "#4d3a78", "#5c5510", "#1c5856", "#544a3a",
  ],
};

export interface Scale {
  dark: boolean;
  /** Versions in ascending order. */
  versions: number[];
  /** Advantage of the trace's trained tokens; null if it is not known. */
  advantage: number | null;
  /** The largest advantage of the group, without its sign. */
  largest: number;
}

/** Compute the class of each token, and the swatches, for one colouring. */
export function colourTokens(trace: Trace, by: Colour, scale: Scale): Colouring {
  const theme = scale.dark ? DARK : LIGHT;
  const context = { label: "context", fill: "", ink: theme.muted };
  const classes = new Uint8Array(trace.ids.length);
  const swatches: Swatch[] = [context];
  const add = (label: string, fill: string, inverse = false, line?: Swatch["line"]) =>
    swatches.push({ label, fill, ink: inverse ? theme.inverse : theme.ink, line });
  if (by === "logprob" || by === "entropy") {
    const bounds = by === "logprob" ? SURPRISE : ENTROPY;
    for (const { start, end } of trace.spans) {
      const surprise = trace.logprobs.subarray(start, end).map((logprob) => -logprob);
      (by === "logprob" ? surprise : average(surprise)).forEach((value, k) => {
        const level = bounds.findIndex((bound) => value <= bound);
        classes[start + k] = 1 + (level < 0 ? bounds.length : level);
      });
    }
    theme.logprob.forEach((fill, i) => {
      const inside = i < bounds.length;
      const most = bounds[inside ? i : i - 1]!;
      const label =
        by === "logprob"
          ? `p ${inside ? "≥" : "<"} ${Math.exp(-most).toFixed(2)}`
          : `${inside ? "≤" : ">"} ${most} nats`;
      add(label, fill, i >= theme.logprobInverse);
    });
    return { classes, swatches };
  }
  if (by === "version") {
    for (const span of trace.spans) {
      classes.fill(1 + (scale.versions.indexOf(span.version) % theme.version.length), span.start, span.end);
    }
    theme.version.slice(0, scale.versions.length).forEach((fill, i) => {
      const same = scale.versions.filter((_, at) => at % theme.version.length === i);
      add(`version ${same.join(", ")}`, fill);
    });
    return { classes, swatches };
  }
  if (by === "advantage") {
    const { advantage, largest } = scale;
    const step = advantage === null || !largest ? 0 : Math.round((STEPS * advantage) / largest);
    for (const span of trace.spans) {
      const trained = span.masked === null && advantage !== null;
      classes.fill(trained ? 1 + STEPS + step : 2 + 2 * STEPS, span.start, span.end);
    }
    theme.advantage.forEach((fill, i) => {
      const value = ((i - STEPS) / STEPS) * largest;
      const inverse = i === 0 || i === 2 * STEPS || (scale.dark && (i === 1 || i === 7));
      add(`${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`, fill, inverse);
    });
    add("no advantage", theme.off, false, "dashed");
    return { classes, swatches };
  }
  for (const span of trace.spans) classes.fill(span.masked === null ? 1 : 2, span.start, span.end);
  const { ink } = theme;
  const [good, warn] = scale.dark ? ["#4cc38a", "#f0b45c"] : ["#15803d", "#d97706"];
  swatches.push({ label: "trainable", fill: theme.trained, ink, bar: good, line: "solid" });
  swatches.push({ label: "sampled, not trainable", fill: theme.masked, ink, bar: warn, line: "dashed" });
  return { classes, swatches };
}

/**
 * An estimate of each token's entropy: the mean surprise of the sampled tokens around it, whose
 * expectation is the mean entropy of their distributions.
 */
function average(surprise: Float32Array): Float32Array {
  const sums = new Float64Array(surprise.length + 1);
  surprise.forEach((value, k) => (sums[k + 1] = sums[k]! + value));
  return surprise.map((_, k) => {
    const from = Math.max(0, k - AROUND);
    const to = Math.min(surprise.length, k + AROUND + 1);
    return (sums[to]! - sums[from]!) / (to - from);
  });
}

/** Divide a trace into columns; return the most common class of each column's sampled tokens. */
export function summarize(classes: Uint8Array, kinds: number, columns: number): Uint8Array {
  const found = new Uint8Array(columns);
  const counts = new Uint32Array(kinds);
  for (let column = 0; column < columns; column++) {
    const from = Math.floor((column * classes.length) / columns);
    const to = Math.max(from + 1, Math.floor(((column + 1) * classes.length) / columns));
    counts.fill(0);
    for (let k = from; k < to; k++) counts[classes[k]!]!++;
    let best = 0;
    for (let kind = 1; kind < kinds; kind++) {
      if (counts[kind]! > 0 && (best === 0 || counts[kind]! > counts[best]!)) best = kind;
    }
    found[column] = best;
  }
  return found;
}
