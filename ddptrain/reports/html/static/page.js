// Starts the page: sorts tables, opens everything for print, reloads a page that is written during a run.
const data = JSON.parse(document.getElementById("data").textContent);
const KEY = `ddptrain-report ${document.title}`;

function remembered() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) || {};
  } catch {
    return {}; // no storage, for example in the preview of a mail program
  }
}

function remember(state) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(state));
  } catch {
    // see above
  }
}

function sortable(table) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = html("button", { type: "button", class: "sort" }, head.textContent.trim());
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isDown = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      const body = table.tBodies[0];
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const sign = isDown ? -1 : 1;
      const rows = [...body.rows].map((row) => ({ row, text: key(row), number: Number(key(row) || NaN) }));
      rows.sort((a, b) => {
        if (!a.text !== !b.text) return a.text ? -1 : 1; // rows without a value stay last
        const difference = Number.isNaN(a.number) || Number.isNaN(b.number) ? a.text.localeCompare(b.text, "en") : a.number - b.number;
        return sign * difference;
      });
      body.append(...rows.map((one) => one.row));
    });
  });
}

function startModel() {
  for (const host of document.querySelectorAll("[data-model]")) {
    const { name, x, y } = data.model[Number(host.dataset.model)];
    let zoom = null;
    const chart = new Chart(host, { title: name, xLabel: "version", leastTick: 1 }, (range) => {
      zoom = range;
      chart.show([line], { zoom });
    });
    const line = { label: name, colour: 0, x: Float64Array.from(x), y: Float64Array.from(y) };
    chart.show([line], { zoom });
  }
}

function startPrinting() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open]):not(.long)")];
    opened.forEach((details) => (details.open = true));
  });
  addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
}

function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  const details = target && target.closest("details");
  if (details) {
    details.open = true;
    target.scrollIntoView();
  }
}

function reloadLater(curves) {
  let isBusy = false;
  addEventListener("pointerdown", () => (isBusy = true));
  addEventListener("pointerup", () => (isBusy = false));
  const details = [...document.querySelectorAll("details")];
  const again = () => {
    if (isBusy || document.hidden) {
      setTimeout(again, 1000);
      return;
    }
    remember({ curves: curves && curves.state, scroll: scrollY, open: details.map((one) => one.open) });
    location.reload();
  };
  setTimeout(again, data.reload_s * 1000);
}

function start() {
  const saved = data.reload_s || data.watched ? remembered() : {};
  const section = document.getElementById("curves");
  const curves = section && data.curves.length ? new Curves(section, data, saved.curves) : null;
  document.querySelectorAll("table.sortable").forEach(sortable);
  const plot = document.getElementById("parallel");
  if (plot && data.sweep) {
    const rows = new Map([...document.querySelectorAll("[data-trial]")].map((row) => [Number(row.dataset.trial), row]));
    new ParallelPlot(plot, data.sweep, rows);
  }
  startModel();
  startPrinting();
  addEventListener("hashchange", openTarget);
  openTarget();
  const details = document.querySelectorAll("details");
  if (saved.open && saved.open.length === details.length) details.forEach((one, at) => (one.open = saved.open[at]));
  if (saved.scroll) scrollTo(0, saved.scroll);
  if (data.reload_s) reloadLater(curves);
}

start();
