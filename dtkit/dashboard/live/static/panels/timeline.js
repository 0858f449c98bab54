// The phases of one of the last steps, a strip for each node; the figure has panels/timeline.py.
//
// All boxes of a kind are one path, which keeps pipelines of many micro-batches fast. Hollow boxes behind show the planned
// schedule. The panel's note describes the box under the pointer.

import { newTooltip, within } from "../chart/tooltip.js";
import { drawParts, h, s, setAttr, setText } from "../elements.js";
import { newFrame } from "../frame.js";
import { duration, tickFormat, ticks } from "../numbers.js";
import { nodeName, pick, pickedClass } from "../picking.js";
import { drawLegend, listPhaseKey, newPrefix, phaseClass, phaseLook, textures } from "../textures.js";
import { newWidth } from "../width.js";

const FEW = 8, FOOT = 20, RIM = 14, WHOLE = 60000, NUMBERED = 400, EACH = 5, NEAR = 3;
const PASSES = ["forward", "backward", "backward input", "backward weight"];

export function timeline(store, _send, redraw) {
  const note = h("span", { class: "dtk-note" }), prefix = newPrefix();
  const layers = Object.fromEntries(["axis", "plan", "boxes", "numbers", "veils", "names"].map((name) => [name, s("g", { class: `dtk-strip-${name}` })]));
  layers.axis.setAttribute("class", "dtk-grid");
  const svg = s("svg", { class: "dtk-chart", role: "img" }, textures(prefix), ...Object.values(layers));
  const legend = h("ul", { class: "dtk-legend", "aria-label": "kinds of work" });
  const frame = newFrame("Timeline", note, { svg, csv: () => listBoxes(store), about: () => store.head.name, key: () => listPhaseKey(usedKinds(store), prefix) });
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "timeline-panel" }, frame.head, svg, legend);
  frame.attach(el, redraw);
  const readWidth = newWidth(el, redraw);
  const view = { store, svg, layers, prefix, width: 0, boxes: null, pointed: null, spot: null, tip: newTooltip(el) };
  const say = () => {
    const box = store.strip ? boxAt(view) : null;
    setText(note, box ? `${box.node}: ${box.what} · ${box.long}` : `${store.strip.note}, what each node did when`);
    if (box && view.spot) view.tip.show(...view.spot, box.node, [{ label: box.what, value: box.long, mark: `dtk-key ${phaseClass(box.kind)}` }, { label: "began", value: box.began, mark: "" }]);
    else view.tip.hide();
  };
  const point = (to) => { view.pointed = to; if (!store.strip?.error) say(); };
  svg.addEventListener("pointermove", (event) => {
    const { left, top } = svg.getBoundingClientRect();
    view.spot = within(el, event);
    point([event.clientX - left, event.clientY - top]);
  });
  svg.addEventListener("pointerleave", () => point(null));
  const update = () => {
    const { strip } = store;
    el.hidden = !strip;
    if (el.hidden) return;
    if (strip.error) throw new Error(strip.error);
    const width = Math.max(180, readWidth());
    drawStripNames(view, width);
    legend.hidden = hasLegendAbove(el);
    if (view.width === width && view.boxes === strip.boxes) return;
    [view.width, view.boxes] = [width, strip.boxes];
    say();
    drawStrip(view, width);
    drawLegend(legend, usedKinds(store), prefix);
    setAttr(svg, "aria-label", `timeline: ${describeStrip(store)}`);
  };
  return { el, update, title: "Timeline" };
}

/** Return the height of a strip: many strips are lower, and those of a pipeline have room for the plan. */
function tallOf({ ranks, piped }) {
  return ranks.length > FEW ? 15 : piped ? 32 : 24;
}
function frameOf({ store: { strip } }, width) {
  const left = 64, rowTall = tallOf(strip);
  return { left, width, x: (v) => left + (v / WHOLE) * (width - left - RIM), y: (place) => place * rowTall, foot: strip.ranks.length * rowTall };
}

function drawStrip(view, width) {
  const { store: { strip, head }, svg, layers } = view, frame = frameOf(view, width);
  const height = frame.foot + FOOT, rowTall = tallOf(strip), gap = rowTall > 24 ? 7 : rowTall > 20 ? 4 : 2;
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) setAttr(svg, name, value);
  drawStripAxis(view, frame);
  const drawn = new Map(), plan = [], numbers = [];
  for (let at = 0; at < strip.boxes.length; at += EACH) {
    const [place, begin, end, code] = strip.boxes.subarray(at, at + EACH);
    const kind = head.kinds[code & 15], batch = (code >> 4) - 1, planned = at >= EACH * strip.measured;
    const x = frame.x(begin), wide = Math.max(0.6, frame.x(end) - x), top = frame.y(place) + (planned ? 1 : gap), tall = rowTall - (planned ? 2 : 2 * gap);
    const d = `M${x.toFixed(1)},${top}h${wide.toFixed(1)}v${tall}h${(-wide).toFixed(1)}z`;
    if (planned) plan.push(d);
    else drawn.set(kind, (drawn.get(kind) ?? "") + d);
    if (!planned && batch >= 0 && wide > 13 && PASSES.includes(kind) && numbers.length < NUMBERED) numbers.push(...microBatch(x + wide / 2, frame.y(place), batch, rowTall));
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

/** Return {node, kind, what, began, long} of the narrowest box at or near the pointer, or null. */
function boxAt(view) {
  const { store, store: { strip, head }, pointed } = view;
  if (!pointed) return null;
  const frame = frameOf(view, view.width), [x, y] = pointed, row = Math.floor(y / tallOf(strip));
  let found = null, least = Infinity;
  for (let at = 0; at < EACH * strip.measured; at += EACH) {
    const [place, begin, end] = strip.boxes.subarray(at, at + EACH), left = frame.x(begin), right = frame.x(end);
    const off = Math.max(left - x, x - right, 0) + (right - left) / 1e4;
    if (place === row && off < Math.min(least, NEAR)) [found, least] = [at, off];
  }
  if (found === null) return null;
  return describeBox(store, found);
}
function describeBox({ strip, head, ...store }, at) {
  const [place, begin, end, code, stage] = strip.boxes.subarray(at, at + EACH), batch = (code >> 4) - 1, kind = head.kinds[code & 15];
  const what = [kind, ...(batch >= 0 ? [`micro-batch ${batch}`] : []), ...(stage ? [`stage ${stage - 1}`] : [])].join(" · ");
  return { node: nodeName(store, strip.ranks[place]), kind, what, began: `at ${duration(begin / WHOLE * strip.seconds)}`, long: duration((end - begin) / WHOLE * strip.seconds) };
}
/** Return the measured boxes as rows of a table. */
function listBoxes({ strip, head }) {
  const rows = [["step", "node", "kind", "micro-batch", "stage", "begin (s)", "end (s)"]], seconds = (v) => v / WHOLE * strip.seconds;
  for (let at = 0; at < EACH * strip.measured; at += EACH) {
    const [place, begin, end, code, stage] = strip.boxes.subarray(at, at + EACH), batch = (code >> 4) - 1;
    rows.push([strip.step, strip.ranks[place], head.kinds[code & 15], batch < 0 ? "" : batch, stage ? stage - 1 : "", seconds(begin), seconds(end)]);
  }
  return rows;
}

function drawStripAxis(view, frame) {
  const ms = 1e3 * view.store.strip.seconds, parts = [];
  const marks = ticks(0, ms, frame.width > 620 ? 8 : 4), write = tickFormat(marks);
  for (const v of marks) {
    const x = frame.x((v / ms) * WHOLE);
    parts.push(["line", { x1: x, x2: x, y1: 0, y2: frame.foot }], ["text", { x, y: frame.foot + 14, "text-anchor": "middle" }, `${write(v)}${v === 0 ? " ms" : ""}`]);
  }
  drawParts(view.layers.axis, parts);
}

/** Draw the names of the strips, and pale strips where another node is highlighted; a click on a name highlights its node. */
function drawStripNames(view, width) {
  const { store, layers: { names, veils } } = view, { ranks } = store.strip, rowTall = tallOf(store.strip);
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
  const { left } = frameOf(view, width), isFaded = (rank) => store.selected !== null && store.selected !== rank;
  const faded = ranks.flatMap((rank, place) => (isFaded(rank) ? [place * rowTall] : []));
  drawParts(veils, faded.map((y) => ["rect", { class: "dtk-veil", x: left, y, width: width - left, height: rowTall }]));
}

/** Return whether the bars, which have the legend of both panels, are shown above the timeline. */
function hasLegendAbove(panel) {
  const isFull = panel.ownerDocument.fullscreenElement === panel;
  return !isFull && panel.parentElement?.querySelector(':scope > [data-testid="time-panel"]:not([hidden], .dtk-off)') != null;
}

/** Return the kinds of the timeline's boxes. */
export function usedKinds({ strip, head }) {
  const used = new Set();
  for (let at = 3; at < EACH * strip.measured; at += EACH) used.add(strip.boxes[at] & 15);
  const planned = strip.boxes.length > EACH * strip.measured ? ["planned"] : [];
  return [...head.kinds.filter((_, k) => used.has(k)), ...planned];
}

/** Return text for a screen reader: the share of the step in which each of the first nodes works. */
function describeStrip({ strip, head }) {
  const idle = ["waiting", "send", "receive", "communication"].map((kind) => head.kinds.indexOf(kind)), busy = strip.ranks.map(() => 0);
  for (let at = 0; at < EACH * strip.measured; at += EACH) {
    const [place, begin, end, code] = strip.boxes.subarray(at, at + EACH);
    if (!idle.includes(code & 15)) busy[place] += end - begin;
  }
  const shares = strip.ranks.slice(0, 8).map((rank, place) => `node ${rank} works ${Math.round((100 * busy[place]) / WHOLE)} %`);
  return `${strip.note}; ${shares.join(", ")}${strip.ranks.length > 8 ? " and others" : ""}`;
}
