// The recording of a session: turns with their texts and times, and the text of tokens.

import type { Failure, Ledger, Reward, Span, Trace } from "./trajectory";

export interface Message {
  role: string;
  content?: string;
  reasoning?: string | null;
  tool_calls?: { id: string; name: string; arguments: string }[];
  images?: { url: string }[];
  failed?: boolean;
}

export interface Turn {
  call: number;
  kind: string;
  thread: string | null;
  parent: number | null;
  continuation: string;
  reasons: string[];
  prompt: number;
  shared: number;
  sampled: number;
  mean_logprob: number | null;
  finish: string;
  stop: string | null;
  outcome: string;
  versions: { version: number; start: number; end: number }[];
  at: number;
  first_token_s: number | null;
  total_s: number | null;
  tools: string[];
  trace: number | null;
  replicas: string[];
  ledger: Ledger;
  detail: {
    messages: Message[];
    answer: Message | null;
    sampling: Record<string, unknown>;
    offered: string[];
  };
}

export interface SessionEvent {
  kind: string;
  at: number;
  call: number | null;
  detail: string;
}

/** What the recording says of its session, its turns and its end: the format of `tugline view --json`. */
interface SessionView {
  diff: string;
  /** Path of the recording. */
  recording: string;
  damage: string;
  torn_bytes: number;
  /** Unix seconds; other times count from it. */
  started: number;
  /** Null if the first record is lost. */
  header: Header | null;
  /** Null if the session has not ended. */
  result: RecordedResult | null;
  turns: Turn[];
  events: SessionEvent[];
  builder: string;
  build_error: string;
  ledger: Ledger;
}

export interface Header {
  session: { id: string; sample: number };
  task: { id: string; harness: { name: string } };
  model: string;
  engine: string;
  mode: string;
  template: string;
  thinking_retention: string;
  forked_from: string;
}

export interface RecordedResult {
  status: string;
  reward: Reward | null;
  report: Record<string, unknown>;
  failure: Failure | null;
  spent: string | null;
  seconds: Record<string, number>;
}

export interface Recording extends SessionView {
  traces: Trace[];
  texts: Texts;
}

interface Slice {
  start: number;
  count: number;
}

interface TraceView {
  kind: string;
  parent: number | null;
  shared: number;
  thread: string | null;
  exact: boolean;
  length: number;
  spans: Span[];
}

interface Page {
  session: SessionView & { traces: TraceView[] };
  ids: number[];
  texts: (string | number[])[];
  tokens: Slice[];
  logprobs: Slice[];
}

/** Decode a recording from the server or the page of a session: gzip of a length, JSON and arrays. */
export async function decodeRecording(packed: Blob): Promise<Recording> {
  const stream = packed.stream().pipeThrough(new DecompressionStream("gzip"));
  const block = await new Response(stream).arrayBuffer();
  const size = new DataView(block).getUint32(0, true);
  const page = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, size))) as Page;
  const offset = ({ start }: Slice) => 4 + size + 4 * start;
  const traces: Trace[] = [];
  page.session.traces.forEach((view, i) => {
    const tokens = page.tokens[i]!;
    const logprobs = page.logprobs[i]!;
    const own = new Int32Array(block, offset(tokens), tokens.count);
    const sampled = new Float32Array(block, offset(logprobs), logprobs.count);
    traces.push(assemble(view, own, sampled, traces, page.ids));
  });
  return { ...page.session, traces, texts: new Texts(page.ids, page.texts) };
}

/** Assemble a trace from the prefix shared with its parent and its own tokens. */
function assemble(
  view: TraceView,
  own: Int32Array,
  sampled: Float32Array,
  before: readonly Trace[],
  distinct: readonly number[],
): Trace {
  const { kind, parent, shared, thread, exact, length, spans } = view;
  const ids = new Int32Array(length);
  if (parent !== null) ids.set(before[parent]!.ids.subarray(0, shared));
  own.forEach((place, k) => (ids[shared + k] = distinct[place]!));
  const mask = new Uint8Array(length);
  const logprobs = new Float32Array(length);
  let at = 0;
  for (const span of spans) {
    if (span.masked === null) mask.fill(1, span.start, span.end);
    logprobs.set(sampled.subarray(at, at + span.end - span.start), span.start);
    at += span.end - span.start;
  }
  return { ids, mask, logprobs, spans, kind, parent, shared, thread, exact };
}

/** The texts of token ids; an id with unknown text is shown as a number. */
export class Texts {
  private readonly known = new Map<number, string | Uint8Array>();

  constructor(ids: readonly number[] = [], texts: readonly (string | number[])[] = []) {
    ids.forEach((id, i) => {
      const text = texts[i]!;
      this.known.set(id, typeof text === "string" ? text : Uint8Array.from(text));
    });
  }

  get empty(): boolean {
    return this.known.size === 0;
  }

  /** The text that each token adds; a character of several tokens belongs to the last one. */
  pieces(ids: Int32Array): string[] {
    const found = new Array<string>(ids.length);
    let decoder: TextDecoder | null = null;
    for (let k = 0; k < ids.length; k++) {
      const text = this.known.get(ids[k]!) ?? `${ids[k]} `;
      if (typeof text === "string") {
        found[k] = decoder ? decoder.decode() + text : text;
        decoder = null;
      } else {
        decoder ??= new TextDecoder();
        found[k] = decoder.decode(text, { stream: true });
      }
    }
    return found;
  }
}

export const NO_TEXTS = new Texts();

const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u00a0\u3000]/gu;

/** Text on one line, with line ends, tabs and other hidden characters made visible. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (char) => {
    if (char === "\n") return "↵";
    if (char === "\t") return "⇥";
    return `\\u{${char.codePointAt(0)!.toString(16)}}`;
  });
}

/** The same for several lines: line ends and tabs are kept. */
export function readable(text: string): string {
  return text.split(/([\n\t])/).map((part, i) => (i % 2 ? part : visible(part))).join("");
}
