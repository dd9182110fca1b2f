// A plot with one axis for each parameter of a sweep, and the metric as the last. A drag on an axis selects trials.
const SHADES = 10;

class ParallelPlot {
  constructor(host, sweep, rows) {
    this.host = host;
    this.sweep = sweep;
    this.rows = rows; // trial number -> row of the table
    this.ranges = new Map();
    this.axes = [...sweep.axes, { name: sweep.metric, scale: "linear", isMetric: true }].map((axis, at) => this.scaled(axis, at));
    this.root = svg("svg", { class: "parallel", role: "img", "aria-label": `${sweep.trials.length} trials; the table below has the same values` }, host);
    this.note = html("p", { class: "hint" }, "Drag along an axis to select trials; a click on the axis selects all.", host);
    this.order = new Map(sweep.ranked.map((number, at) => [number, at]));
    new ResizeObserver(() => this.draw()).observe(host);
    for (const [number, row] of rows) {
      row.addEventListener("pointerenter", () => this.highlight(number));
      row.addEventListener("pointerleave", () => this.highlight(null));
    }
  }

  value(trial, at) {
    return at < this.sweep.axes.length ? trial.params[at] : trial.value;
  }

  scaled(axis, at) {
    const values = this.sweep.trials.map((trial) => this.value(trial, at)).filter((value) => value !== null);
    const isChoice = axis.scale === "choice" || values.some((value) => typeof value !== "number");
    if (isChoice) {
      const names = [...new Set([...(axis.values || []), ...values.map(String)])];
      return { ...axis, names, place: (value) => (names.length > 1 ? names.indexOf(String(value)) / (names.length - 1) : 0.5) };
    }
    const isLog = axis.scale === "log" && values.every((value) => value > 0);
    const own = isLog ? values.map(Math.log10) : values;
    const low = own.reduce((a, b) => Math.min(a, b), Infinity);
    const high = own.reduce((a, b) => Math.max(a, b), -Infinity);
    const span = high - low || 1;
    return { ...axis, isLog, low, span, place: (value) => (high > low ? ((isLog ? Math.log10(value) : value) - low) / span : 0.5) };
  }

  draw() {
    const least = this.axes.length * 118;
    const width = Math.max(this.host.clientWidth, least);
    const height = 320;
    if (!this.host.clientWidth) return;
    this.root.setAttribute("width", width);
    this.root.setAttribute("height", height);
    this.root.replaceChildren();
    this.top = 44;
    this.bottom = height - 18;
    this.px = this.axes.map((_, at) => 60 + ((width - 130) * at) / Math.max(1, this.axes.length - 1));
    this.paths = new Map();
    const worstFirst = [...this.sweep.trials].sort((a, b) => (this.order.get(b.number) ?? 1e9) - (this.order.get(a.number) ?? 1e9));
    for (const trial of worstFirst) this.drawTrial(trial);
    this.axes.forEach((axis, at) => this.drawAxis(axis, at));
    this.select();
  }

  py(axis, value) {
    return this.bottom - axis.place(value) * (this.bottom - this.top);
  }

  drawTrial(trial) {
    let text = "";
    this.axes.forEach((axis, at) => {
      const value = this.value(trial, at);
      if (value !== null) text += `${text ? "L" : "M"}${this.px[at].toFixed(1)} ${this.py(axis, value).toFixed(1)}`;
    });
    const place = this.order.get(trial.number);
    const shade = place === undefined ? "none" : Math.floor((place * SHADES) / Math.max(1, this.order.size));
    const isBest = trial.number === this.sweep.best;
    const path = svg("path", { class: `trial s${shade}${isBest ? " best" : ""}`, d: text }, this.root);
    svg("title", {}, path).textContent = `trial ${trial.number}, ${trial.state}: ${trial.value === null ? "no value" : formatted(trial.value)}`;
    path.addEventListener("pointerenter", () => this.highlight(trial.number));
    path.addEventListener("pointerleave", () => this.highlight(null));
    this.paths.set(trial.number, path);
  }

  drawAxis(axis, at) {
    const x = this.px[at];
    svg("line", { class: "axis", x1: x, x2: x, y1: this.top, y2: this.bottom }, this.root);
    const name = axis.name.replace(/^params\./, "");
    const title = svg("text", { class: "tick name", x, y: 14, "text-anchor": "middle" }, this.root);
    title.textContent = name.length > 18 ? `${name.slice(0, 17)}…` : name;
    svg("title", {}, title).textContent = axis.name;
    if (axis.importance !== null && axis.importance !== undefined) {
      const share = svg("text", { class: "tick", x, y: 29, "text-anchor": "middle" }, this.root);
      share.textContent = `importance ${Math.round(axis.importance * 100)} %`;
    }
    const labels = axis.names ? axis.names.slice(0, 12).map((value, index) => [value, axis.names.length > 1 ? index / (axis.names.length - 1) : 0.5])
      : [0, 0.25, 0.5, 0.75, 1].map((share) => [formatted(axis.isLog ? 10 ** (axis.low + share * axis.span) : axis.low + share * axis.span, axis.isLog ? 0 : axis.span), share]);
    for (const [text, share] of Number.isFinite(axis.low) || axis.names ? labels : []) {
      const label = svg("text", { class: "tick halo", x: x + 5, y: this.bottom - share * (this.bottom - this.top) + 4 }, this.root);
      label.textContent = text.length > 14 ? `${text.slice(0, 13)}…` : text;
    }
    const marked = svg("rect", { class: "selection", x: x - 8, width: 16, height: 0 }, this.root);
    const handle = svg("rect", { class: "handle", x: x - 16, y: this.top - 10, width: 32, height: this.bottom - this.top + 20 }, this.root); // longer: the ends can be selected
    const share = (event) => {
      const y = event.clientY - this.root.getBoundingClientRect().top;
      return Math.min(1, Math.max(0, (this.bottom - y) / (this.bottom - this.top)));
    };
    let from = null;
    const mark = () => {
      const range = this.ranges.get(at);
      marked.setAttribute("height", range ? (range[1] - range[0]) * (this.bottom - this.top) : 0);
      if (range) marked.setAttribute("y", this.bottom - range[1] * (this.bottom - this.top));
    };
    handle.addEventListener("pointerdown", (event) => {
      from = share(event);
      handle.setPointerCapture(event.pointerId);
    });
    handle.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const to = share(event);
      if (Math.abs(to - from) < 0.02) this.ranges.delete(at);
      else this.ranges.set(at, [Math.min(from, to), Math.max(from, to)]);
      mark();
      this.select();
    });
    handle.addEventListener("pointerup", (event) => {
      if (from !== null && Math.abs(share(event) - from) < 0.02) this.ranges.delete(at);
      from = null;
      mark();
      this.select();
    });
    mark();
  }

  select() {
    let count = 0;
    for (const trial of this.sweep.trials) {
      const isIn = [...this.ranges].every(([at, [low, high]]) => {
        const value = this.value(trial, at);
        const place = value === null ? -1 : this.axes[at].place(value);
        return place >= low - 1e-9 && place <= high + 1e-9;
      });
      count += isIn;
      this.paths.get(trial.number).classList.toggle("out", !isIn);
      const row = this.rows.get(trial.number);
      if (row) row.hidden = !isIn;
    }
    this.note.textContent = this.ranges.size
      ? `${count} of ${this.sweep.trials.length} trials are selected; a click on the axis selects all.`
      : "Drag along an axis to select trials.";
  }

  highlight(number) {
    for (const [key, path] of this.paths || []) path.classList.toggle("over", key === number);
    for (const [key, row] of this.rows) row.classList.toggle("over", key === number);
  }
}
