// Names come from untrusted checkpoints, so they are inserted as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["--k0", "--k1", "--k2", "--k3", "--k4", "--k5"].map((name) => `var(${name})`);
const MORE = 200;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  return made;
}

function titled(shape, text) {
  shape.append(drawn("title", {}, text));
  return shape;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit ? bytes.toPrecision(3) : bytes} ${units[unit]}`;
}

// A number with its noun: "1 file", "2 files".
const counted = (number, singular, plural = `${singular}s`) => `${count(number)} ${number === 1 ? singular : plural}`;
const count = (number) => (typeof number === "number" && Number.isInteger(number) ? number.toLocaleString("en") : String(number));
const card = (title, ...children) => element("section", {}, element("h2", {}, title), ...children);
const note = (text) => element("p", { class: "note" }, text);
const name = (text) => element("span", { class: "name" }, text);

function facts(rows) {
  const table = element("table");
  for (const [key, value] of rows) table.append(element("tr", {}, element("td", { class: "key" }, key), element("td", {}, value)));
  return table;
}

const cells = (tag, row, numbers) => row.map((cell, index) => element(tag, numbers.includes(index) ? { class: "number" } : {}, cell));

function grid(header, rows, numbers = []) {
  const table = element("table");
  table.append(element("tr", {}, ...cells("th", header, numbers)));
  for (const row of rows) table.append(element("tr", {}, ...cells("td", row, numbers)));
  return element("div", { class: "wide" }, table);
}

function legend(entries) {
  const list = element("div", { class: "legend" });
  for (const [label, paint] of entries) list.append(element("span", {}, element("i", { style: `background:${paint}` }), label));
  return list;
}

// Horizontal bars of stacked parts, one for each row: [label, total text, [[part, value, paint]]].
function bars(rows) {
  const most = rows.reduce((found, row) => Math.max(found, row[2].reduce((sum, part) => sum + part[1], 0)), 1);
  const picture = element("div", { class: "bars" });
  for (const [label, total, parts] of rows) {
    const bar = element("div", { class: "bar" });
    for (const [part, value, paint] of parts) {
      bar.append(element("i", { class: "piece", title: `${part}: ${size(value)}`, style: `width:${(value / most) * 100}%;background:${paint}` }));
    }
    picture.append(element("span", { class: "label" }, label), bar, element("span", { class: "total" }, total));
  }
  return picture;
}

// A list with incremental search. MORE rows are created at a time, because there may be a hundred thousand.
function searchable(title, id, items, textOf, header, rowOf, numbers, what) {
  const texts = items.map((item) => textOf(item).toLowerCase());
  const box = element("input", { id, type: "search", placeholder: "search: every word must occur", "aria-label": `search ${what}` });
  const place = element("div", { class: "scroll", id: `${id}-rows` });
  const summary = element("p", { class: "note", id: `${id}-found` });
  const more = element("button", { type: "button", id: `${id}-more` }, "show more");
  let found = [], shown = 0, body = null;
  function append() {
    for (const index of found.slice(shown, shown + MORE)) body.append(element("tr", {}, ...cells("td", rowOf(items[index]), numbers)));
    shown = Math.min(found.length, shown + MORE);
    more.hidden = shown === found.length;
    summary.textContent = `${count(found.length)} of ${count(items.length)} ${what}` + (more.hidden ? "" : `, the first ${count(shown)} are shown`);
  }
  function search() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = [];
    for (let index = 0; index < texts.length; index += 1) if (words.every((word) => texts[index].includes(word))) found.push(index);
    body = element("table", {}, element("tr", {}, ...cells("th", header, numbers)));
    place.replaceChildren(body);
    shown = 0;
    append();
  }
  box.addEventListener("input", search);
  more.addEventListener("click", append);
  search();
  return card(title, element("div", { class: "row" }, box), place, element("div", { class: "row" }, summary, more));
}

// Light or dark: by the system setting, unless the button was used.
function themed() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = element("button", { type: "button", id: "theme" });
  let chosen = null;
  function apply() {
    const dark = chosen === null ? system.matches : chosen;
    document.documentElement.classList.toggle("dark", dark);
    button.textContent = dark ? "light" : "dark";
  }
  button.addEventListener("click", () => { chosen = !document.documentElement.classList.contains("dark"); apply(); });
  system.addEventListener("change", apply);
  apply();
  return button;
}

function headed(title, sub) {
  return [
    element("header", {}, element("h1", {}, title), themed()), element("p", { class: "sub" }, sub), element("p", { class: "note" }, data.page.made),
  ];
}

// The flags of a layout, those that must go, and what it changes for the user.
function flagsOf(one) {
  const removed = one.removed_flags.length ? [`Leave out, if your command has them: ${one.removed_flags.join(", ")}`] : [];
  return [element("code", {}, one.flags), ...[...removed, ...one.notes].map(note)];
}
