// The recording of a session: turns with their texts and times, and the text of tokens.

import type { Ledger, Span, Trace } from "./trajectory";

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
  ledger: Ledger;
  detail: { messages: Message[]; answer: Message | null; offered: string[] };
}

export interface SessionEvent {
  kind: string;
  at: number;
  call: number | null;
  detail: string;
}

export interface Recording {
  turns: Turn[];
  events: SessionEvent[];
  started: number;
  damage: string;
  buildError: string;
  ledger: Ledger;
  traces: Trace[];
  texts: Texts;
}

interface Slice {
  start: number;
  count: number;
}

interface Page {
  session: {
    turns: Turn[];
    events: SessionEvent[];
    started: number;
    damage: string;
    build_error: string;
    ledger: Ledger;
    header: { tokenizer: string } | null;
    traces: {
      kind: string;
      parent: number | null;
      shared: number;
      thread: string | null;
      exact: boolean;
      length: number;
      spans: Span[];
    }[];
  };
  ids: number[];
  texts: (string | number[])[];
  tokens: Slice[];
  logprobs: Slice[];
}

/** Decode an answer of `/v1/sessions/ID/recording`: gzip of a length, JSON and arrays. */
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
  const { turns, events, started, damage, build_error: buildError, ledger } = page.session;
  const texts = new Texts(page.ids, page.texts);
  return { turns, events, started, damage, buildError, ledger, traces, texts };
}

/** Assemble a trace from the prefix shared with its parent and its own tokens. */
function assemble(
  view: Page["session"]["traces"][number],
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
