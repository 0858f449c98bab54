// The browser's half of the live view (its other half is live.py; messages are composed in feed.py).
//
//   store     what the messages add up to; one a model, so that two views of it show the same
//   charts    SVG lines from the store's buckets
//   panels    one function each: build(store, send) returns {el, update}; an error stays in its panel
//   widget    receives messages, redraws at most once a frame
//
// Text from engines is only ever set as textContent. There is no markup from data, and no dependency.

// ---------------------------------------------------------------------------------------------------- store

const LOG = 200;
const MARKED = { pause: "‖", resume: "▶", lr: "lr", error: "✕", stop: "■" };

/** An empty store. `curves.data` is Float32 of shape (buckets, charts, lines, 3): smallest, mean, largest. */
export function newStore() {
  return {
    seq: 0, received: 0, head: null, nodes: [], status: null, lr: null, tiles: [], error: null, refused: null,
    log: [], marks: [], evaluations: [], ranks: new Float32Array(0), asked: new Map(), hover: null,
    curves: { width: 1, origin: 0, used: 0, data: new Float32Array(0) },
  };
}

/** Apply a message. Returns false where it does not follow on what the store has: then ask for a snapshot. */
export function apply(store, content, buffers) {
  if (content.kind === "refused") {
    store.refused = content;
    store.asked.delete(content.command);
    return true;
  }
  const whole = content.kind === "snapshot";
  if (content.seq <= store.seq) return true; // seen already
  if (!whole && content.base !== store.seq) return false;
  store.seq = content.seq;
  store.received = Date.now();
  for (const key of ["status", "lr", "tiles", "error"]) store[key] = content[key];
  if (whole) {
    for (const key of ["head", "nodes", "marks", "evaluations"]) store[key] = content[key];
    store.log = content.events;
    store.curves = { width: content.curves.width, origin: content.curves.origin, used: 0, data: new Float32Array(0) };
  } else {
    const events = content.events ?? [];
    store.log = store.log.concat(events).slice(-LOG);
    store.marks = store.marks.concat(events.filter((e) => e.kind in MARKED)).slice(-60);
    store.evaluations = store.evaluations.concat(content.evaluations ?? []).slice(-LOG);
  }
  applyCurves(store, content.curves, floats(buffers[0]));
  const ranks = floats(buffers[1]);
  if (ranks.length) store.ranks = ranks;
  return true;
}

/** A buffer as Float32Array; it may be a DataView at an odd offset. */
function floats(buffer) {
  const bytes = buffer.buffer ? new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength) : new Uint8Array(buffer);
  return new Float32Array(bytes.slice().buffer);
}

function applyCurves(store, part, values) {
  const curves = store.curves;
  const each = store.head.charts.length * store.head.lines * 3; // floats a bucket
  if (!curves.used) curves.origin = part.origin;
  while (curves.used && curves.width < part.width) join(curves, each);
  curves.width = part.width;
  const end = part.first + part.buckets;
  if (end * each > curves.data.length) {
    const larger = new Float32Array(Math.max(64, 2 * end) * each).fill(NaN);
    larger.set(curves.data);
    curves.data = larger;
  }
  const at = part.first * each;
  if (part.flat) for (let i = 0; i < values.length; i++) curves.data.fill(values[i], at + 3 * i, at + 3 * i + 3);
  else curves.data.set(values, at);
  curves.used = Math.max(curves.used, end);
}

/** Join neighbouring buckets, as series.py does, and double their width. */
function join(curves, each) {
  const { data, used } = curves;
  const half = Math.ceil(used / 2);
  for (let b = 0; b < half; b++) {
    for (let i = 0; i < each; i += 3) {
      const p = 2 * b * each + i, q = p + each, to = b * each + i;
      const lone = 2 * b + 1 >= used || Number.isNaN(data[q]);
      const first = !Number.isNaN(data[p]);
      const pick = (k, both) => (lone ? data[p + k] : first ? both(data[p + k], data[q + k]) : data[q + k]);
      const joined = [pick(0, Math.min), pick(1, (a, b) => (a + b) / 2), pick(2, Math.max)];
      data.set(joined, to);
    }
  }
  data.fill(NaN, half * each);
  curves.used = half;
  curves.width *= 2;
}

// ------------------------------------------------------------------------------------------------- elements

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(el, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}
function setText(el, text) {
  if (el.textContent !== text) el.textContent = text;
}
function setAttr(el, name, value) {
  if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value);
}

// -------------------------------------------------------------------------------------------------- numbers

const NOTHING = "—";

function number(value, digits = 3) {
  if (value === null || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(value.toPrecision(digits));
}
function bytes(value) {
  if (!Number.isFinite(value)) return NOTHING;
  for (const unit of ["B", "kB", "MB"]) {
    if (value < 999.5) return `${Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}
function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
function tick(value) {
  if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return (+value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}
/** Round values between low and high, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++) found.push(k * step);
  return found;
}

// --------------------------------------------------------------------------------------------------- charts

const HEIGHT = 200, LEFT = 46, RIGHT = 66, TOP = 14, BOTTOM = 22;

/** A chart panel of the store's chart `name`. `options`: title, unit, fromZero, smooth, overall(head), points(store). */
function chart(store, name, testid, options, redraw) {
  const note = h("span", { class: "dtk-note" });
  const layers = {};
  const svg = s("svg", { role: "img", class: "dtk-chart", height: HEIGHT });
  for (const layer of ["grid", "marks", "bands", "lines", "points", "labels", "cursor"]) {
    svg.append((layers[layer] = s("g", { class: `dtk-${layer}` })));
  }
  const el = h("section", { class: "dtk-panel", "data-testid": testid },
    h("h3", {}, options.title, " ", note), svg);
  const view = { store, svg, layers, paths: new Map(), options, frame: null };
  svg.addEventListener("pointermove", (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    store.hover = view.frame ? Math.min(1, Math.max(0, (x - LEFT) / view.frame.width)) : null;
    redraw();
  });
  svg.addEventListener("pointerleave", () => { store.hover = null; redraw(); });
  const update = () => {
    const index = store.head.charts.indexOf(name);
    const width = Math.max(260, svg.parentElement.clientWidth || 0);
    drawChart(view, index, width);
    setText(note, readout(view) ?? options.note(store.head));
    setAttr(svg, "aria-label", `${options.title}: ${describe(view)}`);
  };
  return { el, update };
}

/**
 * The buckets of a chart as they are drawn: the store's, or with `smooth` so many joined that at most that many are left.
 * {used, width, value(line, bucket, which)}: which is 0 smallest, 1 mean, 2 largest.
 */
function grain(store, index, smooth) {
  const { data, used, width } = store.curves, { charts, lines } = store.head;
  const at = (line, bucket, which) => data[((bucket * charts.length + index) * lines + line) * 3 + which];
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

function drawChart(view, index, width) {
  const { store, svg, options } = view, { curves, head } = store;
  const { used, width: each, value } = (view.grain = grain(store, index, options.smooth));
  setAttr(svg, "width", width);
  setAttr(svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
  const points = options.points?.(store) ?? [];
  let [low, high] = [Infinity, -Infinity];
  for (let b = 0; b < used; b++) {
    for (let line = 0; line < head.lines; line++) {
      low = Math.min(low, orElse(value(line, b, 0), Infinity));
      high = Math.max(high, orElse(value(line, b, 2), -Infinity));
    }
  }
  for (const point of points) [low, high] = [Math.min(low, point.value), Math.max(high, point.value)];
  if (low > high) [low, high] = [0, 1];
  if (options.fromZero) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  high += room;
  if (!options.fromZero) low -= room;
  const first = curves.origin, last = Math.max(first + 1, curves.origin + curves.used * curves.width - 1);
  const end = Math.max(first + 1, Math.min(last, store.status.step || last));
  const plot = { width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };
  view.frame = {
    ...plot, first, end,
    x: (step) => LEFT + (Math.min(step, end) - first) / (end - first) * plot.width,
    y: (v) => TOP + (high - v) / (high - low) * plot.height,
    step: (bucket) => curves.origin + bucket * each + (each - 1) / 2,
  };
  drawGrid(view, low, high, width);
  drawMarks(view);
  const ends = [];
  for (let line = 0; line < head.lines; line++) drawLine(view, line, ends);
  drawPoints(view, points, ends);
  drawLabels(view, ends, width);
  drawCursor(view);
}
function orElse(v, other) {
  return Number.isNaN(v) ? other : v;
}

function drawGrid(view, low, high, width) {
  const { x, y, first, end, width: inner } = view.frame, parts = [];
  for (const v of ticks(low, high, 5)) {
    parts.push(s("line", { x1: LEFT, x2: LEFT + inner, y1: y(v), y2: y(v) }));
    parts.push(s("text", { x: LEFT - 7, y: y(v) + 4, "text-anchor": "end" }, tick(v)));
  }
  const whole = ticks(first, end, width > 420 ? 6 : 4).filter(Number.isInteger);
  for (const v of whole) parts.push(s("text", { x: x(v), y: HEIGHT - 5, "text-anchor": "middle" }, tick(v)));
  view.layers.grid.replaceChildren(...parts);
}

/** What happened, on the step axis; two marks of one place become one. */
function drawMarks(view) {
  const { x, first, end } = view.frame, parts = [];
  let previous = -Infinity;
  for (const mark of view.store.marks) {
    if (mark.step < first || mark.step > end) continue;
    const at = x(mark.step);
    const g = s("g", { class: `dtk-mark dtk-mark-${mark.kind}` }, s("title", {}, `step ${mark.step}: ${mark.text}`),
      s("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (at - previous > 11) g.append(s("text", { x: at, y: TOP - 3, "text-anchor": "middle" }, MARKED[mark.kind] ?? "•"));
    previous = Math.max(previous, at - previous > 11 ? at : previous);
    parts.push(g);
  }
  view.layers.marks.replaceChildren(...parts);
}

/** A line's mean as a path, and its extremes as a band behind it. */
function drawLine(view, line, ends) {
  const { store: { head }, layers, options } = view, { used, width, value } = view.grain, { x, y, step } = view.frame;
  const overall = line === head.lines - 1;
  const band = !overall && (head.banded || width > 1);
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
  const crowd = head.banded && !overall;
  const hue = crowd ? "crowd" : overall ? "all" : `n${line}`;
  const single = overall && head.lines === 2 && !head.banded; // one node: its own line says it all
  const rank = overall ? "all" : crowd ? "band" : line;
  setAttr(pathOf(view, `line${line}`, layers.lines, `dtk-line dtk-${hue}`, rank), "d", crowd || single ? "" : mean);
  const shade = pathOf(view, `band${line}`, layers.bands, `dtk-band dtk-${hue}`);
  setAttr(shade, "d", band && seen ? `${up}${down}Z` : "");
  setAttr(shade, "opacity", crowd ? 0.3 : 0.32 / head.lines); // many bands over each other would hide the lines
  const label = overall ? options.overall(head) : `node ${line}`;
  if (seen && !crowd && !single) ends.push({ y: y(last), label, hue });
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
  const r = points.length > 20 ? 2.5 : 4; // a chain of large ones would hide the lines
  view.layers.points.replaceChildren(...points.map((p) =>
    s("path", { d: `M${x(p.step)},${y(p.value)}m${-r},0l${r},${-r}l${r},${r}l${-r},${r}z` }, s("title", {}, `step ${p.step}: validation ${number(p.value)}`))));
  if (points.length) ends.push({ y: y(points.at(-1).value), label: "◇ valid", hue: "all" });
}

/** Names at the lines' ends, pushed apart where they would overlap. */
function drawLabels(view, ends, width) {
  ends.sort((a, b) => a.y - b.y);
  const placed = spread(ends.map((end) => end.y), 12, TOP, HEIGHT - BOTTOM);
  view.layers.labels.replaceChildren(...ends.map((end, k) =>
    s("text", { x: width - RIGHT + 6, y: placed[k] + 4, class: `dtk-${end.hue}` }, end.label)));
}
/** Ascending positions moved apart to at least `gap`, each crowd around its own middle (as in figures.py). */
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

/** The bucket under the pointer, in whichever chart it is. */
function hovered(view) {
  const { store, frame } = view, { used, width } = view.grain;
  if (store.hover === null || !used || !frame) return null;
  const step = frame.first + store.hover * (frame.end - frame.first);
  return Math.min(used - 1, Math.max(0, Math.floor((step - store.curves.origin) / width)));
}
function drawCursor(view) {
  const bucket = hovered(view), { x, y, step } = view.frame, parts = [];
  if (bucket !== null) {
    const at = x(step(bucket)), v = view.grain.value(view.store.head.lines - 1, bucket, 1);
    parts.push(s("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (!Number.isNaN(v)) parts.push(s("circle", { cx: at, cy: y(v), r: 3 }));
  }
  view.layers.cursor.replaceChildren(...parts);
}
function readout(view) {
  const bucket = hovered(view);
  if (bucket === null) return null;
  const { head, curves } = view.store, { width, value } = view.grain;
  const first = curves.origin + bucket * width;
  const steps = width === 1 ? `step ${first}` : `steps ${first}–${first + width - 1}`;
  const lines = head.banded
    ? [`${number(value(0, bucket, 0))} to ${number(value(0, bucket, 2))}`]
    : head.ranks > 1 ? Array.from({ length: head.ranks }, (_, k) => number(value(k, bucket, 1))) : [];
  return `${steps}: ${number(value(head.lines - 1, bucket, 1))}${lines.length ? ` (${lines.join(" · ")})` : ""}`;
}
function describe(view) {
  const { store } = view, { head } = store, { used, value } = view.grain;
  for (let b = used - 1; b >= 0; b--) {
    const v = value(head.lines - 1, b, 1);
    if (!Number.isNaN(v)) return `${view.options.overall(head)} is ${number(v)} at step ${store.status.step}`;
  }
  return "no step yet";
}

// --------------------------------------------------------------------------------------------------- panels

const STATE_GLYPH = { pending: "…", running: "▶", paused: "‖", completed: "✓", stopped: "■", failed: "✕" };
const LIVE = ["pending", "running", "paused"];

function header(store) {
  const name = h("h2"), what = h("span", { class: "dtk-note" }), chip = h("span", { class: "dtk-chip" });
  const update = () => {
    const { head, status } = store;
    setText(name, head.name);
    setText(what, `${head.strategy} · ${head.ranks} ${head.ranks === 1 ? "node" : "nodes"} · batch ${head.batch.toLocaleString("en-US")}`);
    setText(chip, `${STATE_GLYPH[status.state] ?? ""} ${status.state}`);
  };
  return { el: h("header", {}, name, what, chip), update };
}

function progress(store) {
  const bar = h("div", { class: "dtk-bar" }), left = h("span"), right = h("span");
  const track = h("div", { class: "dtk-track", role: "progressbar", "aria-label": "training progress", "data-testid": "progress", "aria-valuemin": 0 }, bar);
  const update = () => {
    const st = store.status, ticking = st.state === "running" || (st.state === "pending" && st.elapsed > 0);
    const since = ticking ? (Date.now() - store.received) / 1000 : 0;
    const elapsed = clock((st.elapsed ?? 0) + since);
    const begun = st.step > 0 || !LIVE.includes(st.state);
    bar.style.width = `${100 * Math.min(1, st.steps ? st.step / st.steps : 0)}%`;
    setAttr(track, "aria-valuemax", st.steps);
    setAttr(track, "aria-valuenow", st.step);
    setText(left, begun ? `step ${st.step.toLocaleString("en-US")} of ${st.steps.toLocaleString("en-US")} · epoch ${st.epoch.toLocaleString("en-US")} of ${st.epochs.toLocaleString("en-US")}` : `first step, ${elapsed}`);
    const remaining = st.remaining !== null && st.state === "running" ? ` · ${clock(st.remaining - since)} left` : "";
    setText(right, [st.message, begun ? `${elapsed} elapsed${remaining}` : ""].filter(Boolean).join(" · "));
    setAttr(track, "aria-valuetext", left.textContent);
  };
  return { el: h("div", { class: "dtk-progress" }, track, h("div", { class: "dtk-ends" }, left, right)), update };
}

const BUTTONS = [
  { command: "pause", glyph: "‖", label: "Pause", asking: "Pausing…", when: ["pending", "running"] },
  { command: "resume", glyph: "▶", label: "Resume", asking: "Resuming…", when: ["paused"] },
  { command: "step", glyph: "▸|", label: "Step", asking: "Stepping…", when: ["paused"] },
  { command: "stop", glyph: "■", label: "Stop", asking: "Stopping…", when: LIVE },
];

function controls(store, send, redraw) {
  const ask = (command, value) => {
    store.asked.set(command, { state: store.status.state, step: store.status.step, lr: store.lr });
    store.refused = null;
    send({ command, value });
    redraw();
  };
  const buttons = BUTTONS.map((b) => {
    const glyph = h("span", { "aria-hidden": "true" }, b.glyph), label = h("span", {}, b.label);
    const el = h("button", { type: "button", "data-testid": b.command, class: `dtk-${b.command}` }, glyph, label);
    el.addEventListener("click", () => ask(b.command, null));
    return { ...b, el, text: label };
  });
  const rate = rateField(store, ask);
  const said = h("span", { class: "dtk-said", role: "alert" });
  const el = h("div", { class: "dtk-controls", role: "group", "aria-label": "controls" },
    ...buttons.map((b) => b.el), rate.el, said);
  const update = () => {
    const { status } = store;
    forgetAnswered(store);
    const active = el.getRootNode().activeElement;
    for (const b of buttons) {
      const asked = store.asked.has(b.command);
      setText(b.text, asked ? b.asking : b.label);
      b.el.disabled = asked || !b.when.includes(status.state);
    }
    // A button that the keyboard stood on and that went dead hands the focus on.
    if (active?.disabled && el.contains(active)) buttons.find((b) => !b.el.disabled)?.el.focus();
    rate.update();
    setText(said, store.refused?.text ?? "");
  };
  return { el, update };
}
/** What was asked and has taken effect is no longer being asked. */
function forgetAnswered(store) {
  const { asked, status, lr } = store;
  for (const [command, then] of asked) {
    const moved = status.state !== then.state || (command === "step" && status.step !== then.step);
    if (moved || (command === "lr" && lr !== then.lr)) asked.delete(command);
  }
}

function rateField(store, ask) {
  const input = h("input", { type: "number", step: "any", min: "0", "data-testid": "lr", title: "Enter applies it from the next dispatch on; arrow keys change it by a tenth" });
  const el = h("label", { class: "dtk-rate" }, "learning rate", input);
  let edited = false;
  const current = () => (store.lr === null ? "" : String(+store.lr.toPrecision(6)));
  const reset = () => { edited = false; input.value = current(); input.removeAttribute("aria-invalid"); };
  input.addEventListener("input", () => { edited = true; });
  input.addEventListener("blur", reset);
  input.addEventListener("keydown", (event) => {
    const value = input.valueAsNumber;
    if (event.key === "Escape") reset();
    else if (event.key === "Enter") {
      const good = Number.isFinite(value) && value >= 0;
      setAttr(input, "aria-invalid", !good);
      if (good) { edited = false; if (value !== store.lr) ask("lr", value); }
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      event.preventDefault();
      edited = true;
      input.value = String(+((value || 0) * (event.key === "ArrowUp" ? 1.1 : 1 / 1.1)).toPrecision(3));
    }
  });
  const update = () => {
    input.disabled = !LIVE.includes(store.status.state) || store.lr === null;
    if (!edited && !store.asked.has("lr") && input.value !== current()) input.value = current();
  };
  return { el, update };
}

function tiles(store) {
  const el = h("div", { class: "dtk-tiles", role: "list", "data-testid": "tiles" }); // JupyterLab styles dl, dt and dd
  const update = () => {
    while (el.children.length < store.tiles.length) {
      el.append(h("div", { role: "listitem" }, h("div", { class: "dtk-note" }), h("div", { class: "dtk-value" }), h("div", { class: "dtk-note" })));
    }
    store.tiles.forEach((tile, k) => {
      const [label, value, note] = el.children[k].children;
      setText(label, tile.label); setText(value, tile.value); setText(note, tile.note);
    });
  };
  return { el, update };
}

function banner(store) {
  const el = h("div", { class: "dtk-banner", role: "alert", "data-testid": "error", hidden: "" });
  return { el, update: () => { el.hidden = !store.error; setText(el, store.error ?? ""); } };
}

function lossChart(store, _send, redraw) {
  return chart(store, "loss", "loss-chart", {
    title: "Loss",
    note: (head) => (head.banded ? "mean, and the band from lowest to highest node" : head.ranks > 1 ? "per node and mean" : ""),
    overall: () => "mean",
    points: (st) => st.evaluations.filter((e) => Number.isFinite(e.values.loss ?? NaN)).map((e) => ({ step: e.step, value: e.values.loss })),
  }, redraw);
}

function throughputChart(store, _send, redraw) {
  return chart(store, "throughput", "throughput-chart", {
    title: "Throughput",
    fromZero: true,
    smooth: 64, // single steps of a few milliseconds say more of the scheduler than of the training (as in figures.py)
    note: (head) => (head.banded ? "samples/s: all ÷ nodes, and the band of nodes" : head.ranks > 1 ? "samples/s per node, and all ÷ nodes" : "samples/s"),
    overall: (head) => (head.ranks > 1 ? `all ÷ ${head.ranks}` : "all"),
  }, redraw);
}

const COLUMNS = ["node", "engine", "host", "pid", "device", "memory", "threads", "loss", "samples/s"];

function nodesTable(store) {
  const body = h("tbody"), note = h("span", { class: "dtk-note" });
  const table = h("table", {}, h("thead", {}, h("tr", {}, ...COLUMNS.map((c) => h("th", { scope: "col" }, c)))), body);
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "nodes-table" }, h("h3", {}, "Nodes ", note),
    h("div", { class: "dtk-scroll", tabindex: "0", role: "region", "aria-label": "table of nodes" }, table));
  let built = null;
  const update = () => {
    if (built !== store.nodes) {
      body.replaceChildren(...store.nodes.map((node) => nodeRow(node, store.head.banded)));
      built = store.nodes;
      const hosts = new Set(store.nodes.map((n) => n.host)).size;
      setText(note, hosts ? `${store.nodes.length} on ${hosts} ${hosts === 1 ? "host" : "hosts"}` : "");
    }
    store.nodes.forEach((node, k) => {
      const [loss, rate, memory] = store.ranks.subarray(3 * node.rank, 3 * node.rank + 3);
      const cells = body.children[k].children;
      const used = Number.isFinite(memory) ? memory : node.memory_total - node.memory_free;
      setText(cells[5], `${bytes(used)} of ${bytes(node.memory_total)}`);
      setText(cells[7], number(loss ?? NaN)); setText(cells[8], number(rate ?? NaN));
    });
  };
  return { el, update };
}
function nodeRow(node, banded) {
  const swatch = banded ? [] : [h("span", { class: `dtk-swatch dtk-n${node.rank}`, "aria-hidden": "true" })];
  return h("tr", { "data-rank": node.rank }, h("th", { scope: "row" }, ...swatch, String(node.rank)),
    ...[node.engine_id, node.host, node.pid, node.device, "", node.threads, "", ""].map((v) => h("td", {}, String(v))));
}

function log(store) {
  const lines = h("div", { class: "dtk-log", role: "log", "aria-live": "off", tabindex: "0", "data-testid": "log", "aria-label": "log" });
  const el = h("details", { class: "dtk-panel dtk-wide", open: "" }, h("summary", {}, "Log"), lines);
  let shown = null;
  const update = () => {
    if (shown === store.log || !store.log.length && !shown) return;
    const pinned = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    lines.replaceChildren(...store.log.map(logLine));
    if (pinned) lines.scrollTop = lines.scrollHeight;
    shown = store.log;
  };
  return { el, update };
}
function logLine(event) {
  const at = new Date(event.time * 1000).toLocaleTimeString("en-GB");
  const who = event.rank === null ? "" : `[${event.rank}] `;
  return h("div", { class: `dtk-event-${event.kind}` }, h("time", {}, at), h("span", { class: "dtk-at" }, `step ${event.step}`), `${who}${event.text}`);
}

/** For screen readers: the state at once, the numbers every quarter of a minute. */
function summary(store) {
  const el = h("div", { class: "dtk-hidden", role: "status", "aria-live": "polite", "data-testid": "summary" });
  let state = null, spoken = 0;
  const update = () => {
    const st = store.status;
    if (st.state === state && Date.now() - spoken < 15000) return;
    [state, spoken] = [st.state, Date.now()];
    const numbers = store.tiles.slice(0, 2).map((tile) => `${tile.label} ${tile.value}`).join(", ");
    setText(el, `${store.head.name} ${st.state}, step ${st.step} of ${st.steps}, ${numbers}`);
  };
  return { el, update };
}

const PANELS = [header, progress, controls, tiles, banner, lossChart, throughputChart, nodesTable, log, summary];

/** An error in a panel shows in that panel, and nowhere else. */
function guarded(panel) {
  return () => {
    try {
      panel.update();
      panel.broken?.remove();
      panel.broken = null;
    } catch (error) {
      panel.broken ??= panel.el.appendChild(h("p", { class: "dtk-broken" }));
      setText(panel.broken, `this panel failed: ${error.message}`);
    }
  };
}

// --------------------------------------------------------------------------------------------------- widget

/** Follow JupyterLab's theme where there is one, else the system's. Returns what ends that. */
function followTheme(root) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const set = () => {
    const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
    const dark = jpThemeLight ? jpThemeLight === "false" : vscodeThemeKind ? !vscodeThemeKind.includes("light") : system.matches;
    setAttr(root, "data-theme", dark ? "dark" : "light");
  };
  set();
  const observer = new MutationObserver(set);
  observer.observe(document.body, { attributes: true });
  system.addEventListener("change", set);
  return () => { observer.disconnect(); system.removeEventListener("change", set); };
}

function buildView(store, send) {
  const root = h("div", { class: "dtkit", "data-testid": "dtkit-dashboard", "data-state": "", "data-seq": 0, "data-lm-suppress-shortcuts": "true", role: "region", "aria-label": "training dashboard" });
  const body = h("div", { class: "dtk-body" });
  root.append(body);
  let asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
  const panels = PANELS.map((build) => build(store, send, redraw));
  body.append(...panels.map((panel) => panel.el));
  const updates = panels.map(guarded);
  const draw = () => {
    if (!store.head) return;
    for (const update of updates) update();
    setAttr(root, "data-state", store.status.state);
    setAttr(root, "data-step", store.status.step);
    setAttr(root, "data-seq", store.seq);
  };
  return { root, redraw };
}

export default () => {
  const store = newStore();
  const views = new Set();
  let asked = 0;
  const receive = (model, content, buffers) => {
    if (!apply(store, content, buffers) && Date.now() - asked > 1000) {
      asked = Date.now();
      model.send({ hello: "gap" });
    }
    for (const redraw of views) redraw();
  };
  return {
    initialize({ model }) {
      model.on("msg:custom", (content, buffers) => receive(model, content, buffers));
      const { content, buffers } = model.get("opening");
      receive(model, content, buffers);
      model.send({ hello: "opened" });
    },
    render({ model, el }) {
      const { root, redraw } = buildView(store, (message) => model.send(message));
      el.append(root);
      views.add(redraw);
      const stopTheme = followTheme(root);
      const size = new ResizeObserver(redraw);
      size.observe(root);
      const ticking = setInterval(redraw, 1000); // the clock of a long step
      redraw();
      return () => { views.delete(redraw); stopTheme(); size.disconnect(); clearInterval(ticking); };
    },
  };
};
