const SHOWN_BARS = 32;
const MEMORY = [["weights", COLORS[0]], ["gradients", COLORS[1]], ["optimizer", COLORS[2]], ["activations", COLORS[3]]];
const verdict = (is, yes, no) => element("span", { class: is ? "good" : "bad" }, is ? yes : no);
const total = (memory) => MEMORY.reduce((sum, [part]) => sum + memory[part], 0);
const fit = (one) => (one.fits === null ? "?" : verdict(one.fits, "yes", "no"));
const split = (counts) => {
  const least = Math.min(...counts), most = Math.max(...counts);
  return !counts.length ? "" : least === most ? `${most}` : `${least} to ${most}`;
};

function memoryOfGpus() {
  const rows = data.layouts.slice(0, SHOWN_BARS).map((one) => [
    one.layout, size(total(one.memory)), MEMORY.map(([part, paint]) => [part, one.memory[part], paint]),
  ]);
  const parts = [bars(rows), legend(MEMORY)];
  if (data.layouts.length > SHOWN_BARS) parts.push(note(`The first ${SHOWN_BARS} of ${count(data.layouts.length)} are drawn.`));
  parts.push(note("Of the fullest GPU. Activations are an estimate; everything else follows from the shapes."));
  return card("Memory of a GPU", ...parts);
}

function flagsOf(one) {
  const removed = one.removed_flags.length ? [`Leave out, if your command has them: ${one.removed_flags.join(", ")}`] : [];
  return [element("code", {}, one.flags), ...[...removed, ...one.notes].map(note)];
}

const details = (one) => element("details", {}, element("summary", {}, "flags"), ...flagsOf(one));

const layouts = () => searchable(
  "Layouts that Megatron accepts, best first", "search", data.layouts, (one) => one.layout,
  ["layout", "layers", "memory", "fits", "bubble", "batch", "read by a rank", "read by all", "read once", "stock resumes", ""],
  (one) => [
    one.layout, split(one.layers_per_stage), size(total(one.memory)), fit(one), `${Math.round(one.bubble * 100)} %`,
    `${count(one.micro_batch_size)} / ${count(one.global_batch_size)}`, size(one.read_per_rank),
    one.seconds === null ? size(one.read_in_all) : `${size(one.read_in_all)}, ${count(Math.round(one.seconds))} s`, size(one.read_once),
    one.stock_resumes ? "yes" : "no", details(one),
  ], [2, 4, 6, 7, 8], "layouts",
);

function excluded() {
  const rules = Object.entries(data.excluded).map(([rule, number]) => [rule, count(number)]);
  return [
    card("Why the nearest layouts are excluded", grid(["layout", "reason"], data.nearest)),
    card("Combinations that each rule excludes", grid(["rule", "combinations"], rules, [1])),
  ];
}

function listed() {
  const some = data.layouts.length < data.accepted ? `the best ${count(data.layouts.length)} of ${count(data.accepted)}` : count(data.accepted);
  const title = data.layouts.length ? `${some} ${data.accepted === 1 ? "layout" : "layouts"} of ${counted(data.gpus, "GPU")}` : `no layout of ${counted(data.gpus, "GPU")} is accepted`;
  const known = [
    ["written by", data.old_layout || "no job"], ["Megatron", data.megatron_version], ["parameters", count(data.parameters)],
    ["memory of a GPU", `${data.gpu_memory === null ? "" : `${size(data.gpu_memory)}, `}${data.gpu_memory_source}`],
  ];
  if (data.unknown.length) known.push(["missing, defaults assumed", data.unknown.join(", ")]);
  if (data.least_memory !== null) known.push(["least memory of a layout", `${size(data.least_memory)} (${data.least_layout})`]);
  const parts = [...headed(title, data.path), card("Checkpoint and GPUs", facts(known))];
  if (data.layouts.length) {
    const best = data.layouts[0];
    parts.push(card(`Flags for ${best.layout}`, ...flagsOf(best)), layouts(), memoryOfGpus());
  }
  return [title, data.nearest.length ? [...parts, ...excluded()] : parts];
}

function rehearsed() {
  const title = data.will_succeed ? "this resume will succeed" : "this resume will be refused";
  const known = [
    ["written by", data.old_layout], ["rehearsed", `${data.new_layout}, ${counted(data.gpus, "GPU")}, Megatron ${data.megatron_version}`],
    ...[["iteration", data.iteration], ["optimizer", data.optimizer_format], ["loaded by", data.loaded_by], ["because of", data.why]]
      .filter(([, value]) => value !== null).map(([key, value]) => [key, String(value)]),
  ];
  const parts = [...headed(title, data.path), card("Resume", facts(known))];
  if (data.refusal !== null) {
    parts.push(card(data.is_verbatim ? "The job prints" : "Why", element("pre", { class: "bad" }, data.refusal)));
    return [title, parts];
  }
  parts.push(
    card("Checked", facts([
      ["optimizer", `${counted(data.elements, "element")} of ${counted(data.parameters, "parameter")} on ${counted(data.gpus, "rank")}, each found once; placed by ${data.order_sources.join(" and ")}`],
      ["weights", `${counted(data.weights, "element")}, each found once`],
      ["masters", data.proven ? `${count(data.proven)} ${data.proof} (${data.is_full_proof ? "all" : "samples of every parameter"})` : "derived from the weights: nothing to compare"],
      ["to be read", `${size(data.bytes_read)} by all ranks`],
    ])),
    card("Taken for granted", ...data.given.map((text) => element("p", {}, text))),
    card("Flags", ...flagsOf(data)),
  );
  return [title, parts];
}

const [title, parts] = "will_succeed" in data ? rehearsed() : listed();
document.title = `${data.page.runs[0]}: ${title} - mcore-ckpt plan`;
document.getElementById("page").append(...parts);
