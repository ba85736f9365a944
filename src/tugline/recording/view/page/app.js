// The page: creates its parts and keeps them on the same turn, trace and token.

const $ = (id) => document.getElementById(id);

function showHeader({ header, result, recording, builder, turns, started, damage, torn_bytes, build_error }) {
  const kinds = { failed: "bad", timed_out: "bad", cancelled: "mid", completed: "good" };
  const badge = (kind, text) => make("span", { class: `badge ${kind}` }, text);
  const reward = result?.reward;
  $("headline").replaceChildren(
    header ? header.session.id : recording,
    badge(kinds[result?.status] || "mid", (result?.status || "no result").replace("_", " ")),
    reward ? badge(reward.value > 0 ? "good" : "mid", `reward ${Number(reward.value.toFixed(4))}`) : "",
  );
  const listed = (entries) => Object.entries(entries || {}).map(([name, x]) => `${name} ${Number(x.toFixed(3))}`).join(", ");
  const facts = {
    task: header && `${header.task.id} (sample ${header.session.sample})`,
    ran: header && [header.task.harness.name, header.model, header.engine].filter(Boolean).join(" → "),
    prompts: header && [header.mode, header.template, header.thinking_retention].filter(Boolean).join(" "),
    builder,
    calls: count(turns.length),
    started: new Date(started * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC",
    "reward parts": listed(reward?.parts),
    seconds: listed(result?.seconds),
    "forked from": header?.forked_from,
    failure: result?.failure && `${result.failure.boundary}: ${result.failure.message}`,
    damage,
    torn: torn_bytes ? `${count(torn_bytes)} bytes at the end were cut off` : "",
    "no traces": build_error,
  };
  const alarms = new Set(["failure", "damage", "torn", "no traces"]);
  for (const [name, fact] of Object.entries(facts)) {
    if (!fact) continue;
    const kind = alarms.has(name) ? "bad" : undefined;
    $("facts").append(make("div", { class: kind }, make("dt", {}, name), make("dd", {}, visible(fact))));
  }
}

class App {
  constructor({ session, traces }) {
    this.session = session;
    this.traces = traces;
    this.view = "conversation";
    const versions = session.turns.flatMap((turn) => turn.versions.map((span) => span.version));
    const openTurn = (call) => this.openTurn(call);
    const openTrace = (index, token) => this.openTrace(index, token);
    showHeader(session);
    showLedger($("ledger"), session);
    this.timeline = new Timeline($("timeline"), session, openTurn);
    this.turns = new TurnList($("turns"), session, openTurn);
    this.tree = new TraceTree($("traces"), traces, openTrace);
    this.conversation = new Conversation($("conversation"), session, traces, openTrace);
    this.tokens = new TokenView({
      box: $("tokens"),
      legend: $("legend"),
      facts: $("token"),
      by: $("by"),
      fold: $("fold"),
      versions: [...new Set(versions)].sort((a, b) => a - b),
      open: (call) => {
        this.show("conversation");
        this.openTurn(call);
      },
    });
    this.map = new TokenMap($("map"), this.tokens);
    this.search = new Search({
      input: $("search"),
      output: $("found"),
      view: () => this.view,
      tokens: this.tokens,
      conversation: this.conversation,
      openTurn: (call) => this.choose(call),
    });
    this.wire();
    this.list("turns");
    this.show("conversation");
    if (session.turns.length) this.choose(session.turns[0].call);
    else this.conversation.show(null);
  }

  // ---------------------------------------------------------------- navigation
  // Show a turn as a conversation, or at its answer in the tokens.
  openTurn(call) {
    this.choose(call);
    const turn = this.conversation.turns.get(call);
    const span = this.traces[turn.trace]?.spans.find((candidate) => candidate.call === call);
    if (this.view !== "tokens") return;
    if (span) this.openTrace(turn.trace, span.start);
    else this.show("conversation");
  }

  choose(call) {
    this.call = call;
    this.conversation.show(call);
    this.turns.choose(call);
    this.timeline.choose(call);
  }

  openTrace(index, token = null) {
    this.index = index;
    this.show("tokens");
    this.tree.choose(index);
    this.tokens.show(this.traces[index], token);
  }

  list(name) {
    for (const id of ["turns", "traces", "ledger"]) $(id).hidden = id !== name;
    this.mark("data-list", name);
  }

  show(view) {
    this.view = view === "tokens" && this.traces.length ? "tokens" : "conversation";
    for (const id of ["stream", "token", "legend", "token-tools"]) $(id).hidden = this.view !== "tokens";
    $("conversation").hidden = this.view !== "conversation";
    this.mark("data-view", this.view);
  }

  mark(attribute, name) {
    for (const tab of document.querySelectorAll(`[${attribute}]`)) {
      tab.setAttribute("aria-selected", tab.getAttribute(attribute) === name);
    }
  }

  showTokens() {
    if (!this.traces.length) return;
    const index = this.index ?? this.conversation.turns.get(this.call)?.trace ?? 0;
    this.openTrace(index);
  }

  move(by) {
    const calls = this.session.turns.map((turn) => turn.call);
    const next = calls[calls.indexOf(this.call) + by];
    if (next !== undefined) this.openTurn(next);
  }

  // ---------------------------------------------------------------- buttons and keys
  wire() {
    for (const tab of document.querySelectorAll("[data-list]")) {
      tab.addEventListener("click", () => this.list(tab.dataset.list));
    }
    for (const tab of document.querySelectorAll("[data-view]")) {
      tab.addEventListener("click", () => (tab.dataset.view === "tokens" ? this.showTokens() : this.show("conversation")));
    }
    $("theme").addEventListener("click", () => this.theme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    $("help-open").addEventListener("click", () => $("help").showModal());
    document.addEventListener("keydown", (event) => this.key(event));
  }

  theme() {
    const dark = getComputedStyle(document.body).backgroundColor === "rgb(18, 22, 29)";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    this.repaint();
  }

  repaint() {
    colours.clear();
    this.timeline.draw();
    this.map.plan();
  }

  key(event) {
    const typing = event.target.matches("input[type=search], select");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const by = (name) => () => {
      $("by").value = name;
      if (this.view === "tokens") this.tokens.recolour();
    };
    const list = { ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1) };
    const keys = {
      j: () => this.move(1),
      k: () => this.move(-1),
      c: () => this.show("conversation"),
      t: () => this.showTokens(),
      f: () => $("fold").click(),
      d: () => this.theme(),
      "/": () => $("search").select(),
      "?": () => $("help").showModal(),
      1: by("mask"),
      2: by("logprob"),
      3: by("surprise"),
      4: by("version"),
      ...(document.activeElement === $("turns") ? list : {}),
    };
    const handled = this.view === "tokens" && document.activeElement === $("tokens") && this.tokens.key(event.key);
    if (!handled && !keys[event.key]) return;
    if (!handled) keys[event.key]();
    event.preventDefault();
  }
}

unpack($("data").textContent).then(
  (page) => (window.tugline = new App(page)),
  (error) => $("headline").replaceChildren(`This page cannot be shown: ${error.message}`),
);
