// Statistics of results.

import type { Result } from "./api";

const Z = 1.959964; // 95 %
/** Tolerance below 1 at which a reward is a pass, as on the server. */
const ROUNDING = 1e-6;

export const isPass = (reward: number): boolean => reward >= 1 - ROUNDING;

export const mean = (values: readonly number[]): number =>
  values.reduce((sum, value) => sum + value, 0) / values.length;

/** Wilson's interval of a rate, 95 %. */
export function wilson(passed: number, of: number): [number, number] {
  const rate = passed / of;
  const scale = 1 + (Z * Z) / of;
  const middle = (rate + (Z * Z) / (2 * of)) / scale;
  const half = (Z / scale) * Math.sqrt((rate * (1 - rate)) / of + (Z * Z) / (4 * of * of));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

export interface GroupFigures {
  task: string;
  rewarded: number;
  passed: number;
  /** Sum of rewards. */
  total: number;
}

/** The results of one version of the weights. */
export interface VersionFigures extends Omit<GroupFigures, "task"> {
  version: number;
  sessions: number;
  /** Sampled tokens that a trainer may train, and those left out. */
  trainable: number;
  untrainable: number;
  /** Sessions by the boundary that failed. */
  failures: Record<string, number>;
  groups: Map<string, GroupFigures>;
}

/** Sums of results, by the version of the weights at the begin of the session. */
export class Sums {
  private readonly found = new Map<number, VersionFigures>();

  add(results: readonly Result[]): void {
    for (const one of results) {
      if (one.version == null) continue;
      const sum = this.found.get(one.version) ?? {
        version: one.version, sessions: 0, rewarded: 0, passed: 0, total: 0,
        trainable: 0, untrainable: 0, failures: {}, groups: new Map<string, GroupFigures>(),
      };
      this.found.set(one.version, sum);
      sum.sessions++;
      sum.trainable += one.trained;
      sum.untrainable += one.sampled - one.trained;
      if (one.failure) {
        const { boundary } = one.failure;
        sum.failures[boundary] = (sum.failures[boundary] ?? 0) + 1;
      }
      if (one.reward === null) continue;
      const group = sum.groups.get(one.task) ?? { task: one.task, rewarded: 0, passed: 0, total: 0 };
      sum.groups.set(one.task, group);
      for (const each of [sum, group]) {
        each.rewarded++;
        each.total += one.reward;
        if (isPass(one.reward)) each.passed++;
      }
    }
  }

  /** All versions in ascending order. */
  list(): VersionFigures[] {
    return [...this.found.values()].sort((a, b) => a.version - b.version);
  }
}
