// A turn as a conversation: its facts, the added messages, and the answer as received.

const CLIP = 6000; // characters of a message that are shown initially

class Conversation {
  // `open(trace, token)` shows a trace's tokens at a position.
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
      answer ? this.message(answer, true) : make("p", { class: "faint" }, "The harness received no answer."),
      make("p", { class: "faint" }, "Ledger of its tokens"),
      ledgerTable(turn.ledger),
    );
    this.box.scrollTop = 0;
    this.box.querySelector("mark")?.scrollIntoView({ block: "center" });
  }

  facts(turn) {
    const { detail } = turn;
    const reasons = turn.reasons.length ? ` (${turn.reasons.join(", ").replaceAll("_", " ")})` : "";
    const parent = turn.parent === null ? "" : ` after call ${turn.parent}`;
    const sampling = Object.entries(detail.sampling).filter(([, value]) => value !== null && value.length !== 0);
    const facts = {
      call: `${turn.call}, ${turn.kind}${turn.thread ? `, thread ${turn.thread}` : ""}`,
      continues: `${turn.continuation.replaceAll("_", " ")}${reasons}${parent}`,
      prompt: `${plural(turn.prompt, "token")}${turn.shared ? `, ${count(turn.shared)} of them the parent's` : ""}`,
      sampled: `${plural(turn.sampled, "token")}, mean logprob ${fixed(turn.mean_logprob)}`,
      ended: `${turn.finish}${turn.stop ? ` at ${JSON.stringify(turn.stop)}` : ""}, ${turn.outcome.replace("_", " ")}`,
      version: turn.versions.map((span) => `${span.version} (${plural(span.end - span.start, "token")})`).join(", "),
      times: `received at ${seconds(turn.at)}, first token after ${seconds(turn.first_token_s)}, last after ${seconds(turn.total_s)}`,
      sampling: sampling.map(([name, value]) => `${name} ${value}`).join(", "),
      replicas: turn.replicas.join(", "),
      "tools offered": detail.offered.join(", "),
    };
    const list = make("dl", { class: "facts" });
    for (const [name, fact] of Object.entries(facts)) {
      if (fact) list.append(make("dt", {}, name), make("dd", {}, visible(fact)));
    }
    const trace = this.traces[turn.trace];
    const span = trace?.spans.find((candidate) => candidate.call === turn.call);
    if (span) {
      const go = () => this.open(turn.trace, span.start);
      list.append(make("dt", {}, "tokens"), make("dd", {}, make("a", { onclick: go }, `trace ${turn.trace}, from position ${count(span.start)}`)));
    }
    return list;
  }

  message({ role, content, reasoning, tool_calls, images, failed }, answer = false) {
    const box = make("article", { class: answer ? "message answer" : "message" });
    const title = answer ? `${role}: the answer, as the harness received it` : role;
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
    const clipsMatch = this.term && text.toLowerCase().indexOf(this.term) >= CLIP;
    const rest = clipsMatch ? 0 : text.length - CLIP;
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

  // Append text with the matches of the search term marked.
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
