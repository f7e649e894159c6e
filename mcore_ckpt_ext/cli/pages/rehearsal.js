const title = data.will_succeed ? "this resume will succeed" : "this resume will be refused";
const parts = [...headed(title, data.path), card("Resume", facts(data.shown.facts), ...data.shown.remarks.map(note))];
if (data.refusal !== null) {
  parts.push(card(data.is_verbatim ? "The job prints" : "Why", element("pre", { class: "bad" }, data.refusal)));
} else {
  parts.push(
    card("Checked", facts(data.shown.checked)),
    card("Taken for granted", ...data.given.map((text) => element("p", {}, text))),
    card("Flags", ...flagsOf(data)),
  );
}
document.title = `${data.page.runs[0]}: ${title} - mcore-ckpt plan`;
document.getElementById("page").append(...parts);
