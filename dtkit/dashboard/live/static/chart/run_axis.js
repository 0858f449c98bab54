// One horizontal axis for several runs, whose steps differ in time, samples and epochs: each line has its own positions.

import { duration, tickFormat, ticks } from "../numbers.js";
import { MILLISECONDS } from "./axis.js";
import { seriesGrain } from "./grain.js";

const PLACES = 256; // of a line; values between two of them are averaged
const THOUSANDTHS = 1000; // of an epoch: charts have whole positions

/** The axes that charts have instead of steps; `unit` is that of the positions. */
const RUN_AXES = {
  epoch: { label: "epoch", unit: "1/1000 epoch", of: (v) => v / THOUSANDTHS, step: (v) => v * THOUSANDTHS, format: (v) => `epoch ${+v.toFixed(2)}`, write: tickFormat, marks: ticks },
  time: MILLISECONDS,
  samples: { label: "samples", unit: "samples", of: (v) => v, step: (v) => v, format: (v) => `${Math.round(v).toLocaleString("en-US")} samples`, write: tickFormat, marks: (low, high, count) => ticks(low, high, count).filter(Number.isInteger) },
};

/** Return the axis of the charts of runs; undefined where it has steps. */
export function axisOfRuns(store) {
  return RUN_AXES[store.view.x];
}

/** Return the position of a run's step on the present axis: milliseconds, samples, or thousandths of an epoch. */
export function placeStep(store, run, step) {
  const { axes } = store.head, mode = store.view.x;
  if (mode === "time") return interpolate(axes.time[run], step);
  return mode === "epoch" ? step / axes.epoch[run] * THOUSANDTHS : step * axes.samples[run];
}

/** Return the step of a run at a position on the axis `mode`: the inverse of placeStep. */
function findStep({ head: { axes } }, mode, run, place) {
  if (mode === "time") return interpolate([...(axes.time?.[run] ?? [[], []])].reverse(), place);
  if (mode === "epoch") return place / THOUSANDTHS * axes.epoch[run];
  return mode === "samples" ? place / axes.samples[run] : place;
}

/** Return the value at `x` of a line through points, which goes on as it ends. */
function interpolate([xs, ys], x) {
  if (xs.length < 2) return ys.length ? ys[0] * x / Math.max(1, xs[0]) : x;
  let k = 1;
  while (k < xs.length - 1 && xs[k] < x) k++;
  return Math.max(0, ys[k - 1] + (x - xs[k - 1]) / (xs[k] - xs[k - 1] || 1) * (ys[k] - ys[k - 1]));
}

/** Return a grain of equal parts of the axis `mode` that knows which steps each run has in each part, for moving averages. */
export function withSteps(store, grain, mode, part = narrowestPart(grain)) {
  const half = mode === "step" ? 0.5 : 0; // the position of a step is its middle there, and its end on the other axes
  const at = (run, k, side) => findStep(store, mode, run, grain.step(k) + side * part / 2) - half;
  return withRunEnds(store, { ...grain, steps: (run, k) => [at(run, k, -1) + 1, at(run, k, 1)] });
}
/** Return the least distance of two points. The last part may be incomplete, and its point closer to the one before. */
function narrowestPart({ used, step }) {
  const whole = used > 2 ? used - 2 : used - 1;
  return Math.min(...Array.from({ length: whole }, (_, k) => step(k + 1) - step(k)), used > 1 ? Infinity : 1);
}
/** Return a grain that counts no steps after the last one of a run, which may be within a part. */
export function withRunEnds({ head: { axes } }, grain) {
  const steps = grain.steps ?? ((_, at) => grain.span(at));
  return { ...grain, steps: (run, at) => { const [from, to] = steps(run, at); return [from, Math.min(to, axes.last?.[run] ?? Infinity)]; } };
}

/**
 * Return a store whose steps are positions on the present axis, unless that has steps. The range in sight is the owner's, as the
 * charts share it.
 */
export function placedStore(store) {
  const isOn = () => axisOfRuns(store) !== undefined;
  const end = () => Math.max(1, ...store.head.runs.map((_, run) => Math.ceil(placeStep(store, run, store.head.axes.last[run]))));
  return Object.create(store, {
    status: { get: () => (isOn() ? { ...store.status, step: 0 } : store.status) },
    curves: { get: () => (isOn() ? { origin: 0, width: 1, used: store.curves.used && end() + 1, data: store.curves.data } : store.curves) },
    hover: { get: () => store.hover, set: (hover) => { store.hover = hover; } },
  });
}

/** Return a grain with the values of another one at their positions on the present axis. Of `exact` ones, none is averaged. */
export function placedGrain(store, grain, exact) {
  const runs = grain.lines - 1, last = Math.max(...store.head.runs.map((_, run) => placeStep(store, run, store.head.axes.last[run])));
  const part = exact ? 1e-9 : Math.max(1e-9, last / PLACES), rows = new Map();
  for (let run = 0; run < runs; run++) {
    const line = exact ? placeLine(store, grain, run) : fillBetween(averageParts(placeLine(store, grain, run), part), part);
    for (const [at, v] of line) {
      const place = exact ? Math.round(at) : (Math.floor(at / part) + 0.5) * part;
      if (!rows.has(place)) rows.set(place, new Array(runs + 1).fill(NaN));
      rows.get(place)[run] = v;
    }
  }
  const places = [...rows.keys()].sort((a, b) => a - b);
  const placed = seriesGrain({ points: places.length, lines: grain.lines, values: places.flatMap((place) => [place, ...rows.get(place)]) });
  return exact ? placed : withSteps(store, placed, store.view.x, part);
}

/** Return [position, value] of a line's known values; infinity where a gap within it begins, as in other series. */
function placeLine(store, grain, run) {
  const found = [];
  let gap = null;
  for (let at = 0; at < grain.used; at++) {
    const v = grain.value(run, at, 1), isLost = grain.isLost ? grain.isLost(run, at) : Number.isNaN(v);
    const place = placeStep(store, run, Math.min(grain.step(at), store.head.axes.last[run]));
    if (isLost) gap ??= place;
    if (Number.isNaN(v)) continue;
    if (gap !== null && found.length) found.push([gap, Infinity]);
    gap = null;
    found.push([place, v]);
  }
  return found;
}

/** Return the means of the values in each part of the axis. */
function averageParts(line, part) {
  const means = [];
  let sum = 0, count = 0, now = null;
  const end = () => { if (count) means.push([(now + 0.5) * part, sum / count]); };
  for (const [at, v] of [...line, [NaN, NaN]]) {
    const next = Math.floor(at / part);
    if (next !== now || v === Infinity) { end(); [sum, count, now] = [0, 0, next]; }
    if (v === Infinity) means.push([(next + 0.5) * part, v]);
    else [sum, count] = [sum + v, count + 1];
  }
  return means;
}

/** Return a line with values between those known, so that a pointer finds each run everywhere. */
function fillBetween(line, part) {
  return line.flatMap(([at, v], k) => {
    const [next, then] = line[k + 1] ?? [at, v], count = Math.round((next - at) / part);
    if (!Number.isFinite(v) || !Number.isFinite(then) || count < 2) return [[at, v]];
    return Array.from({ length: count }, (_, i) => [at + i * part, v + (then - v) * i / count]);
  });
}
