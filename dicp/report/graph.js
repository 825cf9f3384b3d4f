"use strict";
// The graph: dagre lays it out, SVG shows it; one view box moves over the drawing.

const BOX_WIDTH = 236;
const LINE = 15;
const MAX_OPERATORS = 5;
const LARGE = 150; // steps
const START_SCALE = 0.85; // of a graph too large to be shown whole
const FAR_SCALE = 0.4; // below, only titles are drawn
const INPUTS_UP_TO = 12; // steps, up to which inputs and results are drawn as well

/** The lines in a box: title, operators, then sizes and time. */
function boxLines(box) {
  const operators = box.kind === "operator" ? [] : box.operators.slice(0, MAX_OPERATORS);
  const rest = box.operators.length - MAX_OPERATORS;
  if (rest > 0 && box.kind !== "operator") operators.push(`and ${rest} more`);
  const facts = [bytesText(box.moved)];
  if (box.seconds !== null) facts.unshift(secondsText(box.seconds));
  return { title: shortened(box.title, 32), operators, facts: facts.join(" · ") };
}

/** The graph's longest way to each box, in steps: where dagre will about place it. */
function ranks(graph) {
  const found = new Array(graph.boxes.length).fill(0);
  for (const [from, to] of graph.edges) found[to] = Math.max(found[to], found[from] + 1);
  return found; // edges are sorted by the step that they lead to
}

/** Boxes and edges with their places. Edges over many ranks are not laid out, which would take
 * dagre long and widen the drawing: they are drawn straight and faint. */
function layout(graph) {
  const plan = new dagre.graphlib.Graph();
  plan.setGraph({ rankdir: "TB", ranker: "tight-tree", nodesep: 28, ranksep: 34, marginx: 24, marginy: 24 });
  const rank = ranks(graph);
  const most = graph.boxes.length > LARGE ? 5 : 14;
  graph.boxes.forEach((box, k) => {
    const lines = boxLines(box);
    plan.setNode(String(k), { width: BOX_WIDTH, height: LINE * (lines.operators.length + 2) + 14 });
  });
  const far = [];
  for (const edge of graph.edges) {
    const [from, to, bytes] = edge;
    if (rank[to] - rank[from] > most) far.push(edge);
    else plan.setEdge(String(from), String(to), { edge, width: 8 * bytesText(bytes).length, height: 14, labelpos: "c" });
  }
  const extra = graph.boxes.length <= INPUTS_UP_TO ? addEnds(plan, graph) : [];
  dagre.layout(plan);
  return {
    nodes: graph.boxes.map((_, k) => plan.node(String(k))),
    edges: plan.edges().map(key => plan.edge(key)).filter(edge => edge.edge),
    far,
    ends: extra.map(end => ({ ...end, ...plan.node(end.key), line: plan.edge(end.from, end.to) })),
    width: plan.graph().width,
    height: plan.graph().height,
  };
}

/** What the boxes of a small graph read of the caller's and leave as results, as nodes. */
function addEnds(plan, graph) {
  const ends = [];
  const add = (k, word, tensors) => {
    if (!tensors.length) return;
    const lines = tensors.slice(0, MAX_OPERATORS).map(tensor => {
      const [name, type, bytes] = graph.tensors[tensor];
      return `${word} ${name} ${type} ${bytesText(bytes)}`;
    });
    if (tensors.length > MAX_OPERATORS) lines.push(`and ${tensors.length - MAX_OPERATORS} more`);
    const key = `${word}${k}`;
    const [from, to] = word === "input" ? [key, String(k)] : [String(k), key];
    plan.setNode(key, { width: Math.max(...lines.map(line => 6.2 * line.length + 18)), height: 14 * lines.length + 8 });
    plan.setEdge(from, to, {});
    ends.push({ key, lines, from, to });
  };
  const written = new Set();
  graph.boxes.forEach((box, k) => {
    const own = tensor => graph.tensors[tensor][3] === "caller" && !written.has(tensor);
    add(k, "input", box.reads.map(([tensor]) => tensor).filter(own));
    add(k, "result", box.writes.map(([tensor]) => tensor).filter(tensor => graph.tensors[tensor][4]));
    for (const [tensor] of box.writes) written.add(tensor);
  });
  return ends;
}

/** A smooth line through points. */
function curve(points) {
  const [first, ...rest] = points;
  let path = `M${first.x},${first.y}`;
  for (let k = 0; k < rest.length - 1; k += 1) {
    const middle = { x: (rest[k].x + rest[k + 1].x) / 2, y: (rest[k].y + rest[k + 1].y) / 2 };
    path += `Q${rest[k].x},${rest[k].y} ${middle.x},${middle.y}`;
  }
  const last = rest[rest.length - 1];
  return `${path}L${last.x},${last.y}`;
}

function tensorsText(graph, numbers) {
  return numbers.map(n => `${graph.tensors[n][0]} ${graph.tensors[n][1]}`).join("\n");
}

class GraphView {
  /** onSelect(k): called with the number of a box that was clicked. */
  constructor(onSelect) {
    this.svg = byId("drawing");
    this.overview = byId("overview");
    this.canvas = byId("canvas");
    this.onSelect = onSelect;
    this.layouts = new Map();
    this.listen();
  }

  show(graph) {
    if (!this.layouts.has(graph)) this.layouts.set(graph, layout(graph));
    this.graph = graph;
    this.plan = this.layouts.get(graph);
    this.draw();
    this.start();
  }

  // ---- drawing ---------------------------------------------------------------------------------

  draw() {
    const { graph, plan } = this;
    this.boxes = graph.boxes.map((box, k) => this.drawBox(box, k));
    this.links = graph.boxes.map(() => []);
    const lines = shape("g", { class: "edges" });
    for (const edge of plan.edges) this.drawEdge(lines, edge.edge, curve(edge.points), edge);
    for (const edge of plan.far) this.drawFar(lines, edge);
    for (const end of plan.ends) this.drawEnd(lines, end);
    this.svg.replaceChildren(this.arrow(), lines, ...this.boxes);
    this.drawOverview();
  }

  arrow() {
    const marker = shape("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
    marker.append(shape("path", { d: "M0,0L8,4L0,8z" }));
    const defs = shape("defs", {});
    defs.append(marker);
    return defs;
  }

  drawBox(box, k) {
    const { x, y, width, height } = this.plan.nodes[k];
    const group = shape("g", {
      class: `box ${box.kind}${box.failed.length ? " failed" : ""}`, "data-box": k, tabindex: 0, role: "button",
      transform: `translate(${x - width / 2},${y - height / 2})`,
    });
    const { title, operators, facts } = boxLines(box);
    group.append(shape("title", {}, `${box.name}\n${KINDS[box.kind]}`));
    group.append(shape("rect", { width, height, rx: 5 }));
    group.append(shape("text", { class: "name", x: 10, y: 18 }, title));
    operators.forEach((op, row) => {
      group.append(shape("text", { class: "operator", x: 10, y: 18 + LINE * (row + 1) }, shortened(op, 33)));
    });
    group.append(shape("text", { class: "facts", x: 10, y: height - 9 }, facts));
    return group;
  }

  drawEdge(parent, [from, to, bytes, tensors], path, label) {
    const group = shape("g", { class: "edge" });
    group.append(shape("title", {}, tensorsText(this.graph, tensors)));
    group.append(shape("path", { d: path, "marker-end": "url(#arrow)" }));
    group.append(shape("text", { x: label.x, y: label.y + 4 }, bytesText(bytes)));
    this.links[from].push(group);
    this.links[to].push(group);
    parent.append(group);
  }

  /** An edge that was not laid out: down the right side of its boxes. */
  drawFar(parent, edge) {
    const [from, to] = edge;
    const a = this.plan.nodes[from];
    const b = this.plan.nodes[to];
    const start = { x: a.x + a.width / 2, y: a.y };
    const end = { x: b.x + b.width / 2, y: b.y };
    const out = Math.max(start.x, end.x) + 40;
    const path = `M${start.x},${start.y}C${out},${start.y} ${out},${start.y + 60} ${out},${start.y + 90}` +
      `L${out},${end.y - 90}C${out},${end.y - 60} ${out},${end.y} ${end.x},${end.y}`;
    const group = parent.childElementCount;
    this.drawEdge(parent, edge, path, { x: out, y: start.y + 50 });
    parent.children[group].classList.add("far");
  }

  drawEnd(parent, end) {
    if (end.line) parent.append(shape("path", { class: "end", d: curve(end.line.points), "marker-end": "url(#arrow)" }));
    const group = shape("g", { class: "end", transform: `translate(${end.x - end.width / 2},${end.y - end.height / 2})` });
    group.append(shape("rect", { width: end.width, height: end.height, rx: 8 }));
    end.lines.forEach((line, k) => group.append(shape("text", { x: end.width / 2, y: 15 + 14 * k }, line)));
    parent.append(group);
  }

  drawOverview() {
    const { plan } = this;
    this.overview.setAttribute("viewBox", `0 0 ${plan.width} ${plan.height}`);
    this.overview.setAttribute("preserveAspectRatio", "none");
    this.frame = shape("rect", { class: "frame" });
    const boxes = plan.nodes.map(({ x, y, width, height }, k) =>
      shape("rect", { class: this.graph.boxes[k].kind, x: x - width / 2, y: y - height / 2, width, height }));
    this.marks = boxes;
    this.overview.replaceChildren(...boxes, this.frame);
  }

  // ---- moving ----------------------------------------------------------------------------------

  get size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  /** Show the drawing from (x, y) on, `scale` screen pixels to one of its own. */
  move(x, y, scale) {
    const { width, height } = this.size;
    this.at = { x, y, scale };
    this.svg.setAttribute("viewBox", `${x} ${y} ${width / scale} ${height / scale}`);
    this.svg.classList.toggle("distant", scale < FAR_SCALE);
    const seen = { x, y, width: width / scale, height: height / scale };
    for (const [name, value] of Object.entries(seen)) this.frame.setAttribute(name, value);
    this.overview.classList.toggle("needless", this.plan.height * START_SCALE < 1.5 * height);
  }

  fit() {
    const { width, height } = this.size;
    const { plan } = this;
    const scale = Math.min(width / plan.width, height / plan.height, 1.2);
    this.move((plan.width - width / scale) / 2, (plan.height - height / scale) / 2, scale);
  }

  /** All of a small graph, or the first steps of a large one. */
  start() {
    const { width, height } = this.size;
    const { plan } = this;
    if (Math.min(width / plan.width, height / plan.height) > 0.6) this.fit();
    else this.center(0, Math.min(START_SCALE, Math.max(width / plan.width, 0.6)));
  }

  center(k, scale = Math.max(this.at.scale, 0.7)) {
    const { width, height } = this.size;
    const { x, y } = this.plan.nodes[k];
    const across = this.plan.width * scale <= width ? this.plan.width / 2 : x;
    this.move(across - width / scale / 2, y - height / scale / (k === 0 ? 5 : 2), scale);
  }

  zoom(factor, px = this.size.width / 2, py = this.size.height / 2) {
    const { x, y, scale } = this.at;
    const next = Math.min(Math.max(scale * factor, 0.005), 4);
    this.move(x + px / scale - px / next, y + py / scale - py / next, next);
  }

  pan(dx, dy) {
    const { x, y, scale } = this.at;
    this.move(x + dx / scale, y + dy / scale, scale);
  }

  // ---- marking ---------------------------------------------------------------------------------

  select(k) {
    this.svg.querySelectorAll(".selected").forEach(each => each.classList.remove("selected"));
    if (k === null) return;
    this.boxes[k].classList.add("selected");
    for (const link of this.links[k]) {
      link.classList.add("selected");
      link.parentNode.append(link); // drawn over the others
    }
  }

  /** Dim all boxes but these; null: none is dimmed. */
  mark(found) {
    const kept = found && new Set(found);
    this.svg.classList.toggle("searching", kept !== null);
    this.boxes.forEach((box, k) => {
      box.classList.toggle("match", kept !== null && kept.has(k));
      this.marks[k].classList.toggle("match", kept !== null && kept.has(k));
    });
  }

  // ---- events ----------------------------------------------------------------------------------

  listen() {
    let drag = null;
    this.canvas.addEventListener("wheel", event => {
      event.preventDefault();
      const { left, top } = this.canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 300), event.clientX - left, event.clientY - top);
      else this.pan(event.deltaX, event.deltaY);
    }, { passive: false });
    this.svg.addEventListener("pointerdown", event => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    this.svg.addEventListener("pointermove", event => {
      if (!drag || event.buttons !== 1) return;
      const [dx, dy] = [drag.x - event.clientX, drag.y - event.clientY];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      if (!drag.moved) this.svg.setPointerCapture(event.pointerId);
      this.pan(dx, dy);
      drag = { x: event.clientX, y: event.clientY, moved: true };
    });
    this.svg.addEventListener("click", event => {
      const moved = drag && drag.moved;
      drag = null;
      const box = event.target.closest("[data-box]");
      if (box && !moved) this.onSelect(Number(box.dataset.box));
    });
    this.canvas.addEventListener("keydown", event => {
      const box = event.target.closest("[data-box]");
      const step = { ArrowUp: [0, -60], ArrowDown: [0, 60], ArrowLeft: [-60, 0], ArrowRight: [60, 0] }[event.key];
      if (box && (event.key === "Enter" || event.key === " ")) this.onSelect(Number(box.dataset.box));
      else if (step) this.pan(...step);
      else if (event.key === "+" || event.key === "-") this.zoom(event.key === "+" ? 1.25 : 0.8);
      else return;
      event.preventDefault();
    });
    const jump = event => {
      if (event.buttons !== 1) return;
      const { left, top, width, height } = this.overview.getBoundingClientRect();
      const { scale } = this.at;
      this.move((event.clientX - left) / width * this.plan.width - this.size.width / scale / 2,
        (event.clientY - top) / height * this.plan.height - this.size.height / scale / 2, scale);
    };
    this.overview.addEventListener("pointerdown", jump);
    this.overview.addEventListener("pointermove", jump);
    const actions = { in: () => this.zoom(1.25), out: () => this.zoom(0.8), fit: () => this.fit(), start: () => this.center(0, 1) };
    byId("zoom").addEventListener("click", event => actions[event.target.dataset.zoom]?.());
    new ResizeObserver(() => this.at && this.move(this.at.x, this.at.y, this.at.scale)).observe(this.canvas);
  }
}
