"use strict";
// The page: which graph is shown, which box is chosen, what is searched for.

const rows = data.graphs.flatMap(graph => graph.boxes.map((box, k) => ({ graph, box, k })));
for (const row of rows) {
  const { graph, box } = row;
  const places = box.origins.flatMap(([op, node, place]) => [op, node, place, data.lines[place] ?? ""]);
  const tensors = [...box.reads, ...box.writes].map(([tensor]) => graph.tensors[tensor][0]);
  row.words = [box.name, box.kind, box.text, ...places, ...tensors].join("\n").toLowerCase();
}

const state = { graph: null, found: null, next: 0 };
let charts = [];

const view = new GraphView(k => choose(state.graph, k));

function choose(graph, k) {
  if (graph !== state.graph) showGraph(graph);
  view.select(k);
  showPanel(graph, k);
}

function showGraph(graph) {
  state.graph = graph;
  byId("chosen").value = String(data.graphs.indexOf(graph));
  const sizes = Object.entries(graph.sizes).map(([name, size]) => `${name}=${size}`).join(", ");
  const whole = graph.whole ? ` A whole run takes ${secondsText(graph.whole)}.` : "";
  byId("graph-note").textContent = graph.obstacle ? `Not drawn: ${graph.obstacle}.` :
    `${graph.title} for target ${graph.target}: ${counts(graph.boxes)}${sizes ? `; sizes of the first call: ${sizes}` : ""}.${whole}`;
  if (graph.boxes.length) view.show(graph);
  byId("split").hidden = !graph.boxes.length;
  showPanel(graph, null);
  charts.forEach(each => each.destroy());
  charts = showMemory(graph);
  markFound();
}

function counts(boxes) {
  const words = { kernel: "kernel", operator: "operator", library: "library call", eager: "eager call", copy: "copy" };
  return Object.entries(words).map(([kind, word]) => [boxes.filter(box => box.kind === kind).length, kind, word])
    .filter(([count]) => count)
    .map(([count, kind, word]) => (kind === "copy" && count > 1 ? `${count} copies` : plural(count, word)))
    .join(", ");
}

// ---- search ------------------------------------------------------------------------------------

function search() {
  const text = byId("search").value.trim().toLowerCase();
  state.found = text ? rows.filter(row => row.words.includes(text)) : null;
  state.next = 0;
  markFound();
  filterKernels(state.found && new Set(state.found));
}

function markFound() {
  const { found, graph } = state;
  const here = found && found.filter(row => row.graph === graph);
  if (graph.boxes.length) view.mark(here && here.map(row => row.k));
  const elsewhere = found ? found.length - here.length : 0;
  byId("found").textContent = found === null ? "" :
    `${here.length} here${elsewhere ? `, ${elsewhere} in other graphs` : ""}${found.length ? "; Enter shows the next" : ""}`;
}

function showNext(backwards) {
  const { found } = state;
  if (!found || !found.length) return;
  const count = found.length;
  const current = (backwards ? state.next - 2 + 2 * count : state.next) % count;
  const { graph, k } = found[current];
  state.next = (current + 1) % count;
  choose(graph, k);
  view.center(k);
}

// ---- the page ----------------------------------------------------------------------------------

function showSummary() {
  const { about } = data;
  byId("about").textContent = `${about.command} · ${about.versions} · ${about.made}`;
  const boxes = data.graphs.flatMap(graph => graph.boxes);
  const count = kind => boxes.filter(box => box.kind === kind).length;
  const eager = Math.max(count("eager"), data.left.filter(row => row.decision === "eager").length);
  const compile = data.compilations.flatMap(each => each.stages).reduce((sum, [, seconds]) => sum + seconds, 0);
  const items = [
    [plural(data.compilations.length, "graph"), ""],
    [plural(count("kernel"), "kernel"), "kernel"],
    [plural(count("operator"), "graph operator"), "operator"],
    [plural(count("library"), "library call"), "library"],
    [plural(eager, "eager call"), eager ? "eager" : ""],
    [plural(data.breaks.length, "graph break"), data.breaks.length ? "eager" : ""],
    [`compiled in ${secondsText(compile)}`, ""],
    [plural(data.tools.failures.length, "failed comparison"), "failed"],
    [plural(data.tools.bisections.length, "bisected fault"), "failed"],
    [plural(data.tools.modules.length, "wrong module value"), "failed"],
  ].filter(([text, kind]) => !(text.startsWith("0 ") && ["kernel", "operator", "failed", "library"].includes(kind)));
  byId("summary").replaceChildren(...items.map(([text, kind]) => element("li", { className: `chip ${kind}` }, text)));
  const used = new Set(boxes.map(box => box.kind));
  byId("legend").replaceChildren(...Object.entries(KINDS).filter(([kind]) => used.has(kind))
    .map(([kind, text]) => element("li", {}, element("span", { className: `mark ${kind}` }), text)));
  byId("chosen").append(...data.graphs.map((graph, k) =>
    element("option", { value: String(k) }, `${graph.title} (${plural(graph.boxes.length, "step")})`)));
}

function showFound(row) {
  choose(row.graph, row.k);
  view.center(row.k);
  byId("graph").scrollIntoView({ behavior: "auto" });
}

byId("chosen").addEventListener("change", event => showGraph(data.graphs[Number(event.target.value)]));
byId("search").addEventListener("input", search);
byId("search").addEventListener("keydown", event => {
  if (event.key === "Enter") showNext(event.shiftKey);
  if (event.key === "Escape") {
    event.target.value = "";
    search();
  }
});
let resized = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => charts.forEach(each => each.setSize({ width: width(), height: each.height })));
});

showSummary();
showKernels(rows, showFound);
showStages();
showBreaks();
showTools();
if (data.graphs.length) showGraph(data.graphs[0]);
else for (const id of ["graph", "memory"]) byId(id).replaceChildren(element("h2", {}, byId(id).querySelector("h2").textContent), element("p", {}, "No program was compiled."));
document.body.dataset.ready = "true";
