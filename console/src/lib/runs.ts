// Runs, the figures of their steps, and the differences between their configurations.

import { get, type Schemas } from "./api";
import type { Point } from "./chart";

export type Run = Schemas["RunView"];
export type RunStep = Schemas["RunStep"];

export const REWARD = "rollout/reward";
export const HELD_OUT = "heldout/pass_at/1/value";
const INTERVAL = ["heldout/pass_at/1/low", "heldout/pass_at/1/high"] as const;
const SECONDS = "time/step_s";
const VERSION = "version";
const HELD_OUT_VERSION = "heldout/version";
const PAGE = 1000;
/** Seconds without a report after which a training is said to be interrupted. */
const QUIET_S = 600;

/** Steps of a run after a step; only some figures if these are named. */
export async function readSteps(
  id: string, signal: AbortSignal, { after = -1, figure }: { after?: number; figure?: string[] } = {},
): Promise<RunStep[]> {
  const steps: RunStep[] = [];
  for (let more = true; more; ) {
    const query = { after: steps.at(-1)?.step ?? after, limit: PAGE, figure };
    const page = await get("/v1/runs/{id}/steps", { id, query, signal });
    steps.push(...page);
    more = page.length === PAGE;
  }
  return steps;
}

/** What a list of runs shows of a training. */
export interface Curves {
  /** Only the figures of the curves. */
  steps: RunStep[];
  reward: Point[];
  heldOut: Point[];
  /** Seconds of the last step; 0 if they are not known. */
  seconds: number;
  /** Cost so far, and that of a solved task, where they are known. */
  cost?: number;
  solved?: number;
}

export const COST = "cost/total";
export const SOLVED_COST = "cost/solved";

export async function readCurves(run: string, signal: AbortSignal): Promise<Curves> {
  const steps = await readSteps(run, signal, { figure: [REWARD, SECONDS, VERSION, HELD_OUT_VERSION, HELD_OUT, COST, SOLVED_COST, ...INTERVAL] });
  const last = (name: string) => steps.findLast(({ figures }) => figures?.[name] !== undefined)?.figures?.[name];
  const at = ({ step }: RunStep) => step;
  return {
    steps, reward: pickReward(steps, at), heldOut: pickHeldOut(steps, at), seconds: last(SECONDS) ?? 0,
    cost: last(COST), solved: last(SOLVED_COST),
  };
}

type At = (step: RunStep, version: string) => number | undefined;

/** Rewards of steps at their places on an axis. */
export const pickReward = (steps: readonly RunStep[], at: At): Point[] => pick(steps, (step) => at(step, VERSION), REWARD);

/** Held-out pass@1 with its interval. */
export const pickHeldOut = (steps: readonly RunStep[], at: At): Point[] =>
  pick(steps, (step) => at(step, HELD_OUT_VERSION), HELD_OUT, ...INTERVAL);

function pick(steps: readonly RunStep[], at: (step: RunStep) => number | undefined, name: string, low = "", high = ""): Point[] {
  return steps.flatMap((step): Point[] => {
    const { figures = {} } = step;
    const place = at(step);
    const value = figures[name];
    return value === undefined || place === undefined ? [] : [{ at: place, value, low: figures[low], high: figures[high] }];
  }).sort((a, b) => a.at - b.at);
}

/** Only trainings report, so that of other runs it is not known whether they were killed. */
export function stateOf(run: Run, now: number, stepSeconds = 0): string {
  if (run.ended !== null) return "ended";
  if (now - run.updated <= Math.max(QUIET_S, 3 * stepSeconds)) return "running";
  return run.kind === "train" ? "interrupted" : "not ended";
}

/** Values of a configuration by their path, such as `grpo.lr`. */
function flatten(value: unknown, path: string, into: Map<string, string>): void {
  const nested = value !== null && typeof value === "object" && !Array.isArray(value);
  if (!nested) return void into.set(path, JSON.stringify(value));
  for (const [key, each] of Object.entries(value)) flatten(each, path ? `${path}.${key}` : key, into);
}

export interface Difference {
  key: string;
  /** As JSON, for each configuration; null where the key is missing. */
  values: (string | null)[];
}

/** Keys that do not have the same value in all configurations. */
export function findDifferences(configurations: readonly object[]): Difference[] {
  const all = configurations.map((one) => {
    const found = new Map<string, string>();
    flatten(one, "", found);
    return found;
  });
  const keys = [...new Set(all.flatMap((one) => [...one.keys()]))].sort();
  return keys
    .map((key) => ({ key, values: all.map((one) => one.get(key) ?? null) }))
    .filter(({ values }) => new Set(values).size > 1);
}
