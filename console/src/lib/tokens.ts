// The tokens of a trace on a canvas, in rows of equal height; only visible rows are drawn.

import type { Colouring } from "./colours";
import { visible } from "./recording";
import { spanOf, type Trace } from "./trajectory";

export const ROW = 18;
const FONT = '12px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
/** Width of the left margin with the numbers of calls. */
const GUTTER = 72;
/** Contexts longer than this are folded to `KEPT` tokens at either end. */
const FOLD = 160;
const KEPT = 48;
const PLAIN = /^[\x20-\x7e]*$/;
const WIDE =
  /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u;

interface Word {
  text: string;
  cells: number;
  ends: boolean;
}

const THEME = ["text", "muted", "line", "accent", "raised", "match", "good", "bad", "agent"] as const;
export type Theme = Record<(typeof THEME)[number], string>;

/** How the tokens of a trace are drawn. */
export interface Look {
  colouring: Colouring;
  /** The selected token; -1 for none. */
  selected: number;
  /** 1 for each token with a part of a search match. */
  marked: Uint8Array | null;
}

/** Words by token text, for texts that are not plain; shared by all traces. */
const words = new Map<string, Word>();

function wordOf(piece: string): Word {
  if (PLAIN.test(piece)) return { text: piece, cells: piece.length, ends: false };
  let word = words.get(piece);
  if (!word) {
    const text = visible(piece);
    let cells = 0;
    for (const char of text) cells += char > "\u10ff" && WIDE.test(char) ? 2 : 1;
    word = { text, cells, ends: piece.includes("\n") };
    words.set(piece, word);
  }
  return word;
}

/** The theme's colours, for a canvas. */
export function readTheme(element: Element): Theme {
  const style = getComputedStyle(element);
  const colours = THEME.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]);
  return Object.fromEntries(colours) as Theme;
}

/** Clear a canvas, adapt it to its displayed size, and return a context in CSS pixels. */
export function openCanvas(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth * ratio, canvas.clientHeight * ratio];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const pen = canvas.getContext("2d")!;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  return pen;
}

export class TokenRows {
  /** First token of each row, and the token after its last one. */
  private from: number[] = [];
  private to: number[] = [];
  private readonly folds = new Set<number>();
  private readonly unfolded = new Set<number>();
  private readonly spans: Int32Array;
  private columns = 0;
  private advance = 0;

  constructor(
    readonly trace: Trace,
    private readonly pieces: string[],
    private readonly folded = true,
  ) {
    this.spans = spanOf(trace);
  }

  get count(): number {
    return this.from.length;
  }

  /** Break the tokens into rows that fit a canvas of this width. */
  layOut(width: number, pen: CanvasRenderingContext2D): void {
    pen.font = FONT;
    this.advance = pen.measureText("x".repeat(100)).width / 100;
    const columns = Math.max(20, Math.floor((width - GUTTER - 8) / this.advance));
    if (columns !== this.columns) this.fill(columns);
  }

  private fill(columns: number): void {
    this.columns = columns;
    this.from = [];
    this.to = [];
    this.folds.clear();
    for (const [start, end, isAnswer] of this.runs()) {
      const whole = isAnswer || !this.folded || this.unfolded.has(start) || end - start <= FOLD;
      if (whole) {
        this.fillRun(start, end);
      } else {
        this.fillRun(start, start + KEPT);
        this.folds.add(this.from.length);
        this.push(start + KEPT, end - KEPT);
        this.fillRun(end - KEPT, end);
      }
    }
  }

  /** Runs of context and of answers. */
  private *runs(): Generator<[start: number, end: number, isAnswer: boolean]> {
    let at = 0;
    for (const span of this.trace.spans) {
      if (at < span.start) yield [at, span.start, false];
      yield [span.start, span.end, true];
      at = span.end;
    }
    if (at < this.trace.ids.length) yield [at, this.trace.ids.length, false];
  }

  private fillRun(start: number, end: number): void {
    let first = start;
    let used = 0;
    for (let k = start; k < end; k++) {
      const piece = this.pieces[k]!;
      let [cells, ends] = [piece.length, false];
      if (!PLAIN.test(piece)) ({ cells, ends } = wordOf(piece));
      if (k > first && used + cells > this.columns) {
        this.push(first, k);
        first = k;
        used = 0;
      }
      used += cells;
      if (ends) {
        this.push(first, k + 1);
        first = k + 1;
        used = 0;
      }
    }
    if (first < end) this.push(first, end);
  }

  private push(from: number, to: number): void {
    this.from.push(from);
    this.to.push(to);
  }

  /** The row that shows a token. */
  rowOf(k: number): number {
    let low = 0;
    let high = this.from.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.from[middle]! <= k) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** First token of a row. */
  startOf(row: number): number {
    return this.from[Math.max(0, Math.min(this.from.length - 1, row))] ?? 0;
  }

  /** Unfold the context that hides a token. */
  unfold(k: number): void {
    const row = this.rowOf(k);
    if (!this.folds.has(row)) return;
    this.unfolded.add(this.from[row]! - KEPT);
    this.fill(this.columns);
  }

  /** Unfold the fold at a position of the canvas; returns whether there is one. */
  unfoldAt(y: number): boolean {
    const row = Math.floor(y / ROW);
    if (!this.folds.has(row)) return false;
    this.unfold(this.from[row]!);
    return true;
  }

  /** The token at a position of the canvas, in the margin the first one of the row; null for none. */
  tokenAt(x: number, y: number): number | null {
    const row = Math.floor(y / ROW);
    if (row < 0 || row >= this.from.length || this.folds.has(row)) return null;
    let right = GUTTER;
    for (let k = this.from[row]!; k < this.to[row]!; k++) {
      right += wordOf(this.pieces[k]!).cells * this.advance;
      if (x < right) return k;
    }
    return null;
  }

  /** Draw the visible rows from `top` on, in pixels. */
  draw(canvas: HTMLCanvasElement, top: number, look: Look): void {
    const pen = openCanvas(canvas);
    const theme = readTheme(canvas);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const first = Math.max(0, Math.floor(top / ROW));
    const last = Math.min(this.from.length, Math.ceil((top + canvas.clientHeight) / ROW));
    for (let row = first; row < last; row++) {
      this.drawRow(pen, theme, row, row * ROW - top, look);
    }
  }

  private drawRow(
    pen: CanvasRenderingContext2D,
    theme: Theme,
    row: number,
    y: number,
    { colouring: { classes, swatches }, selected, marked }: Look,
  ): void {
    const from = this.from[row]!;
    const to = this.to[row]!;
    const span = this.spans[from]!;
    const middle = y + ROW / 2 + 0.5;
    if (from === 0 || this.spans[from - 1] !== span) {
      pen.fillStyle = theme.muted;
      const call = this.trace.spans[span]?.call;
      pen.fillText(call === undefined ? "context" : `call ${call}`, 8, middle);
    }
    if (this.folds.has(row)) {
      pen.fillStyle = theme.raised;
      pen.fillRect(GUTTER, y + 1, 220, ROW - 2);
      pen.fillStyle = theme.muted;
      pen.fillText(`… ${(to - from).toLocaleString("en")} tokens …`, GUTTER + 8, middle);
      return;
    }
    let x = GUTTER;
    for (let k = from; k < to; k++) {
      const { text, cells } = wordOf(this.pieces[k]!);
      const width = cells * this.advance;
      const { fill, ink, line } = swatches[classes[k]!]!;
      const match = marked?.[k] === 1;
      if (fill || match) {
        pen.fillStyle = match ? theme.match : fill;
        pen.fillRect(x, y + 1, width, ROW - 2);
      }
      pen.fillStyle = match ? theme.text : ink;
      if (line) {
        const step = line === "solid" ? width : 3;
        for (let at = 0; at < width; at += 2 * step) {
          pen.fillRect(x + at, y + ROW - 2, Math.min(step, width - at), 1);
        }
      }
      pen.fillText(text, x, middle);
      if (k === selected) {
        pen.strokeStyle = theme.accent;
        pen.lineWidth = 2;
        pen.strokeRect(x, y + 1, Math.max(3, width), ROW - 2);
      }
      x += width;
    }
  }
}

/**
 * Draw a trace as a bar of columns, each in the colour of its class.
 *
 * The bar takes `share` of the canvas; `marks` are positions on the canvas, from 0 to 1.
 */
export function drawBar(
  canvas: HTMLCanvasElement,
  columns: Uint8Array,
  { swatches }: Colouring,
  marks: readonly number[] = [],
  share = 1,
): void {
  const pen = openCanvas(canvas);
  const theme = readTheme(canvas);
  const { clientWidth, clientHeight: height } = canvas;
  const width = clientWidth * share;
  pen.fillStyle = theme.raised;
  pen.fillRect(0, 0, width, height);
  for (let i = 0; i < columns.length; ) {
    let end = i + 1;
    while (end < columns.length && columns[end] === columns[i]) end++;
    const left = (i / columns.length) * width;
    const swatch = swatches[columns[i]!]!;
    pen.fillStyle = swatch.bar || swatch.fill || theme.line;
    pen.fillRect(left, 0, ((end - i) / columns.length) * width, height);
    i = end;
  }
  pen.fillStyle = theme.text;
  for (const mark of marks) pen.fillRect(Math.round(mark * clientWidth), 0, 1, height);
}
