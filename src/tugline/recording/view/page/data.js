// What the page shows, out of the one block of compressed data that the file carries.
"use strict";

// The block is gzip of: the JSON's length in bytes (uint32), the JSON, then the arrays.
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

// One sequence to train on. Its arrays are put together when they are first looked at.
class Trace {
  constructor(view, own, sampled, all, page) {
    Object.assign(this, view);
    this.own = own;
    this.sampled = sampled;
    this.all = all;
    this.page = page;
  }

  // Places in the table of ids: the beginning is the parent's, and the parent's own, and so on.
  get places() {
    if (this._places) return this._places;
    const found = new Int32Array(this.length);
    let end = this.length;
    for (let one = this; one && end > 0; one = one.parent === null ? null : this.all[one.parent]) {
      const start = Math.min(one.shared, end);
      found.set(one.own.subarray(0, end - start), start);
      end = start;
    }
    return (this._places = found);
  }

  id(k) {
    return this.page.ids[this.places[k]];
  }

  // The text that each token adds. A character made of several tokens stands at its last one.
  get pieces() {
    if (this._pieces) return this._pieces;
    const { texts } = this.page;
    const found = new Array(this.length);
    let decoder = null;
    for (let k = 0; k < this.length; k++) {
      const text = texts[this.places[k]];
      if (typeof text === "string") {
        found[k] = decoder ? decoder.decode() + text : text;
        decoder = null;
      } else {
        decoder = decoder || new TextDecoder();
        found[k] = decoder.decode(Uint8Array.from(text), { stream: true });
      }
    }
    return (this._pieces = found);
  }

  // Of each token the number of its span, or -1: it is context.
  get spanOf() {
    if (this._spanOf) return this._spanOf;
    const found = new Int32Array(this.length).fill(-1);
    this.spans.forEach((span, i) => found.fill(i, span.start, span.end));
    return (this._spanOf = found);
  }

  // Log probabilities; 0 where nothing was sampled.
  get logprobs() {
    if (this._logprobs) return this._logprobs;
    const found = new Float32Array(this.length);
    let at = 0;
    for (const span of this.spans) {
      found.set(this.sampled.subarray(at, at + span.end - span.start), span.start);
      at += span.end - span.start;
    }
    return (this._logprobs = found);
  }

  // The mean of -logprob over the 17 tokens around each one, within its answer: where the model
  // was unsure for longer than a token.
  get surprise() {
    if (this._surprise) return this._surprise;
    const found = new Float32Array(this.length);
    const { logprobs } = this;
    for (const { start, end } of this.spans) {
      for (let k = start; k < end; k++) {
        const from = Math.max(start, k - 8);
        const to = Math.min(end, k + 9);
        let sum = 0;
        for (let i = from; i < to; i++) sum -= logprobs[i];
        found[k] = sum / (to - from);
      }
    }
    return (this._surprise = found);
  }
}

// ------------------------------------------------------------------ words
const count = (n) => n.toLocaleString("en-US");
const seconds = (s) => (s === null ? "–" : s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);
const fixed = (x) => (x === null ? "–" : (x === 0 ? 0 : x).toFixed(3).replace("-", "−"));
const plural = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

// Text on one line in which everything can be seen: line ends, tabs, marks of direction.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u00a0\u3000]/gu;
function visible(text) {
  return text.replace(HIDDEN, (char) => {
    if (char === "\n") return "↵";
    if (char === "\t") return "⇥";
    return `\\u{${char.codePointAt(0).toString(16)}}`;
  });
}

// The same over many lines: their ends and tabs stay what they are.
const readable = (text) => text.split(/([\n\t])/).map((part) => (part === "\n" || part === "\t" ? part : visible(part))).join("");

// A colour of the style sheet as a canvas wants it. Forgotten when the theme changes.
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

// An element with attributes and children. Text is always text, never markup.
function make(kind, attributes = {}, ...children) {
  const element = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
