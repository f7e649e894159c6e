const DRAWN = 300, AT_ONCE = 8;
const different = data.kinds.flatMap((kind) => kind.different);
const share = (tensor) => (tensor.elements ? tensor.different / tensor.elements : 0);
// Sort by the largest difference; tensors that cannot be compared come first.
different.sort((a, b) => (b.problem ? 1 : 0) - (a.problem ? 1 : 0) || b.largest - a.largest || share(b) - share(a));
const number = (value) => (typeof value === "number" ? Number(value.toPrecision(3)).toString() : String(value));

function differences(tensor) {
  const found = [];
  if (tensor.problem) found.push(`cannot be compared: ${tensor.problem}`);
  if (String(tensor.shapes[0]) !== String(tensor.shapes[1])) found.push(`shape ${tensor.shapes[0].join(" x ")} against ${tensor.shapes[1].join(" x ")}`);
  if (tensor.dtypes[0] !== tensor.dtypes[1]) found.push(`${tensor.dtypes[0]} against ${tensor.dtypes[1]}`);
  if (tensor.different) found.push(`${count(tensor.different)} of ${counted(tensor.elements, "element")} ${tensor.different === 1 ? "differs" : "differ"} (${number(100 * share(tensor))} %)`);
  if (tensor.largest) found.push(`by at most ${number(tensor.largest)}`);
  if (tensor.signed_zeros) found.push(`${count(tensor.signed_zeros)} only in the sign of zero`);
  if (tensor.padding) found.push(`${counted(tensor.padding.rows, "row more", "rows more")} in ${tensor.padding.only_in}, ${counted(tensor.padding.nonzero, "element")} not zero`);
  if (tensor.first) found.push(`the first at (${tensor.first[0].join(", ")}): ${tensor.first[1]} against ${tensor.first[2]}`);
  return found.join("; ");
}

// A picture of a tensor with two axes, the first one downwards. The opacity of a cell shows the share of different elements, its color the largest difference.
function picture(tensor) {
  const map = tensor.where, each = 10, tall = 14;
  const drawing = drawn("svg", { viewBox: `0 0 ${map.columns * each} ${map.rows * tall}`, role: "img", preserveAspectRatio: "none", style: `height:${map.rows * tall}px` });
  const logs = map.cells.map((cell) => Math.log10(cell[2] || 1e-45)), least = logs.reduce((a, b) => Math.min(a, b), 0), most = logs.reduce((a, b) => Math.max(a, b), -50);
  const elements = Math.max(1, tensor.elements / (map.rows * map.columns));
  map.cells.forEach(([cell, differ, largest], index) => {
    const strength = most > least ? (logs[index] - least) / (most - least) : 1;
    const box = { x: (cell % map.columns) * each, y: Math.floor(cell / map.columns) * tall, width: each, height: tall, class: "cell",
                  fill: strength > 0.8 ? "var(--k3)" : strength > 0.5 ? "var(--k2)" : "var(--k1)", opacity: Math.min(1, 0.3 + (0.7 * differ) / elements) };
    drawing.append(titled(drawn("rect", box), `${counted(differ, "element differs", "elements differ")} here, by at most ${number(largest)}`));
  });
  return drawing;
}

// All pictures except the first ones are created when they come into view.
function drawings() {
  const list = element("div", { id: "differences" });
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      const tensor = different[Number(entry.target.dataset.index)];
      if (tensor.where) entry.target.append(picture(tensor));
    }
  }, { rootMargin: "400px" });
  different.slice(0, DRAWN).forEach((tensor, index) => {
    const one = element("div", { class: "difference", "data-index": index }, element("div", {}, `${tensor.kind} `, name(tensor.name)), note(differences(tensor)));
    list.append(one);
    if (index >= AT_ONCE) watcher.observe(one);
    else if (tensor.where) one.append(picture(tensor));
  });
  const parts = [list, legend([["largest differences", "var(--k3)"], ["smaller", "var(--k2)"], ["smallest of this tensor", "var(--k1)"]]),
    note("Each picture is a tensor: its first axis downwards, all others to the right. A cell is the fuller the more of its elements differ.")];
  if (different.length > DRAWN) parts.push(note(`The ${count(DRAWN)} with the largest differences are drawn, of ${count(different.length)}; the list below has all.`));
  return card("Where the differences are, and how large", ...parts);
}

const missing = data.kinds.flatMap((kind) => [
  ...kind.only_in_a.map((tensor) => ["A", kind.kind, tensor]), ...kind.only_in_b.map((tensor) => ["B", kind.kind, tensor]),
]);
const unread = [["A", data.account_a], ["B", data.account_b]].flatMap(([side, account]) => account.not_looked_at.map((item) => [side, item]));
const settings = data.settings.filter((setting) => !setting.equal);
document.title = `${data.page.runs.join(" and ")}: ${data.verdict} - mcore-ckpt diff`;
const page = document.getElementById("page");
page.append(
  ...headed(data.verdict, `A is ${data.a}, B is ${data.b}`),
  card("Besides the tensors", grid(["", "A", "B", ""], data.facts.map((fact) => [fact.what, fact.a, fact.b, fact.a === fact.b ? "" : "differs"]))),
  ...(settings.length ? [card("Settings that differ", grid(["", "A", "B"], settings.map((setting) => [setting.name, setting.a, setting.b])))] : []),
  card("Tensors", grid(["kind", "compared", "elements", "different", "only in A", "only in B"], data.kinds.map((kind) => [
    kind.kind, count(kind.compared), count(kind.elements), element("span", { class: kind.different.length ? "bad" : "good" }, count(kind.different.length)),
    count(kind.only_in_a.length), count(kind.only_in_b.length)]), [1, 2, 3, 4, 5])),
);
if (different.length) {
  page.append(drawings(), searchable(
    "All that differ", "search", different, (t) => `${t.kind} ${t.name}`, ["kind", "name", "differ", "of", "by at most"],
    (t) => [t.kind, name(t.name), count(t.different), count(t.elements), number(t.largest)], [2, 3, 4], "tensors",
  ));
}
if (missing.length) page.append(searchable("Only in one of the two", "missing", missing, (row) => row.join(" "), ["in", "kind", "name"], ([side, kind, tensor]) => [side, kind, name(tensor)], [], "tensors"));
if (unread.length) page.append(card("Not compared", grid(["in", "key", "bytes", "why"], unread.slice(0, 1000).map(([side, item]) => [side, name(item.key), size(item.nbytes), item.why || "unknown key"]), [2])));
