// What each node did when, in the last step: a strip a node; its kept half is panels/timeline.py.
//
// All boxes of a kind are one path, so that a pipeline of many micro-batches stays light. The schedule that was planned
// stands behind what was measured, hollow.

import { h, s, setAttr, setText } from "../elements.js";
import { tick, ticks } from "../numbers.js";
import { nodeName, pick, pickedClass } from "../picking.js";
import { drawLegend, newPrefix, phaseLook, textures } from "../textures.js";

const FEW = 8, FOOT = 20, RIM = 14, WHOLE = 60000, NUMBERED = 400;

export function timeline(store) {
  const note = h("span", { class: "dtk-note" }), prefix = newPrefix();
  const layers = Object.fromEntries(["axis", "plan", "boxes", "numbers", "names"].map((name) => [name, s("g", { class: `dtk-strip-${name}` })]));
  layers.axis.setAttribute("class", "dtk-grid");
  const svg = s("svg", { class: "dtk-chart", role: "img" }, textures(prefix), ...Object.values(layers));
  const legend = h("ul", { class: "dtk-legend", "aria-label": "kinds of work" });
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "timeline-panel" }, h("h3", {}, "Timeline ", note), svg, legend);
  const view = { store, svg, layers, prefix, width: 0, boxes: null };
  const update = () => {
    const { strip } = store;
    el.hidden = !strip;
    if (el.hidden) return;
    if (strip.error) throw new Error(strip.error);
    setText(note, `${strip.note}, what each node did when`);
    const width = Math.max(260, el.clientWidth || 0);
    drawStripNames(view);
    if (view.width === width && view.boxes === strip.boxes) return;
    [view.width, view.boxes] = [width, strip.boxes];
    drawStrip(view, width);
    const used = usedKinds(store);
    drawLegend(legend, used, prefix);
    setAttr(svg, "aria-label", `timeline: ${describeStrip(store)}`);
  };
  return { el, update };
}

/** How high a strip is: many are lower. */
function tallOf({ ranks }) {
  return ranks.length > FEW ? 15 : 24;
}
function frameOf({ store: { strip } }, width) {
  const left = 64, rowTall = tallOf(strip);
  return { left, width, x: (v) => left + (v / WHOLE) * (width - left - RIM), y: (place) => place * rowTall, foot: strip.ranks.length * rowTall };
}

function drawStrip(view, width) {
  const { store: { strip, head }, svg, layers } = view, frame = frameOf(view, width);
  const height = frame.foot + FOOT, rowTall = tallOf(strip), gap = rowTall > 20 ? 4 : 2;
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) setAttr(svg, name, value);
  drawStripAxis(view, frame);
  const drawn = new Map(), plan = [], numbers = [];
  for (let at = 0; at < strip.boxes.length; at += 4) {
    const [place, begin, end, code] = strip.boxes.subarray(at, at + 4);
    const kind = head.kinds[code & 15], batch = (code >> 4) - 1, planned = at >= 4 * strip.measured;
    const x = frame.x(begin), wide = Math.max(0.6, frame.x(end) - x), top = frame.y(place) + (planned ? 1 : gap), tall = rowTall - (planned ? 2 : 2 * gap);
    const d = `M${x.toFixed(1)},${top}h${wide.toFixed(1)}v${tall}h${(-wide).toFixed(1)}z`;
    if (planned) plan.push(d);
    else drawn.set(kind, (drawn.get(kind) ?? "") + d);
    if (!planned && batch >= 0 && wide > 13 && numbers.length < NUMBERED) numbers.push(...microBatch(x + wide / 2, frame.y(place), batch, rowTall));
  }
  layers.boxes.replaceChildren(...[...drawn].map(([kind, d]) => s("path", { d, ...phaseLook(view.prefix, kind) })));
  layers.plan.replaceChildren(...(plan.length ? [s("path", { d: plan.join(""), class: "dtk-planned" })] : []));
  layers.numbers.replaceChildren(...numbers);
}
function microBatch(x, top, batch, rowTall) {
  const text = String(batch), wide = text.length * 6.5 + 4;
  return [s("rect", { class: "dtk-pill", x: x - wide / 2, y: top + rowTall / 2 - 6, width: wide, height: 12, rx: 3 }),
    s("text", { class: "dtk-share", x, y: top + rowTall / 2 + 4, "text-anchor": "middle" }, text)];
}

function drawStripAxis(view, frame) {
  const ms = 1e3 * view.store.strip.seconds, parts = [];
  for (const v of ticks(0, ms, frame.width > 620 ? 8 : 4)) {
    const x = frame.x((v / ms) * WHOLE);
    parts.push(s("line", { x1: x, x2: x, y1: 0, y2: frame.foot }), s("text", { x, y: frame.foot + 14, "text-anchor": "middle" }, `${tick(v)}${v === 0 ? " ms" : ""}`));
  }
  view.layers.axis.replaceChildren(...parts);
}

/** The names of the strips; a click on one highlights its node. */
function drawStripNames(view) {
  const { store, layers: { names } } = view, { ranks } = store.strip, rowTall = tallOf(store.strip);
  while (names.children.length > ranks.length) names.lastChild.remove();
  while (names.children.length < ranks.length) {
    const place = names.children.length, text = s("text", { x: 58 });
    text.addEventListener("click", () => pick(store, store.strip.ranks[place]));
    names.append(text);
  }
  ranks.forEach((rank, place) => {
    setText(names.children[place], nodeName(store, rank));
    setAttr(names.children[place], "y", place * rowTall + rowTall / 2 + 4);
    setAttr(names.children[place], "class", `dtk-name${pickedClass(store, rank)}`);
  });
}

function usedKinds({ strip, head }) {
  const used = new Set();
  for (let at = 3; at < 4 * strip.measured; at += 4) used.add(strip.boxes[at] & 15);
  return head.kinds.filter((_, k) => used.has(k));
}

/** For a screen reader: how much of the step each node of the first few works. */
function describeStrip({ strip, head }) {
  const idle = ["waiting", "communication"].map((kind) => head.kinds.indexOf(kind)), busy = strip.ranks.map(() => 0);
  for (let at = 0; at < 4 * strip.measured; at += 4) {
    const [place, begin, end, code] = strip.boxes.subarray(at, at + 4);
    if (!idle.includes(code & 15)) busy[place] += end - begin;
  }
  const said = strip.ranks.slice(0, 8).map((rank, place) => `node ${rank} works ${Math.round((100 * busy[place]) / WHOLE)} %`);
  return `${strip.note}; ${said.join(", ")}${strip.ranks.length > 8 ? " and others" : ""}`;
}
