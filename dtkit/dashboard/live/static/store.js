// The state of a run, from its messages: one store for each model, so that all its views show the same.
// messages.py builds the messages; buckets are merged here as in summary/curves.py.

const LOG = 200, EVALUATIONS = 2000;
/** A kernel sends a sign of life every two seconds; without one for so long, it is gone. */
const SILENCE_MS = 5000;
/** The states in which a run takes commands. */
export const LIVE = ["pending", "running", "paused"];

/** The kinds of events with a mark on the step axis, and the mark. */
export const MARKED = { pause: "‖", resume: "▶", lr: "lr", error: "✕", stop: "■", lost: "†", repair: "+", save: "↓", stuck: "⊘", diverged: "↗" };

/**
 * Return an empty store. `curves.data` is Float32 of shape (buckets, columns, 3): smallest, mean, largest; `head.charts`
 * has the columns of each chart. `curves.last` is the last step of the last bucket, which may have fewer than others. `bars` is Float32 of shape (bars, phases), in seconds; `ranks` of shape (ranks, 3); `spot.data`
 * of shape (buckets, charts, ranks); `strip.boxes` is Uint16 of shape (boxes, 5), see messages.py. `time`, `bars` and
 * `strip` are those of the zoomed steps once the kernel has sent them, and else `latest`. The owner of the store sets
 * `send` and `redraw`.
 */
export function newStore() {
  return {
    seq: 0, received: 0, head: null, nodes: [], status: null, lr: null, rates: [], tiles: [], throughput: null, error: null, refused: null, refusedAt: -Infinity,
    notices: [], verdict: null, latest: { time: null, bars: new Float32Array(0), strip: null }, nodesNow: { world: 0, lost: [], stuck: [], stopped: [], outliers: [], slow: [], slowed: [] },
    detail: null, selected: null, pointed: null, // the key of the lines at the pointer in the legend
     picking: false, effect: { count: 0, text: "" }, firstSteps: 0, effectAt: -Infinity, spot: null, pictures: new Map(), series: new Map(),
    beats: false, gone: false, lost: false, view: newView(), send: () => {}, redraw: () => {}, sight: { watch: () => {}, isAway: () => false }, pictureSight: { watch: () => {} }, attention: { watch: () => {}, forget: () => {}, update: () => {}, isHidden: () => false },
    log: [], marks: [], evaluations: [], newest: { evaluations: [], numbers: {} }, // that titles of charts have before the lines do
    ranks: new Float32Array(0), asked: new Map(), hover: null, // the step at the pointer
    curves: { width: 1, origin: 0, used: 0, data: new Float32Array(0) },
    get time() { return rangeInSight(this)?.time ?? this.latest.time; },
    get bars() { return rangeInSight(this)?.time ? this.detail.bars : this.latest.bars; },
    get strip() { return rangeInSight(this)?.strip ?? this.latest.strip; },
  };
}

/** Return the settings of the chart tools: `log` is the scale that a person chose for all charts, `ownLog` those for single
 * ones, and `autoLog` those that charts chose; `shownLog` has the scales of the charts in sight that can have either one.
 * `refresh` has the seconds between two updates, or 0 where they come as they can; `zoom` has the first and last step in sight, `hidden` the keys of lines; `sorting` is that of a table of runs. */
function newView() {
  return { x: "step", smooth: 0, log: null, ownLog: new Map(), autoLog: new Map(), shownLog: new Map(), robust: false, refresh: 0, zoom: null, hidden: new Set(), sorting: null };
}

/** Return whether charts have a logarithmic scale that they chose by themselves, and no person has chosen any for all. */
export function isLogAuto({ log, ownLog, autoLog, shownLog }) {
  return log === null && [...shownLog].some(([key, isLog]) => isLog && autoLog.get(key) && !ownLog.has(key));
}

/** Return how many charts have a logarithmic scale, and how many could. */
export function countLog({ shownLog }) {
  return [[...shownLog.values()].filter(Boolean).length, shownLog.size];
}

/** Return whether the charts have a logarithmic scale: true, false, or "mixed". */
export function isLogShown({ log, shownLog }) {
  const scales = new Set(shownLog.values());
  return scales.size > 1 ? "mixed" : [...scales][0] ?? log ?? false;
}

/** Return whether a run waits for its first start. */
export function isReady(store) {
  return store.status.state === "paused" && !(store.status.elapsed > 0);
}

/** Return the milliseconds between two updates that a person chose, while a run makes progress; 0 without a choice. */
export function refreshMs({ view, status }) {
  return ["pending", "running"].includes(status?.state) ? 1000 * view.refresh : 0;
}

/** Return whether the kernel of a run in progress was restarted, or sends nothing any more. */
export function isLost(store) {
  const isSilent = store.beats && Date.now() - store.heard > SILENCE_MS;
  return (store.gone || isSilent) && LIVE.includes(store.status?.state);
}

const TICKING_MS = 20_000; // longer than anything that a message shows for a while

/** Return whether time alone changes the view: the clock of a run in progress, or what the last message shows for a while. */
export function isTicking(store) {
  const isRunning = ["pending", "running"].includes(store.status?.state) && !store.lost;
  return isRunning || store.lost !== isLost(store) || Date.now() - store.received < TICKING_MS;
}

/** Return a text that changes with what a person waits for, or must see at once. */
export function pressing({ status, error, refused, effect, firstSteps, selected, picking, nodesNow, detail, asked, head, nodes }) {
  const { lost, stuck } = nodesNow, answers = asked.size ? [asked.size, status.step] : null;
  return JSON.stringify([status?.state, status?.activity?.text, error, refused, effect.count, firstSteps, selected, picking, lost, stuck, detail?.range, answers, head?.ranks, nodes.length]);
}

/** Apply a message. Return false if it doesn't follow the last one; the page then asks for a snapshot. */
export function apply(store, content, buffers) {
  [store.heard, store.gone] = [Date.now(), false];
  if (content.kind === "alive") {
    store.beats = true;
    return true;
  }
  if (content.kind === "text") {
    store.received = Date.now();
    applyHead(store, content);
    store.newest = content.newest ?? store.newest;
    return true;
  }
  if (content.kind === "refused") {
    [store.refused, store.refusedAt] = [content, Date.now()];
    store.asked.delete(content.command);
    return true;
  }
  if (content.kind === "picture") {
    const note = content.note ?? null, bytes = content.error === null && note === null ? raw(buffers[0]) : null;
    const since = store.pictures.get(content.name)?.since ?? Date.now();
    store.pictures.set(content.name, { error: content.error, note, bytes, wide: Boolean(content.wide), since });
    return true;
  }
  if (content.kind === "no picture") { // its panel was removed or replaced
    store.pictures.delete(content.name);
    return true;
  }
  if (content.kind === "detail") {
    const { range, curves, time = null, strip = null } = content, bars = floats(buffers[1]);
    store.detail = { ...curves, range, used: curves.buckets, data: floats(buffers[0]), time, bars, strip: strip && readStrip(strip, buffers[2]) };
    return true;
  }
  if (content.kind === "series") {
    applySeries(store, content.series, floats(buffers[0]));
    store.newest = { ...store.newest, numbers: {} };
    return true;
  }
  const whole = content.kind === "snapshot";
  if (content.seq <= store.seq) return true; // applied already
  if (!whole && content.base !== store.seq) return false;
  store.seq = content.seq;
  if (content.kind === "rest") { // curves that the last message had no room for
    applyCurves(store, content.curves, floats(buffers[0]));
    return true;
  }
  store.received = Date.now();
  applyHead(store, content);
  store.newest = { ...store.newest, evaluations: [] };
  for (const key of ["error", "notices"]) store[key] = content[key];
  if (content.verdict !== undefined) store.verdict = content.verdict;
  applyNow(store, content);
  store.head = content.head ?? store.head; // it changes when nodes are left out
  if (whole) {
    for (const key of ["marks", "evaluations"]) store[key] = content[key];
    store.log = content.events;
    store.detail = null; // a run may have gone back to a snapshot
    askForRange(store);
    store.curves = { width: content.curves.width, origin: content.curves.origin, used: 0, data: new Float32Array(0) };
  } else {
    const { events = [], evaluations = [] } = content; // panels draw a list again only where it is another one
    if (events.length) store.log = latest(store.log.concat(events));
    if (events.length) store.marks = store.marks.concat(events.filter((e) => e.kind in MARKED)).slice(-60);
    const { undone_after: end } = content; // the run went back to a snapshot
    if (end !== undefined) store.evaluations = store.evaluations.filter((e) => e.step <= end);
    if (evaluations.length) store.evaluations = thin(store.evaluations.concat(evaluations));
  }
  store.nodes = content.nodes ?? store.nodes;
  applyCurves(store, content.curves, floats(buffers[0]));
  const ranks = floats(buffers[1]);
  if (ranks.length) store.ranks = ranks;
  if (content.time) store.latest = { ...store.latest, time: content.time, bars: floats(buffers[2]) };
  if (content.spot) applySpot(store, content.spot, floats(buffers[3]));
  if (content.series) applySeries(store, content.series, floats(buffers[2])); // of a comparison
  if (content.strip) store.latest = { ...store.latest, strip: readStrip(content.strip, buffers[4]) };
  return true;
}

function readStrip(strip, buffer) {
  return { ...strip, boxes: new Uint16Array(raw(buffer).buffer), measured: strip.boxes };
}

/** Return the whole steps of the range in sight. */
export function wholeSteps([first, last]) {
  return [Math.floor(first), Math.ceil(last)];
}

/** Ask the kernel for what it knows of the range in sight, if a kernel is there and this is new. */
export function askForRange(store) {
  if (store.view.zoom && !store.lost && !store.head.runs && !rangeInSight(store)) store.send({ zoom: wholeSteps(store.view.zoom) });
}

/** Return what the kernel sent for exactly the range in sight; null where it sent nothing. */
function rangeInSight({ view: { zoom }, detail }) {
  return zoom && detail && String(detail.range) === String(wholeSteps(zoom)) ? detail : null;
}

/**
 * Return the last number of steps whose evaluation is drawn. While a run is fast, its curves follow some messages later,
 * and a line to a point beyond them would leave the chart.
 */
export function lastEvaluated({ curves, status }) {
  return LIVE.includes(status?.state) ? curves.origin + curves.used * curves.width : Infinity;
}

/** Return the validations of a number {step, value} that charts may show. */
export function evaluatedPoints(store, name) {
  const last = lastEvaluated(store);
  return store.evaluations.filter(({ step, values }) => step <= last && Number.isFinite(values[name] ?? NaN)).map(({ step, values }) => ({ step, value: values[name] }));
}

/** Return whether the user also logs a number of this name in the training. A chart then has both. */
export function isLogged({ series }, name) {
  return series.has(name) && !series.get(name).system;
}

/** Return the finer curves that the kernel sent for the range in sight; null where it sent none. */
export function detailInSight({ view: { zoom }, detail, curves }) {
  const covers = zoom && detail && detail.used && detail.width < curves.width && detail.range[0] <= zoom[0] && detail.range[1] >= zoom[1];
  return covers ? detail : null;
}

/** Return the last events, and the last marked ones before them, as messages.py does. */
function latest(events) {
  const marked = events.slice(0, -LOG).filter((e) => e.kind in MARKED);
  return [...marked.slice(-60), ...events.slice(-LOG)];
}
/** Return evaluations, every other one of the older half where there are too many. */
function thin(evaluations) {
  const half = Math.ceil(evaluations.length / 2);
  return evaluations.length <= EVALUATIONS ? evaluations : evaluations.filter((_, k) => k >= half || k % 2 === 0);
}
/** Return a copy of a buffer's bytes; it may be a DataView at an odd offset. */
function raw(buffer) {
  return (buffer.buffer ? new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength) : new Uint8Array(buffer)).slice();
}
function floats(buffer) {
  return new Float32Array(raw(buffer).buffer);
}

function applySeries(store, series, values) {
  for (const one of series) store.series.set(one.name, { ...one, values: values.subarray(one.first, one.first + one.points * (one.lines + 1)) });
}

function applyHead(store, content) {
  for (const key of ["status", "lr", "tiles", "throughput"]) store[key] = content[key];
  store.rates = content.rates ?? (store.lr > 0 ? [store.lr] : []); // that a new one is compared with
}

function applyNow(store, content) {
  store.nodesNow = content.nodes_now ?? store.nodesNow;
  if (content.effect.count !== store.effect.count) store.effectAt = Date.now();
  store.effect = content.effect;
  store.firstSteps += Boolean(content.is_first_step); // which a person waits for
  const selected = content.selected ?? null;
  if (store.picking && selected !== store.selected) return; // the kernel hasn't received this page's choice yet
  [store.selected, store.picking] = [selected, false];
}

/** Apply lines of single nodes. A new choice or a new width comes with whole lines. */
function applySpot(store, part, values) {
  const each = part.charts.length * part.ranks.length;
  const kept = part.first ? store.spot.data.subarray(0, part.first * each) : [];
  const data = new Float32Array(kept.length + values.length);
  data.set(kept);
  data.set(values, kept.length);
  store.spot = { ...part, data, used: part.first + part.buckets };
}

function applyCurves(store, part, values) {
  const curves = store.curves;
  const each = store.head.columns * 3; // floats in a bucket
  if (!curves.used) curves.origin = part.origin;
  while (curves.used && curves.width < part.width) join(curves, each);
  curves.width = part.width;
  curves.last = Math.max(curves.last ?? 0, part.last ?? Infinity);
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

/** Merge neighboring buckets, as in summary/curves.py, and double their width. */
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
