// The trained tokens of a session as typed arrays, with a `Trace` for each sequence.

export interface Span {
  call: number;
  start: number;
  end: number;
  version: number;
  masked: string | null;
}

export interface Ledger {
  sampled: number;
  trained: number;
  masked: Record<string, number>;
  dropped: Record<string, number>;
}

export interface Reward {
  value: number;
  parts: Record<string, number>;
  per_trace: number[];
}

export interface Failure {
  boundary: string;
  message: string;
  cause: string | null;
}

export interface Trace {
  ids: Int32Array;
  /** 1 where a token is trained. */
  mask: Uint8Array;
  /** 0 where nothing was sampled. */
  logprobs: Float32Array;
  spans: Span[];
  kind: string;
  /** Index of the trace that this one forked from. */
  parent: number | null;
  /** Number of leading ids shared with the parent. */
  shared: number;
  thread: string | null;
  exact: boolean;
}

export interface Trajectory {
  session: string;
  task: string;
  sample: number;
  status: string;
  traces: Trace[];
  ledger: Ledger;
  reward: Reward | null;
  report: Record<string, unknown>;
  failure: Failure | null;
  spent: string | null;
  seconds: Record<string, number>;
  harness: string;
}

/** Decode a trajectory in the format `application/x-msgpack`. */
export function decodeTrajectory(data: ArrayBuffer): Trajectory {
  const trajectory = new Unpacker(data).read() as Trajectory;
  for (const trace of trajectory.traces) {
    trace.ids = new Int32Array(items(trace.ids, "i"));
    trace.logprobs = new Float32Array(items(trace.logprobs, "f"));
    trace.mask = new Uint8Array(items(trace.mask, "?"));
  }
  return trajectory;
}

/** The items of an encoded array: a letter for the type, then the bytes. */
function items(value: unknown, type: string): ArrayBuffer {
  const bytes = value as Uint8Array<ArrayBuffer>;
  if (!(bytes instanceof Uint8Array) || String.fromCharCode(bytes[0] ?? 0) !== type) {
    throw new Error(`the trajectory is invalid: expected an array of type ${type}`);
  }
  return bytes.slice(1).buffer;
}

/** Reads one msgpack value; binary values are views. */
class Unpacker {
  private at = 0;
  private readonly view: DataView;
  private readonly text = new TextDecoder();

  constructor(private readonly data: ArrayBuffer) {
    this.view = new DataView(data);
  }

  read(): unknown {
    const tag = this.number(1);
    if (tag < 0x80) return tag;
    if (tag < 0x90) return this.map(tag & 0x0f);
    if (tag < 0xa0) return this.array(tag & 0x0f);
    if (tag < 0xc0) return this.string(tag & 0x1f);
    if (tag >= 0xe0) return tag - 0x100;
    switch (tag) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return this.bytes(this.number(1 << (tag - 0xc4)));
      case 0xca:
        return this.view.getFloat32(this.skip(4));
      case 0xcb:
        return this.view.getFloat64(this.skip(8));
      case 0xcc:
      case 0xcd:
      case 0xce:
        return this.number(1 << (tag - 0xcc));
      case 0xcf:
        return Number(this.view.getBigUint64(this.skip(8)));
      case 0xd0:
        return this.view.getInt8(this.skip(1));
      case 0xd1:
        return this.view.getInt16(this.skip(2));
      case 0xd2:
        return this.view.getInt32(this.skip(4));
      case 0xd3:
        return Number(this.view.getBigInt64(this.skip(8)));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.string(this.number(1 << (tag - 0xd9)));
      case 0xdc:
      case 0xdd:
        return this.array(this.number(2 << (tag - 0xdc)));
      case 0xde:
      case 0xdf:
        return this.map(this.number(2 << (tag - 0xde)));
    }
    throw new Error(`the trajectory has an unknown msgpack tag 0x${tag.toString(16)}`);
  }

  /** An unsigned number of 1, 2 or 4 bytes. */
  private number(size: number): number {
    const at = this.skip(size);
    if (size === 1) return this.view.getUint8(at);
    return size === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  private skip(size: number): number {
    const at = this.at;
    this.at += size;
    return at;
  }

  private bytes(size: number): Uint8Array<ArrayBuffer> {
    return new Uint8Array(this.data, this.skip(size), size);
  }

  private string(size: number): string {
    return this.text.decode(this.bytes(size));
  }

  private array(size: number): unknown[] {
    return Array.from({ length: size }, () => this.read());
  }

  private map(size: number): Record<string, unknown> {
    const found: Record<string, unknown> = Object.create(null);
    for (let i = 0; i < size; i++) found[String(this.read())] = this.read();
    return found;
  }
}

// ------------------------------------------------------------------ derived data

/** Span index of each token; -1 is context. */
export function spanOf(trace: Trace): Int32Array {
  const found = new Int32Array(trace.ids.length).fill(-1);
  trace.spans.forEach((span, i) => found.fill(i, span.start, span.end));
  return found;
}

/** The call that sampled a token, or the first call whose prompt has it; undefined if there is none. */
export const callOf = (trace: Trace, k: number): number | undefined =>
  trace.spans.find((span) => span.end > k)?.call;

/** Number of trained tokens. */
export const countTrained = (trace: Trace): number =>
  trace.spans.reduce((sum, span) => sum + (span.masked === null ? span.end - span.start : 0), 0);

/** The tokens of a model call in the traces. */
export interface CallTokens {
  call: number;
  trace: number;
  start: number;
  end: number;
  versions: number[];
  masked: string | null;
  meanLogprob: number;
}

/** The calls whose answers are in a trace, by number. */
export function listCalls(traces: readonly Trace[]): CallTokens[] {
  const found = new Map<number, CallTokens & { sum: number }>();
  traces.forEach((trace, index) => {
    for (const span of trace.spans) {
      let sum = 0;
      for (let k = span.start; k < span.end; k++) sum += trace.logprobs[k]!;
      const known = found.get(span.call);
      if (known && known.trace === index) {
        known.end = Math.max(known.end, span.end);
        known.sum += sum;
        known.masked ??= span.masked;
        if (!known.versions.includes(span.version)) known.versions.push(span.version);
      } else if (!known) {
        const { call, start, end, masked, version } = span;
        found.set(call, {
          call, trace: index, start, end, masked, versions: [version], sum, meanLogprob: 0,
        });
      }
    }
  });
  const calls = [...found.values()].sort((a, b) => a.call - b.call);
  for (const one of calls) one.meanLogprob = one.sum / Math.max(1, one.end - one.start);
  return calls;
}

/** Oldest and newest version that sampled anything; null if nothing was sampled. */
export function versionRange(traces: readonly Trace[]): [number, number] | null {
  const versions = traces.flatMap((trace) => trace.spans.map((span) => span.version));
  return versions.length ? [Math.min(...versions), Math.max(...versions)] : null;
}

/** The parts of a ledger, largest first within each kind: trainable, masked, dropped. */
export function ledgerParts(ledger: Ledger): { kind: string; reason: string; tokens: number }[] {
  const parts = [{ kind: "trainable", reason: "", tokens: ledger.trained }];
  for (const kind of ["masked", "dropped"] as const) {
    const sorted = Object.entries(ledger[kind]).sort((a, b) => b[1] - a[1]);
    for (const [reason, tokens] of sorted) parts.push({ kind, reason, tokens });
  }
  return parts.filter((part) => part.tokens > 0 || part.kind === "trainable");
}
