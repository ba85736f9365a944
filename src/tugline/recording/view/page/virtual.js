// A list of rows of equal height; only visible rows are in the document.

class VirtualList {
  // `draw(i)` creates the element of row i.
  constructor(box, height, draw) {
    this.box = box;
    this.height = height;
    this.draw = draw;
    this.count = 0;
    this.shown = new Map();
    this.rows = make("div", { class: "rows" });
    box.replaceChildren(this.rows);
    box.addEventListener("scroll", () => this.plan(), { passive: true });
    new ResizeObserver(() => this.plan()).observe(box);
  }

  // Set the number of rows and redraw all.
  reset(count) {
    this.count = count;
    this.rows.style.height = `${count * this.height}px`;
    this.redraw();
  }

  redraw() {
    this.shown.clear();
    this.rows.replaceChildren();
    this.update();
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.update();
    });
  }

  update() {
    if (!this.box.clientHeight) return;
    const spare = 12;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.height) - spare);
    const seen = Math.ceil(this.box.clientHeight / this.height);
    const last = Math.min(this.count, first + seen + 2 * spare);
    for (const [i, row] of this.shown) {
      if (i < first || i >= last) {
        row.remove();
        this.shown.delete(i);
      }
    }
    const fresh = document.createDocumentFragment();
    for (let i = first; i < last; i++) {
      if (this.shown.has(i)) continue;
      const row = this.draw(i);
      row.style.top = `${i * this.height}px`;
      this.shown.set(i, row);
      fresh.append(row);
    }
    this.rows.append(fresh);
  }

  // Scroll as little as necessary to show row i at some rows' distance from the edge.
  reveal(i) {
    const room = this.box.clientHeight;
    const margin = Math.min(3 * this.height, room / 3);
    const top = i * this.height;
    if (top - margin < this.box.scrollTop) this.box.scrollTop = top - margin;
    const bottom = top + this.height + margin;
    if (bottom > this.box.scrollTop + room) this.box.scrollTop = bottom - room;
    this.update();
  }
}
