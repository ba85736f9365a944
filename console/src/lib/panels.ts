// What the training page draws of the steps of a run.

import type { Line, Mark, Point } from "./chart";
import { words } from "./format";
import { HELD_OUT, REWARD, type RunStep } from "./runs";

export const AXES = ["step", "version", "hour"] as const;
export type Axis = (typeof AXES)[number];
export const LABELS: Record<Axis, string> = { step: "steps", version: "versions", hour: "hours" };

export interface Panel {
  title: string;
  unit?: string;
  lines: Line[];
  stacked?: boolean;
  from?: number;
  to?: number;
  /** Whether values are counts. */
  whole?: boolean;
  /** Whether values are shares, to be shown in percent. */
  share?: boolean;
  /** Whether smoothing would mislead: evaluations with an interval, and sums. */
  exact?: boolean;
}

type Figures = Record<string, number>;
type Value = string | ((figures: Figures) => number | undefined);

interface Series {
  label: string;
  value: Value;
  colour: string;
  low?: string;
  high?: string;
}

interface Plan extends Omit<Panel, "lines"> {
  series: Series[];
  /** Figure with the version of the weights that the values are of. */
  version?: string;
}

const one = (value: Value, label = "mean"): Series[] => [{ label, value, colour: "accent" }];
const two = (first: [string, Value], second: [string, Value]): Series[] => [
  { label: first[0], value: first[1], colour: "accent" },
  { label: second[0], value: second[1], colour: "agent" },
];
const divide = (part: string, whole: string) => (figures: Figures) =>
  figures[part] === undefined || !figures[whole] ? undefined : figures[part] / figures[whole];

/** Seconds of a step in neither of its measured parts. */
function otherSeconds(figures: Figures): number | undefined {
  const all = figures["time/step_s"];
  if (all === undefined) return undefined;
  const parts = ["time/wait_s", "time/train_s", "publish/seconds"].map((name) => figures[name] ?? 0);
  return Math.max(0, all - parts.reduce((sum, part) => sum + part, 0));
}

const PLANS: Plan[] = [
  {
    title: "Held-out pass@1", unit: "95 % interval", from: 0, to: 1, share: true, exact: true, version: "heldout/version",
    series: [{ label: "pass@1", value: HELD_OUT, colour: "accent", low: "heldout/pass_at/1/low", high: "heldout/pass_at/1/high" }],
  },
  { title: "Reward", unit: "mean over sessions", series: one(REWARD) },
  { title: "Entropy", unit: "nats", from: 0, series: one("rollout/entropy") },
  { title: "KL to the reference", unit: "nats, k3", from: 0, series: one("update/kl") },
  { title: "Clipped tokens", from: 0, share: true, series: one("update/clip_fraction") },
  {
    title: "Engine–trainer mismatch", unit: "nats", from: 0,
    series: two(["mean", "update/mismatch/total/mean_abs"], ["p99", "update/mismatch/total/p99_abs"]),
  },
  { title: "Gradient norm", unit: "before clipping", from: 0, series: one("update/grad_norm") },
  { title: "Staleness", unit: "versions", from: 0, series: two(["mean", "rollout/staleness"], ["max", "rollout/staleness_max"]) },
  { title: "Length", unit: "sampled tokens per session", from: 0, series: one(divide("rollout/sampled", "rollout/sessions")) },
  { title: "Failures", unit: "sessions without a reward", from: 0, whole: true, series: one("rollout/failed", "failed") },
  { title: "Groups", from: 0, whole: true, series: two(["with signal", "rollout/signal"], ["all", "rollout/groups"]) },
  {
    title: "Time per step", unit: "seconds", stacked: true,
    series: [
      { label: "waiting for sessions", value: "time/wait_s", colour: "agent" },
      { label: "training", value: "time/train_s", colour: "accent" },
      { label: "publishing", value: "publish/seconds", colour: "evaluator" },
      { label: "other", value: otherSeconds, colour: "muted" },
    ],
  },
  { title: "Cost", unit: "in the currency of the prices", from: 0, series: two(["of a step", "cost/step"], ["of a solved task", "cost/solved"]) },
  { title: "Total cost", unit: "so far", from: 0, exact: true, series: one("cost/total", "total") },
];
const LEDGER = "update/ledger/";
const REASONS = ["agent", "bad", "engine", "runtime", "evaluator", "harness", "muted"];

/** Tokens of each step: trained, and left out by reason. */
function planTokens(steps: readonly RunStep[]): Plan {
  const names = new Set(steps.flatMap(({ figures }) => Object.keys(figures ?? {})));
  const lost = [...names].filter((name) => /^(masked|dropped)\//.test(name.replace(LEDGER, ""))).sort();
  const series = lost.map((name, i): Series => ({
    label: words(name.slice(LEDGER.length).replace("/", ": ")), value: name, colour: REASONS[i % REASONS.length]!,
  }));
  const trained = { label: "trained", value: `${LEDGER}trained`, colour: "good" };
  return { title: "Tokens", unit: "per step", stacked: true, series: [trained, ...series] };
}

/** Places of steps on an axis: a whole number, or the hours that the steps up to it took. */
export class Places {
  private readonly hours = new Map<number, number>();

  constructor(
    readonly axis: Axis,
    private readonly steps: readonly RunStep[],
  ) {
    let seconds = 0;
    for (const { step, figures } of steps) {
      seconds += figures?.["time/step_s"] ?? 0;
      this.hours.set(step, seconds / 3600);
    }
  }

  /** Undefined if the step has no place there. */
  find({ step, figures }: RunStep, version = "version"): number | undefined {
    if (this.axis === "step") return step;
    return this.axis === "version" ? figures?.[version] : this.hours.get(step);
  }

  /** The first and last version of the steps in a range of the axis, or the reverse. */
  convert([from, to]: [number, number], back = false): [number, number] | null {
    const found = this.steps.flatMap((step) => {
      const place = this.find(step);
      const version = step.figures?.version;
      if (place === undefined || version === undefined) return [];
      const [given, wanted] = back ? [version, place] : [place, version];
      return from <= given && given <= to ? [wanted] : [];
    });
    return found.length ? [Math.min(...found), Math.max(...found)] : null;
  }

  /** The whole range; null without any place. */
  range(): [number, number] | null {
    const all = this.steps.flatMap((step) => [this.find(step), this.find(step, "heldout/version")]);
    const known = all.filter((place) => place !== undefined);
    return known.length ? [Math.min(...known), Math.max(...known)] : null;
  }
}

/** The axes for which the steps have data. */
export function listAxes(steps: readonly RunStep[]): Axis[] {
  const has = (name: string) => steps.some(({ figures }) => figures?.[name] !== undefined);
  return AXES.filter((axis) => axis === "step" || has(axis === "hour" ? "time/step_s" : "version"));
}

/** The panels with data. */
export function makePanels(steps: readonly RunStep[], places: Places): Panel[] {
  return [...PLANS, planTokens(steps)].flatMap(({ series, version, ...rest }) => {
    const lines = series
      .map(({ label, colour, value, low = "", high = "" }): Line => ({
        label, colour,
        points: steps.flatMap((step): Point[] => {
          const figures = step.figures ?? {};
          const [at, known] = [places.find(step, version), typeof value === "string" ? figures[value] : value(figures)];
          return at === undefined || known === undefined ? [] : [{ at, value: known, low: figures[low], high: figures[high] }];
        }).sort((a, b) => a.at - b.at),
      }))
      .filter(({ points }) => points.length);
    return lines.length ? [{ ...rest, lines }] : [];
  });
}

/** A mark for each alarm, resumption and evaluation. */
export function makeMarks(steps: readonly RunStep[], places: Places): Mark[] {
  return steps.flatMap((step) =>
    Object.entries(step.notes ?? {}).flatMap(([name, text]): Mark[] => {
      const kind = name.startsWith("alarm ") ? "alarm" : name === "resumed" ? "resumed" : name === "held out" ? "evaluation" : null;
      const at = places.find(step, kind === "evaluation" ? "heldout/version" : "version");
      return kind === null || at === undefined ? [] : [{ at, kind, text: `${name}: ${text}` }];
    }),
  );
}
