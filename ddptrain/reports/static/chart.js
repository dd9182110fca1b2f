// One chart: uPlot, with values at the pointer, zoom by dragging (also on a touch screen), and control by keyboard.
const COLOURS = 10;
const STEPS = Array.from({ length: 33 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)); // between ticks
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

function html(name, attributes, text, parent) {
  const node = document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function formatted(value, span) {
  if (!Number.isFinite(value)) return "NaN";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-4)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const digits = span ? Math.ceil(-Math.log10(span)) + 2 : 5 - Math.ceil(Math.log10(size || 1));
  return value.toFixed(Math.max(0, Math.min(8, digits))).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

function smoothed(values, weight) {
  let [mean, share] = [0, 0];
  return weight ? values.map((value) => {
    if (!Number.isFinite(value)) return NaN;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  }) : values;
}

function nearest(values, wanted) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && (low === values.length || wanted - values[low - 1] <= values[low] - wanted) ? low - 1 : low;
}

function logTicks(plot, axis, low, high) {
  const decades = Math.log10(high / low);
  const factors = decades < 1.5 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : decades < 4 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.ceil(decades / 8)) {
    found.push(...factors.map((factor) => factor * 10 ** power).filter((tick) => tick >= low && tick <= high));
  }
  return found.length > 1 ? found : [low, high];
}

class Chart {
  // onZoom(range or null) is called when the user zooms; it sets the range of all charts.
  constructor(host, title, onZoom) {
    Object.assign(this, { host, title, onZoom, lines: [] });
    this.root = html("div", { class: "plot" }, undefined, host);
    this.tip = html("div", { class: "tip", hidden: "" }, undefined, host);
    this.live = html("p", { class: "unseen", "aria-live": "polite" }, "", host);
    host.tabIndex = 0;
    host.setAttribute("role", "group");
    host.setAttribute("aria-roledescription", "chart");
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("blur", () => this.leave());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => (this.plot ? this.plot.setSize(this.size()) : this.draw())).observe(host);
  }

  // lines: [{label, colour, x, y}]; x is sorted. settings: xLabel, log, weight, zoom.
  show(lines, settings) {
    Object.assign(this, settings);
    this.lines = lines.map((line) => ({ ...line, smooth: smoothed(line.y, this.weight) }));
    const last = this.lines.slice(0, 5).map((line) => `${line.label} ${formatted(line.y.at(-1))}`);
    const hint = "Arrow keys show values, plus and minus zoom, 0 shows everything.";
    this.host.setAttribute("aria-label", `${this.title}; last values: ${last.join(", ")}. ${hint}`);
    this.draw();
  }

  size() {
    const width = this.host.clientWidth;
    return { width, height: Math.max(190, Math.min(280, width * 0.6)) };
  }

  range() {
    const ends = this.lines.flatMap((line) => (line.x.length ? [line.x[0], line.x.at(-1)] : []));
    const [low, high] = [ends.reduce((a, b) => Math.min(a, b), Infinity), ends.reduce((a, b) => Math.max(a, b), -Infinity)];
    return low < high ? [low, high] : low === high ? [low - 0.5, high + 0.5] : [0, 1];
  }

  draw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (!this.host.clientWidth || !this.lines.length) return;
    const usable = (value) => (Number.isFinite(value) && (!this.log || value > 0) ? value : null);
    const drawn = [
      ...(this.weight ? this.lines.map((line) => ({ ...line, values: line.y, faint: true })) : []),
      ...this.lines.map((line) => ({ ...line, values: line.smooth })),
    ];
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
    const values = (plot, ticks) => ticks.map((tick) => (tick === null ? "" : formatted(tick, this.log ? 0 : ticks.at(-1) - ticks[0])));
    const padded = (plot, low, high) => {
      if (low === null) return this.log ? [0.1, 1] : [0, 1];
      if (this.log) return [low / 1.15, high * 1.15];
      const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.5;
      return [low - room, high + room];
    };
    const data = uPlot.join(drawn.map((line) => [Array.from(line.x), Array.from(line.values, usable)]));
    const options = {
      ...this.size(),
      legend: { show: false },
      padding: [8, 14, 0, 0],
      scales: { x: { time: false, range: () => this.zoom || this.range() }, y: { distr: this.log ? 3 : 1, range: padded } },
      axes: [{ ...axis, grid: { show: false }, values, incrs: this.xLabel === "step" ? STEPS : undefined, label: this.xLabel, labelSize: 16, labelFont: axis.font, size: 26 }, { ...axis, values, size: 62, ...(this.log ? { splits: logTicks, filter: (plot, ticks) => ticks } : {}) }],
      series: [{}, ...drawn.map((line) => ({
        stroke: colour(`--c${line.colour % COLOURS}`),
        width: line.faint ? 1 : 1.7,
        alpha: line.faint ? 0.3 : 1,
        auto: !line.faint,
        dash: line.colour >= COLOURS ? [6, 4] : undefined,
        points: { show: line.x.length === 1, size: 7, fill: colour(`--c${line.colour % COLOURS}`) },
      }))],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        dataIdx: (plot, at, index, x) => {
          const line = drawn[at - 1];
          return !line ? index : line.faint ? null : nearest(plot.data[0], line.x[nearest(line.x, x)]);
        },
      },
      hooks: { setCursor: [(plot) => (plot.cursor.left < 0 ? this.leave() : this.point(plot.posToVal(plot.cursor.left, "x"), plot.cursor.top))] },
    };
    this.plot = new uPlot(options, data, this.root);
    this.listen(this.plot.over);
  }

  // uPlot drags with a mouse only.
  listen(over) {
    let from = null;
    const place = (event) => Math.min(over.clientWidth, Math.max(0, event.clientX - over.getBoundingClientRect().left));
    const select = (left, width) => this.plot.setSelect({ left, width, top: 0, height: over.clientHeight }, false);
    over.addEventListener("pointerdown", (event) => (from = event.button === 0 ? place(event) : null));
    over.addEventListener("pointermove", (event) => {
      const at = place(event);
      if (event.pointerType !== "mouse") this.plot.setCursor({ left: at, top: event.offsetY });
      if (from !== null && event.buttons) select(Math.min(from, at), Math.abs(at - from));
    });
    over.addEventListener("pointerup", (event) => {
      const ends = [from, place(event)].sort((a, b) => a - b);
      select(0, 0);
      if (from !== null && ends[1] - ends[0] > 6) this.onZoom(ends.map((at) => this.plot.posToVal(at, "x")));
      from = null;
    });
    over.addEventListener("pointerleave", () => select(0, 0, (from = null)));
    over.addEventListener("dblclick", () => this.onZoom(null));
  }

  leave() {
    this.tip.hidden = true;
  }

  // Shows the values at x; those nearest to the pointer (y, in pixels) come first.
  point(x, y) {
    const found = this.lines.filter((line) => line.x.length).map((line) => {
      const at = nearest(line.x, x);
      return { line, x: line.x[at], value: line.y[at], distance: Math.abs(this.plot.valToPos(line.smooth[at], "y") - y) || 0 };
    });
    if (!found.length) return;
    this.at = found.reduce((best, one) => (Math.abs(one.x - x) < Math.abs(best - x) ? one.x : best), found[0].x);
    const shown = found.sort((a, b) => a.distance - b.distance).slice(0, 10);
    const title = `${this.xLabel} ${formatted(this.at)}`;
    this.tip.replaceChildren(html("strong", {}, title));
    for (const one of shown) {
      const row = html("div", {}, undefined, this.tip);
      html("i", { class: `key c${one.line.colour % COLOURS}` }, "", row);
      html("span", {}, one.line.label, row);
      html("b", {}, formatted(one.value), row);
    }
    if (found.length > shown.length) html("em", {}, `and ${found.length - shown.length} more`, this.tip);
    this.tip.hidden = false;
    const px = this.plot.over.offsetLeft + this.plot.valToPos(this.at, "x");
    const isRight = px > this.host.clientWidth / 2;
    this.tip.style.left = isRight ? "auto" : `${px + 12}px`;
    this.tip.style.right = isRight ? `${this.host.clientWidth - px + 12}px` : "auto";
    this.text = `${title}: ${shown.map((one) => `${one.line.label} ${formatted(one.value)}`).join(", ")}`;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.plot) return;
    const [first, last] = this.range();
    const [start, end] = this.zoom || [first, last];
    const longest = this.lines.reduce((most, line) => (line.x.length > most.length ? line.x : most), this.lines[0].x);
    const xs = longest.filter((x) => x >= start && x <= end);
    if (!xs.length) return;
    const at = this.at >= start && this.at <= end ? this.at : start;
    const step = (by) => {
      const x = xs[Math.min(xs.length - 1, Math.max(0, nearest(xs, at) + by))];
      this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 0 });
      this.live.textContent = this.text;
    };
    const zoom = (low, high) => this.onZoom([Math.max(first, low), Math.min(last, high)]);
    const actions = {
      ArrowRight: () => step(this.at === undefined ? 0 : event.shiftKey ? 10 : 1),
      ArrowLeft: () => step(event.shiftKey ? -10 : -1),
      Home: () => step(-xs.length),
      End: () => step(xs.length),
      "+": () => zoom(at - (end - start) / 4, at + (end - start) / 4),
      "-": () => zoom(start - (end - start) / 2, end + (end - start) / 2),
      0: () => this.onZoom(null),
      Escape: () => this.leave(),
    };
    const action = actions[event.key === "=" ? "+" : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
