const STATES = { passed: "good", failed: "bad" };
const state = (text) => element("span", STATES[text] ? { class: STATES[text] } : {}, text.replaceAll("_", " "));
const errors = data.problems.filter((one) => one.severity === "error").length;
const verdict = data.sound ? (data.quick ? "sound: metadata only, data not read" : "sound") : `NOT SOUND: ${count(errors)} ${errors === 1 ? "error" : "errors"}`;

document.title = `${data.page.runs[0]}: ${verdict} - mcore-ckpt verify`;
document.getElementById("page").append(
  ...headed(verdict, data.path),
  card("Checks", grid(["check", "result", "of"], data.checks.map((one) => [one.id.replaceAll("_", " "), state(one.status), one.extent.join("; ")]))),
);
if (data.problems.length) {
  document.getElementById("page").append(searchable(
    "Findings", "findings", data.problems, (one) => `${one.severity} ${one.check} ${one.where} ${one.what}`,
    ["severity", "check", "where", "what"], (one) => [one.severity, one.check.replaceAll("_", " "), name(one.where), one.what], [], "findings",
  ));
}
