// A trace as a stream of tokens: laid out in rows of one height, so that any length scrolls.

const FOLD = 160; // a context of more tokens is folded
const KEPT = 48; // of which so many stay at each end
const LEVELS = [0.01, 0.05, 0.2, 0.5, 1, 2]; // -logprob; the last class is beyond them
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u;

const level = (x) => {
  const i = LEVELS.findIndex((most) => x <= most);
  return i < 0 ? LEVELS.length : i;
};

function cells(text) {
  let width = 0;
  for (const char of text) width += char > "\u10ff" && WIDE.test(char) ? 2 : 1;
  return width;
}

class TokenView {
  // `open(call)` shows the conversation of a call; `by` and `fold` are the tools of the page.
  constructor({ box, legend, facts, by, fold, open, versions }) {
    Object.assign(this, { box, legend, facts, by, fold, open, versions });
    this.list = new VirtualList(box, 20, (i) => this.row(i));
    this.unfolded = new Set();
    this.words = new Map();
    this.columns = 0;
    new ResizeObserver(() => this.resized()).observe(box);
    box.addEventListener("click", (event) => this.clicked(event));
    box.addEventListener("mouseover", (event) => this.hovered(event));
    box.addEventListener("mouseleave", () => this.tell(this.here));
    by.addEventListener("change", () => this.recolour());
    fold.addEventListener("change", () => {
      this.unfolded.clear();
      this.lay();
    });
  }

  show(trace, at = null) {
    if (trace !== this.trace) {
      this.trace = trace;
      this.here = null;
      this.hits = this.places = null;
      this.unfolded.clear();
      this.box.scrollTop = 0;
      this.lay();
    }
    this.recolour();
    if (at !== null) this.select(at);
    else this.tell(this.here);
  }

  resized() {
    const columns = this.measured();
    if (this.trace && columns !== this.columns) this.lay();
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
  // Rows as first and last token; a fold is a row, too. Keeps what is in sight in its place.
  lay() {
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
    const found = [];
    let at = 0;
    this.trace.spans.forEach((span, i) => {
      if (at < span.start) found.push([at, span.start, -1]);
      found.push([span.start, span.end, i]);
      at = span.end;
    });
    if (at < this.trace.length) found.push([at, this.trace.length, -1]);
    return found;
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
    const heat = [...LEVELS, null].map((most, i) => [
      `h${i}`,
      most === null ? `p < ${Math.exp(-LEVELS.at(-1)).toFixed(2)}` : `p ≥ ${Math.exp(-most).toFixed(2)}`,
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
      this.lay();
    } else if (call !== undefined) this.open(Number(call));
    else if (k !== undefined) this.select(Number(k));
  }

  hovered(event) {
    const { k } = event.target.dataset;
    if (k !== undefined) this.tell(Number(k));
  }

  select(k) {
    const here = Math.max(0, Math.min(this.trace.length - 1, k));
    this.here = here;
    if (this.from && this.folds.has(this.rowOf(here))) {
      this.unfolded.add(this.from[this.rowOf(here)] - KEPT);
      this.lay();
    }
    if (this.from) this.list.reveal(this.rowOf(here));
    this.list.redraw();
    this.tell(here);
  }

  // The call that sampled token k, or whose prompt brought it in.
  callOf(k) {
    const { spans, spanOf } = this.trace;
    if (spanOf[k] >= 0) return spans[spanOf[k]].call;
    const next = spans.find((span) => span.start > k);
    return next ? next.call : null;
  }

  tell(k) {
    if (k === null || k === undefined) {
      this.facts.replaceChildren(make("span", { class: "faint" }, "point at a token, or click it"));
      return;
    }
    const { trace } = this;
    const span = trace.spans[trace.spanOf[k]];
    const call = this.callOf(k);
    const said = [
      make("code", {}, `“${visible(trace.pieces[k])}”`),
      `id ${trace.id(k)}`,
      `position ${count(k)}`,
      call === null ? null : make("a", { onclick: () => this.open(call) }, `call ${call}`),
    ];
    if (span) {
      const logprob = trace.logprobs[k];
      said.push(`logprob ${fixed(logprob)}`, `p ${(100 * Math.exp(logprob)).toFixed(1)} %`);
      said.push(`version ${span.version}`);
      const masked = span.masked && `not trained: ${span.masked}`;
      said.push(make("span", { class: masked ? "mid" : "good" }, masked || "trained"));
    } else said.push(make("span", { class: "faint" }, "context"));
    this.facts.replaceChildren(...said.filter(Boolean).map((one) => make("span", {}, one)));
  }

  // Keys while the stream has the focus; true if the key was meant for it.
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
