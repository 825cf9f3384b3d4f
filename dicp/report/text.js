"use strict";
// Texts for numbers, and elements. All text from the data becomes text nodes, never markup.

const data = JSON.parse(document.getElementById("data").textContent);

const byId = id => document.getElementById(id);

/** An HTML element with properties, and children that are elements or text. */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** An SVG element with attributes and text. */
function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function scaled(value, step, units) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) {
    value /= step;
    unit += 1;
  }
  const digits = value >= 100 || unit === 0 && Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

const bytesText = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const flopsText = value => (value === null ? "not known" : scaled(value, 1000, ["", "k", "M", "G", "T", "P"]).trim());
const secondsText = value => scaled(value * 1e9, 1000, ["ns", "µs", "ms", "s"]);
const shareText = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const shortened = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

/** `/long/way/to/model.py:12` as `to/model.py:12`. */
function shortPlace(place) {
  return place.split(/[\\/]/).slice(-2).join("/");
}

const KINDS = {
  kernel: "generated kernel",
  operator: "operator of the vendor's graph",
  library: "library call",
  eager: "eager call",
  copy: "copy to other strides",
};

const PLACES = {
  caller: "inputs and parameters",
  constant: "constants",
  workspace: "workspace, in use",
  allocation: "allocations",
  call: "results of calls",
  vendor: "values inside of the vendor's graph",
};
