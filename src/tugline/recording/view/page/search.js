// Text search in the tokens of the shown trace, or in the messages of all turns.

const MAX_MATCHES = 20000;

class Search {
  // `view()` names the current view; `openTurn` and `tokens` show a match.
  constructor({ input, output, view, tokens, conversation, openTurn }) {
    Object.assign(this, { input, output, view, tokens, conversation, openTurn });
    this.places = [];
    input.addEventListener("input", () => this.find());
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") {
        input.value = "";
        this.find();
        input.blur();
      }
    });
  }

  // Search for the term, and go to the first match from the current position.
  find() {
    const term = this.input.value.toLowerCase();
    this.conversation.term = term;
    this.tokens.hits = this.tokens.places = null;
    this.places = !term ? [] : this.view() === "tokens" ? this.inTokens(term) : this.inTurns(term);
    const here = this.view() === "tokens" ? (this.tokens.here ?? 0) : this.conversation.call;
    const next = this.places.findIndex((place) => place >= here);
    this.at = next < 0 ? 0 : next;
    if (this.places.length) this.go();
    else this.clear(term);
  }

  clear(term) {
    this.output.value = term ? "not found" : "";
    if (this.view() === "tokens") this.tokens.recolour();
    else this.conversation.show(this.conversation.call);
  }

  step(by) {
    if (!this.places.length) return;
    this.at = (this.at + by + this.places.length) % this.places.length;
    this.go();
  }

  go() {
    const place = this.places[this.at];
    this.output.value = `${count(this.at + 1)} of ${count(this.places.length)}`;
    if (this.view() === "tokens") this.tokens.select(place);
    else this.openTurn(place);
  }

  // Return the first token of each match; all tokens of matches are marked.
  inTokens(term) {
    const { trace } = this.tokens;
    const pieces = trace.pieces;
    const starts = new Int32Array(pieces.length + 1);
    for (let k = 0; k < pieces.length; k++) starts[k + 1] = starts[k] + pieces[k].length;
    if (this.textOf !== trace) {
      this.text = pieces.map((piece) => piece.toLowerCase().padEnd(piece.length)).join("");
      this.textOf = trace;
    }
    const hits = new Uint8Array(pieces.length);
    const places = [];
    let k = 0;
    for (let at = this.text.indexOf(term); at >= 0 && places.length < MAX_MATCHES; at = this.text.indexOf(term, at + term.length)) {
      while (starts[k + 1] <= at) k++;
      places.push(k);
      for (let i = k; i < pieces.length && starts[i] < at + term.length; i++) hits[i] = 1;
    }
    this.tokens.hits = hits;
    this.tokens.places = places;
    this.tokens.changed?.();
    return places;
  }

  inTurns(term) {
    const texts = ({ messages, answer }) =>
      [...messages, ...(answer ? [answer] : [])].flatMap(({ content, reasoning, tool_calls }) => [
        content || "",
        reasoning || "",
        ...(tool_calls || []).map((tool) => `${tool.name}(${tool.arguments})`),
      ]);
    const holds = (turn) => texts(turn.detail).some((text) => text.toLowerCase().includes(term));
    return this.conversation.session.turns.filter(holds).map((turn) => turn.call);
  }
}
