// Which stretches of a training are compared, and how changes of values are written.

import type { Schemas } from "./api";
import type { Places } from "./panels";
import type { RunStep } from "./runs";

export type Change = Schemas["Change"];
export type Changes = Schemas["Changes"];

/** A stretch of a run: its steps or versions, and the versions of the weights of its sessions. */
export interface Stretch {
  from: number;
  to: number;
  versions: [number, number];
}

export interface Stretches {
  noun: "step" | "version";
  before: Stretch;
  now: Stretch;
}

interface Place {
  at: number;
  version: number;
}

/**
 * The stretch in a range of the axis and the equally long one before it; without one before it, the
 * second half of the range and the first. Null if there are not two versions.
 */
export function findStretches(
  steps: readonly RunStep[], places: Places, versions: readonly number[], range: [number, number] | null,
): Stretches | null {
  const reported = steps.flatMap((step): Place[] => {
    const version = step.figures?.version;
    return version === undefined ? [] : [{ at: step.step, version }];
  });
  const byVersion = places.axis === "version" || !reported.length;
  const all = byVersion ? listVersions(reported, versions) : reported;
  const at = new Map(steps.map((step) => [step.step, places.find(step)]));
  const wanted = byVersion && places.axis !== "version" ? null : range; // no step has a version
  const inside = all.filter((one) => {
    const place = byVersion ? one.at : at.get(one.at);
    return wanted === null || (place !== undefined && wanted[0] <= place && place <= wanted[1]);
  });
  const first = all.indexOf(inside[0]!);
  const earlier = inside.length ? all.slice(Math.max(0, first - inside.length), first) : [];
  const half = Math.floor(inside.length / 2);
  const [before, now] = wanted && earlier.length ? [earlier, inside] : [inside.slice(0, half), inside.slice(half)];
  const last = Math.max(...before.map(({ version }) => version));
  const stretches = [before, now.filter(({ version }) => version > last)].map(measure);
  if (stretches[0] === null || stretches[1] === null) return null;
  return { noun: byVersion ? "version" : "step", before: stretches[0]!, now: stretches[1]! };
}

function listVersions(reported: readonly Place[], versions: readonly number[]): Place[] {
  const known = new Set([...reported.map(({ version }) => version), ...versions]);
  return [...known].sort((a, b) => a - b).map((version) => ({ at: version, version }));
}

function measure(places: readonly Place[]): Stretch | null {
  const versions = places.map(({ version }) => version);
  if (!versions.length) return null;
  return { from: places[0]!.at, to: places.at(-1)!.at, versions: [Math.min(...versions), Math.max(...versions)] };
}

/** "40 to 44", "7". */
const nameRange = (from: number, to: number): string => (from === to ? String(from) : `${from} to ${to}`);

/** "steps 40 to 44 against 35 to 39 (versions 39 to 43 against 34 to 38)". */
export function describe({ noun, before, now }: Stretches): string {
  const plural = now.from === now.to && before.from === before.to ? noun : `${noun}s`;
  const text = `${plural} ${nameRange(now.from, now.to)} against ${nameRange(before.from, before.to)}`;
  if (noun === "version") return text;
  return `${text} (versions ${nameRange(...now.versions)} against ${nameRange(...before.versions)})`;
}

export const share = (value: number): string => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
