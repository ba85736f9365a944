// Lists on the left: turns and events, the tree of traces, the ledger.

const CONTINUATION_CLASS = {
  first: "faint",
  exact: "good",
  echo_changed: "mid",
  forked: "mid",
  broken: "bad",
  no_token_ids: "bad",
};

// Letters for the harness's thread ids, in order of appearance; none for a single thread.
function letters(turns) {
  const threads = [...new Set(turns.map((turn) => turn.thread))];
  const letter = (i) => (i < 26 ? "" : letter(Math.floor(i / 26) - 1)) + String.fromCharCode(97 + (i % 26));
  return threads.length > 1 ? new Map(threads.map((thread, i) => [thread, letter(i)])) : new Map();
}

class TurnList {
  constructor(box, session, open) {
    this.open = open;
    this.letters = letters(session.turns);
    this.moments = [...session.turns, ...session.events].sort((a, b) => a.at - b.at);
    this.rowOf = new Map();
    this.moments.forEach((item, i) => "prompt" in item && this.rowOf.set(item.call, i));
    this.list = new VirtualList(box, 46, (i) => this.row(this.moments[i]));
    this.list.reset(this.moments.length);
  }

  row(item) {
    return "prompt" in item ? this.turn(item) : this.event(item);
  }

  event({ kind, at, call, detail }) {
    return make(
      "div",
      { class: "entry event" },
      make("div", { class: "top" }, make("span", {}, kind.replace("_", " ")), call === null ? null : make("span", {}, `in call ${call}`), make("span", {}, seconds(at))),
      make("div", { class: "below", title: detail }, visible(detail)),
    );
  }

  turn(turn) {
    const { call, kind, continuation, reasons, detail } = turn;
    const text = detail.answer?.content || "";
    const tools = detail.answer?.tool_calls?.map((tool) => `${tool.name}(${tool.arguments})`) || [];
    const reason = reasons.length ? `: ${reasons.join(", ").replaceAll("_", " ")}` : "";
    const from = continuation === "forked" && turn.parent !== null ? ` from ${turn.parent}` : "";
    return make(
      "div",
      {
        class: `entry ${continuation}`,
        role: "option",
        "aria-selected": call === this.chosen,
        onclick: () => this.open(call),
      },
      make(
        "div",
        { class: "top" },
        make("span", { class: "number" }, `${call}`),
        kind === "main" ? null : make("span", {}, `${kind} ${this.letters.get(turn.thread) || ""}`),
        make("span", { class: CONTINUATION_CLASS[continuation] }, `${continuation.replaceAll("_", " ")}${reason}${from}`),
        this.ended(turn),
        make("span", { class: "faint push", title: "new prompt tokens → sampled" }, `+${count(turn.prompt - turn.shared)} → ${count(turn.sampled)}`),
        make("span", { class: "faint time" }, seconds(turn.total_s)),
      ),
      make("div", { class: "below" }, visible([text, ...tools].filter(Boolean).join("  ").slice(0, 160)) || "\u00a0"),
    );
  }

  ended({ outcome, finish }) {
    const end = outcome === "complete" ? finish : outcome.replace("_", " ");
    return end === "stop" ? null : make("span", { class: "bad" }, end);
  }

  choose(call) {
    this.chosen = call;
    this.list.reveal(this.rowOf.get(call));
    this.list.redraw();
  }
}

// Traces as a tree: a fork is indented by one step from its parent.
class TraceTree {
  constructor(box, traces, open) {
    this.traces = traces;
    this.open = open;
    this.order = [];
    const children = new Map();
    for (const trace of traces) {
      const parent = trace.parent !== null && trace.parent < trace.index ? trace.parent : null;
      children.set(parent, [...(children.get(parent) || []), trace]);
    }
    const waiting = (children.get(null) || []).reverse().map((trace) => [trace, 0]);
    while (waiting.length) {
      const [trace, depth] = waiting.pop();
      this.order.push({ trace, depth });
      const below = children.get(trace.index) || [];
      const continues = (child) => child.shared === trace.length;
      const ordered = [...below.filter((child) => !continues(child)), ...below.filter(continues)].reverse();
      for (const child of ordered) waiting.push([child, depth + (continues(child) ? 0 : 1)]);
    }
    this.guides();
    this.list = new VirtualList(box, 46, (i) => this.row(this.order[i]));
    this.list.reset(this.order.length);
  }

  // Compute, for each row, the depths at which a line continues to a lower row.
  guides() {
    let below = new Set();
    for (const entry of [...this.order].reverse()) {
      entry.through = new Set([...below].filter((depth) => depth <= entry.depth));
      below = new Set([...entry.through].filter((depth) => depth < entry.depth)).add(entry.depth);
    }
  }

  row({ trace, depth, through }) {
    const { index, kind, length, trained, parent, shared, exact } = trace;
    const guides = [];
    for (let d = 1; d <= Math.min(depth, 10); d++) {
      const kinds = ["guide", through.has(d) && "through", d === depth && "turn"];
      guides.push(make("span", { class: kinds.filter(Boolean).join(" ") }));
    }
    const calls = new Set(trace.spans.map((span) => span.call)).size;
    const origin = parent === null ? null : make(
      "a",
      { onclick: (event) => (event.stopPropagation(), this.open(parent, Math.max(0, shared - 1))) },
      this.describeOrigin(trace),
    );
    return make(
      "div",
      {
        class: "entry tree",
        role: "option",
        "aria-selected": index === this.chosen,
        onclick: () => this.open(index),
      },
      ...guides,
      make(
        "div",
        { class: "what" },
        make("div", { class: "top" }, make("b", {}, `trace ${index}`), make("span", {}, kind), exact ? null : make("span", { class: "bad" }, "not exact"), make("span", { class: "faint" }, `${count(length)} tokens`)),
        make("div", { class: "below" }, `${count(trained)} trained in ${plural(calls, "answer")}  `, origin),
      ),
    );
  }

  describeOrigin({ kind, parent, shared }) {
    if (kind === "subagent") return `started by trace ${parent}`;
    if (shared === this.traces[parent].length) return `continues trace ${parent}`;
    return `forks from trace ${parent} after ${plural(shared, "token")}`;
  }

  choose(index) {
    this.chosen = index;
    this.list.reveal(this.order.findIndex((entry) => entry.trace.index === index));
    this.list.redraw();
  }
}

const LEDGER = { trained: "--good", masked: "--mid", dropped: "--bad" };

function ledgerRows({ trained, masked, dropped }) {
  const rows = [["trained", "", trained]];
  for (const [reason, n] of Object.entries(masked)) rows.push(["masked", reason, n]);
  for (const [reason, n] of Object.entries(dropped)) rows.push(["dropped", reason, n]);
  return rows;
}

function ledgerTable(ledger) {
  const share = (n) => (ledger.sampled ? `${((100 * n) / ledger.sampled).toFixed(1)} %` : "");
  const swatch = (what) => {
    const square = make("span", { class: "swatch" });
    square.style.background = `var(${LEDGER[what]})`;
    return square;
  };
  const cell = (text, kind = "") => make("td", { class: kind }, text);
  return make(
    "table",
    {},
    ...ledgerRows(ledger).map(([what, reason, n]) =>
      make("tr", {}, make("td", {}, swatch(what), what), cell(reason.replaceAll("_", " ")), cell(count(n), "n"), cell(share(n), "n")),
    ),
    make("tr", {}, cell("sampled"), cell(""), cell(count(ledger.sampled), "n"), cell("")),
  );
}

function showLedger(box, { ledger, builder, build_error }) {
  const bar = make("div", { class: "bar" });
  for (const [what, , n] of ledgerRows(ledger)) {
    const part = make("span");
    part.style.flex = `${n} 0 0`;
    part.style.background = `var(${LEDGER[what]})`;
    bar.append(part);
  }
  const note = build_error || `every sampled token of the session, as ${builder} uses it`;
  box.replaceChildren(bar, ledgerTable(ledger), make("p", { class: build_error ? "bad" : "faint" }, note));
}
