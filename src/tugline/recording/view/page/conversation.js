// One turn in words: its figures, what the request added, and what the harness was told.

const CLIP = 6000; // characters of a message that are shown at first

class Conversation {
  // `open(trace, token)` shows the tokens of a trace from a place on.
  constructor(box, session, traces, open) {
    Object.assign(this, { box, session, traces, open });
    this.turns = new Map(session.turns.map((turn) => [turn.call, turn]));
    this.term = "";
  }

  show(call) {
    this.call = call;
    const turn = this.turns.get(call);
    if (!turn) {
      this.box.replaceChildren("This session has no calls.");
      return;
    }
    const { messages, answer } = turn.detail;
    this.box.replaceChildren(
      this.facts(turn),
      ...messages.map((message) => this.message(message)),
      answer ? this.message(answer, true) : make("p", { class: "faint" }, "The harness was told nothing."),
      make("p", { class: "faint" }, "What became of its tokens"),
      ledgerTable(turn.ledger),
    );
    this.box.scrollTop = 0;
    this.box.querySelector("mark")?.scrollIntoView({ block: "center" });
  }

  facts(turn) {
    const { detail } = turn;
    const reasons = turn.reasons.length ? ` (${turn.reasons.join(", ").replaceAll("_", " ")})` : "";
    const parent = turn.parent === null ? "" : ` after call ${turn.parent}`;
    const fixedWish = Object.entries(detail.sampling).filter(([, value]) => value !== null && value.length !== 0);
    const facts = {
      call: `${turn.call}, ${turn.kind}${turn.thread ? `, thread ${turn.thread}` : ""}`,
      continues: `${turn.continuation.replaceAll("_", " ")}${reasons}${parent}`,
      prompt: `${plural(turn.prompt, "token")}${turn.shared ? `, ${count(turn.shared)} of them the parent's` : ""}`,
      sampled: `${plural(turn.sampled, "token")}, mean logprob ${fixed(turn.mean_logprob)}`,
      ended: `${turn.finish}${turn.stop ? ` at ${JSON.stringify(turn.stop)}` : ""}, ${turn.outcome.replace("_", " ")}`,
      version: turn.versions.map((span) => `${span.version} (${plural(span.end - span.start, "token")})`).join(", "),
      times: `received at ${seconds(turn.at)}, first token after ${seconds(turn.first_token_s)}, last after ${seconds(turn.total_s)}`,
      sampling: fixedWish.map(([name, value]) => `${name} ${value}`).join(", "),
      replicas: turn.replicas.join(", "),
      "tools offered": detail.offered.join(", "),
    };
    const list = make("dl", { class: "facts" });
    for (const [name, fact] of Object.entries(facts)) {
      if (fact) list.append(make("dt", {}, name), make("dd", {}, visible(fact)));
    }
    const trace = this.traces[turn.trace];
    const span = trace?.spans.find((one) => one.call === turn.call);
    if (span) {
      const go = () => this.open(turn.trace, span.start);
      list.append(make("dt", {}, "tokens"), make("dd", {}, make("a", { onclick: go }, `trace ${turn.trace}, from position ${count(span.start)}`)));
    }
    return list;
  }

  message({ role, content, reasoning, tool_calls, images, failed }, told = false) {
    const box = make("article", { class: told ? "message answer" : "message" });
    const title = told ? `${role}: the answer, as the harness was told` : role;
    box.append(make("h3", {}, title, failed ? make("span", { class: "bad" }, "failed") : null));
    if (reasoning) this.text(box, reasoning, "reasoning");
    if (content) this.text(box, content, "content");
    for (const tool of tool_calls || []) this.text(box, `${tool.name}(${tool.arguments})`, "tool");
    for (const { url } of images || []) {
      const inside = url.startsWith("data:image/");
      box.append(inside ? make("img", { src: url, alt: "picture" }) : make("pre", {}, `picture: ${url}`));
    }
    return box;
  }

  text(box, text, kind) {
    const pre = make("pre", { class: kind });
    const found = this.term && text.toLowerCase().indexOf(this.term) >= CLIP;
    const rest = found ? 0 : text.length - CLIP;
    this.marked(pre, rest > 0 ? text.slice(0, CLIP) : text);
    box.append(pre);
    if (rest <= 0) return;
    const more = make("button", {}, `show ${count(rest)} more characters`);
    more.addEventListener("click", () => {
      pre.replaceChildren();
      this.marked(pre, text);
      more.remove();
    });
    box.append(more);
  }

  // Text with the places of the search term marked.
  marked(pre, text) {
    const low = this.term ? text.toLowerCase() : "";
    let at = 0;
    for (let hit = this.term ? low.indexOf(this.term) : -1; hit >= 0; hit = low.indexOf(this.term, at)) {
      pre.append(readable(text.slice(at, hit)), make("mark", {}, readable(text.slice(hit, hit + this.term.length))));
      at = hit + this.term.length;
    }
    pre.append(readable(text.slice(at)));
  }
}
