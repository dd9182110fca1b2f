// The section with curves: reads the numbers of the page, and shows what its controls choose.
const PANELS_AT_FIRST = 6;

function numbers(text, kind) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return kind === "f4" ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

// A resumed run can have times that go back; the chart needs them in order.
function inOrder(x, y) {
  let isSorted = true;
  for (let at = 1; at < x.length && isSorted; at++) isSorted = x[at] >= x[at - 1];
  if (isSorted) return { x, y };
  const order = Array.from(x.keys()).sort((a, b) => x[a] - x[b]);
  return { x: Float64Array.from(order, (at) => x[at]), y: Float64Array.from(order, (at) => y[at]) };
}

const isOfSystem = (name) => name.startsWith("system/");

class Curves {
  constructor(section, data) {
    this.section = section;
    this.runs = data.runs;
    this.curves = data.curves;
    this.isSingle = data.runs.length === 1;
    this.panels = new Map();
    this.form = section.querySelector("form");
    this.grid = section.querySelector(".panels");
    this.state = { x: this.axes()[0], rank: "mean", log: false, weight: 0, zoom: null, off: [], metrics: null };
    if (!this.axes().includes(this.state.x)) this.state.x = this.axes()[0];
    this.fill();
    this.form.addEventListener("input", () => this.read());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.querySelector("[name=reset]").addEventListener("click", () => this.zoom(null));
    this.draw();
  }

  // System metrics have no step: they are drawn by time, also if the others are not.
  axes() {
    const logged = this.curves.filter((curve) => !isOfSystem(curve.metric));
    const curves = logged.length ? logged : this.curves;
    const found = ["step", "time", "epoch"].filter((name) => curves.some((curve) => curve[name]));
    const complete = found.filter((name) => curves.every((curve) => curve[name]));
    return [...complete, ...found.filter((name) => !complete.includes(name))];
  }

  // Curves of one run that share their last part, as train/loss and val/loss, share a panel.
  group(curve) {
    return this.isSingle && !isOfSystem(curve.metric) ? curve.metric.slice(curve.metric.lastIndexOf("/") + 1) : curve.metric;
  }

  groups() {
    const names = [...new Set(this.curves.map((curve) => this.group(curve)))];
    const weight = (name) => (isOfSystem(name) ? 3 : name.includes("loss") ? 0 : /acc|f1|auc|score|top/.test(name) ? 1 : 2);
    return names.sort((a, b) => weight(a) - weight(b));
  }

  fill() {
    const labels = { step: "step", time: "time (s)", epoch: "epoch" };
    const axis = this.form.elements.x;
    for (const name of this.axes()) html("option", { value: name }, labels[name], axis);
    axis.value = this.state.x;
    const ranks = [...new Set(this.curves.map((curve) => curve.rank))].filter((rank) => rank !== "mean");
    const rank = this.form.elements.rank;
    html("option", { value: "mean" }, "mean of the ranks", rank);
    if (ranks.length) html("option", { value: "all" }, "every rank", rank);
    for (const one of ranks.sort((a, b) => a - b)) html("option", { value: one }, `rank ${one}`, rank);
    rank.value = this.state.rank;
    if (rank.selectedIndex < 0) rank.value = this.state.rank = "mean";
    this.form.elements.log.checked = this.state.log;
    this.form.elements.weight.value = this.state.weight;
    this.choices(".metrics", "metric", this.groups(), (name, at) =>
      this.state.metrics ? this.state.metrics.includes(name) : at < PANELS_AT_FIRST && !isOfSystem(name));
    if (!this.isSingle) {
      this.choices(".runs", "run", this.runs.map((run) => run.id), (name) => !this.state.off.includes(name), true);
    }
  }

  choices(where, name, labels, isOn, hasColours) {
    const box = this.form.querySelector(where);
    if (!box) return;
    box.hidden = false;
    labels.forEach((text, at) => {
      const label = html("label", { class: "choice" }, undefined, box);
      const input = html("input", { type: "checkbox", name, value: text }, undefined, label);
      input.checked = isOn(text, at);
      if (hasColours) html("i", { class: `key c${at % COLOURS}${at >= COLOURS ? " dashed" : ""}` }, "", label);
      html("span", {}, text, label);
    });
  }

  read() {
    const { x, rank, log, weight } = this.form.elements;
    const checked = (name, wanted) =>
      [...this.form.querySelectorAll(`[name=${name}]`)].filter((box) => box.checked === wanted).map((box) => box.value);
    const zoom = x.value === this.state.x ? this.state.zoom : null;
    this.state = {
      x: x.value, rank: rank.value, log: log.checked, weight: Number(weight.value), zoom,
      off: checked("run", false), metrics: checked("metric", true),
    };
    this.draw();
  }

  zoom(range) {
    this.state.zoom = range && range[1] > range[0] ? range : null;
    this.draw();
  }

  axis(name) {
    return isOfSystem(name) ? "time" : this.state.x;
  }

  decoded(curve) {
    if (!curve.decoded) curve.decoded = {};
    const axis = this.axis(curve.metric);
    if (!curve.decoded[axis] && curve[axis]) {
      curve.decoded[axis] = inOrder(numbers(curve[axis], axis === "step" ? "f8" : "f4"), numbers(curve.y, "f8"));
    }
    return curve.decoded[axis];
  }

  lines(group) {
    const off = new Set(this.state.off);
    const own = this.curves.filter((curve) => this.group(curve) === group && !off.has(this.runs[curve.run].id));
    const onlyMean = (curve) => !own.some((other) => other.metric === curve.metric && other.run === curve.run && other !== curve);
    const { rank } = this.state;
    const shown = own.filter((curve) =>
      rank === "all" ? curve.rank !== "mean" || onlyMean(curve)
        : rank === "mean" ? curve.rank === "mean" || !own.some((other) => other.run === curve.run && other.metric === curve.metric && other.rank === "mean")
          : String(curve.rank) === rank || (curve.rank === "mean" && onlyMean(curve)));
    return shown.map((curve, at) => {
      const points = this.decoded(curve);
      const rankText = curve.rank === "mean" ? "" : `rank ${curve.rank}`;
      const name = this.isSingle ? curve.metric : this.runs[curve.run].id;
      return points && { ...points, label: [name, rankText].filter(Boolean).join(", "), colour: this.isSingle ? at : curve.run };
    }).filter(Boolean);
  }

  draw() {
    const shown = [...this.form.querySelectorAll("[name=metric]")].filter((box) => box.checked).map((box) => box.value);
    for (const [name, panel] of this.panels) panel.figure.hidden = !shown.includes(name);
    for (const name of shown) {
      const lines = this.lines(name);
      const panel = this.panel(name);
      const axis = this.axis(name);
      panel.chart.options.xLabel = axis === "time" ? "seconds" : axis;
      panel.figure.hidden = false;
      panel.chart.show(lines, { log: this.state.log, weight: this.state.weight, zoom: axis === this.state.x ? this.state.zoom : null });
      panel.legend.replaceChildren();
      for (const line of this.isSingle ? lines.slice(0, 24) : []) {
        const item = html("span", { class: "choice" }, undefined, panel.legend);
        html("i", { class: `key c${line.colour % COLOURS}${line.colour >= COLOURS ? " dashed" : ""}` }, "", item);
        html("span", {}, line.label, item);
      }
    }
    this.form.querySelector("[name=reset]").disabled = !this.state.zoom;
    this.form.querySelector("output").textContent = this.state.weight ? this.state.weight.toFixed(2) : "off";
  }

  panel(name) {
    if (!this.panels.has(name)) {
      const figure = html("figure", { class: "panel" }, undefined, this.grid);
      html("figcaption", {}, name, figure);
      const chart = new Chart(html("div", { class: "chart" }, undefined, figure), { title: name }, (range) => this.axis(name) === this.state.x && this.zoom(range));
      this.panels.set(name, { figure, chart, legend: html("div", { class: "legend" }, undefined, figure) });
    }
    return this.panels.get(name);
  }
}
