// A chart over the steps, as SVG. A panel names its chart and its options; all charts share the tools of store.view.
//
//   chart/grain.js    what is drawn: buckets of the store, or single points
//   chart/average.js  moving averages
//   chart/caption.js  the note next to the title
//   chart/axis.js     steps, epochs, time or samples
//   chart/band.js     what bands are
//   chart/lines.js    lines, bands, points, labels
//   chart/run_labels.js  names or numbers of runs
//   chart/marks.js    signs of events
//   chart/scale.js    the scale of one chart
//   chart/table.js    values for a download
//   chart/picture_key.js  what colors and signs of a downloaded picture are
//   chart/pointer.js  pointing and zooming
//   chart/cursor.js   the line at the pointed step
//   chart/tooltip.js  the box at the pointer

import { movingAverage } from "./chart/average.js";
import { xAxis } from "./chart/axis.js";
import { bandKey, bandName, bandRows } from "./chart/band.js";
import { fitCaption } from "./chart/caption.js";
import { newCursor } from "./chart/cursor.js";
import { bucketGrain, hasNegative, inverted, leastInSight, onlyPositive, valueLimits } from "./chart/grain.js";
import { drawLabels, drawLine, drawPoints, drawSpots, LABEL_LETTER_PX, lineAverages, lineHue, lineKey, smoothing, spotValue } from "./chart/lines.js";
import { GLYPH_SPACE, mergeSigns } from "./chart/marks.js";
import { listPictureKey } from "./chart/picture_key.js";
import { drawDragged, listenToChart } from "./chart/pointer.js";
import { isLogScale, noteScale, scaleOfOne, staysLinear } from "./chart/scale.js";
import { describeExport, listValues } from "./chart/table.js";
import { drawRunLabels } from "./chart/run_labels.js";
import { newTooltip, within } from "./chart/tooltip.js";
import { drawParts, s, h, setAttr, setText } from "./elements.js";
import { newFrame } from "./frame.js";
import { rowHeight } from "./grid.js";
import { logTicks, number, tickFormat, ticks } from "./numbers.js";
import { nodeName } from "./picking.js";
import { detailInSight, lastEvaluated, LIVE, MARKED } from "./store.js";
import { newPrefix } from "./textures.js";
import { scaleButton, toolbar } from "./toolbar.js";
import { newWidth } from "./width.js";

const LEFT = 50, TOP = 14, BOTTOM = 22, TOOLS = 60, TOOLS_AND_SCALE = 92; // these as in dashboard.css
const CAPTION_MS = 120; // captions of all charts follow a pointer that rests: each makes the browser lay out its panel
const FAR_PX = 1e4; // outside any chart; pictures lose longer numbers

/**
 * Return a panel with the chart `name` of the store. Required `options`: title, testid, note(head, layout) and
 * overall(head, value). Optional ones, by what they are about:
 * - caption: lead(view): what it says first, help(head, whole): its tooltip, also of the whole caption
 * - values: unit, format(value), exact: never smooth, merged (buckets at most, with a band between quantiles),
 *   inverted: draw the reciprocals of the values, newest(): the last value where it may be ahead of the lines
 * - lines: shown(store), stepped: values hold until the next one, joined: lines without gaps but where the grain lost
 *   numbers, isFlat(store, el): a line instead of a chart, grain(store) with its layout(store)
 * - names: overallName, right(head, view): room for labels, lineName(store, line) with labelLines(store, line, most,
 *   width): that name at the line's end
 * - points: points(store), pointName, measured: the metric whose best has a ring in a report
 * - axes: height, stepName: what its steps are, for a table, axis: instead of that of all charts, fromZero,
 *   most(store): the largest value that the axis has to show, canLog: a logarithmic scale, where one is chosen or the
 *   values span many orders, which leaves out values that are not positive; "positive": none where some are negative
 */
export function chart(store, name, options, redraw) {
  const note = h("span", { class: "dtk-note" });
  const layers = {}, clip = newPrefix(), clipped = s("rect"), cursor = newCursor();
  const svg = s("svg", { role: "img", class: "dtk-chart dtk-lines-chart", tabindex: 0 }, s("clipPath", { id: clip }, clipped));
  for (const layer of ["grid", "marks", "bands", "lines", "points", "best", "labels", "dragged"]) {
    svg.append((layers[layer] = s("g", { class: `dtk-${layer}` })));
  }
  for (const layer of ["bands", "lines", "points"]) layers[layer].setAttribute("clip-path", `url(#${clip})`);
  const csv = () => listValues({ ...view, grain: readValues(view, false) }, overallLabel(view));
  const frame = newFrame(options.title, note, { svg, csv, about: (isDrawn) => describeExport(view, isDrawn), key: () => listPictureKey(view, overallLabel(view)) });
  const el = h("section", { class: "dtk-panel", "data-testid": options.testid, ...(options.title ? { "data-name": options.title } : {}) }, frame.head, svg, cursor.el);
  const ownScale = scaleOfOne(store, () => view), scale = scaleButton(ownScale, "chart-scale", "log");
  if (options.canLog) frame.add(scale.el);
  frame.attach(el, redraw);
  const updateTools = fullScreenTools(store, el, ownScale);
  const view = { store, name, svg, layers, clipped, paths: new Map(), options, layout: null, frame: null, grain: null, width: 0, point: null, cursor, tip: newTooltip(el) };
  const readWidth = newWidth(el, redraw);
  listenToChart(view, redraw);
  const writeCaption = () => {
    const flat = el.classList.contains("dtk-flat"), caption = (flat ? null : readout(view)) ?? options.note(store.head, view.layout, view);
    const whole = [options.lead?.(view), view.isLog && !flat ? "log scale" : "", caption].filter(Boolean).join(" · ");
    if (options.help) setAttr(note, "title", options.help(store.head, whole));
    else setAttr(note, "title", whole); // of which a narrow chart shows a part
    const isCard = flat && el.closest(".dtk-small") !== null; // its caption has a line of its own
    setText(note, isCard ? whole : fitCaption(options.title ?? "", whole, view.width - (scale.el.hidden ? TOOLS : TOOLS_AND_SCALE)));
  };
  let captionTimer = null;
  const point = () => {
    if (el.hidden || !view.frame || el.classList.contains("dtk-flat")) return;
    drawCursor(view);
    drawTooltip(view, el);
    clearTimeout(captionTimer);
    captionTimer = setTimeout(writeCaption, CAPTION_MS);
  };
  const rewrite = () => { // what is cheap, while the lines wait for their turn
    if (el.hidden || !view.frame) return;
    writeCaption();
    const labels = [...layers.labels.querySelectorAll("text")];
    const own = view.layout.nodes ? labels.find(({ textContent }) => textContent.startsWith("mean")) : labels.length === 1 ? labels[0] : null;
    const isNewer = (options.newest?.() ?? null) !== null && !store.view.zoom; // a zoomed line ends earlier
    if (isNewer && own) setText(own, options.overall(store.head, NaN));
  };
  const update = () => {
    view.layout = options.layout?.(store) ?? store.head.charts[name];
    const isLate = !store.curves.used && !store.head.runs && !LIVE.includes(store.status.state); // no step will come
    el.hidden = isLate || !(options.shown?.(store) ?? true);
    if (el.hidden) return noteScale(view, null, redraw);
    const flat = Boolean(options.isFlat?.(store, el)), isMoved = el.classList.contains("dtk-flat") !== flat;
    el.classList.toggle("dtk-flat", flat);
    view.height = frame.height() ?? rowHeight(el, flat ? 0 : options.height ?? 200);
    view.grain = readValues(view);
    view.canLog = Boolean(options.canLog) && !(options.canLog === "positive" && hasNegative(view.grain));
    view.isLog = view.canLog && isLogScale(view);
    noteScale(view, view.canLog && !flat && !staysLinear(view) ? view.isLog : null, redraw);
    updateTools();
    scale.update();
    if (frame.height() !== null) scale.el.hidden = true; // the tools above the chart have it
    if (view.isLog) changeValues(view.grain, onlyPositive);
    view.width = readWidth(isMoved);
    if (!flat) drawChart(view, Math.max(160, view.width));
    else view.cursor.hide();
    writeCaption();
    drawTooltip(view, el);
    setAttr(svg, "aria-label", `${options.title}: ${describe(view)}`);
  };
  return { el, update, point, rewrite, title: options.title };
}

/** Return the grain of a chart, as it is drawn, or without a bucket of several ones of the store. */
function readValues(view, isMerged = true) {
  const { store, options } = view, grain = options.grain?.(store) ?? readBuckets(view, isMerged ? options.merged : undefined);
  if (options.inverted) changeValues(grain, inverted);
  return grain;
}
/** Return the grain of the store's buckets, finer ones where the range in sight has them. */
function readBuckets({ store, layout }, most) {
  const detail = detailInSight(store), read = (curves) => bucketGrain(curves, store.head.columns, layout, most);
  return detail ? { ...read(detail), earlier: read(store.curves) } : read(store.curves);
}
function changeValues(grain, change) {
  for (const part of [grain, grain.earlier]) if (part) part.value = change(part.value);
}

/** Return a function that shows the tools and the legend of all charts in a panel while it fills the screen. */
function fullScreenTools(store, panel, scale) {
  let tools = null;
  return () => {
    const isFull = panel.ownerDocument.fullscreenElement === panel;
    if (!isFull) tools?.el.remove();
    if (!isFull) tools = null;
    else if (!tools) panel.querySelector("h3").after((tools = toolbar(store, null, scale)).el);
    tools?.update();
  };
}

function drawChart(view, width) {
  const { store, svg, options, layout, height, grain } = view;
  view.axis = options.axis ?? xAxis(store);
  const isSingle = !layout.nodes && !layout.banded && !options.lineName; // no node's line, which the legend could hide
  view.shown = (line) => isSingle || !store.view.hidden.has(lineKey(layout, line));
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) setAttr(svg, key, value);
  const points = store.view.hidden.has("valid") ? [] : (options.points?.(store) ?? []).filter((point) => !view.isLog || point.value > 0);
  view.points = points;
  view.isPointed = !isSingle && hasPointedLines(view);
  view.whole = wholeRange(view);
  const [first, end] = store.view.zoom ?? view.whole;
  const inSight = points.filter((point) => point.step >= first && point.step <= end).map((point) => point.value);
  const limits = valueLimits(grain, {
    shown: view.shown, from: first, to: end, extra: inSight, averages: (line) => lineAverages(view, line), isLog: view.isLog, robust: store.view.robust, fromZero: options.fromZero, most: options.most?.(store),
  });
  const [low, high] = options.fromZero && !view.isLog ? withNextTick(limits, tickCount(height)) : limits;
  const right = options.right?.(store.head, view) ?? labelsRoom(store), plot = { width: width - LEFT - right, height: height - TOP - BOTTOM };
  const size = view.isLog ? Math.log10 : (v) => v, { axis } = view, from = axis.of(first), long = axis.of(end) - from || 1;
  view.frame = {
    ...plot, first, end, low, high,
    x: (step) => LEFT + (axis.of(step) - from) / long * plot.width,
    y: (v) => Math.max(-FAR_PX, TOP + (size(high) - size(v)) / (size(high) - size(low)) * plot.height),
    stepAt: (x) => Math.min(end, Math.max(first, axis.step(from + (x - LEFT) / plot.width * long))),
  };
  if (view.isLog) view.frame.least = leastInSight(grain, view.shown, first, end);
  clipToPlot(view, plot);
  drawGrid(view, width);
  drawMarks(view);
  const ends = [];
  for (let line = 0; line <= layout.nodes; line++) drawLine(view, line, ends);
  drawSpots(view, ends);
  drawPoints(view, points, ends);
  (options.lineName ? drawRunLabels : drawLabels)(view, ends, { from: LEFT, left: width - right + 8, top: TOP, bottom: height - BOTTOM });
  drawCursor(view);
}
/** Return whether a chart has the lines that a person points at in the legend. */
function hasPointedLines({ store: { pointed, view, spot }, name, layout, points }) {
  if (pointed === null || view.hidden.has(pointed)) return false;
  if (pointed === "valid") return points.length > 0;
  if (pointed === "spots") return layout.banded && Boolean(spot?.charts.includes(name));
  return Array.from({ length: layout.nodes + 1 }, (_, line) => lineKey(layout, line)).includes(pointed);
}

const LABEL_ROOM = 92; // for "◇ validation" and "mean 0.114"

/** Return the room right of all charts of a run, so that equal steps are below each other. */
function labelsRoom({ head: { overall = "" } }) {
  return Math.max(LABEL_ROOM, 16 + LABEL_LETTER_PX * overall.length);
}

const DOT_ROOM = 5; // around the plot, for whole dots and line ends

/** Draw nothing beyond the plot. A line that goes on out of sight ends at the plot's edge. */
function clipToPlot({ clipped, whole, frame: { first, end } }, { width, height }) {
  const before = first > whole[0] ? 0 : DOT_ROOM, after = end < whole[1] ? 0 : DOT_ROOM;
  for (const [key, value] of Object.entries({ x: LEFT - before, y: TOP - DOT_ROOM, width: before + width + after, height: height + 2 * DOT_ROOM })) setAttr(clipped, key, value);
}

/** Return the first and the last step of all charts, so that they have one axis. */
function wholeRange({ store }) {
  const { curves } = store, first = curves.used ? curves.origin : 1, end = curves.origin + curves.used * curves.width - 1;
  const evaluated = store.head.runs ? store.status.step : Math.min(store.evaluations.at(-1)?.step ?? 0, lastEvaluated(store));
  const last = Math.max(first + 1, end, evaluated);
  return [first, Math.max(first + 1, Math.min(last, store.status.step || last))];
}

function tickCount(height) {
  return Math.max(2, Math.round(height / 42));
}
/** Return limits up to the next tick, where the largest value is nearer to that one: it would touch an edge without a number. */
function withNextTick([low, high], count) {
  const marks = ticks(low, high, count), [before, last] = marks.slice(-2), next = 2 * last - before;
  return marks.length > 1 && next - high < high - last ? [low, next] : [low, high];
}

function drawGrid(view, width) {
  const { x, y, first, end, low, high, width: inner } = view.frame, { axis } = view, parts = [];
  if (!view.grain.used) {
    return drawParts(view.layers.grid, [["text", { x: width / 2, y: view.height / 2, "text-anchor": "middle" }, "no step yet"]]);
  }
  const count = tickCount(view.height), values = view.isLog ? logTicks(low, high, count) : ticks(low, high, count), write = tickFormat(values);
  for (const v of values) {
    parts.push(["line", { x1: LEFT, x2: LEFT + inner, y1: y(v), y2: y(v) }]);
    parts.push(["text", { x: LEFT - 7, y: y(v) + 4, "text-anchor": "end" }, write(v)]);
  }
  parts.push(["text", { x: LEFT - 7, y: view.height - 5, "text-anchor": "end" }, axis.label]);
  let free = LEFT - 4;
  const places = axis.marks(axis.of(first), axis.of(end), Math.max(3, Math.round(width / 85))), name = axis.write(places);
  for (const v of places) {
    const at = x(axis.step(v)), half = 3.3 * name(v).length;
    if (at - half < free || at > LEFT + inner + 2) continue; // it would overlap the last one
    parts.push(["text", { x: at, y: view.height - 5, "text-anchor": "middle" }, name(v)]);
    free = at + half + 6;
  }
  drawParts(view.layers.grid, [...parts, ...bandKey(view, width)]);
}

const MOST_TEXTS = 12;

/** Draw event marks on the step axis; those next to each other share one text, in which each sign has its color. `view.markSpans` has where they are. */
function drawMarks(view) {
  const { x, first, end } = view.frame, parts = [], signs = [];
  view.markSpans = [];
  for (const mark of view.store.marks) {
    const step = end < view.whole[1] ? mark.step : Math.min(mark.step, end); // the last step may have no values
    if (step < first || step > end) continue;
    const at = x(step), look = `dtk-mark dtk-mark-${mark.kind}`;
    const text = `step ${mark.step}: ${mark.text}`;
    parts.push(s("g", { class: look }, s("title", {}, text),
      s("line", { x1: at, x2: at, y1: TOP, y2: view.height - BOTTOM })));
    signs.push({ at, glyph: MARKED[mark.kind] ?? "•", kind: mark.kind, look, text });
    view.markSpans.push([at, at]);
  }
  for (const { at, half, glyphs, marks } of mergeSigns(signs, LEFT, LEFT + view.frame.width)) {
    view.markSpans.push([at - half, at + half]);
    const texts = marks.slice(-MOST_TEXTS).map((k) => signs[k].text);
    const spans = glyphs.map((glyph, k) => s("tspan", { class: signs.find((sign) => sign.glyph === glyph).look }, k ? GLYPH_SPACE + glyph : glyph));
    parts.push(s("g", { class: "dtk-sign" }, s("title", {}, texts.join("\n")), s("text", { x: at, y: TOP - 3, "text-anchor": "middle" }, ...spans)));
  }
  view.layers.marks.replaceChildren(...parts);
}

/** Return the place under the pointer, in all charts. */
function hovered({ store, frame, grain }) {
  if (store.hover === null || !grain.used || !frame || store.hover < frame.first || store.hover > frame.end) return null;
  return grain.find(store.hover);
}
function drawCursor(view) {
  const at = hovered(view), { x, y, first, end } = view.frame, { layout, grain, height } = view, bottom = height - BOTTOM;
  if (at === null) view.cursor.hide();
  else {
    const v = view.shown(layout.nodes) ? grain.value(layout.nodes, at, 1) : NaN;
    view.cursor.show(x(Math.min(end, Math.max(first, grain.step(at)))), y(v), TOP, bottom, height);
  }
  drawDragged(view, TOP, bottom);
}

function format({ options }, v) {
  const text = options.format?.(v) ?? number(v);
  return options.unit && Number.isFinite(v) ? `${text} ${options.unit}` : text;
}
/** Return the position of a span in words: steps, or the time where that is the axis. */
function spanText({ options: { axis } }, span) {
  return axis ? axis.format(axis.of(span[1])) : stepsText(span);
}
function stepsText([first, last]) {
  return first === last ? `step ${first.toLocaleString("en-US")}` : `steps ${first.toLocaleString("en-US")}–${last.toLocaleString("en-US")}`;
}
function readout(view) {
  const at = hovered(view);
  if (at === null) return null;
  if (view.store.head.runs) return spanText(view, view.grain.span(at)); // the tooltip has the runs
  return `${spanText(view, view.grain.span(at))}: ${format(view, view.grain.value(view.layout.nodes, at, 1))}`;
}

/** Name every line at the pointer, with its value and unit. */
function drawTooltip(view, panel) {
  const at = hovered(view), { point, keyed, svg, frame } = view;
  if (at === null || view.dragged || !(point || (keyed && svg.ownerDocument.activeElement === svg))) return view.tip.hide();
  const box = svg.getBoundingClientRect(), spot = point ?? [box.left + frame.x(view.store.hover), box.top + TOP + 10];
  const [x, y] = within(panel, { clientX: spot[0], clientY: spot[1] }), { axis, grain } = view, span = grain.span(at);
  const more = axis.label === "step" || view.options.axis ? "" : ` · ${axis.label} ${axis.format(axis.of(span[1]))}`;
  view.tip.show(x, y, `${spanText(view, span)}${more}`, tooltipRows(view, at));
}
function tooltipRows(view, at) {
  const { layout } = view, rows = [];
  for (let line = 0; line <= layout.nodes; line++) {
    const single = line === layout.nodes && layout.nodes === 1 && !layout.banded; // the same as its node
    if (view.shown(line) && !single && !Number.isNaN(view.grain.value(line, at, 1))) rows.push(lineRow(view, line, at));
  }
  return [...rows, ...spotRows(view, at), ...pointRows(view, at), ...bandRows(view, at)];
}
function lineRow(view, line, at) {
  const { store, layout, grain, options } = view, overall = line === layout.nodes, mark = `dtk-${lineHue(layout, line)}`;
  const text = options.spanned ? formatSpan(view, line, at) : format(view, grain.value(line, at, 1));
  if (layout.banded && !overall) return { label: bandName(view), value: `${format(view, grain.value(0, at, 0))} to ${format(view, grain.value(0, at, 2))}`, mark };
  const label = overall ? overallLabel(view) : options.lineName?.(store, line) ?? nodeName(store, line);
  return { label, value: withAverage(view, line, at, text), mark, run: options.lineName ? line : null };
}
/** Return the lowest and the highest value of a point, or its only one. */
function formatSpan(view, line, at) {
  const edges = [0, 2].map((part) => format(view, view.grain.value(line, at, part)));
  return edges[0] === edges[1] ? edges[0] : edges.join(" to ");
}
function overallLabel({ options: { overallName: name, title }, store, layout }) {
  return (typeof name === "function" ? name(store.head) : name) ?? (layout.nodes ? "mean" : title);
}
function withAverage(view, line, at, text) {
  const weight = smoothing(view);
  return weight ? `${format(view, movingAverage(view.grain, line, weight)[at])} (${text})` : text;
}
function spotRows(view, at) {
  const { store: { spot, view: tools }, name, layout, grain } = view;
  if (!layout.banded || !spot?.charts.includes(name) || tools.hidden.has("spots")) return [];
  const bucket = Math.min(spot.used - 1, Math.max(0, Math.floor((grain.step(at) - spot.origin) / spot.width)));
  return spot.ranks.map((rank, k) => ({ label: nodeName(view.store, rank), value: format(view, spotValue(view, k, bucket)), mark: `dtk-${rank === view.store.selected ? "chosen" : `s${k % 4}`}` }));
}
function pointRows(view, at) {
  const [first, last] = view.grain.span(at), { options, points } = view;
  const middle = (first + last) / 2, isNearer = (point, other) => Math.abs(point.step - middle) < Math.abs(other.step - middle);
  const nearest = options.pointName && points.length ? [points.reduce((best, point) => (isNearer(best, point) ? best : point))] : [];
  return nearest.map(({ step, value }) => ({ label: `validation at step ${step.toLocaleString("en-US")}`, value: format(view, value), mark: "dtk-all" }));
}

function describe(view) {
  const { store, layout, grain, options } = view;
  if (options.lineName) return describeRuns(view);
  for (let at = grain.used - 1; at >= 0; at--) {
    const v = grain.value(layout.nodes, at, 1);
    if (!Number.isNaN(v)) return `${layout.nodes > 1 || layout.banded ? "over all nodes " : ""}${format(view, v)} at step ${store.status.step}`;
  }
  return "no step yet";
}

/** Return the last value of each run that is shown. */
function describeRuns({ store, layout, grain, options, shown = () => true }) {
  const texts = [];
  for (let line = 0; line < layout.nodes; line++) {
    let at = grain.used - 1;
    while (at >= 0 && Number.isNaN(grain.value(line, at, 1))) at--;
    if (at >= 0 && shown(line)) texts.push(`${options.lineName(store, line)} ${format({ options }, grain.value(line, at, 1))}`);
  }
  return texts.length ? `last values ${texts.join("; ")}` : "no step yet";
}
