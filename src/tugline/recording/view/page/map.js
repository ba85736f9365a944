// Overview of the trace beside the scroll bar: answers, search matches and the visible part.

class TokenMap {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.seen = make("div", { id: "seen" });
    canvas.after(this.seen);
    view.changed = () => this.plan();
    view.box.addEventListener("scroll", () => this.follow(), { passive: true });
    new ResizeObserver(() => this.plan()).observe(canvas);
    const go = (event) => {
      if (!(event.buttons & 1)) return;
      const { box } = view;
      box.scrollTop = (event.offsetY / canvas.clientHeight) * box.scrollHeight - box.clientHeight / 2;
    };
    canvas.addEventListener("mousedown", go);
    canvas.addEventListener("mousemove", go);
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    const { canvas, view } = this;
    const height = canvas.clientHeight;
    if (!height || !view.trace || !view.from) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const rows = Math.max(view.from.length, view.box.clientHeight / 20);
    const line = (row, kind, from, width, size = 1) => {
      pen.fillStyle = kind;
      pen.fillRect(from, (row / rows) * height, width, Math.max(1, (size / rows) * height));
    };
    const [trained, masked, match] = ["--good", "--mid", "--heat"].map(colourOf);
    for (const span of view.trace.spans) {
      const row = view.rowOf(span.start);
      line(row, span.masked ? masked : trained, 4, 14, view.rowOf(span.end - 1) - row + 1);
    }
    for (const k of view.places || []) line(view.rowOf(k), match, 0, 22);
    this.follow();
  }

  // Move the marker of the visible part, without redrawing.
  follow() {
    const { scrollTop, clientHeight, scrollHeight } = this.view.box;
    this.seen.style.top = `${(100 * scrollTop) / scrollHeight}%`;
    this.seen.style.height = `${(100 * clientHeight) / scrollHeight}%`;
  }
}
