// Starts the page: sorts tables, opens everything for print.
const data = JSON.parse(document.getElementById("data").textContent);

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

function start() {
  const section = document.getElementById("curves");
  if (section && data.curves.length) new Curves(section, data);
  document.querySelectorAll("table.sortable").forEach(sortable);
  const plot = document.getElementById("parallel");
  if (plot && data.sweep) {
    const rows = new Map([...document.querySelectorAll("[data-trial]")].map((row) => [Number(row.dataset.trial), row]));
    new ParallelPlot(plot, data.sweep, rows);
  }
  startPrinting();
  addEventListener("hashchange", openTarget);
  openTarget();
}

start();
