// The section with curves: draws what its controls choose. System metrics are folded away below the others.
const PANELS_AT_FIRST = 6;
const isOfSystem = (name) => name.startsWith("system/");
const numbers = (text) => new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);

// A resumed run can have times that go back; a chart needs them in order.
function inOrder(x, y) {
  if (x.every((value, at) => !at || value >= x[at - 1])) return { x, y };
  const order = Array.from(x.keys()).sort((a, b) => x[a] - x[b]);
  return { x: Float32Array.from(order, (at) => x[at]), y: Float32Array.from(order, (at) => y[at]) };
}

class Curves {
  constructor(section) {
    this.section = section;
    this.form = section.querySelector("form");
    this.folded = section.querySelector("details.system");
    this.panels = new Map();
    this.chosen = new Map(); // the user's choices: "metric loss" -> whether it is shown
    this.zoom = null;
    this.form.addEventListener("input", ({ target }) => {
      if (target.type === "checkbox" && target.value !== "on") this.chosen.set(`${target.name} ${target.value}`, target.checked);
      if (target.name === "x") this.zoom = null;
      this.draw();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.elements.reset.addEventListener("click", () => this.zoomTo(null));
    this.folded.addEventListener("toggle", () => this.draw());
  }

  // data: the names of runs, and curves with their numbers; also while a run is running.
  show({ runs, curves }) {
    this.runs = runs;
    this.curves = curves;
    this.isSingle = runs.length === 1;
    this.section.hidden = !curves.length;
    if (!curves.length) return;
    const groups = this.groups();
    const own = groups.filter((name) => !isOfSystem(name));
    this.options(this.form.elements.x, this.axes(), { step: "step", time: "time (s)", epoch: "epoch" });
    const ranks = [...new Set(curves.map((curve) => curve.rank))].filter((rank) => rank !== "mean").sort((a, b) => a - b);
    this.options(this.form.elements.rank, ["mean", ...(ranks.length ? ["all"] : []), ...ranks], { mean: "mean of the ranks", all: "every rank" });
    this.choices(".metrics", "metric", own, (name, at) => at < PANELS_AT_FIRST);
    if (!this.isSingle) this.choices(".runs", "run", runs.map((run) => run.id), () => true, true);
    this.folded.hidden = own.length === groups.length;
    this.draw();
  }

  // System metrics have no step: they are drawn by time, also if the others are not.
  axes() {
    const logged = this.curves.filter((curve) => !isOfSystem(curve.metric));
    const has = (name, all) => (all ? logged.every((curve) => curve[name]) : logged.some((curve) => curve[name]));
    const found = ["step", "time", "epoch"].filter((name) => has(name, false));
    return found.length ? found.sort((a, b) => has(b, true) - has(a, true)) : ["time"];
  }

  // Curves of one run that share their last part, as train/loss and val/loss, share a panel.
  group(curve) {
    return this.isSingle && !isOfSystem(curve.metric) ? curve.metric.slice(curve.metric.lastIndexOf("/") + 1) : curve.metric;
  }

  groups() {
    const validated = new Set(this.curves.filter((curve) => /^(val|valid|validation|eval|test)[/_]/.test(curve.metric)).map((curve) => this.group(curve)));
    const weight = (name) => (validated.has(name) ? 0 : 2) + (name.includes("loss") ? 0 : 1);
    return [...new Set(this.curves.map((curve) => this.group(curve)))].sort((a, b) => weight(a) - weight(b));
  }

  options(select, values, labels) {
    const before = select.value;
    select.replaceChildren(...values.map((value) => html("option", { value }, labels[value] || `rank ${value}`)));
    if (values.map(String).includes(before)) select.value = before;
  }

  choices(where, name, values, isOn, hasColours) {
    const box = this.form.querySelector(where);
    box.hidden = values.length < 2;
    if (box.childElementCount - 1 === values.length) return; // as at the last call
    box.querySelectorAll("label").forEach((label) => label.remove());
    values.forEach((value, at) => {
      const label = html("label", { class: "choice" }, undefined, box);
      html("input", { type: "checkbox", name, value }, undefined, label).checked = this.chosen.get(`${name} ${value}`) ?? isOn(value, at);
      if (hasColours) html("i", { class: `key c${at % COLOURS}${at >= COLOURS ? " dashed" : ""}` }, "", label);
      html("span", {}, value, label);
    });
  }

  checked(name) {
    return new Set([...this.form.querySelectorAll(`input[name=${name}]:checked`)].map((box) => box.value));
  }

  zoomTo(range) {
    this.zoom = range && range[1] > range[0] ? range : null;
    this.draw();
  }

  lines(group, axis) {
    const runs = this.checked("run");
    const rank = this.form.elements.rank.value;
    const own = this.curves.filter((curve) => this.group(curve) === group && curve[axis] && (this.isSingle || runs.has(this.runs[curve.run].id)));
    const ofRanks = new Set(own.filter((curve) => curve.rank !== "mean").map((curve) => `${curve.run} ${curve.metric}`));
    const means = new Set(own.filter((curve) => curve.rank === "mean").map((curve) => `${curve.run} ${curve.metric}`));
    const isShown = (curve) => {
      const key = `${curve.run} ${curve.metric}`;
      if (curve.rank === "mean") return rank === "mean" || !ofRanks.has(key);
      return rank === "all" || String(curve.rank) === rank || (rank === "mean" && !means.has(key));
    };
    return own.filter(isShown).map((curve, at) => {
      curve.decoded ??= {};
      curve.decoded[axis] ??= inOrder(numbers(curve[axis]), numbers(curve.y));
      const names = [this.isSingle ? curve.metric : this.runs[curve.run].id, curve.rank === "mean" ? "" : `rank ${curve.rank}`];
      return { ...curve.decoded[axis], label: names.filter(Boolean).join(", "), colour: this.isSingle ? at : curve.run };
    });
  }

  draw() {
    const { x, log, weight } = this.form.elements;
    const metrics = this.checked("metric");
    const own = this.groups().filter((name) => !isOfSystem(name));
    const shown = own.length < 2 ? own : own.filter((name) => metrics.has(name));
    if (this.folded.open) shown.push(...this.groups().filter(isOfSystem));
    for (const [name, panel] of this.panels) panel.figure.hidden = !shown.includes(name);
    for (const name of shown) {
      const axis = isOfSystem(name) ? "time" : x.value;
      const lines = this.lines(name, axis);
      const panel = this.panel(name);
      panel.figure.hidden = false;
      panel.chart.show(lines, { xLabel: axis === "time" ? "seconds" : axis, log: log.checked && !isOfSystem(name), weight: Number(weight.value), zoom: axis === x.value ? this.zoom : null });
      panel.legend.replaceChildren(...(this.isSingle ? lines.slice(0, 24) : []).map((line) => {
        const item = html("span", { class: "choice" });
        html("i", { class: `key c${line.colour % COLOURS}${line.colour >= COLOURS ? " dashed" : ""}` }, "", item);
        html("span", {}, line.label, item);
        return item;
      }));
    }
    this.form.elements.reset.disabled = !this.zoom;
    this.form.querySelector("output").textContent = Number(weight.value) ? Number(weight.value).toFixed(2) : "off";
  }

  panel(name) {
    if (!this.panels.has(name)) {
      const grid = isOfSystem(name) ? this.folded.querySelector(".panels") : this.form.nextElementSibling;
      const figure = html("figure", { class: "panel" }, undefined, grid);
      html("figcaption", {}, name, figure);
      const zoom = (range) => (!isOfSystem(name) || this.form.elements.x.value === "time") && this.zoomTo(range);
      const chart = new Chart(html("div", { class: "chart" }, undefined, figure), name, zoom);
      this.panels.set(name, { figure, chart, legend: html("div", { class: "legend" }, undefined, figure) });
    }
    return this.panels.get(name);
  }
}
