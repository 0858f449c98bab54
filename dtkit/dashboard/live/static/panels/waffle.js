// A square for each of many nodes, dark where it is fast; the figure has panels/waffle.py.
//
// A list box with one keyboard stop: arrow keys move from square to square, Enter highlights a node in all panels, and
// Escape ends that. Nodes with a problem have a glyph, so that they differ without colors.

import { h, setAttr, setText } from "../elements.js";
import { bytes, number } from "../numbers.js";
import { newPrefix } from "../textures.js";
import { CONDITION_GLYPH, condition, describeCondition, pick } from "../picking.js";

export function waffle(store, _send, redraw) {
  const note = h("span", { class: "dtk-note", "aria-live": "polite" });
  const grid = h("div", { class: "dtk-waffle", role: "listbox", tabindex: "0", "aria-label": "nodes", "data-testid": "waffle" });
  const key = h("p", { class: "dtk-note" }, "samples/s without waiting, next to the median: ",
    h("span", { class: "dtk-scale", "aria-hidden": "true" }), " half to all of it · ▲ keeps the others waiting · ▼ slowed on purpose · ⊘ stuck or stopped · ✕ lost");
  const el = h("section", { class: "dtk-panel dtk-wide dtk-glance", "data-testid": "waffle-panel" }, h("h3", {}, "Nodes at a glance ", note), grid, key);
  const view = { store, grid, cells: [], at: 0, focused: false, pointed: null, name: newPrefix(), redraw };
  listenToCells(view);
  const isAbsent = () => store.head.ranks <= 8;
  const update = () => {
    el.hidden = isAbsent();
    if (el.hidden) return;
    while (view.cells.length < store.head.ranks) addCell(view);
    const median = middle(store);
    view.cells.forEach((cell, rank) => drawCell(view, cell, rank, median));
    setAttr(grid, "aria-activedescendant", `${view.name}-${view.at}`);
    view.say();
  };
  view.say = () => {
    const shown = view.pointed ?? (view.focused ? view.at : store.selected);
    setText(note, shown === null ? `${store.head.ranks} nodes` : describeNode(store, shown));
  };
  return { el, update, isAbsent, title: "Nodes at a glance" };
}

function addCell(view) {
  const rank = view.cells.length;
  const cell = h("div", { role: "option", id: `${view.name}-${rank}`, class: "dtk-cell", "data-rank": rank }, String(rank));
  view.cells.push(cell);
  view.grid.append(cell);
}

function drawCell(view, cell, rank, median) {
  const { store } = view, what = condition(store, rank), rate = store.ranks[3 * rank + 1];
  const level = Number.isFinite(rate) && median ? Math.min(1, Math.max(0, 2 * rate / median - 1)) : 0;
  const picked = store.selected === rank;
  const here = view.focused && view.at === rank ? " dtk-here" : "";
  setAttr(cell, "class", `dtk-cell${what ? ` dtk-is-${what}` : ""}${level < 0.5 ? " dtk-pale" : ""}${picked ? " dtk-picked" : ""}${here}`);
  setAttr(cell, "style", `--level: ${(100 * (0.15 + 0.85 * level)).toFixed(0)}%`);
  setAttr(cell, "aria-selected", picked);
  setAttr(cell, "aria-label", `node ${rank}${what ? `, ${describeCondition(store, rank)}` : ""}`);
  setText(cell, CONDITION_GLYPH[what] || String(rank));
}

/** Return the median of the nodes' throughput. */
function middle(store) {
  const rates = [];
  for (let rank = 0; rank < store.head.ranks; rank++) if (Number.isFinite(store.ranks[3 * rank + 1])) rates.push(store.ranks[3 * rank + 1]);
  return rates.sort((a, b) => a - b)[rates.length >> 1] ?? 0;
}

export function describeNode(store, rank) {
  const [loss, rate, memory] = store.ranks.subarray(3 * rank, 3 * rank + 3), what = condition(store, rank);
  const host = store.nodes.find((node) => node.rank === rank)?.host;
  return `node ${rank}${host ? ` on ${host}` : ""}${what ? `, ${describeCondition(store, rank)}` : ""}: ${number(rate ?? NaN)} samples/s · loss ${number(loss ?? NaN)} · ${bytes(memory ?? NaN)}`;
}

function listenToCells(view) {
  const { grid, store, redraw } = view;
  const rankOf = (event) => (event.target.dataset?.rank === undefined ? null : Number(event.target.dataset.rank));
  grid.addEventListener("pointermove", (event) => { view.pointed = rankOf(event); view.say(); });
  grid.addEventListener("pointerleave", () => { view.pointed = null; view.say(); });
  grid.addEventListener("focus", () => { view.focused = true; redraw(); });
  grid.addEventListener("blur", () => { view.focused = false; redraw(); });
  grid.addEventListener("click", (event) => {
    if (rankOf(event) === null) return;
    view.at = rankOf(event);
    pick(store, view.at);
  });
  grid.addEventListener("keydown", (event) => {
    const across = view.cells.filter((cell) => cell.offsetTop === view.cells[0].offsetTop).length || 1;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape" && store.selected !== null) pick(store, store.selected);
    else if (event.key === "Enter" || event.key === " ") pick(store, view.at);
    else if (by) view.at = Math.min(view.cells.length - 1, Math.max(0, view.at + by));
    else return;
    view.pointed = null; // the keyboard takes over
    event.preventDefault();
    redraw();
  });
}
