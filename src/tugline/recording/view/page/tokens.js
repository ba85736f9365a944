// The tokens of a trace, in rows of equal height, so that traces of any length scroll.

const FOLD = 160; // length in tokens above which a context is folded
const KEPT = 48; // tokens shown at each end of a folded context
const LEVELS = [0.01, 0.05, 0.2, 0.5, 1, 2]; // bounds of -logprob; the last class is unbounded
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u;

const level = (x) => {
  const i = LEVELS.findIndex((bound) => x <= bound);
  return i < 0 ? LEVELS.length : i;
};

function cells(text) {
  let width = 0;
  for (const char of text) width += char > "\u10ff" && WIDE.test(char) ? 2 : 1;
  return width;
}

class TokenView {
  // `open(call)` shows the conversation of a call; `by` and `fold` are controls of the page.
  constructor({ box, legend, facts, by, fold, open, versions }) {
    Object.assign(this, { box, legend, facts, by, fold, open, versions });
    this.list = new VirtualList(box, 20, (i) => this.row(i));
    this.unfolded = new Set();
    this.words = new Map();
    this.columns = 0;
    new ResizeObserver(() => this.resized()).observe(box);
    box.addEventListener("click", (event) => this.clicked(event));
    box.addEventListener("mouseover", (event) => this.hovered(event));
    box.addEventListener("mouseleave", () => this.describe(this.here));
    by.addEventListener("change", () => this.recolour());
    fold.addEventListener("change", () => {
      this.unfolded.clear();
      this.layout();
    });
  }

  show(trace, at = null) {
    if (trace !== this.trace) {
      this.trace = trace;
      this.here = null;
      this.hits = this.places = null;
      this.unfolded.clear();
      this.box.scrollTop = 0;
      this.layout();
    }
    this.recolour();
    if (at !== null) this.select(at);
    else this.describe(this.here);
  }

  resized() {
    const columns = this.measured();
    if (this.trace && columns !== this.columns) this.layout();
  }

  measured() {
    if (!this.advance) {
      const probe = make("span", {}, "x".repeat(100));
      this.box.append(probe);
      this.advance = probe.getBoundingClientRect().width / 100;
      probe.remove();
    }
    return Math.max(20, Math.floor((this.box.clientWidth - 140) / (this.advance || 8)));
  }

  // ---------------------------------------------------------------- layout
  // Compute the token range of each row; a fold is one row. The selected token stays in view.
  layout() {
    if (!this.trace || !this.box.clientWidth) return;
    this.columns = this.measured();
    const { trace } = this;
    const pieces = trace.pieces;
    this.from = [];
    this.to = [];
    this.folds = new Set();
    for (const [start, end, span] of this.runs()) {
      const whole = span >= 0 || !this.fold.checked || this.unfolded.has(start);
      if (whole || end - start <= FOLD) {
        this.fill(pieces, start, end);
      } else {
        this.fill(pieces, start, start + KEPT);
        this.folds.add(this.from.length);
        this.push(start + KEPT, end - KEPT);
        this.fill(pieces, end - KEPT, end);
      }
    }
    this.list.reset(this.from.length);
    this.changed?.();
    if (this.here !== null && this.here !== undefined) this.list.reveal(this.rowOf(this.here));
  }

  runs() {
    const runs = [];
    let at = 0;
    this.trace.spans.forEach((span, i) => {
      if (at < span.start) runs.push([at, span.start, -1]);
      runs.push([span.start, span.end, i]);
      at = span.end;
    });
    if (at < this.trace.length) runs.push([at, this.trace.length, -1]);
    return runs;
  }

  fill(pieces, start, end) {
    let first = start;
    let used = 0;
    for (let k = start; k < end; k++) {
      const word = this.word(pieces[k]);
      if (k > first && used + word.width > this.columns) {
        this.push(first, k);
        first = k;
        used = 0;
      }
      used += word.width;
      if (word.ends) {
        this.push(first, k + 1);
        first = k + 1;
        used = 0;
      }
    }
    if (first < end) this.push(first, end);
  }

  push(from, to) {
    this.from.push(from);
    this.to.push(to);
  }

  word(piece) {
    let word = this.words.get(piece);
    if (!word) {
      const text = visible(piece);
      word = { text, width: cells(text), ends: piece.includes("\n") };
      this.words.set(piece, word);
    }
    return word;
  }

  rowOf(k) {
    let low = 0;
    let high = this.from.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.from[middle] <= k) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // ---------------------------------------------------------------- drawing
  row(i) {
    const from = this.from[i];
    const span = this.trace.spanOf[from];
    const begins = from === 0 || this.trace.spanOf[from - 1] !== span;
    const line = make("div", { class: "line" });
    line.append(this.origin(begins ? span : null));
    if (this.folds.has(i)) {
      const size = count(this.to[i] - from);
      line.append(make("span", { class: "fold", "data-fold": from - KEPT }, `… ${size} tokens …`));
      return line;
    }
    for (let k = from; k < this.to[i]; k++) {
      const text = this.word(this.trace.pieces[k]).text;
      line.append(make("span", { class: this.colour(k), "data-k": k }, text));
    }
    return line;
  }

  origin(span) {
    if (span === null) return make("span", { class: "origin" });
    if (span < 0) return make("span", { class: "origin" }, "context");
    const { call, masked } = this.trace.spans[span];
    return make(
      "span",
      { class: "origin", title: masked ? `masked: ${masked}` : "trained" },
      make("a", { "data-call": call }, `call ${call}`),
    );
  }

  colour(k) {
    const { trace } = this;
    const span = trace.spanOf[k];
    let kind = "x";
    if (span >= 0) {
      const { masked, version } = trace.spans[span];
      if (this.by.value === "mask") kind = masked ? "masked" : "trained";
      else if (this.by.value === "version") kind = `v${this.versions.indexOf(version) % 6}`;
      else if (this.by.value === "logprob") kind = `h${level(-trace.logprobs[k])}`;
      else kind = `h${level(trace.surprise[k])}`;
    }
    return `k ${kind}${k === this.here ? " here" : ""}${this.hits?.[k] ? " hit" : ""}`;
  }

  recolour() {
    this.explain();
    this.list.redraw();
    this.changed?.();
  }

  explain() {
    const legend = {
      mask: [["trained", "trained"], ["masked", "sampled, not trained"], ["x", "context"]],
      version: this.versions.map((v, i) => [`v${i % 6}`, `version ${v}`]),
    };
    const heat = [...LEVELS, null].map((bound, i) => [
      `h${i}`,
      bound === null ? `p < ${Math.exp(-LEVELS.at(-1)).toFixed(2)}` : `p ≥ ${Math.exp(-bound).toFixed(2)}`,
    ]);
    const entries = legend[this.by.value] || heat;
    const what = this.by.value === "surprise" ? "mean over 17 tokens of the answer" : null;
    const { index, kind, length, trained, exact } = this.trace;
    this.legend.replaceChildren(
      make("b", {}, `trace ${index}, ${kind}`),
      `${count(length)} tokens, ${count(trained)} trained`,
      exact ? "" : make("span", { class: "bad" }, "not exact"),
      ...entries.map(([kind, text]) => make("span", { class: `k ${kind}` }, text)),
      what || "",
    );
  }

  // ---------------------------------------------------------------- one token
  clicked(event) {
    const { k, fold, call } = event.target.dataset;
    if (fold !== undefined) {
      this.unfolded.add(Number(fold));
      this.layout();
    } else if (call !== undefined) this.open(Number(call));
    else if (k !== undefined) this.select(Number(k));
  }

  hovered(event) {
    const { k } = event.target.dataset;
    if (k !== undefined) this.describe(Number(k));
  }

  select(k) {
    const here = Math.max(0, Math.min(this.trace.length - 1, k));
    this.here = here;
    if (this.from && this.folds.has(this.rowOf(here))) {
      this.unfolded.add(this.from[this.rowOf(here)] - KEPT);
      this.layout();
    }
    if (this.from) this.list.reveal(this.rowOf(here));
    this.list.redraw();
    this.describe(here);
  }

  // The call that sampled token k, or the first call whose prompt has the token.
  callOf(k) {
    const { spans, spanOf } = this.trace;
    if (spanOf[k] >= 0) return spans[spanOf[k]].call;
    const next = spans.find((span) => span.start > k);
    return next ? next.call : null;
  }

  describe(k) {
    if (k === null || k === undefined) {
      this.facts.replaceChildren(make("span", { class: "faint" }, "point at a token, or click it"));
      return;
    }
    const { trace } = this;
    const span = trace.spans[trace.spanOf[k]];
    const call = this.callOf(k);
    const facts = [
      make("code", {}, `“${visible(trace.pieces[k])}”`),
      `id ${trace.id(k)}`,
      `position ${count(k)}`,
      call === null ? null : make("a", { onclick: () => this.open(call) }, `call ${call}`),
    ];
    if (span) {
      const logprob = trace.logprobs[k];
      facts.push(`logprob ${fixed(logprob)}`, `p ${(100 * Math.exp(logprob)).toFixed(1)} %`);
      facts.push(`version ${span.version}`);
      const masked = span.masked && `not trained: ${span.masked}`;
      facts.push(make("span", { class: masked ? "mid" : "good" }, masked || "trained"));
    } else facts.push(make("span", { class: "faint" }, "context"));
    this.facts.replaceChildren(...facts.filter(Boolean).map((fact) => make("span", {}, fact)));
  }

  // Handle a key while the tokens have the focus; returns whether it was handled.
  key(name) {
    const here = this.here ?? 0;
    const row = () => this.rowOf(here);
    const starts = this.trace.spans.map((span) => span.start);
    const moves = {
      ArrowLeft: () => here - 1,
      ArrowRight: () => here + 1,
      ArrowUp: () => this.from[Math.max(0, row() - 1)],
      ArrowDown: () => this.from[Math.min(this.from.length - 1, row() + 1)],
      Home: () => 0,
      End: () => this.trace.length - 1,
      "[": () => starts.findLast((start) => start < here) ?? 0,
      "]": () => starts.find((start) => start > here) ?? this.trace.length - 1,
    };
    if (!moves[name] || !this.trace.length) return false;
    this.select(moves[name]());
    return true;
  }
}
