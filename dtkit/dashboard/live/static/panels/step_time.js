// The time of a step by phase, a bar for each node; the figure has panels/step_time.py.
//
// The bars are one keyboard stop: arrow keys move from bar to bar, the panel's note describes the current one, and Enter
// highlights its node in all panels.

import { drawParts, h, s, setAttr, setText } from "../elements.js";
import { newTooltip, within } from "../chart/tooltip.js";
import { newFrame } from "../frame.js";
import { duration, share, tickFormat, ticks } from "../numbers.js";
import { pick, pickedClass } from "../picking.js";
import { drawLegend, listPhaseKey, newPrefix, phaseClass, phaseLook, textures } from "../textures.js";
import { usedKinds } from "./timeline.js";
import { newWidth } from "../width.js";

const BAR = 22, GAP = 8, AXIS = 20, END = 64;

export function stepTime(store, _send, redraw) {
  const note = h("span", { class: "dtk-note", "aria-live": "polite" });
  const straggler = h("p", { class: "dtk-straggler", "data-testid": "straggler" });
  const layers = { axis: s("g", { class: "dtk-grid" }), bars: s("g") };
  const view = { store, redraw, prefix: newPrefix(), bars: [], rows: [], at: 0, pointed: null, spot: null, layers };
  const svg = s("svg", { class: "dtk-chart dtk-bars", role: "list", "aria-label": "where a step's time goes, by node" },
    textures(view.prefix), layers.axis, layers.bars);
  const legend = h("ul", { class: "dtk-legend", "aria-label": "phases" });
  const title = "Where a step's time goes", key = () => listPhaseKey(legendPhases(store, read(store), false), view.prefix);
  const frame = newFrame(title, note, { svg, csv: () => listTimes(store), about: () => store.head.name, key });
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "time-panel" }, frame.head, straggler, svg, legend);
  frame.attach(el, redraw);
  const readWidth = newWidth(el, redraw);
  view.tip = newTooltip(el);
  svg.addEventListener("keydown", (event) => move(view, event));
  view.say = () => {
    const bar = view.bars[view.pointed];
    if (bar && view.spot) view.tip.show(...view.spot, `${bar.label}: ${duration(bar.whole)} a step`, phaseRows(bar, store.head.phases));
    else view.tip.hide();
    setText(note, bar && !view.spot ? described(bar, store.head.phases) : `ms, mean of ${store.time.steps}`);
  };
  svg.addEventListener("pointermove", (event) => { view.spot = within(el, event); view.say(); });
  svg.addEventListener("pointerleave", () => { view.spot = null; view.say(); });
  const update = () => {
    const { time } = store;
    el.hidden = !time?.bars.length;
    if (el.hidden) return;
    setText(straggler, time.straggler ? `▲ ${time.straggler}` : "");
    straggler.hidden = !time.straggler;
    const bars = read(store);
    draw(view, svg, bars, Math.max(190, readWidth()));
    drawLegend(legend, legendPhases(store, bars, isTimelineShown(el)), view.prefix);
    view.bars = bars;
    view.say();
  };
  return { el, update, title: "Where a step's time goes" };
}

/** Return the bars of the store: {label, slow, seconds, whole}. */
function read({ time, bars, head }) {
  const each = head.phases.length;
  return time.bars.map((bar, k) => {
    const seconds = Array.from(bars.subarray(k * each, (k + 1) * each), (v) => (Number.isFinite(v) ? v : 0));
    return { ...bar, seconds, whole: seconds.reduce((a, b) => a + b, 0) };
  });
}

/** Return whether the timeline, which leaves its legend to the bars, is shown in the same view. */
function isTimelineShown(panel) {
  return panel.parentElement?.querySelector(':scope > [data-testid="timeline-panel"]:not(.dtk-off)') != null;
}
/** Return the phases of the legend: of the bars, and of the timeline if it is shown. */
function legendPhases(store, bars, withTimeline) {
  const { head, strip } = store, kinds = withTimeline && strip && !strip.error ? usedKinds(store) : [];
  const phases = head.phases.filter((phase, k) => seen(bars, k) || kinds.includes(phase));
  return [...phases, ...kinds.filter((kind) => !phases.includes(kind))];
}

/** Return the phases that are long enough to be seen in some bar. */
function seen(bars, k) {
  const longest = Math.max(...bars.map((bar) => bar.whole));
  return bars.some((bar) => bar.seconds[k] >= 0.004 * longest);
}

function described(bar, phases) {
  const parts = phases.flatMap((phase, k) => (bar.seconds[k] > 0 ? [`${phase} ${duration(bar.seconds[k])} (${share(bar.seconds[k] / bar.whole)})`] : []));
  return `${bar.label}: ${duration(bar.whole)} a step: ${parts.join(" · ")}`;
}

function phaseRows(bar, phases) {
  return phases.flatMap((phase, k) => (bar.seconds[k] > 0 ? [{ label: phase, value: `${duration(bar.seconds[k])} · ${share(bar.seconds[k] / bar.whole)}`, mark: `dtk-key ${phaseClass(phase)}` }] : []));
}
/** Return the bars as rows of a table. */
function listTimes(store) {
  return [["node", ...store.head.phases.map((phase) => `${phase} (s)`)], ...read(store).map((bar) => [bar.label, ...bar.seconds])];
}

function draw(view, svg, bars, width) {
  const longest = Math.max(...bars.map((bar) => bar.whole)) || 1;
  const left = Math.max(...bars.map((bar) => bar.label.length)) * 7 + 30;
  const scale = (width - left - END) / longest;
  const height = bars.length * (BAR + GAP) + AXIS;
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) setAttr(svg, name, value);
  drawAxis(view.layers.axis, { longest, scale, left, height, width });
  while (view.rows.length > bars.length) view.rows.pop().el.remove();
  while (view.rows.length < bars.length) addRow(view);
  view.at = Math.min(view.at, bars.length - 1);
  bars.forEach((bar, k) => drawRow(view, k, bar, { scale, left }));
}

function drawAxis(layer, { longest, scale, left, height, width }) {
  const parts = [];
  const marks = ticks(0, longest * 1e3, width > 620 ? 8 : 4), write = tickFormat(marks);
  for (const v of marks) {
    const x = left + v / 1e3 * scale;
    parts.push(["line", { x1: x, x2: x, y1: 0, y2: height - AXIS }], ["text", { x, y: height - 6, "text-anchor": "middle" }, `${write(v)}${v === 0 ? " ms" : ""}`]);
  }
  drawParts(layer, parts);
}

/** Return a bar, made once and then updated, so that it keeps the keyboard focus. */
function addRow(view) {
  const k = view.rows.length, { phases } = view.store.head;
  const el = s("g", { role: "listitem", class: "dtk-row" });
  const label = s("text", { class: "dtk-name", y: BAR / 2 + 4 }), whole = s("text", { class: "dtk-whole", y: BAR / 2 + 4 });
  const frame = s("rect", { class: "dtk-frame", height: BAR + 4, y: -2, rx: 4 });
  const segments = phases.map((phase) => ({
    rect: s("rect", { height: BAR, ...phaseLook(view.prefix, phase) }),
    pill: s("rect", { class: "dtk-pill", height: BAR - 7, y: 3.5, rx: 4 }), // text on a texture isn't readable
    text: s("text", { class: "dtk-share", y: BAR / 2 + 4, "text-anchor": "middle" }),
  }));
  el.append(frame, label, ...segments.map((seg) => seg.rect), ...segments.flatMap((seg) => [seg.pill, seg.text]), whole);
  const point = (to, show) => () => { view.pointed = to; if (to !== null) view.at = to; show(); };
  for (const [event, to] of [["pointerenter", k], ["pointerleave", null]]) el.addEventListener(event, point(to, view.say));
  for (const [event, to] of [["focus", k], ["blur", null]]) el.addEventListener(event, point(to, view.redraw));
  el.addEventListener("click", () => pick(view.store, view.rows[k].rank));
  view.rows.push({ rank: -1, el, label, whole, frame, segments });
  view.layers.bars.append(el);
}

function drawRow(view, k, bar, { scale, left }) {
  const row = view.rows[k], { phases } = view.store.head;
  setAttr(row.el, "transform", `translate(0 ${k * (BAR + GAP) + GAP / 2})`);
  setAttr(row.el, "aria-label", `${bar.slow ? "straggler, " : ""}${described(bar, phases)}`);
  setAttr(row.el, "tabindex", k === view.at ? 0 : -1);
  setAttr(row.el, "class", `dtk-row${bar.slow ? " dtk-slow" : ""}${pickedClass(view.store, bar.rank)}`);
  row.rank = bar.rank;
  setAttr(row.el, "data-rank", bar.rank);
  setText(row.label, `${bar.slow ? "▲ " : ""}${bar.label}`);
  setAttr(row.label, "x", left - 8);
  let x = left;
  row.segments.forEach(({ rect, pill, text }, i) => {
    const wide = Math.max(0, bar.seconds[i] * scale);
    setAttr(rect, "x", x.toFixed(1));
    setAttr(rect, "width", wide.toFixed(1));
    const part = share(bar.seconds[i] / (bar.whole || 1));
    const words = wide < 42 ? "" : wide < 112 ? part : `${duration(bar.seconds[i])} · ${part}`;
    const under = words && words.length * 6.4 + 10;
    setText(text, words);
    setAttr(text, "x", (x + wide / 2).toFixed(1));
    setAttr(pill, "width", under || 0);
    setAttr(pill, "x", (x + (wide - under) / 2).toFixed(1));
    x += wide;
  });
  setText(row.whole, duration(bar.whole));
  setAttr(row.whole, "x", (x + 7).toFixed(1));
  setAttr(row.frame, "width", (x + END - 4).toFixed(1));
}

function move(view, event) {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pick(view.store, view.rows[view.at].rank);
    return;
  }
  const last = view.rows.length - 1;
  const to = { ArrowDown: view.at + 1, ArrowUp: view.at - 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  view.rows[Math.max(0, Math.min(last, to))].el.focus();
}
