// Starts the page: curves, sorted and filtered tables, runs that are compared, and updates of a served page.
const data = JSON.parse(document.getElementById("data").textContent);
const section = document.getElementById("curves");
const curves = section && new Curves(section);

function sort(table) {
  const heads = [...table.querySelectorAll("thead th")];
  const column = heads.findIndex((head) => head.hasAttribute("aria-sort"));
  if (column < 0) return;
  const sign = heads[column].getAttribute("aria-sort") === "ascending" ? 1 : -1;
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, text: key(row), number: Number(key(row) || NaN) }));
  rows.sort((a, b) => {
    if (!a.text !== !b.text) return a.text ? -1 : 1; // rows without a value stay last
    return sign * (Number.isNaN(a.number) || Number.isNaN(b.number) ? a.text.localeCompare(b.text, "en") : a.number - b.number);
  });
  table.tBodies[0].append(...rows.map((one) => one.row));
}

document.addEventListener("click", (event) => {
  const head = event.target.closest(".sort")?.parentElement;
  if (!head) return;
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  head.parentElement.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
  sort(head.closest("table"));
});

const keyOf = (node) => node.dataset?.key || node.id || (node.nodeName === "DETAILS" ? node.firstElementChild.textContent : "");

// Makes `now` like `wanted`, without touching what the user has opened, ticked, sorted or focused.
function patch(now, wanted) {
  for (const { name, value } of [...wanted.attributes]) if (name !== "open" && now.getAttribute(name) !== value) now.setAttribute(name, value);
  for (const { name } of [...now.attributes]) if (!wanted.hasAttribute(name) && !["open", "hidden", "aria-sort"].includes(name)) now.removeAttribute(name);
  const keyed = new Map([...now.children].filter(keyOf).map((child) => [keyOf(child), child]));
  const others = [...now.childNodes].filter((child) => !keyOf(child));
  const kept = [...wanted.childNodes].map((child) => {
    const at = others.findIndex((other) => other.nodeName === child.nodeName);
    const old = keyOf(child) ? keyed.get(keyOf(child)) : at < 0 ? undefined : others.splice(at, 1)[0];
    if (!old || old.nodeName !== child.nodeName) return child;
    if (child.nodeType === Node.TEXT_NODE && old.data !== child.data) old.data = child.data;
    if (child.nodeType === Node.ELEMENT_NODE && !("keep" in child.dataset) && !old.isEqualNode(child)) patch(old, child);
    return old;
  });
  if (kept.length !== now.childNodes.length || kept.some((child, at) => child !== now.childNodes[at])) now.replaceChildren(...kept);
}

// A list: only the rows that contain every word of the filter. The ticked runs are compared.
function filter() {
  const words = (document.getElementById("filter")?.value ?? "").toLowerCase().split(/\s+/);
  let count = 0;
  document.querySelectorAll("#list tbody tr").forEach((row) => {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    count += !row.hidden;
  });
  const output = document.getElementById("shown");
  if (output) output.textContent = `${count} shown`;
  const ticked = document.querySelectorAll("#list input:checked").length;
  const button = document.getElementById("compare");
  if (button) button.disabled = ticked < 2;
}
document.addEventListener("input", (event) => event.target.closest("#filters, #list") && filter());

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function fetched(query) {
  const answer = await fetch(query, { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  return answer.json();
}

// A served page asks whether something has changed: at most every two seconds, and for a fifth of the time.
async function follow() {
  const asked = location.search || "?";
  let version = "";
  for (let pause = 2000; ; await wait(document.hidden ? 10000 : pause)) {
    const began = performance.now();
    try {
      const news = await fetched(`${asked}&json=${version}`);
      document.getElementById("lost").hidden = true;
      version = news.version;
      if (news.body !== undefined) {
        patch(document.getElementById("body"), new DOMParser().parseFromString(`<div id="body">${news.body}</div>`, "text/html").body.firstChild);
        document.querySelectorAll("table.sortable").forEach(sort);
        filter();
        if (curves && news.curves) curves.show(news);
        contents();
      }
      if (news.ended) return;
    } catch (error) {
      document.getElementById("lost").hidden = false;
    }
    pause = Math.max(2000, 5 * (performance.now() - began));
  }
}

// The curves of several runs come one run after the other. Drawing takes a fifth of the time.
async function load() {
  let due = 0;
  for (const [run, { query }] of data.runs.entries()) {
    const news = await fetched(query);
    data.curves.push(...news.curves.map((curve) => ({ ...curve, run })));
    if (performance.now() < due && run < data.runs.length - 1) continue;
    const began = performance.now();
    curves.show(data);
    due = performance.now() + 4 * (performance.now() - began);
  }
  contents();
}

// The table of contents: the titles with an anchor.
function contents() {
  const titles = [...document.querySelectorAll("main :is(h2, h3)[id]")].filter((title) => title.offsetParent);
  const links = titles.map((title) => {
    const item = html("li");
    html("a", { href: `#${title.id}` }, title.firstChild.textContent.trim(), item);
    return item;
  });
  document.getElementById("contents").replaceChildren(...(links.length > 1 ? links : []));
}

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open]):not(.long)")];
  opened.forEach((details) => (details.open = true));
});
addEventListener("afterprint", () => opened.forEach((details) => (details.open = false)));
if (curves) curves.show(data);
if (curves && data.runs[0].query) load();
if (data.live) follow();
contents();
filter();
