// Timeline of calls: from the request (pale) to the first and last token (full colour).
// Overlapping calls are in separate lanes; a thread keeps its lane if possible.

const LANE = 13;
const EDGE = 14;
const KINDS = { main: "--accent", subagent: "--good", side: "--faint", compaction: "--mid", branch: "--mid" };

class Timeline {
  constructor(canvas, session, open) {
    Object.assign(this, { canvas, turns: session.turns, events: session.events, open });
    const ends = this.turns.map((turn) => turn.at + (turn.total_s ?? 0));
    const begins = [...this.turns, ...this.events].map((each) => each.at);
    this.start = begins.length ? Math.min(...begins) : 0;
    this.end = Math.max(this.start + 0.001, ...begins, ...ends);
    this.lanes = this.sorted();
    canvas.hidden = !this.turns.length;
    canvas.addEventListener("click", (event) => {
      const turn = this.under(event);
      if (turn) open(turn.call);
    });
    canvas.addEventListener("mousemove", (event) => {
      const turn = this.under(event);
      canvas.title = turn ? `call ${turn.call}: at ${seconds(turn.at)}, took ${seconds(turn.total_s)}` : "";
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // Choose each turn's lane: that of its thread if free, else the first free lane.
  sorted() {
    const free = [];
    const home = new Map();
    return this.turns.map((turn) => {
      let lane = home.get(turn.thread);
      if (lane === undefined || free[lane] > turn.at) lane = free.findIndex((end) => end <= turn.at);
      if (home.get(turn.thread) === undefined && lane >= 0 && [...home.values()].includes(lane)) lane = -1;
      if (lane < 0) lane = free.length;
      free[lane] = turn.at + (turn.total_s ?? 0);
      if (!home.has(turn.thread)) home.set(turn.thread, lane);
      return Math.min(lane, 11);
    });
  }

  x(at) {
    return EDGE + ((at - this.start) / (this.end - this.start)) * (this.canvas.clientWidth - 2 * EDGE);
  }

  bars() {
    return this.turns.map((turn, i) => {
      const from = this.x(turn.at);
      const first = this.x(turn.at + (turn.first_token_s ?? 0));
      const to = Math.max(from + 2, this.x(turn.at + (turn.total_s ?? 0)));
      return { turn, from, first: Math.min(first, to - 1), to, top: 6 + this.lanes[i] * LANE };
    });
  }

  under(event) {
    const { offsetX: x, offsetY: y } = event;
    const near = this.bars().filter((bar) => Math.abs(y - bar.top - LANE / 2) <= LANE / 2);
    const away = (bar) => Math.max(bar.from - x, x - bar.to, 0);
    const nearest = near.sort((a, b) => away(a) - away(b))[0];
    return nearest && away(nearest) < 6 ? nearest.turn : null;
  }

  choose(call) {
    this.chosen = call;
    this.draw();
  }

  draw() {
    const height = (Math.max(...this.lanes, 0) + 1) * LANE + 24;
    const ratio = window.devicePixelRatio || 1;
    const { canvas } = this;
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.body);
    this.axis(pen, height, style);
    for (const bar of this.bars()) {
      pen.fillStyle = colourOf(KINDS[bar.turn.kind] || "--accent");
      pen.globalAlpha = 0.35;
      pen.fillRect(bar.from, bar.top, bar.to - bar.from, LANE - 3);
      pen.globalAlpha = 1;
      pen.fillRect(bar.first, bar.top, bar.to - bar.first, LANE - 3);
      if (bar.turn.call === this.chosen) {
        pen.strokeStyle = style.color;
        pen.lineWidth = 2;
        pen.strokeRect(bar.from - 1, bar.top - 1, bar.to - bar.from + 2, LANE - 1);
      }
    }
    pen.fillStyle = colourOf("--bad");
    for (const event of this.events) pen.fillRect(this.x(event.at) - 1, 0, 2, height - 18);
  }

  axis(pen, height, style) {
    const whole = this.end - this.start;
    const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600].find((s) => whole / s < 12) || 7200;
    pen.font = `11px ${style.fontFamily}`;
    pen.fillStyle = colourOf("--faint");
    for (let at = Math.ceil(this.start / step) * step; at <= this.end; at += step) {
      const x = this.x(at);
      pen.fillRect(x, height - 18, 1, 4);
      if (x < this.canvas.clientWidth - 44) pen.fillText(`${Number(at.toFixed(1))} s`, x + 3, height - 7);
    }
  }
}
