const SHOWN_BARS = 32;
const MEMORY = [["weights", COLORS[0]], ["gradients", COLORS[1]], ["optimizer", COLORS[2]], ["activations", COLORS[3]]];
const said = data.shown;

function memoryOfGpus() {
  const total = said.header.indexOf("memory");
  const rows = data.layouts.slice(0, SHOWN_BARS).map((one, index) => [
    one.layout, said.rows[index][total], MEMORY.map(([part, paint]) => [part, one.memory[part], paint]),
  ]);
  const parts = [bars(rows), legend(MEMORY)];
  if (data.layouts.length > SHOWN_BARS) parts.push(note(`The first ${SHOWN_BARS} of ${count(data.layouts.length)} are drawn.`));
  parts.push(note("Of the fullest GPU. Activations are an estimate; everything else that is drawn follows from the shapes. The totals include what is needed for a while, CUDA and NCCL."));
  return card("Memory of a GPU", ...parts);
}

const details = (one) => element("details", {}, element("summary", {}, "flags"), ...flagsOf(one));
const paint = (text, column) => (said.header[column] !== "fits" || text === "?" ? text : element("span", { class: text === "yes" ? "good" : "bad" }, text));

const layouts = () => searchable(
  "Layouts that Megatron accepts, best first", "search", data.layouts, (one) => one.layout, [...said.header, ""],
  (one) => [...said.rows[data.layouts.indexOf(one)].map(paint), details(one)], [2, 4, 6, 7], "layouts",
);

function excluded() {
  const rules = Object.entries(data.excluded).map(([rule, number]) => [rule, count(number)]);
  return [
    card("Why the nearest layouts are excluded", grid(["layout", "reason"], data.nearest)),
    card("Combinations that each rule excludes", grid(["rule", "combinations"], rules, [1])),
  ];
}

const some = data.layouts.length < data.accepted ? `the best ${count(data.layouts.length)} of ${count(data.accepted)}` : count(data.accepted);
const title = data.layouts.length ? `${some} ${data.accepted === 1 ? "layout" : "layouts"} of ${counted(data.gpus, "GPU")}` : `no layout of ${counted(data.gpus, "GPU")} is accepted`;
const known = [...said.facts];
if (data.least_memory !== null) known.push(["least memory of a layout", `${size(data.least_memory)} (${data.least_layout})`]);
const parts = [...headed(title, data.path), card("Checkpoint and GPUs", facts(known), ...said.remarks.map(note))];
if (data.layouts.length) {
  const best = data.layouts[0];
  parts.push(
    card(`Flags for ${best.layout}`, ...flagsOf(best), ...said.best.map(note)), layouts(),
    card("What goes on as before", ...said.sentences.map((text) => element("p", {}, text))), memoryOfGpus(),
  );
}
if (said.fewer.length) parts.push(card(said.fewer_title, grid(said.fewer_header, said.fewer, [0, 2, 4])));
if (data.nearest.length) parts.push(...excluded());
document.title = `${data.page.runs[0]}: ${title} - mcore-ckpt plan`;
document.getElementById("page").append(...parts);
