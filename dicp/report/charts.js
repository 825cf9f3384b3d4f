"use strict";
// Charts: compile time as bars, memory over the run by uPlot.

const STAGE_COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"];
const PLACE_COLOURS = { caller: "#bab0ac", constant: "#9c755f", workspace: "#4e79a7", allocation: "#59a14f", call: "#f28e2b", vendor: "#b07aa1" };

// ---- compile time ------------------------------------------------------------------------------

function showStages() {
  const totals = data.compilations.map(each => each.stages.reduce((sum, [, seconds]) => sum + seconds, 0));
  const longest = Math.max(...totals, 1e-9);
  const names = [...new Set(data.compilations.flatMap(each => each.stages.map(([name]) => name)))];
  const colour = name => STAGE_COLOURS[names.indexOf(name) % STAGE_COLOURS.length];
  const total = totals.reduce((sum, value) => sum + value, 0);
  const cached = data.compilations.filter(each => each.cache !== "cold").length;
  byId("compile-note").textContent = `${secondsText(total)} for ${plural(data.compilations.length, "graph")}; dynamo and aotautograd, ` +
    "PyTorch's front end, count for the first graph compiled of a function." +
    (cached ? ` ${plural(cached, "graph")} came from the cache and were not compiled: set DICP_CACHE=0.` : "");
  const legend = element("ul", { className: "legend" }, ...names.map(name => {
    const mark = element("span", { className: "mark" });
    mark.style.background = colour(name);
    return element("li", {}, mark, name);
  }));
  const bars = data.compilations.map((each, k) => {
    const parts = each.stages.map(([name, seconds]) => {
      const part = element("span", { title: `${name} ${secondsText(seconds)}` });
      part.style.background = colour(name);
      part.style.width = `${100 * seconds / longest}%`;
      return part;
    });
    return element("div", { className: "stage-row" }, element("span", { className: "stage-name" }, each.title),
      element("span", { className: "stage-bar" }, ...parts), element("span", { className: "number" }, secondsText(totals[k])));
  });
  byId("stages").replaceChildren(legend, ...bars);
  const seconds = (row, name) => row.stages.find(stage => stage[0] === name)?.[1] ?? null;
  const columns = [
    { title: "graph", text: row => row.title, value: row => row.title },
    { title: "cache", text: row => row.cache, value: row => row.cache },
    { title: "decisions", text: row => Object.entries(row.decisions).map(([kind, n]) => `${n} ${kind}`).join(", "), value: row => row.title },
    ...names.map(name => ({
      title: name, number: true, value: row => seconds(row, name),
      text: row => (seconds(row, name) === null ? "" : secondsText(seconds(row, name))),
    })),
  ];
  fillTable(byId("stage-table"), columns, data.compilations);
}

// ---- memory ------------------------------------------------------------------------------------

/** Bytes by place, each on top of those before it. */
function stacked(memory) {
  const steps = Object.values(memory)[0]?.length ?? 0;
  const sum = new Array(steps).fill(0);
  return Object.entries(memory).map(([place, values]) => {
    values.forEach((value, k) => { sum[k] += value; });
    return { place, values, top: [...sum] };
  });
}

const width = () => Math.max(280, byId("memory").clientWidth - 8);
const numbers = count => Array.from({ length: count }, (_, k) => k + 1);
const wholeNumbers = [1, 2, 5].flatMap(first => [1, 10, 100, 1000].map(power => first * power)).sort((a, b) => a - b);
const axes = [
  { label: "step", labelSize: 18, space: 60, incrs: wholeNumbers },
  { size: 84, incrs: Array.from({ length: 44 }, (_, k) => 2 ** k), values: (_, ticks) => ticks.map(bytesText) },
];

/** A chart of bytes over steps; the cursor names the step. */
function chart(graph, into, series, values, height, extra = {}) {
  const xs = numbers(graph.boxes.length);
  const step = { label: "step", value: (_, k) => (k === null ? "" : `${k} ${shortened(graph.boxes[k - 1].title, 40)}`) };
  const options = {
    width: width(), height, axes, series: [step, ...series], cursor: { drag: { x: true, y: false } },
    scales: { x: { time: false, range: [0.5, xs.length + 0.5] }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.05] } },
    ...extra,
  };
  return new uPlot(options, [xs, ...values], into);
}

function showMemory(graph) {
  const into = byId("memory-chart");
  into.replaceChildren();
  byId("blocks-chart").replaceChildren();
  const layers = stacked(graph.memory);
  const none = layers.length === 0;
  const top = none ? [] : layers[layers.length - 1].top;
  const peak = top.indexOf(Math.max(...top));
  const vendor = graph.memory.vendor ? " The vendor's compiler plans the memory inside of its graph: values there count from the operator that computes them to the last one that reads them." : "";
  byId("memory-note").textContent = none ? "No tensors." :
    `${graph.title}: at most ${bytesText(top[peak])} at once, at step ${peak + 1} (${graph.boxes[peak].title}); ` +
    `workspace ${bytesText(graph.workspace)}.${vendor}`;
  if (none) return [];
  const drawn = [...layers].reverse();
  const series = drawn.map(({ place, values }) => ({
    label: PLACES[place], fill: PLACE_COLOURS[place], stroke: PLACE_COLOURS[place], width: 1, points: { show: false },
    paths: uPlot.paths.bars({ size: [1, Infinity], gap: 0 }), value: (_, sum, series, k) => (k === null ? "" : bytesText(values[k])),
  }));
  const charts = [chart(graph, into, series, drawn.map(({ top }) => top), 260)];
  const blocks = graph.blocks.length ? blocksChart(graph) : null;
  byId("blocks-heading").hidden = byId("blocks-chart").hidden = !blocks;
  return blocks ? [...charts, blocks] : charts;
}

/** The plan of the workspace: each tensor a block from its first to its last step, at its offset. */
function blocksChart(graph) {
  const draw = plot => {
    const { ctx } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.font = `${11 * devicePixelRatio}px sans-serif`;
    graph.blocks.forEach(([name, first, last, offset, bytes], k) => {
      const [x, right] = [plot.valToPos(first + 0.5, "x", true), plot.valToPos(last + 1.5, "x", true)];
      const [y, bottom] = [plot.valToPos(offset + bytes, "y", true), plot.valToPos(offset, "y", true)];
      ctx.fillStyle = STAGE_COLOURS[k % STAGE_COLOURS.length];
      ctx.fillRect(x + 0.5, y + 0.5, Math.max(1, right - x - 1), Math.max(1, bottom - y - 1));
      const text = `${name} ${bytesText(bytes)}`;
      if (bottom - y > 14 * devicePixelRatio && right - x > ctx.measureText(text).width + 8) {
        ctx.fillStyle = "#fff";
        ctx.fillText(text, x + 4, y + 12 * devicePixelRatio);
      }
    });
    ctx.restore();
  };
  const series = [{ label: "workspace", stroke: "transparent", points: { show: false }, value: (_, value) => (value === null ? "" : bytesText(value)) }];
  const values = [new Array(graph.boxes.length).fill(graph.workspace)];
  return chart(graph, byId("blocks-chart"), series, values, 240, { hooks: { draw: [draw] }, legend: { show: false } });
}
