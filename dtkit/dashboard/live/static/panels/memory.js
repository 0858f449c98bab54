// Memory of each node against its limit; of many nodes the least, the median and the most; the figure has panels/memory.py.

import { h, setAttr, setText } from "../elements.js";
import { bytes, share } from "../numbers.js";
import { nodeName, pickedClass } from "../picking.js";

const NEARLY = 0.9; // share of the limit from which on a bar is an alert
const AMPLE = 0.5; // share up to which one line is enough for all nodes

export function memory(store) {
  const rows = h("div", { class: "dtk-memory", role: "list" });
  const el = h("section", { class: "dtk-panel dtk-strip", "data-testid": "memory-panel" }, h("h3", {}, "Memory limits"), rows);
  const update = () => {
    const shown = shownMemory(store);
    el.hidden = !shown.length;
    el.classList.toggle("dtk-flat", shown.every(({ used, limit }) => used < AMPLE * limit));
    while (rows.children.length > shown.length) rows.lastChild.remove();
    while (rows.children.length < shown.length) rows.append(memoryRow());
    shown.forEach((item, k) => drawMemory(store, rows.children[k], item));
  };
  return { el, update, title: "Memory limits" };
}

/** Return {rank, label, used, limit} of every node, or of three among many and the highlighted one. */
function shownMemory(store) {
  const bars = store.nodes.map(({ rank, memory_total: limit }) => ({ rank, used: store.ranks[3 * rank + 2], limit, label: "" }));
  const known = bars.filter(({ used, limit }) => Number.isFinite(used) && limit > 0);
  if (store.head.ranks <= 8 || !known.length) return known;
  const sorted = [...known].sort((a, b) => a.used / a.limit - b.used / b.limit);
  const three = [[sorted.at(-1), "most: "], [sorted[sorted.length >> 1], "median: "], [sorted[0], "least: "]];
  const picked = known.filter(({ rank }) => rank === store.selected).map((item) => [item, ""]);
  return [...picked, ...three].map(([item, label]) => ({ ...item, label }));
}

function memoryRow() {
  return h("div", { role: "listitem" }, h("span", { class: "dtk-who" }), h("span", { class: "dtk-used", "aria-hidden": "true" }, h("span")), h("span", { class: "dtk-note" }));
}

function drawMemory(store, row, { rank, label, used, limit }) {
  const [who, track, text] = row.children, part = used / limit, tight = part >= NEARLY;
  setAttr(row, "class", `dtk-store${tight ? " dtk-tight" : ""}${pickedClass(store, rank)}`);
  setAttr(row, "data-rank", rank);
  setText(who, `${label}${nodeName(store, rank)}`);
  setAttr(track.firstChild, "style", `width: ${(100 * Math.min(1, part)).toFixed(1)}%`);
  setText(text, `${tight ? "▲ " : ""}${bytes(used)} of ${bytes(limit)} · ${share(part)}`);
}
