// The rows of the list of turns: model calls, and the events between them.

import { decimals, exact, logprob, tokens, words } from "./format";
import type { Recording, SessionEvent, Turn } from "./recording";
import type { CallTokens, Trace } from "./trajectory";

export interface Entry {
  /** Number of the call; null for an event. */
  call: number | null;
  title: string;
  notes: { text: string; tone: "" | "muted" | "warn" | "bad" }[];
  tokens: string;
  time: string;
  text: string;
  forked: boolean;
}

const TONES: Record<string, Entry["notes"][number]["tone"]> = {
  first: "muted",
  exact: "muted",
  broken: "bad",
  no_token_ids: "bad",
};

/** Characters of an answer in a row. */
const CLIP = 160;

/** The calls and events of a recording by their time. */
export function listEntries({ turns, events }: Recording): Entry[] {
  const letters = nameThreads(turns);
  return [...turns, ...events]
    .sort((a, b) => a.at - b.at)
    .map((one) => ("prompt" in one ? describeTurn(one, letters) : describeEvent(one)));
}

/** The calls of traces, for a session whose recording is elsewhere. */
export function listCallEntries(calls: Iterable<CallTokens>, traces: readonly Trace[]): Entry[] {
  return [...calls].map((one) => {
    const { kind } = traces[one.trace]!;
    const notes: Entry["notes"] = [];
    if (kind !== "main") notes.push({ text: kind, tone: "" });
    if (one.masked !== null) notes.push({ text: `masked: ${words(one.masked)}`, tone: "warn" });
    return {
      call: one.call,
      title: String(one.call),
      notes,
      tokens: tokens(one.end - one.start),
      time: "",
      text: `mean logprob ${logprob(one.meanLogprob)}, version ${one.versions.join(", ")}`,
      forked: false,
    };
  });
}

/** Letters for the ids of threads, in order of appearance; none for a single thread. */
export function nameThreads(turns: readonly Turn[]): ReadonlyMap<string | null, string> {
  const threads = [...new Set(turns.map((turn) => turn.thread))];
  if (threads.length < 2) return new Map();
  return new Map(threads.map((thread, i) => [thread, letterOf(i)]));
}

function letterOf(i: number): string {
  const before = i < 26 ? "" : letterOf(Math.floor(i / 26) - 1);
  return before + String.fromCharCode(97 + (i % 26));
}

function describeTurn(turn: Turn, letters: ReadonlyMap<string | null, string>): Entry {
  const { call, kind, continuation, reasons, outcome, finish } = turn;
  const { answer } = turn.detail;
  const forked = continuation === "forked";
  const reason = reasons.length ? `: ${reasons.map(words).join(", ")}` : "";
  const origin = forked && turn.parent !== null ? ` from ${turn.parent}` : "";
  const notes: Entry["notes"] = [];
  if (kind !== "main") notes.push({ text: `${kind} ${letters.get(turn.thread) ?? ""}`, tone: "" });
  notes.push({ text: words(continuation) + reason + origin, tone: TONES[continuation] ?? "warn" });
  const end = outcome === "complete" ? finish : words(outcome);
  if (end !== "stop") notes.push({ text: end, tone: "bad" });
  const calls = (answer?.tool_calls ?? []).map((tool) => `${tool.name}(${tool.arguments})`);
  return {
    call,
    title: String(call),
    notes,
    tokens: `+${exact(turn.prompt - turn.shared)} → ${exact(turn.sampled)}`,
    time: turn.total_s === null ? "" : decimals(turn.total_s),
    text: [answer?.content, ...calls].filter(Boolean).join("  ").slice(0, CLIP),
    forked,
  };
}

function describeEvent({ kind, at, call, detail }: SessionEvent): Entry {
  return {
    call: null,
    title: words(kind),
    notes: call === null ? [] : [{ text: `in call ${call}`, tone: "" }],
    tokens: "",
    time: decimals(at),
    text: detail,
    forked: false,
  };
}
