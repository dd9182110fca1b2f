// A line chart as SVG: zoom by dragging, values at the pointer, logarithmic values, smoothing, control by keyboard.
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 10;

function svg(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(node);
  return node;
}

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
  const digits = span ? Math.max(0, Math.min(8, Math.ceil(-Math.log10(span)) + 2)) : 5 - Math.ceil(Math.log10(size || 1));
  return value.toFixed(Math.max(0, Math.min(8, digits))).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

// least: the smallest distance of two ticks.
function niceTicks(low, high, most, least = 0) {
  const rough = Math.max(least, (high - low) / Math.max(1, most));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) || rough;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9 && found.length < 50; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}

function logTicks(low, high) {
  const found = [];
  const decades = Math.ceil(high) - Math.floor(low);
  const factors = decades <= 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 8));
  for (let power = Math.floor(low); power <= Math.ceil(high); power += every) {
    for (const factor of factors) {
      const tick = Math.log10(factor) + power;
      if (tick >= low && tick <= high) found.push(tick);
    }
  }
  return found.length ? found : [low, high];
}

function smoothed(values, weight) {
  if (!weight) return values;
  const result = new Float64Array(values.length);
  let mean = 0;
  let share = 0;
  for (let at = 0; at < values.length; at++) {
    if (Number.isFinite(values[at])) {
      mean = weight * mean + (1 - weight) * values[at];
      share = weight * share + (1 - weight);
      result[at] = mean / share;
    } else {
      result[at] = NaN;
    }
  }
  return result;
}

function firstAtLeast(values, wanted) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(values, wanted) {
  const at = firstAtLeast(values, wanted);
  if (at === 0) return 0;
  if (at === values.length) return at - 1;
  return wanted - values[at - 1] <= values[at] - wanted ? at - 1 : at;
}

class Chart {
  // options: title, xLabel, leastTick. onZoom(range or null) is called when the user zooms; it sets the range of all charts.
  constructor(host, options, onZoom) {
    this.host = host;
    this.options = options;
    this.onZoom = onZoom;
    this.lines = [];
    this.zoom = null;
    this.log = false;
    this.weight = 0;
    this.margin = { left: 62, right: 14, top: 8, bottom: 34 };
    this.root = svg("svg", { class: "plot", "aria-hidden": "true" }, host);
    this.tip = html("div", { class: "tip", hidden: "" }, undefined, host);
    this.live = html("p", { class: "unseen", "aria-live": "polite" }, "", host);
    host.tabIndex = 0;
    host.setAttribute("role", "group");
    host.setAttribute("aria-roledescription", "chart");
    this.listen();
    new ResizeObserver(() => this.draw()).observe(host);
  }

  // lines: [{label, colour, x, y, faint}]; x is sorted.
  show(lines, settings) {
    Object.assign(this, settings);
    this.lines = lines.map((line) => ({ ...line, smooth: smoothed(line.y, this.weight) }));
    const last = this.lines.slice(0, 5).map((line) => `${line.label} ${formatted(line.y[line.y.length - 1])}`);
    const hint = "Arrow keys show values, plus and minus zoom, 0 shows everything.";
    this.host.setAttribute("aria-label", `${this.options.title}; last values: ${last.join(", ")}. ${hint}`);
    this.draw();
  }

  range() {
    let low = Infinity;
    let high = -Infinity;
    for (const line of this.lines) {
      if (!line.x.length) continue;
      low = Math.min(low, line.x[0]);
      high = Math.max(high, line.x[line.x.length - 1]);
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  valueRange([start, end]) {
    let low = Infinity;
    let high = -Infinity;
    for (const line of this.lines) {
      const values = this.weight ? line.smooth : line.y;
      const stop = Math.min(values.length, firstAtLeast(line.x, end) + 1);
      for (let at = Math.max(0, firstAtLeast(line.x, start) - 1); at < stop; at++) {
        const value = this.scaled(values[at]);
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    if (low > high) return [0, 1];
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.5;
    return [low - room, high + room];
  }

  scaled(value) {
    if (!this.log) return Number.isFinite(value) ? value : NaN;
    return value > 0 && Number.isFinite(value) ? Math.log10(value) : NaN;
  }

  draw() {
    const width = this.host.clientWidth;
    if (!width) return;
    this.width = width;
    this.height = Math.max(190, Math.min(280, width * 0.6));
    this.xRange = this.zoom || this.range();
    this.yRange = this.valueRange(this.xRange);
    this.root.setAttribute("width", width);
    this.root.setAttribute("height", this.height);
    this.root.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.root.replaceChildren();
    this.drawAxes();
    const clip = svg("svg", { ...this.area(), class: "area" }, this.root);
    clip.setAttribute("viewBox", Object.values(this.area()).join(" "));
    for (const line of this.lines) this.drawLine(line, clip);
    this.cursor = svg("g", { class: "cursor" }, this.root);
    this.selection = svg("rect", { class: "selection", y: this.margin.top, height: this.area().height, width: 0 }, this.root);
  }

  area() {
    const { left, right, top, bottom } = this.margin;
    return { x: left, y: top, width: Math.max(10, this.width - left - right), height: this.height - top - bottom };
  }

  px(x) {
    const { x: left, width } = this.area();
    return left + ((x - this.xRange[0]) / (this.xRange[1] - this.xRange[0])) * width;
  }

  py(value) {
    const { y, height } = this.area();
    return y + height - ((this.scaled(value) - this.yRange[0]) / (this.yRange[1] - this.yRange[0])) * height;
  }

  xAt(px) {
    const { x: left, width } = this.area();
    const share = Math.min(1, Math.max(0, (px - left) / width));
    return this.xRange[0] + share * (this.xRange[1] - this.xRange[0]);
  }

  drawAxes() {
    const { x, y, width, height } = this.area();
    const [low, high] = this.yRange;
    const ticks = this.log ? logTicks(low, high) : niceTicks(low, high, height / 32);
    for (const tick of ticks) {
      const at = y + height - ((tick - low) / (high - low)) * height;
      svg("line", { class: "grid", x1: x, x2: x + width, y1: at, y2: at }, this.root);
      const label = svg("text", { class: "tick", x: x - 6, y: at + 4, "text-anchor": "end" }, this.root);
      label.textContent = this.log ? formatted(10 ** tick) : formatted(tick, high - low);
    }
    for (const tick of niceTicks(this.xRange[0], this.xRange[1], width / 60, this.options.leastTick)) {
      const label = svg("text", { class: "tick", x: this.px(tick), y: y + height + 15, "text-anchor": "middle" }, this.root);
      label.textContent = formatted(tick, this.xRange[1] - this.xRange[0]);
    }
    const name = svg("text", { class: "tick", x: x + width, y: this.height - 4, "text-anchor": "end" }, this.root);
    name.textContent = this.options.xLabel;
    svg("line", { class: "axis", x1: x, x2: x + width, y1: y + height, y2: y + height }, this.root);
  }

  drawLine(line, parent) {
    const kind = `line c${line.colour % COLOURS}` + (line.colour >= COLOURS ? " dashed" : "");
    if (this.weight) svg("path", { class: `${kind} raw`, d: this.path(line.x, line.y) }, parent);
    const shape = svg("path", { class: kind + (line.faint ? " raw" : ""), d: this.path(line.x, line.smooth) }, parent);
    svg("title", {}, shape).textContent = line.label;
  }

  // The visible part; of many points in a column of pixels the smallest and the largest.
  path(x, values) {
    const start = Math.max(0, firstAtLeast(x, this.xRange[0]) - 1);
    const end = Math.min(x.length, firstAtLeast(x, this.xRange[1]) + 2);
    const size = Math.max(1, Math.ceil((end - start) / (2 * this.area().width)));
    let text = "";
    let isOpen = false;
    const add = (at) => {
      const y = this.py(values[at]);
      if (!Number.isFinite(y + this.px(x[at]))) {
        isOpen = false;
        return;
      }
      text += `${isOpen ? "L" : "M"}${this.px(x[at]).toFixed(1)} ${y.toFixed(1)}${isOpen ? "" : "h0"}`;
      isOpen = true;
    };
    for (let from = start; from < end; from += size) {
      const to = Math.min(end, from + size);
      let least = from;
      let most = from;
      for (let at = from; at < to; at++) {
        if (!(values[at] >= values[least])) least = at;
        if (!(values[at] <= values[most])) most = at;
      }
      add(Math.min(least, most));
      if (least !== most) add(Math.max(least, most));
    }
    return text;
  }

  listen() {
    const place = (event) => event.clientX - this.root.getBoundingClientRect().left;
    this.root.addEventListener("pointerdown", (event) => {
      if (event.button === 0) this.from = place(event);
    });
    this.root.addEventListener("pointermove", (event) => {
      const at = place(event);
      if (this.from !== undefined && event.buttons) this.select(this.from, at);
      this.point(this.xAt(at), event.clientY - this.root.getBoundingClientRect().top);
    });
    this.root.addEventListener("pointerup", (event) => this.finishSelection(place(event)));
    this.root.addEventListener("pointerleave", () => {
      this.leave();
      if (this.from !== undefined) this.select(0, 0);
      this.from = undefined;
    });
    this.root.addEventListener("dblclick", () => this.onZoom(null));
    this.host.addEventListener("keydown", (event) => this.key(event));
    this.host.addEventListener("blur", () => this.leave());
  }

  select(from, to) {
    const { x, width } = this.area();
    const inside = [from, to].map((at) => Math.min(x + width, Math.max(x, at)));
    this.selection.setAttribute("x", Math.min(...inside));
    this.selection.setAttribute("width", Math.abs(inside[1] - inside[0]));
  }

  finishSelection(to) {
    const from = this.from;
    this.from = undefined;
    if (from === undefined) return;
    this.select(0, 0);
    if (Math.abs(to - from) > 6) this.onZoom([this.xAt(Math.min(from, to)), this.xAt(Math.max(from, to))]);
  }

  leave() {
    this.tip.hidden = true;
    if (this.cursor) this.cursor.replaceChildren();
  }

  // Shows the values at x; those nearest to the pointer (y, in pixels) come first.
  point(x, y) {
    const found = this.lines
      .filter((line) => line.x.length && !line.faint)
      .map((line) => {
        const at = nearest(line.x, x);
        return { line, x: line.x[at], value: (this.weight ? line.smooth : line.y)[at], raw: line.y[at] };
      });
    if (!found.length) return "";
    const distance = (one) => Math.abs((Number.isFinite(this.py(one.value)) ? this.py(one.value) : 1e9) - (y || 0));
    const position = found.reduce((best, one) => (Math.abs(one.x - x) < Math.abs(best - x) ? one.x : best), found[0].x);
    const shown = (y === undefined ? found : [...found].sort((a, b) => distance(a) - distance(b))).slice(0, 10);
    this.cursor.replaceChildren();
    const { y: top, height, width, x: left } = this.area();
    const px = this.px(position);
    svg("line", { x1: px, x2: px, y1: top, y2: top + height }, this.cursor);
    this.tip.replaceChildren();
    html("strong", {}, `${this.options.xLabel} ${formatted(position)}`, this.tip);
    for (const one of shown) {
      const py = this.py(one.value);
      if (Number.isFinite(py) && py >= top && py <= top + height) {
        svg("circle", { class: `c${one.line.colour % COLOURS}`, cx: this.px(one.x), cy: py, r: 3.5 }, this.cursor);
      }
      const row = html("div", {}, undefined, this.tip);
      html("i", { class: `key c${one.line.colour % COLOURS}` }, "", row);
      html("span", {}, one.line.label, row);
      html("b", {}, formatted(one.raw), row);
    }
    if (found.length > shown.length) html("em", {}, `and ${found.length - shown.length} more`, this.tip);
    this.tip.hidden = false;
    const isRight = px > left + width / 2;
    this.tip.style.left = isRight ? "auto" : `${px + 12}px`;
    this.tip.style.right = isRight ? `${this.width - px + 12}px` : "auto";
    this.at = position;
    return `${this.options.xLabel} ${formatted(position)}: ${shown.map((one) => `${one.line.label} ${formatted(one.raw)}`).join(", ")}`;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.lines.length) return;
    const [start, end] = this.xRange;
    const xs = this.lines.reduce((most, line) => (line.x.length > most.length ? line.x : most), this.lines[0].x);
    const at = this.at === undefined || this.at < start || this.at > end ? start : this.at;
    const span = end - start;
    const clipped = (low, high) => {
      const [first, last] = this.range();
      return [Math.max(first, low), Math.min(last, high)];
    };
    const step = (by) => {
      const index = Math.min(xs.length - 1, Math.max(0, nearest(xs, at) + by));
      this.live.textContent = this.point(xs[index]);
    };
    const actions = {
      ArrowRight: () => step(this.at === undefined ? 0 : event.shiftKey ? 10 : 1),
      ArrowLeft: () => step(event.shiftKey ? -10 : -1),
      Home: () => step(-xs.length),
      End: () => step(xs.length),
      "+": () => this.onZoom(clipped(at - span / 4, at + span / 4)),
      "-": () => this.onZoom(clipped(start - span / 2, end + span / 2)),
      0: () => this.onZoom(null),
      Escape: () => this.leave(),
    };
    const action = actions[event.key === "=" ? "+" : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
