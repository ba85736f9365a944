// Data of the page, decoded from the block of compressed data in the file.
"use strict";

// The block is gzip of the JSON's length in bytes (uint32), the JSON, and the arrays.
async function unpack(text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const block = await new Response(stream).arrayBuffer();
  const size = new DataView(block).getUint32(0, true);
  const page = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, size)));
  const array = (kind, { start, count }) => new kind(block, 4 + size + 4 * start, count);
  const traces = [];
  page.session.traces.forEach((view, i) => {
    const own = array(Int32Array, page.tokens[i]);
    traces.push(new Trace(view, own, array(Float32Array, page.logprobs[i]), traces, page));
  });
  return { session: page.session, traces };
}

// A trace. Its arrays are built on first access.
class Trace {
  constructor(view, own, sampled, all, page) {
    Object.assign(this, view);
    this.own = own;
    this.sampled = sampled;
    this.all = all;
    this.page = page;
  }

  // Index of each token in the table of ids. Shared leading tokens come from the parents.
  get places() {
    if (this._places) return this._places;
    const places = new Int32Array(this.length);
    let end = this.length;
    for (let trace = this; trace && end > 0; trace = trace.parent === null ? null : this.all[trace.parent]) {
      const start = Math.min(trace.shared, end);
      places.set(trace.own.subarray(0, end - start), start);
      end = start;
    }
    return (this._places = places);
  }

  id(k) {
    return this.page.ids[this.places[k]];
  }

  // Text that each token adds. A character split over several tokens belongs to the last one.
  get pieces() {
    if (this._pieces) return this._pieces;
    const { texts } = this.page;
    const pieces = new Array(this.length);
    let decoder = null;
    for (let k = 0; k < this.length; k++) {
      const text = texts[this.places[k]];
      if (typeof text === "string") {
        pieces[k] = decoder ? decoder.decode() + text : text;
        decoder = null;
      } else {
        decoder = decoder || new TextDecoder();
        pieces[k] = decoder.decode(Uint8Array.from(text), { stream: true });
      }
    }
    return (this._pieces = pieces);
  }

  // Index of each token's span; -1 for context.
  get spanOf() {
    if (this._spanOf) return this._spanOf;
    const indices = new Int32Array(this.length).fill(-1);
    this.spans.forEach((span, i) => indices.fill(i, span.start, span.end));
    return (this._spanOf = indices);
  }

  // Log probability of each token; 0 for context.
  get logprobs() {
    if (this._logprobs) return this._logprobs;
    const logprobs = new Float32Array(this.length);
    let at = 0;
    for (const span of this.spans) {
      logprobs.set(this.sampled.subarray(at, at + span.end - span.start), span.start);
      at += span.end - span.start;
    }
    return (this._logprobs = logprobs);
  }

  // Mean of -logprob over the 17 tokens around each token, within its answer: high where the model
  // was unsure for more than one token.
  get surprise() {
    if (this._surprise) return this._surprise;
    const means = new Float32Array(this.length);
    const { logprobs } = this;
    for (const { start, end } of this.spans) {
      for (let k = start; k < end; k++) {
        const from = Math.max(start, k - 8);
        const to = Math.min(end, k + 9);
        let sum = 0;
        for (let i = from; i < to; i++) sum -= logprobs[i];
        means[k] = sum / (to - from);
      }
    }
    return (this._surprise = means);
  }
}

// ------------------------------------------------------------------ formatting
const count = (n) => n.toLocaleString("en-US");
const seconds = (s) => (s === null ? "–" : s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);
const fixed = (x) => (x === null ? "–" : (x === 0 ? 0 : x).toFixed(3).replace("-", "−"));
const plural = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

// Text on one line, with visible line ends, tabs and other invisible characters.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u00a0\u3000]/gu;
function visible(text) {
  return text.replace(HIDDEN, (char) => {
    if (char === "\n") return "↵";
    if (char === "\t") return "⇥";
    return `\\u{${char.codePointAt(0).toString(16)}}`;
  });
}

// Text on several lines, like `visible`, but with unchanged line ends and tabs.
const readable = (text) => text.split(/([\n\t])/).map((part) => (part === "\n" || part === "\t" ? part : visible(part))).join("");

// Computed value of a style sheet's colour, for a canvas. Cleared when the theme changes.
const colours = new Map();
function colourOf(name) {
  if (!colours.has(name)) {
    const probe = make("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

// Create an element with attributes and children. Strings become text, never markup.
function make(kind, attributes = {}, ...children) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
