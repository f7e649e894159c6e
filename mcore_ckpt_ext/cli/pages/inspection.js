const KINDS = Object.keys(data.bytes_by_kind);
const color = (kind) => (kind === "other" ? COLORS[5] : COLORS[KINDS.filter((k) => k !== "other").indexOf(kind) % 5]);
const heldBy = (stage, rank) => stage.ranks.some(([first, last]) => first <= rank && rank < last);
const runs = (ranks) => {
  const some = ranks.slice(0, 8).map(([first, last]) => (last - first > 1 ? `${first} to ${last - 1}` : `${first}`)).join(", ");
  return ranks.length > 8 ? `${some}, ...` : some;
};

function byRank() {
  const groups = new Map();
  for (const file of data.files) {
    const label = file.rank === null ? file.file.split("/")[0] : `rank ${file.rank}`;
    const sums = groups.get(label) || {};
    for (const [kind, bytes] of Object.entries(file.bytes_by_kind)) sums[kind] = (sums[kind] || 0) + bytes;
    groups.set(label, sums);
  }
  const shown = 64;
  const rows = [...groups].slice(0, shown).map(([label, sums]) => [
    label, size(Object.values(sums).reduce((a, b) => a + b, 0)),
    KINDS.filter((kind) => sums[kind]).map((kind) => [kind, sums[kind], color(kind)]),
  ]);
  const parts = [element("div", { class: "scroll" }, bars(rows)), legend(KINDS.map((kind) => [kind, color(kind)]))];
  if (groups.size > shown) parts.push(note(`The first ${shown} of ${count(groups.size)} are drawn; the list of files below has all.`));
  if (data.silent_ranks.length) {
    const some = data.silent_ranks.slice(0, 24).join(", ") + (data.silent_ranks.length > 24 ? ", ..." : "");
    parts.push(note(`No file from ${counted(data.silent_ranks.length, "rank")} (${some}): ${data.why_silent}.`));
  }
  return card("Bytes by rank", ...parts);
}

// The layers of each rank: a lane for each pipeline rank, a box for each of its chunks.
function layerMap() {
  const lanes = new Map();
  for (const stage of data.stages) lanes.set(stage.pipeline, [...(lanes.get(stage.pipeline) || []), stage]);
  const layers = data.stages.reduce((most, stage) => Math.max(most, stage.last), 1);
  const picture = element("div", { class: "layers", id: "layers" });
  const box = element("input", { id: "rank", type: "number", min: 0, max: (data.layout.world ?? 1) - 1, placeholder: "a rank's number", "aria-label": "rank" });
  const summary = element("p", { class: "note", id: "rank-summary" });
  const drawnLanes = [];
  for (const [pipeline, stages] of lanes) {
    const lane = element("div", { class: "lane", title: `pipeline ${pipeline}: ranks ${runs(stages[0].ranks)}` });
    for (const stage of stages) {
      const left = (stage.first / layers) * 100, width = ((stage.last - stage.first) / layers) * 100;
      const text = stage.last - stage.first > 1 ? `${stage.first} to ${stage.last - 1}` : `${stage.first}`;
      if (width) lane.append(element("span", { class: "chunk", style: `left:${left}%;width:${width}%;background:${COLORS[pipeline % 5]}`, title: `chunk ${stage.chunk}: layers ${text}` }, text));
    }
    lane.addEventListener("click", () => { box.value = stages[0].ranks[0][0]; show(); });
    drawnLanes.push([lane, stages]);
    picture.append(element("span", { class: "label" }, `ranks ${runs(stages[0].ranks)}`), lane);
  }
  function show() {
    const rank = box.value === "" ? null : Number(box.value);
    let own = [];
    for (const [lane, stages] of drawnLanes) {
      const is = rank !== null && heldBy(stages[0], rank);
      lane.classList.toggle("lit", is);
      if (is) own = stages;
    }
    const files = rank === null ? [] : data.files.filter((file) => file.rank === rank);
    const where = files.length ? ` (${files[0].place})` : "";
    const held = own.filter((s) => s.last > s.first).map((s) => (s.last - s.first > 1 ? `${s.first} to ${s.last - 1}` : `${s.first}`)).join(", ");
    summary.textContent = rank === null ? "Choose a lane, or type a rank's number."
      : !own.length ? `There is no rank ${count(rank)}.`
        : `Rank ${count(rank)}${where}: layers ${held || "none"}; ${files.length ? `it wrote ${files.slice(0, 8).map((file) => file.file).join(", ")}` : "it wrote no file of its own"}.`;
    document.title = rank === null || !own.length ? TITLE : `rank ${rank}${where} - ${TITLE}`;
  }
  box.addEventListener("input", show);
  show();
  return card("Which layer lies on which rank", element("div", { class: "row" }, box), element("div", { class: "scroll" }, picture), summary);
}

function bufferMap() {
  const choose = element("select", { id: "buffer", "aria-label": "gradient buffer" });
  data.buffers.forEach((buffer, index) => choose.append(element("option", { value: index }, `${buffer.group}: ${buffer.buffer}`)));
  const place = element("div");
  function show() {
    const buffer = data.buffers[Number(choose.value)];
    const width = 1000, lanes = 8, lane = 26, each = Math.max(1, Math.ceil(buffer.numel / lanes));
    const picture = drawn("svg", { viewBox: `0 0 ${width} ${lanes * lane}`, role: "img", id: "map" });
    for (let row = 0; row < lanes; row += 1) {
      const filled = Math.max(0, Math.min(buffer.numel - row * each, each));
      picture.append(drawn("rect", { x: 0, y: row * lane, width: (filled / each) * width, height: lane - 5, rx: 3, fill: "var(--bar)" }));
    }
    buffer.parameters.forEach(([parameter, first, last], index) => {
      for (let row = Math.floor(first / each); row * each < last && row < lanes; row += 1) {
        const low = Math.max(first, row * each), high = Math.min(last, (row + 1) * each);
        const box = { x: ((low - row * each) / each) * width, y: row * lane, width: ((high - low) / each) * width, height: lane - 5,
                      rx: 2, fill: COLORS[index % 5], class: "part", "data-part": index };
        picture.append(titled(drawn("rect", box), `${parameter}\nelements ${count(first)} to ${count(last)}`));
      }
    });
    const summary = buffer.order_source
      ? `Order: ${buffer.order_source}; sizes and chunk borders agree. \`mcore-ckpt verify\` proves it. Grey is padding.`
      : "No known order of parameters fits by sizes and chunk borders; verify looks for the parameters by content.";
    const rows = buffer.parameters.map(([parameter, first, last]) => [name(parameter), count(first), count(last), count(last - first)]);
    const list = element("div", { class: "scroll" }, grid(["parameter", "first", "end", "elements"], rows, [1, 2, 3]));
    place.replaceChildren(picture, note(`${counted(buffer.numel, "element")}. ${summary}`), list);
  }
  choose.addEventListener("change", show);
  show();
  return card("Map of a gradient buffer", element("div", { class: "row" }, choose), place);
}

const tensors = () => searchable(
  "Tensors", "search", data.tensors, (t) => `${t.kind} ${t.name} ${t.dtype}`, ["kind", "name", "shape", "dtype", "elements"],
  (t) => [t.kind, name(t.name), t.shape.join(" x "), t.dtype, count(t.shape.reduce((a, b) => a * b, 1))], [4], "tensors",
);

// The names of tensors in a file are added when its row is opened, because there may be millions in all.
function contents(file) {
  const opened = element("details", {}, element("summary", {}, count(file.tensors.length)));
  opened.addEventListener("toggle", () => {
    if (opened.open && opened.childElementCount === 1) opened.append(name(file.tensors.map((index) => data.names[index]).join(", ")));
  });
  return opened;
}

function files() {
  const who = (file) => (file.rank === null ? file.place : `rank ${file.rank}, writer ${file.writer} (${file.place})`);
  const list = searchable(
    "Files", "files", data.files, (file) => `${file.file} ${who(file)} ${file.bytes_on_disk === null ? "missing" : ""}`,
    ["file", "who wrote it", "on disk", "records", "tensors"],
    (file) => [name(file.file), who(file), file.bytes_on_disk === null ? "missing" : size(file.bytes_on_disk), count(file.records), contents(file)],
    [2, 3], "files",
  );
  if (data.files.some((file) => file.rank !== null)) list.append(note("__x_y.distcp: x is the global rank that wrote it, y which of that rank's writers."));
  return list;
}

const LAYOUT = data.layout_text || "no layout", ITERATION = data.iteration === null ? "no iteration" : `iteration ${count(data.iteration)}`;
const TITLE = `${LAYOUT}, ${ITERATION} - ${data.page.runs[0]} - mcore-ckpt inspect`;
document.title = TITLE;
const bound = (item) => (item.first && item.last ? (item.first === item.last ? item.first : `${item.first} to ${item.last}`)
  : item.first ? `${item.first} or later` : `${item.last} or earlier`);
const sum = Object.values(data.bytes_by_kind).reduce((a, b) => a + b, 0);
const kinds = [...KINDS.map((kind) => [kind, data.bytes_by_kind[kind], color(kind)]), ["archives' overhead", Math.max(0, data.bytes_on_disk - sum), COLORS[5]]];
const page = document.getElementById("page");
page.append(
  ...headed(data.path, `${LAYOUT}${data.layout.world === null ? "" : `, ${counted(data.layout.world, "rank")}`}, ${ITERATION}, ${size(data.bytes_on_disk)} on disk, written by ${/^\d/.test(data.writer.version) ? "Megatron " : ""}${data.writer.version}`),
  element("div", { class: "cards" },
    card("Checkpoint", facts([
      ["format", data.format], ["optimizer", [data.optimizer_format, data.optimizer].filter(Boolean).join(": ") || "none"],
      ["layout", Object.entries(data.layout).map(([dimension, ranks]) => `${dimension} ${ranks === null ? "not known" : count(ranks)}`).join(", ")],
      ["sidecar", data.sidecar ? "yes" : "no"], ...Object.entries(data.training).map(([key, value]) => [key, count(value)]),
    ])),
    card("Model", facts(Object.entries(data.model).map(([key, value]) => [key, count(value)]))),
  ),
  card("Who can resume it, optimizer included",
    grid(["who", "versions", "layouts", ""], data.resumptions.map((item) => [item.who, item.versions, item.layouts, item.note]))),
  card("Bytes by kind", bars(kinds.map(([kind, bytes, paint]) => [kind, size(bytes), [[kind, bytes, paint]]]))),
  byRank(),
);
if (data.stages.length) page.append(layerMap());
if (data.buffers.length) page.append(bufferMap());
page.append(
  tensors(), files(),
  card("How the version is known", grid(["evidence", "Megatron"], data.writer.evidence.map((item) => [item.what, bound(item)]))),
);
