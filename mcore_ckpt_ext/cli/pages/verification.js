const STATES = { passed: "good", failed: "bad" };
const state = (text) => element("span", STATES[text] ? { class: STATES[text] } : {}, text);

document.title = `${data.page.runs[0]}: ${data.verdict} - mcore-ckpt verify`;
document.getElementById("page").append(
  ...headed(data.verdict, data.path),
  card("Checks", grid(["check", "result", "of"], data.checks.map((one) => [one.id.replaceAll("-", " "), state(one.status), one.extent.join("; ")]))),
);
if (data.problems.length) {
  document.getElementById("page").append(searchable(
    "Findings", "findings", data.problems, (one) => `${one.severity} ${one.check} ${one.where} ${one.what}`,
    ["severity", "check", "where", "what"], (one) => [one.severity, one.check.replaceAll("-", " "), name(one.where), one.what], [], "findings",
  ));
}
