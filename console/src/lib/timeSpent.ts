// Where the time of sessions goes: the parts, what is drawn of them, and the sentence on the largest.

import type { Schemas } from "./api";
import type { Line } from "./chart";

export type TimeParts = Schemas["TimeParts"];
export type TimePoint = Schemas["TimePoint"];
type Name = Exclude<keyof TimeParts, "sessions">;

interface Part {
  name: Name;
  label: string;
  /** As the subject of a sentence. */
  subject: string;
  /** Name of a theme colour. */
  colour: string;
}

/** In the order of a session. */
const PARTS: Part[] = [
  { name: "waiting_s", label: "waiting", subject: "Waiting in the queue or for a slot", colour: "accent" },
  { name: "sandbox_s", label: "sandbox start", subject: "Sandbox start", colour: "runtime" },
  { name: "engine_s", label: "engine", subject: "The engine", colour: "engine" },
  { name: "agent_s", label: "agent and tools", subject: "The agent with its tools", colour: "agent" },
  { name: "unsplit_s", label: "engine or agent, unknown", subject: "The agent's stage, whose time at the engine is unknown,", colour: "text" },
  { name: "evaluation_s", label: "evaluation", subject: "Evaluation", colour: "evaluator" },
  { name: "other_s", label: "other", subject: "Other work", colour: "infrastructure" },
];

export interface Spent extends Part {
  /** Seconds for each session. */
  seconds: number;
  share: number;
}

const sum = (parts: TimeParts, names: readonly Part[]) => names.reduce((total, { name }) => total + (parts[name] ?? 0), 0);

/** The parts that took any time, for each session. */
export function listSpent(parts: TimeParts): Spent[] {
  const sessions = parts.sessions ?? 0;
  const whole = sum(parts, PARTS);
  return PARTS.flatMap((part) => {
    const value = parts[part.name] ?? 0;
    return value > 0 ? [{ ...part, seconds: value / sessions, share: value / whole }] : [];
  });
}

/** A duration with two digits, or all before the point. */
export function showSeconds(value: number): string {
  return `${value > 0 && value < 9.95 ? value.toPrecision(2) : value.toFixed(0)} s`;
}
export const showShare = (value: number): string => `${(100 * value).toFixed(0)} %`;

/** The sentence that names the largest part; if that is waiting, also the largest of the rest. */
export function nameBottleneck(parts: TimeParts): string {
  const spent = listSpent(parts);
  const whole = spent.reduce((total, { seconds }) => total + seconds, 0);
  const [largest, next] = [...spent].sort((a, b) => b.seconds - a.seconds);
  if (!largest) return "No session with known times has ended.";
  const part = `${largest.subject} takes ${showShare(largest.share)} of a session's time (${showSeconds(largest.seconds)} of ${showSeconds(whole)})`;
  if (largest.name !== "waiting_s" || !next) return `${part}.`;
  const rest = whole - largest.seconds;
  const subject = next.subject[0]!.toLowerCase() + next.subject.slice(1);
  return `${part}; of the rest, ${subject} takes ${showShare(next.seconds / rest)} (${showSeconds(next.seconds)} of ${showSeconds(rest)}).`;
}

/** Lines of a stacked chart: seconds for each session, or shares of its time. */
export function drawSpent(points: readonly TimePoint[], shares: boolean, place: (at: number) => number): Line[] {
  const known = points.map((point) => ({ at: place(point.at), parts: new Map(listSpent(point).map((part) => [part.name, part])) }));
  return PARTS.filter(({ name }) => known.some(({ parts }) => parts.has(name))).map(({ name, label, colour }) => ({
    label,
    colour,
    points: known.map(({ at, parts }) => ({ at, value: (shares ? parts.get(name)?.share : parts.get(name)?.seconds) ?? 0 })),
  }));
}
