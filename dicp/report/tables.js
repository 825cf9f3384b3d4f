"use strict";
// Tables: a column has a title, a text for a row, and a value to sort by; long texts wrap.

/** Fill a table; a click on a head sorts by its column. onRow(row): called for a clicked row. */
function fillTable(table, columns, rows, onRow) {
  const body = element("tbody");
  const makeRow = row => {
    const cells = columns.map(({ text, number, long }) =>
      element("td", { className: number ? "number" : long ? "text" : "" }, text(row)));
    const made = element("tr", {}, ...cells);
    made.row = row;
    return made;
  };
  body.append(...rows.map(makeRow));
  if (onRow) {
    body.className = "clickable";
    body.addEventListener("click", event => {
      const found = event.target.closest("tr");
      if (found) onRow(found.row);
    });
  }
  const heads = columns.map(column => {
    const button = element("button", { type: "button", title: column.help ?? "" }, column.title);
    const head = element("th", { scope: "col" }, button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = made => column.value(made.row);
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
      };
      body.append(...[...body.children].sort(order));
    });
    return head;
  });
  table.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), body);
}

const KERNEL_COLUMNS = [
  { title: "name", text: ({ box }) => element("span", { title: box.name }, shortened(box.title, 48)), value: ({ box }) => box.title },
  { title: "kind", text: ({ box }) => element("span", { className: `chip ${box.kind}` }, box.kind), value: ({ box }) => box.kind },
  { title: "operators", long: true, text: ({ box }) => shortened(box.operators.join(", "), 70), value: ({ box }) => box.origins.length },
  { title: "graph", text: ({ graph }) => graph.title, value: ({ graph }) => graph.title },
  { title: "bytes", number: true, text: ({ box }) => bytesText(box.moved), value: ({ box }) => box.moved, help: "read and written" },
  { title: "FLOPs", number: true, text: ({ box }) => flopsText(box.flops), value: ({ box }) => box.flops },
  { title: "time", number: true, text: ({ box }) => (box.seconds === null ? "not measured" : secondsText(box.seconds)), value: ({ box }) => box.seconds },
  { title: "roofline", number: true, text: ({ box }) => (box.limit === null ? "" : secondsText(box.limit)), value: ({ box }) => box.limit, help: "the larger of the time of a copy of as many bytes, and of as many operations in a matrix product" },
  { title: "bound by", text: ({ box }) => box.bound ?? "", value: ({ box }) => box.bound },
  { title: "of roofline", number: true, text: ({ box }) => meter(box), value: ({ box }) => (box.limit === null ? null : box.limit / box.seconds) },
];

function meter(box) {
  if (box.limit === null) return "";
  const share = box.limit / box.seconds;
  const bar = element("span", { className: "meter" });
  bar.style.setProperty("--share", `${Math.min(100, 100 * share)}%`);
  return element("span", {}, bar, shareText(share));
}

function kernelsNote() {
  const { roofline } = data;
  const flops = "Operations count one per element of the result of an operator, or of its largest operand; products, " +
    "convolutions and attention by PyTorch's formulas.";
  const untimed = [...new Set(data.graphs.map(graph => graph.untimed).filter(Boolean))];
  const missing = untimed.length ? ` Not measured: ${untimed.join("; ")}.` : "";
  if (roofline.obstacle) return `No roofline: ${roofline.obstacle}.${missing} ${flops}`;
  const rates = Object.entries(roofline.rates).map(([dtype, rate]) => `${scaled(rate, 1000, ["", "k", "M", "G", "T", "P"])}FLOP/s in ${dtype}`);
  const copy = `${scaled(roofline.bandwidth, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])} in the largest copy`;
  const busy = roofline.load < 0.5 ? "" :
    `Other work ran beside it (a load of ${roofline.load.toFixed(1)}), so that times and rates are less exact. `;
  return `Times are medians over runs of the graph on ${roofline.processor} (${roofline.device}, ${plural(roofline.threads, "thread")}), ` +
    "each with its call. The roofline was measured on the same machine afterwards: a copy of as many bytes takes what a copy of " +
    `that size took (${copy}), operations take what a matrix product took (${rates.join(", ")}). A kernel whose operands are ` +
    `still in a cache can be faster than a copy. ${busy}${flops}${missing}`;
}

function showKernels(rows, onRow) {
  byId("kernels-note").textContent = kernelsNote();
  fillTable(byId("kernel-table"), KERNEL_COLUMNS, rows, onRow);
}

/** Show the rows of the kernel table that were found; all of them for null. */
function filterKernels(found) {
  for (const row of byId("kernel-table").tBodies[0].rows) row.hidden = found !== null && !found.has(row.row);
}

// ---- breaks and eager calls --------------------------------------------------------------------

function showBreaks() {
  const list = byId("break-list");
  if (!data.breaks.length) list.append(element("p", {}, "Dynamo left nothing to Python."));
  for (const found of data.breaks) {
    const head = element("summary", {}, element("strong", {}, found.skipped ? "skipped by Dynamo" : "graph break"),
      ` at ${shortPlace(found.place)}: ${found.reason}`);
    const line = data.lines[found.place];
    list.append(element("details", { className: "break", title: found.place }, head,
      line ? element("pre", { className: "line" }, line) : null,
      ...found.more.map(text => element("p", {}, text))));
  }
  const place = row => (row.line ? element("span", { title: row.line }, shortPlace(row.line)) : "");
  const columns = [
    { title: "operator", text: row => row.op, value: row => row.op },
    { title: "decision", text: row => element("span", { className: `chip ${row.decision}` }, row.decision), value: row => row.decision },
    { title: "reason", long: true, text: row => row.reason, value: row => row.reason },
    { title: "line", text: place, value: row => row.line },
    { title: "source", text: row => element("code", {}, shortened(data.lines[row.line] ?? "", 80)), value: row => data.lines[row.line] ?? "" },
    { title: "graph", text: row => row.graph, value: row => row.graph },
  ];
  if (data.left.length) fillTable(byId("left-table"), columns, data.left);
  else byId("left-table").replaceWith(element("p", {}, "Every operator of the graphs was compiled."));
}

// ---- operator tools ----------------------------------------------------------------------------

function keyedTable(title, rows) {
  if (!rows.length) return "";
  const columns = Object.keys(rows[0]).map(name => ({
    title: name,
    number: rows.every(row => row[name] === "" || !Number.isNaN(Number(row[name]))),
    text: row => String(row[name]),
    value: row => (row[name] === "" || Number.isNaN(Number(row[name])) ? String(row[name]) : Number(row[name])),
  }));
  const table = element("table");
  fillTable(table, columns, rows);
  return element("div", {}, element("h3", {}, title), element("div", { className: "wide" }, table));
}

/** One result with a name for each value, the names beside the values. */
function facts(title, found) {
  const lines = Object.entries(found).map(([name, value]) =>
    element("tr", {}, element("th", { scope: "row" }, name), element("td", { className: "text" }, value)));
  const table = element("table", { className: "facts" }, element("tbody", {}, ...lines));
  return element("div", {}, element("h3", {}, title), element("div", { className: "wide" }, table));
}

function showTools() {
  const { tools } = data;
  const into = byId("tool-results");
  if (!tools.any) {
    into.append(element("p", {}, `No results of operator tools in ${tools.folder}. See docs/op_tools.md for what finds wrong, slow and overflowing operators.`));
    return;
  }
  into.append(element("p", {}, `Read from ${tools.folder}.`));
  if (tools.said.length) into.append(element("h3", {}, "What the tools said"), element("pre", { className: "said" }, tools.said.join("\n")));
  if (tools.compared) {
    const text = tools.failures.length
      ? `${tools.failures.length} of ${plural(tools.compared, "comparison")} beyond the tolerance:` : `All ${plural(tools.compared, "comparison")} within the tolerance.`;
    into.append(element("p", { className: tools.failures.length ? "failure" : "" }, text));
  }
  into.append(keyedTable("Autocompare: beyond the tolerance", tools.failures));
  for (const found of tools.bisections) into.append(facts(`Bisection of ${found.script}`, found));
  if (tools.module_values && !tools.modules.length)
    into.append(element("p", {}, `All ${plural(tools.module_values, "value")} of modules agree with eager.`));
  into.append(keyedTable(`Modules beyond the fp64 rule, of ${plural(tools.module_values, "value")}`, tools.modules));
  const timings = tools.timings.map(t => ({
    operator: t.name + (t.estimated ? " (estimate)" : ""), calls: t.calls,
    "forward ms": Number(t.forward.toFixed(6)), "backward ms": Number(t.backward.toFixed(6)),
  }));
  into.append(keyedTable("Time by operator and kernel", timings));
  into.append(keyedTable("Captured calls", Object.entries(tools.captures).map(([operator, calls]) => ({ operator, calls }))));
  for (const [file, rows] of Object.entries(tools.monitor)) into.append(keyedTable(`Process monitor: ${file}`, rows));
  for (const file of tools.unread) into.append(element("p", { className: "failure" }, `not readable: ${file}`));
}
