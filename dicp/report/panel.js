"use strict";
// The panel beside the graph: everything about one kernel, call or operator.

function lineItem([op, node, place]) {
  const parts = [element("code", {}, op), " ", element("span", { className: "node" }, node)];
  if (place) parts.push(element("div", { className: "place", title: place }, shortPlace(place)));
  if (data.lines[place]) parts.push(element("pre", { className: "line" }, data.lines[place]));
  return element("li", {}, ...parts);
}

function accessTable(graph, title, accesses) {
  if (!accesses.length) return null;
  const rows = accesses.map(([tensor, bytes]) => {
    const [name, type, , place] = graph.tensors[tensor];
    return element("tr", {}, element("td", {}, name), element("td", {}, type),
      element("td", { className: "number" }, bytesText(bytes)), element("td", {}, place));
  });
  return element("div", {}, element("h4", {}, title), element("table", {}, element("tbody", {}, ...rows)));
}

function timeText(graph, box) {
  if (box.seconds === null) {
    const launch = graph.launches.find(each => each.group === box.group);
    if (launch && launch.seconds !== null) return `part of ${box.group}, which takes ${secondsText(launch.seconds)}`;
    return `not measured: ${graph.untimed || "it runs only once, or its tensors are empty"}`;
  }
  let text = `${secondsText(box.seconds)} (median of ${graph.runs} runs; least ${secondsText(box.least)})`;
  if (box.limit !== null) {
    text += `; at least ${secondsText(box.limit)} for its ${box.bound}: ${shareText(box.limit / box.seconds)} of the roofline`;
  }
  return text;
}

/** Texts that one of several buttons shows. */
function tabs(texts) {
  const shown = element("pre", { className: "source" });
  const buttons = texts.map(([title, text]) => {
    const button = element("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      buttons.forEach(each => each.classList.toggle("chosen", each === button));
      shown.textContent = text;
    });
    return button;
  });
  buttons[0]?.click();
  return element("div", { className: "tabs" }, element("div", {}, ...buttons), shown);
}

function showPanel(graph, k) {
  const panel = byId("panel");
  if (k === null) {
    panel.replaceChildren(element("p", { className: "hint" },
      "Click a box for its loop program, its generated source and the lines of the program that it comes from."));
    return;
  }
  const box = graph.boxes[k];
  const texts = [
    ["Operator", box.text],
    ["Loop program", box.kind === "kernel" ? graph.programs[box.name] : ""],
    ["Vendor's graph", graph.programs[box.group]],
    ["Generated source", graph.sources[box.name] ?? graph.sources[box.group]],
  ].filter(([, text]) => text);
  panel.replaceChildren(
    element("h3", {}, box.name),
    element("p", {}, element("span", { className: `chip ${box.kind}` }, KINDS[box.kind]),
      ` step ${k + 1} of ${graph.boxes.length}${box.group ? `, in ${box.group}` : ""}`),
    ...box.failed.map(row => element("p", { className: "failure" }, `autocompare disagrees: ${row}`)),
    element("p", {}, `Time: ${timeText(graph, box)}`),
    element("p", {}, `Moves ${bytesText(box.moved)}; operations: ${flopsText(box.flops)}`),
    box.origins.length ? element("h4", {}, "From the program") : "",
    element("ul", { className: "origins" }, ...box.origins.map(lineItem)),
    accessTable(graph, "Reads", box.reads) ?? "",
    accessTable(graph, "Writes", box.writes) ?? "",
    texts.length ? tabs(texts) : element("p", { className: "hint" }, "PyTorch runs this call; dicp generates nothing for it."),
  );
  panel.scrollTop = 0;
}
