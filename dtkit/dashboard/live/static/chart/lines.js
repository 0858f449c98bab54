// The lines of a chart, with bands, labels at their ends, and the points of evaluations.

import { drawParts, s, setAttr } from "../elements.js";
import { number } from "../numbers.js";
import { nodeName, pick, pickedClass, pointedClass } from "../picking.js";
import { movingAverage } from "./average.js";

export const LABEL_GAP = 12;

/** Return the key under which a line is hidden: "n3", "band" for many nodes, or "all". */
export function lineKey(layout, line) {
  if (line === layout.nodes) return "all";
  return layout.banded ? "band" : `n${line}`;
}
/** Return the class of a line's color. */
export function lineHue(layout, line) {
  if (line === layout.nodes) return layout.nodes ? "all" : "only";
  return layout.banded ? "crowd" : `n${line % 8}`;
}
/** Return the number of a run's dashes; `choose_dash` in summary/run_lines.py is the same. Colors four apart are alike, and get others. */
export function runDash(run) {
  return (run + 2 * Math.floor(run / 4) + Math.floor(run / 8)) % 4;
}

const SAME_LINE_PX = 0.4, TURN_PX = 9;

/** Return for each line the numbers of those that lie on it in this chart, its own included: the last one would hide the others. */
function findEqualLines(view) {
  const { grain, layout } = view, { y } = view.frame, lines = Array.from({ length: layout.nodes }, (_, line) => line).filter((line) => view.shown(line));
  const isNear = (a, b) => Number.isNaN(a) === Number.isNaN(b) && !(Math.abs(y(a) - y(b)) > SAME_LINE_PX);
  const areEqual = (one, other) => {
    for (let at = 0; at < grain.used; at++) if (!isNear(grain.value(one, at, 1), grain.value(other, at, 1))) return false;
    return true;
  };
  const isDrawn = (line) => Array.from({ length: grain.used }, (_, at) => grain.value(line, at, 1)).some((v) => !Number.isNaN(v)), groups = new Map();
  for (const line of lines.filter(isDrawn)) {
    const group = [...groups.values()].find(([first]) => areEqual(first, line)) ?? [];
    group.push(line);
    groups.set(line, group);
  }
  return groups;
}
/** Return the style with which a line and those that lie on it take turns; an empty text for a line of its own. */
function turnStyle(view, line) {
  const group = view.equalLines?.get(line) ?? [], place = group.indexOf(line);
  return group.length < 2 ? "" : `stroke-dasharray: ${TURN_PX} ${TURN_PX * (group.length - 1)}; stroke-dashoffset: ${TURN_PX * (group.length - place)}; stroke-linecap: butt`;
}
/** Return which runs have one line, such as "equal lines: 1 = 3"; an empty text if none do. A caption is cut at commas. */
export function describeEqualLines({ equalLines = new Map() }) {
  const groups = [...new Set(equalLines.values())].filter((group) => group.length > 1).map((group) => group.map((line) => line + 1));
  return groups.length ? `equal lines: ${groups.map((group) => group.join(" = ")).join("; ")}` : "";
}

/** Return the weight of the moving average in a chart. */
export function smoothing({ store, options }) {
  return options.exact ? 0 : store.view.smooth;
}

/** Return the moving average that is drawn over a line; null where none is, as over the band of many nodes. */
export function lineAverages(view, line) {
  const weight = view.layout.banded && line < view.layout.nodes ? 0 : smoothing(view);
  return weight ? movingAverage(view.grain, line, weight) : null;
}

/** End the present part of a line and of its band: what comes next is drawn apart from it. */
function breakLine(drawn) {
  if (drawn.part === 1) drawn.mean += "h.01"; // a dot, with round caps
  if (drawn.up) drawn.shade += `${drawn.up}${drawn.down}Z`;
  [drawn.up, drawn.down, drawn.part] = ["", "", 0];
}

/** Return the value of a bucket: of one amid which the value changed, that to which it changed, and not a mean that never was. */
function nextHeldValue(grain, line, at, before) {
  const [low, mean, high] = [0, 1, 2].map((which) => grain.value(line, at, which));
  if (low === high || !Number.isFinite(mean + before)) return mean;
  return Math.abs(high - before) > Math.abs(low - before) ? high : low;
}

/** Draw a line's mean as a path, its extremes as a band behind it, and its moving average over it where one is asked for. */
export function drawLine(view, line, ends) {
  const { store, layers, options, layout, grain } = view, { x, y, first, end, least: lowest } = view.frame;
  const overall = line === layout.nodes, alone = !layout.nodes, crowd = layout.banded && !overall;
  const single = overall && layout.nodes === 1 && !layout.banded; // the line of a single node is also the overall line
  const hidden = !view.shown(line) || single;
  const band = !hidden && (alone ? grain.wide > 1 : !overall && (layout.banded || grain.wide > 1));
  const means = hidden ? null : lineAverages(view, line);
  const drawn = { mean: "", up: "", down: "", shade: "", smooth: "", part: 0, held: NaN, last: NaN, end: NaN, known: 0, seen: 0, beyond: null };
  for (let at = 0; at < grain.used && !hidden; at++) {
    const v = options.stepped ? nextHeldValue(grain, line, at, drawn.held) : grain.value(line, at, 1);
    drawn.held = v;
    if (Number.isNaN(v)) { if (!options.joined || grain.isLost(line, at)) breakLine(drawn); continue; }
    const left = x(grain.step(at)).toFixed(1), pen = drawn.part++ ? "L" : "M";
    drawn.known++;
    if (options.stepped && pen === "L") drawn.mean += `H${x((grain.step(at - 1) + grain.step(at)) / 2).toFixed(1)}V${y(v).toFixed(1)}`;
    drawn.mean += `${pen}${left},${y(v).toFixed(1)}`;
    if (means) drawn.smooth += `${pen}${left},${y(means[at]).toFixed(1)}`;
    if (band) {
      drawn.up += `${pen}${left},${y(grain.value(line, at, 2)).toFixed(1)}`;
      const least = grain.value(line, at, 0); // NaN on a logarithmic scale, where it is 0
      drawn.down = `L${left},${y(Number.isNaN(least) ? lowest : least).toFixed(1)}${drawn.down}`;
    }
    const [from, to] = grain.span(at);
    if (to >= first && from <= end) { drawn.last = means ? means[at] : v; drawn.end = Number(left); drawn.seen++; }
    else if (pen === "L" && drawn.seen && drawn.beyond === null) drawn.beyond = [Number(left), y(means ? means[at] : v)];
  }
  breakLine(drawn);
  const hue = lineHue(layout, line), own = overall || crowd || options.lineName ? undefined : line;
  const hasMean = !options.lineName && !options.overallName && (layout.nodes > 1 || layout.banded), isPart = hasMean && !overall && !crowd; // of the mean, which a reader looks for first
  const dash = options.lineName ? ` dtk-dash${runDash(line)}` : isPart ? " dtk-part" : overall && !hasMean && layout.nodes ? " dtk-dashed" : ""; // runs differ without colors too
  const picked = `${pickedClass(store, own)}${pointedClass(view, lineKey(layout, line))}`;
  const path = pathOf(view, `line${line}`, layers.lines, "", overall ? "all" : crowd ? "band" : line);
  setAttr(path, "class", `dtk-line dtk-${hue}${dash}${drawn.known === 1 ? " dtk-dot" : ""}${means ? " dtk-raw" : ""}${picked}`);
  setAttr(path, "d", crowd ? "" : drawn.mean);
  if (options.lineName && line === 0) view.equalLines = findEqualLines(view);
  const turn = drawn.known > 1 ? turnStyle(view, line) : "";
  setAttr(path, "style", turn);
  drawAverage(view, line, drawn.smooth, `dtk-${hue}${dash}${picked}`, turn);
  const shade = pathOf(view, `band${line}`, layers.bands, "");
  setAttr(shade, "class", `dtk-band dtk-${hue}${pointedClass(view, lineKey(layout, line))}`);
  setAttr(shade, "d", drawn.shade);
  setAttr(shade, "style", `--share: ${crowd ? 1 : (means ? 0.5 : 1) / (layout.nodes + 1)}`); // overlapping bands would hide the lines
  if (!drawn.seen || crowd) return;
  const label = overall ? options.overall(store.head, drawn.last) : options.lineName?.(store, line) ?? nodeName(store, line);
  ends.push({ ...endInSight(drawn, y(drawn.last), x(end)), label, hue, rank: own, line });
}

/** Return where a line ends: at the plot's edge if it goes on to a point out of sight, so that its name isn't written over it. */
function endInSight({ end, beyond }, height, edge) {
  if (beyond === null || end >= edge) return { x: end, y: height };
  return { x: edge, y: height + (beyond[1] - height) * (edge - end) / (beyond[0] - end) };
}

function drawAverage(view, line, d, look, style) {
  const key = `smooth${line}`;
  if (!d) {
    view.paths.get(key)?.remove();
    view.paths.delete(key);
    return;
  }
  const path = pathOf(view, key, view.layers.lines, "");
  setAttr(path, "class", `dtk-line dtk-smooth ${look}`);
  setAttr(path, "style", style);
  setAttr(path, "d", d);
}

/** Draw lines of outliers and of the highlighted node over the band of many nodes. */
export function drawSpots(view, ends) {
  const { store, layers, layout, name } = view, { spot } = store, { x, y } = view.frame;
  const ranks = spot?.charts.includes(name) ? spot.ranks : [];
  if (!layout.banded) return;
  for (let k = 0; k < 5; k++) {
    const path = pathOf(view, `spot${k}`, layers.lines, "dtk-line"), rank = ranks[k];
    if (rank === undefined || store.view.hidden.has("spots")) { setAttr(path, "d", ""); continue; }
    const hue = rank === store.selected ? "chosen" : `s${k % 4}`;
    let d = "", last = NaN, pen = "M";
    for (let b = 0; b < spot.used; b++) {
      const v = spotValue(view, k, b);
      if (!(view.isLog ? v > 0 : Number.isFinite(v))) { pen = "M"; continue; }
      d += `${pen}${x(spot.origin + b * spot.width + (spot.width - 1) / 2).toFixed(1)},${y(v).toFixed(1)}`;
      [pen, last] = ["L", v];
    }
    setAttr(path, "d", d);
    setAttr(path, "data-rank", rank);
    setAttr(path, "class", `dtk-line dtk-spot dtk-${hue}${store.selected === rank ? " dtk-picked" : ""}${pointedClass(view, "spots")}`);
    if (d) ends.push({ y: y(last), label: nodeName(store, rank), hue, rank });
  }
}
/** Return the value of the k-th single line among many nodes. */
export function spotValue({ store: { spot }, name, options }, k, bucket) {
  const v = spot.data[(bucket * spot.charts.length + spot.charts.indexOf(name)) * spot.ranks.length + k];
  return options.inverted ? 1 / v : v;
}

function pathOf(view, key, layer, cls, rank) {
  if (!view.paths.has(key)) {
    const path = s("path", rank === undefined ? { class: cls } : { class: cls, "data-rank": rank });
    view.paths.set(key, path);
    layer.append(path);
  }
  return view.paths.get(key);
}

const DENSE = 20, APART_PX = 16;

/** Draw the evaluations as diamonds; many are joined by a line. */
export function drawPoints(view, points, ends) {
  const { x, y, first, end } = view.frame, r = points.length > DENSE ? 3 : 4;
  const joined = points.map((p, k) => `${k ? "L" : "M"}${x(p.step).toFixed(1)},${y(p.value).toFixed(1)}`).join("");
  const chain = points.length > DENSE ? [s("path", { class: "dtk-chain", d: joined })] : [];
  view.layers.points.replaceChildren(...chain, ...apart(points, x).map((p) =>
    s("path", { d: `M${x(p.step).toFixed(1)},${y(p.value).toFixed(1)}m${-r},0l${r},${-r}l${r},${r}l${-r},${r}z` }, s("title", {}, `step ${p.step}: ${number(p.value)}`))));
  setAttr(view.layers.points, "class", `dtk-points${pointedClass(view, "valid")}`);
  drawBest(view, points);
  const seen = points.filter(({ step }) => step >= first && step <= end);
  if (seen.length && view.options.pointName) ends.push({ y: y(seen.at(-1).value), label: view.options.pointName, hue: "all", isPoint: true });
}
const RING_PX = 6, BEST_ROOM = 26;

/** Draw a ring around the best evaluation of a report, with the word of its card above it, or below it at the upper edge. */
function drawBest({ store, options, layers, frame, height, isLog }, points) {
  const [step, value, word] = store.head.best?.[options.measured] ?? [NaN, NaN, ""], x = frame.x(step), y = frame.y(value), right = x + BEST_ROOM > frame.x(frame.end);
  const isInSight = points.length > 0 && step >= frame.first && step <= frame.end && y >= 0 && y <= height && !(isLog && value <= 0);
  if (!isInSight) return layers.best.replaceChildren();
  const anchor = right ? "end" : x - BEST_ROOM < frame.x(frame.first) ? "start" : "middle";
  layers.best.replaceChildren(s("title", {}, `${word} ${number(value)}, at step ${step.toLocaleString("en-US")}`), s("circle", { class: "dtk-ring", cx: x, cy: y, r: RING_PX }),
    s("text", { class: "dtk-halo", x, y: y > 34 ? y - RING_PX - 4 : y + RING_PX + 12, "text-anchor": anchor }, word));
}
/** Return points that don't overlap, including the last one. */
function apart(points, x) {
  if (points.length <= DENSE) return points;
  const kept = [];
  for (const point of [...points].reverse()) if (!kept.length || x(kept.at(-1).step) - x(point.step) >= APART_PX) kept.push(point);
  return kept.reverse();
}

/** Write names at the lines' ends, apart from each other. */
export function drawLabels(view, lineEnds, { left, top, bottom }) {
  const ends = orderLabels(thinLabels(view, mergeLabels(view, lineEnds), top, bottom), view.labelOrder);
  view.labelOrder = ends.map(labelKey);
  const placed = spread(ends.map((end) => end.y), LABEL_GAP, top, bottom), { at, isShort } = placeLabels(view, ends, left), isWithin = at < left;
  const names = ends.map((end, k) => ["text", { x: at, y: placed[k] + 4, class: `dtk-${end.hue}${isWithin ? " dtk-halo" : ""}${pickedClass(view.store, end.rank)}` }, end.label]);
  const leaders = isShort && !isWithin ? ends.map((end, k) => ["path", { d: `M${end.x + 2},${end.y}L${at - 2},${placed[k]}`, class: "dtk-leader" }]) : [];
  drawParts(view.layers.labels, [...names, ...leaders]);
  ends.forEach(({ rank }, k) => { view.layers.labels.children[k].onclick = rank === undefined ? null : () => pick(view.store, rank); });
}
const AWAY_PX = 7;
export const LABEL_LETTER_PX = 6.9; // in a wide font
/** How far before the plot's end a line ends that is short. */
export const SHORT_PX = 30;

/**
 * Return {at, isShort}: where labels begin, and whether all lines end long before the axis does. Labels of short lines are next
 * to the lines' ends unless a mark is there.
 */
function placeLabels(view, ends, left) {
  const last = Math.max(...ends.map((end) => end.x)), near = last + AWAY_PX, isShort = left - last > SHORT_PX; // a point has no end
  const beyond = near + LABEL_LETTER_PX * Math.max(...ends.map(({ label }) => label.length));
  const isMarked = view.markSpans.some(([from, to]) => from < beyond && to > near);
  return { at: isShort && !isMarked ? near : left, isShort };
}

const SAME_PX = 3, APART_LABELS_PX = 9; // apart, so that labels don't flicker between one and several

/** Return one label, that of the line over all nodes, while the nodes' lines end at the same height as it. */
function mergeLabels(view, ends) {
  const all = ends.filter((end) => end.line !== undefined), heights = all.map((end) => end.y);
  const isOne = all.length > Math.max(2, view.layout.nodes) && !view.options.lineName && view.store.selected === null;
  if (!isOne || all.some(({ label }) => /^\W/.test(label))) return ends; // the name of a lost node begins with a sign
  const apart = Math.max(...heights) - Math.min(...heights);
  view.isMerged = apart <= (view.isMerged ? APART_LABELS_PX : SAME_PX);
  return view.isMerged ? [all.at(-1), ...ends.filter((end) => end.line === undefined)] : ends;
}
const FAR_LABEL_PX = 2 * LABEL_GAP, NEAR_LABEL_PX = LABEL_GAP; // from its line; apart, as above

/** Return labels, of which one stands for the nodes without a sign while names of all would be far from their lines. */
function thinLabels(view, ends, top, bottom) {
  const { selected } = view.store, isPlain = ({ rank, label }) => rank !== undefined && rank !== selected && !/^\W/.test(label);
  const plain = ends.filter(isPlain), rest = ends.filter((end) => !isPlain(end)), named = ends.filter(({ rank }) => rank !== undefined);
  const ordered = orderLabels(ends, view.labelOrder), heights = spread(ordered.map(({ y }) => y), LABEL_GAP, top, bottom);
  const away = Math.max(0, ...ordered.map(({ y }, k) => Math.abs(heights[k] - y)));
  view.isThinned = plain.length > 2 && away > (view.isThinned ? NEAR_LABEL_PX : FAR_LABEL_PX);
  if (!view.isThinned) return ends;
  const y = meanHeight(plain), x = Math.max(...plain.map((end) => end.x));
  return [{ x, y, label: plain.length === named.length ? `${plain.length} nodes` : `${plain.length} others`, hue: "many" }, ...rest];
}
/**
 * Return labels from top to bottom, as their lines end. Close ones keep their `former` order while their lines cross within
 * noise, so that they don't swap with each value. That of points stands above or below them all, as the last point does.
 */
export function orderLabels(ends, former = []) {
  const sorted = [...ends].sort((a, b) => a.y - b.y), groups = [];
  for (const end of sorted) {
    if (groups.length && end.y - groups.at(-1).at(-1).y < LABEL_GAP) groups.at(-1).push(end);
    else groups.push([end]);
  }
  return groups.flatMap((group) => {
    const lines = keepOrder(group.filter(({ isPoint }) => !isPoint), former), middle = meanHeight(group), among = meanHeight(lines);
    const ordered = [...group.filter(({ isPoint, y }) => isPoint && y < among), ...lines, ...group.filter(({ isPoint, y }) => isPoint && !(y < among))];
    return ordered.length > 1 ? ordered.map((end) => ({ ...end, y: middle })) : ordered;
  });
}
const CROSSED_PX = 3; // from which on the labels of lines that crossed change places

/** Return labels, given from top to bottom, in their former order, unless a line is clearly above one that was higher. */
function keepOrder(lines, former) {
  const places = new Map(lines.map((end) => [end, former.indexOf(labelKey(end))])), kept = [...lines].sort((a, b) => places.get(a) - places.get(b));
  const isCrossed = kept.some((end, k) => kept.slice(k + 1).some((below) => end.y - below.y > CROSSED_PX));
  return isCrossed || [...places.values()].includes(-1) ? lines : kept;
}
/** Return the key of a line's label, whose text may have the last value. */
function labelKey({ hue, rank }) {
  return `${hue} ${rank}`;
}
function meanHeight(ends) {
  return ends.reduce((sum, { y }) => sum + y, 0) / ends.length;
}
/** Return ascending positions at least `gap` apart; close positions stay around their middle (as in figures/style.py). */
export function spread(wanted, gap, low, high) {
  const crowds = [];
  for (const y of wanted) {
    let [middle, count] = [Math.max(low, Math.min(high, y)), 1];
    while (crowds.length && middle - crowds.at(-1)[0] < gap * (count + crowds.at(-1)[1]) / 2) {
      const [other, others] = crowds.pop();
      middle = (middle * count + other * others) / (count + others);
      count += others;
    }
    const half = gap * (count - 1) / 2;
    crowds.push([Math.max(low + half, Math.min(high - half, middle)), count]);
  }
  return crowds.flatMap(([middle, count]) => Array.from({ length: count }, (_, k) => middle + gap * (k - (count - 1) / 2)));
}
