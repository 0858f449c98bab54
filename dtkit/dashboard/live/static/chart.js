// Lines over the steps, as SVG, drawn from the store's buckets. A panel names its chart and its options.

import { s, h, setAttr, setText } from "./elements.js";
import { logTicks, number, tick, ticks } from "./numbers.js";
import { nodeName, pick, pickedClass } from "./picking.js";
import { MARKED } from "./store.js";

const LEFT = 46, RIGHT = 72, TOP = 14, BOTTOM = 22;

/**
 * Return a panel with the chart `name` of the store. Required `options`: title, testid, note(head, layout),
 * overall(head, value). Optional: fromZero, smooth, height, points(store), shown(store), lineName(store, line), lineClass,
 * canLog: a button for a logarithmic scale, which leaves out values that are not positive.
 */
export function chart(store, name, options, redraw) {
  const note = h("span", { class: "dtk-note" });
  const layers = {}, height = options.height ?? 200;
  const svg = s("svg", { role: "img", class: "dtk-chart", height, tabindex: 0 });
  for (const layer of ["grid", "marks", "bands", "lines", "points", "labels", "cursor"]) {
    svg.append((layers[layer] = s("g", { class: `dtk-${layer}` })));
  }
  const scale = h("button", { type: "button", class: "dtk-log-scale", "data-testid": "scale", title: "logarithmic scale" }, "log");
  scale.hidden = !options.canLog;
  scale.addEventListener("click", () => { store.logScale = !store.logScale; redraw(); });
  const el = h("section", { class: "dtk-panel", "data-testid": options.testid },
    h("h3", {}, options.title, " ", note, scale), svg);
  const view = { store, name, svg, layers, height, paths: new Map(), options, layout: null, frame: null };
  pointAt(view, redraw);
  const update = () => {
    view.layout = store.head.charts[name];
    view.isLog = Boolean(options.canLog) && store.logScale;
    setAttr(scale, "aria-pressed", view.isLog);
    el.hidden = !(options.shown?.(store) ?? true);
    if (el.hidden) return;
    drawChart(view, Math.max(260, svg.parentElement.clientWidth || 0));
    setText(note, readout(view) ?? options.note(store.head, view.layout));
    setAttr(svg, "aria-label", `${options.title}: ${describe(view)}`);
  };
  return { el, update };
}

/** Point at a step with the pointer or the arrow keys, in all charts. */
function pointAt(view, redraw) {
  const { store, svg } = view;
  const to = (hover) => { store.hover = hover; redraw(); };
  svg.addEventListener("pointermove", (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    to(view.frame ? Math.min(1, Math.max(0, (x - LEFT) / view.frame.width)) : null);
  });
  svg.addEventListener("pointerleave", () => to(null));
  svg.addEventListener("blur", () => to(null));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") to(null);
    if (!by || !view.frame) return;
    event.preventDefault();
    const each = view.grain.width / (view.frame.end - view.frame.first);
    to(Math.min(1, Math.max(0, (store.hover ?? 1) + by * each)));
  });
}

/**
 * Return the buckets of a chart as {used, width, value(line, bucket, which)}: which is 0 smallest, 1 mean, 2 largest.
 * With `smooth`, buckets are merged until at most that many are left.
 */
function grain(store, layout, smooth) {
  const { data, used, width } = store.curves, { columns } = store.head;
  const at = (line, bucket, which) => data[(bucket * columns + layout.first + line) * 3 + which];
  let each = 1;
  while (smooth && used > smooth * each) each *= 2;
  if (each === 1) return { used, width, value: at };
  const value = (line, bucket, which) => {
    const found = [];
    for (let b = bucket * each; b < Math.min(used, (bucket + 1) * each); b++) {
      const v = at(line, b, which);
      if (!Number.isNaN(v)) found.push(v);
    }
    if (!found.length) return NaN;
    return which === 0 ? Math.min(...found) : which === 2 ? Math.max(...found) : found.reduce((a, b) => a + b) / found.length;
  };
  return { used: Math.ceil(used / each), width: width * each, value };
}

function drawChart(view, width) {
  const { store, svg, options, layout, height } = view, { curves } = store;
  const { width: each } = (view.grain = grain(store, layout, options.smooth));
  if (view.isLog) view.grain.value = onlyPositive(view.grain.value);
  setAttr(svg, "width", width);
  setAttr(svg, "viewBox", `0 0 ${width} ${height}`);
  const points = (options.points?.(store) ?? []).filter((point) => !view.isLog || point.value > 0);
  const [low, high] = range(view, points);
  const first = curves.origin, last = Math.max(first + 1, curves.origin + curves.used * curves.width - 1);
  const end = Math.max(first + 1, Math.min(last, store.status.step || last));
  const plot = { width: width - LEFT - RIGHT, height: height - TOP - BOTTOM };
  const size = view.isLog ? Math.log10 : (v) => v;
  view.frame = {
    ...plot, first, end,
    x: (step) => LEFT + (Math.min(step, end) - first) / (end - first) * plot.width,
    y: (v) => TOP + (size(high) - size(v)) / (size(high) - size(low)) * plot.height,
    step: (bucket) => curves.origin + bucket * each + (each - 1) / 2,
  };
  drawGrid(view, low, high, width);
  drawMarks(view);
  const ends = [];
  for (let line = 0; line <= layout.nodes; line++) drawLine(view, line, ends);
  drawSpots(view, ends);
  drawPoints(view, points, ends);
  drawLabels(view, ends, width);
  drawCursor(view);
}
/** Return the range of the drawn values, with some room. */
function range(view, points) {
  const { options, layout } = view, { used, value } = view.grain;
  let [low, high] = [Infinity, -Infinity];
  for (let b = 0; b < used; b++) {
    for (let line = 0; line <= layout.nodes; line++) {
      low = Math.min(low, orElse(value(line, b, 0), Infinity));
      high = Math.max(high, orElse(value(line, b, 2), -Infinity));
    }
  }
  for (const point of points) [low, high] = [Math.min(low, point.value), Math.max(high, point.value)];
  if (low > high) [low, high] = view.isLog ? [0.1, 1] : [0, 1];
  if (view.isLog) return [low / 1.1, high * 1.1];
  if (options.fromZero) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [options.fromZero ? low : low - room, high + room];
}
function onlyPositive(value) {
  return (line, bucket, which) => { const v = value(line, bucket, which); return v > 0 ? v : NaN; };
}
function orElse(v, other) {
  return Number.isNaN(v) ? other : v;
}

function drawGrid(view, low, high, width) {
  const { x, y, first, end, width: inner } = view.frame, parts = [];
  if (!view.grain.used) {
    view.layers.grid.replaceChildren(s("text", { x: width / 2, y: view.height / 2, "text-anchor": "middle" }, "no step yet"));
    return;
  }
  const count = view.height > 150 ? 5 : 3;
  for (const v of view.isLog ? logTicks(low, high, count) : ticks(low, high, count)) {
    parts.push(s("line", { x1: LEFT, x2: LEFT + inner, y1: y(v), y2: y(v) }));
    parts.push(s("text", { x: LEFT - 7, y: y(v) + 4, "text-anchor": "end" }, tick(v)));
  }
  const whole = ticks(first, end, width > 420 ? 6 : 4).filter(Number.isInteger);
  parts.push(s("text", { x: LEFT - 7, y: view.height - 5, "text-anchor": "end" }, "step"));
  for (const v of whole) {
    if (x(v) - 3.3 * tick(v).length < LEFT - 4) continue; // it would overlap the label
    parts.push(s("text", { x: x(v), y: view.height - 5, "text-anchor": "middle" }, tick(v)));
  }
  view.layers.grid.replaceChildren(...parts);
}

/** Draw event marks on the step axis; marks at the same position are merged. */
function drawMarks(view) {
  const { x, first, end } = view.frame, parts = [];
  let previous = -Infinity;
  for (const mark of view.store.marks) {
    if (mark.step < first || mark.step > end) continue;
    const at = x(mark.step);
    const g = s("g", { class: `dtk-mark dtk-mark-${mark.kind}` }, s("title", {}, `step ${mark.step}: ${mark.text}`),
      s("line", { x1: at, x2: at, y1: TOP, y2: view.height - BOTTOM }));
    if (at - previous > 11) g.append(s("text", { x: at, y: TOP - 3, "text-anchor": "middle" }, MARKED[mark.kind] ?? "•"));
    previous = Math.max(previous, at - previous > 11 ? at : previous);
    parts.push(g);
  }
  view.layers.marks.replaceChildren(...parts);
}

/** Draw a line's mean as a path, and its extremes as a band behind it. */
function drawLine(view, line, ends) {
  const { store, layers, options, layout } = view;
  const { used, width, value } = view.grain, { x, y, step } = view.frame;
  const overall = line === layout.nodes, alone = !layout.nodes;
  const band = alone ? width > 1 : !overall && (layout.banded || width > 1);
  let mean = "", up = "", down = "", pen = "M", last = NaN, seen = 0;
  for (let b = 0; b < used; b++) {
    const v = value(line, b, 1);
    if (Number.isNaN(v)) { pen = "M"; continue; }
    const at = x(step(b)).toFixed(1);
    mean += `${pen}${at},${y(v).toFixed(1)}`;
    if (band) {
      up += `${up ? "L" : "M"}${at},${y(value(line, b, 2)).toFixed(1)}`;
      down = `L${at},${y(value(line, b, 0)).toFixed(1)}${down}`;
    }
    pen = "L"; last = v; seen++;
  }
  if (seen === 1) mean += "h.01"; // a dot, with round caps
  const crowd = layout.banded && !overall;
  const hue = crowd ? "crowd" : alone ? "only" : overall ? "all" : `n${line % 8}`;
  const single = overall && layout.nodes === 1 && !layout.banded; // the line of a single node is also the overall line
  const rank = overall ? "all" : crowd ? "band" : line;
  const path = pathOf(view, `line${line}`, layers.lines, "", rank), own = overall || crowd || options.lineName ? undefined : line;
  const dash = options.lineName ? ` dtk-dash${line % 4}` : ""; // runs differ without colors too
  setAttr(path, "class", `dtk-line dtk-${hue}${dash}${pickedClass(store, own)}`);
  setAttr(path, "d", crowd || single ? "" : mean);
  const shade = pathOf(view, `band${line}`, layers.bands, `dtk-band dtk-${hue}`);
  setAttr(shade, "d", band && seen ? `${up}${down}Z` : "");
  setAttr(shade, "opacity", crowd ? 0.3 : 0.32 / (layout.nodes + 1)); // overlapping bands would hide the lines
  const label = overall ? options.overall(store.head, last) : options.lineName?.(store, line) ?? nodeName(store, line);
  if (seen && !crowd && !single) ends.push({ y: y(last), label, hue, rank: own });
}

/** Draw lines of outliers and of the highlighted node over the band of many nodes. */
function drawSpots(view, ends) {
  const { store, layers, layout, name } = view, { spot } = store, { x, y } = view.frame;
  const ranks = layout.banded && spot?.charts.includes(name) ? spot.ranks : [];
  for (let k = 0; k < 5; k++) {
    const path = pathOf(view, `spot${k}`, layers.lines, "dtk-line"), rank = ranks[k];
    if (rank === undefined) { setAttr(path, "d", ""); continue; }
    let d = "", pen = "M", last = NaN;
    for (let b = 0; b < spot.used; b++) {
      const v = spot.data[(b * spot.charts.length + spot.charts.indexOf(name)) * ranks.length + k];
      if (Number.isNaN(v)) { pen = "M"; continue; }
      d += `${pen}${x(spot.origin + b * spot.width + (spot.width - 1) / 2).toFixed(1)},${y(v).toFixed(1)}`;
      pen = "L"; last = v;
    }
    const hue = rank === store.selected ? "chosen" : `s${k % 4}`;
    setAttr(path, "class", `dtk-line dtk-spot dtk-${hue}${pickedClass(store, rank)}`);
    setAttr(path, "data-rank", rank);
    setAttr(path, "d", d);
    if (d) ends.push({ y: y(last), label: nodeName(store, rank), hue, rank });
  }
}
function pathOf(view, key, layer, cls, rank) {
  if (!view.paths.has(key)) {
    const path = s("path", rank === undefined ? { class: cls } : { class: cls, "data-rank": rank });
    view.paths.set(key, path);
    layer.append(path);
  }
  return view.paths.get(key);
}

function drawPoints(view, points, ends) {
  const { x, y } = view.frame;
  const r = points.length > 20 ? 3 : 4;
  const chain = points.length > 20 ? [s("path", { class: "dtk-chain", d: points.map((p, k) => `${k ? "L" : "M"}${x(p.step)},${y(p.value)}`).join("") })] : [];
  view.layers.points.replaceChildren(...chain, ...apart(points, x).map((p) =>
    s("path", { d: `M${x(p.step)},${y(p.value)}m${-r},0l${r},${-r}l${r},${r}l${-r},${r}z` }, s("title", {}, `step ${p.step}: validation ${number(p.value)}`))));
  if (points.length) ends.push({ y: y(points.at(-1).value), label: "◇ valid", hue: "all" });
}

/** Draw points that don't overlap, including the last one; a line joins all points. */
function apart(points, x) {
  if (points.length <= 20) return points;
  const kept = [];
  for (const point of [...points].reverse()) if (!kept.length || x(kept.at(-1).step) - x(point.step) >= 16) kept.push(point);
  return kept.reverse();
}

/** Write names at the lines' ends, apart from each other. */
function drawLabels(view, ends, width) {
  ends.sort((a, b) => a.y - b.y);
  const placed = spread(ends.map((end) => end.y), 12, TOP, view.height - BOTTOM);
  view.layers.labels.replaceChildren(...ends.map((end, k) => {
    const text = s("text", { x: width - RIGHT + 8, y: placed[k] + 4, class: `dtk-${end.hue}${pickedClass(view.store, end.rank)}` }, end.label);
    if (end.rank !== undefined) text.addEventListener("click", () => pick(view.store, end.rank));
    return text;
  }));
}
/** Return ascending positions at least `gap` apart; close positions stay around their middle (as in figures/style.py). */
function spread(wanted, gap, low, high) {
  const crowds = [];
  for (const y of wanted) {
    let [middle, count] = [y, 1];
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

/** Draw the bucket under the pointer, in all charts. */
function hovered(view) {
  const { store, frame } = view, { used, width } = view.grain;
  if (store.hover === null || !used || !frame) return null;
  const step = frame.first + store.hover * (frame.end - frame.first);
  return Math.min(used - 1, Math.max(0, Math.floor((step - store.curves.origin) / width)));
}
function drawCursor(view) {
  const bucket = hovered(view), { x, y, step } = view.frame, parts = [];
  if (bucket !== null) {
    const at = x(step(bucket)), v = view.grain.value(view.layout.nodes, bucket, 1);
    parts.push(s("line", { x1: at, x2: at, y1: TOP, y2: view.height - BOTTOM }));
    if (!Number.isNaN(v)) parts.push(s("circle", { cx: at, cy: y(v), r: 3 }));
  }
  view.layers.cursor.replaceChildren(...parts);
}
function readout(view) {
  const bucket = hovered(view);
  if (bucket === null) return null;
  const { store: { curves }, layout } = view, { width, value } = view.grain;
  const first = curves.origin + bucket * width;
  const steps = width === 1 ? `step ${first}` : `steps ${first}–${first + width - 1}`;
  const lines = layout.banded
    ? [`${number(value(0, bucket, 0))} to ${number(value(0, bucket, 2))}`]
    : layout.nodes > 1 ? Array.from({ length: layout.nodes }, (_, k) => number(value(k, bucket, 1))) : [];
  return `${steps}: ${number(value(layout.nodes, bucket, 1))}${lines.length ? ` (${lines.join(" · ")})` : ""}`;
}
function describe(view) {
  const { store, layout } = view, { used, value } = view.grain;
  for (let b = used - 1; b >= 0; b--) {
    const v = value(layout.nodes, b, 1);
    if (!Number.isNaN(v)) return `${layout.nodes > 1 || layout.banded ? "over all nodes " : ""}${number(v)} at step ${store.status.step}`;
  }
  return "no step yet";
}
