// The horizontal axis of all charts: steps, epochs, seconds of training, or samples.

import { duration, tickFormat, ticks } from "../numbers.js";

export const AXES = ["step", "epoch", "time", "samples"];

/**
 * Return {label, of(step), step(of), format(value), marks(low, high, count), write(marks)}: positions on the axis, and back to
 * steps. write() returns how one of these marks is written.
 */
export function xAxis(store) {
  const mode = store.view.x, head = store.head ?? {};
  if (mode === "time" && head.charts?.step_s) return timeAxis(store);
  const each = mode === "epoch" ? 1 / (head.steps_per_epoch || 1) : mode === "samples" ? head.batch || 1 : 1;
  const whole = mode !== "epoch";
  return {
    label: AXES.includes(mode) && mode !== "time" ? mode : "step",
    of: (step) => step * each,
    step: (v) => v / each,
    format: (v) => (whole ? Math.round(v).toLocaleString("en-US") : String(+v.toFixed(2))),
    write: tickFormat,
    marks: (low, high, count) => ticks(low, high, count).filter((v) => !whole || Number.isInteger(v)),
  };
}

/** The axis of a chart whose positions are milliseconds. */
export const MILLISECONDS = { label: "time", unit: "ms", of: (ms) => ms / 1e3, step: (seconds) => seconds * 1e3, format: duration, write: () => shortTime, marks: timeMarks };

/** Steps have taken what the buckets say; pauses don't count. */
function timeAxis(store) {
  const { curves, head } = store, column = head.charts.step_s.first, { used, width, origin } = curves;
  const ends = new Float64Array(used + 1); // seconds at the beginning of each bucket
  const last = Math.max(origin, store.status.step);
  for (let b = 0; b < used; b++) {
    const mean = curves.data[(b * head.columns + column) * 3 + 1], count = Math.min(width, last - origin - b * width + 1);
    ends[b + 1] = ends[b] + (Number.isFinite(mean) ? mean * Math.max(0, count) : 0);
  }
  const of = (step) => {
    if (!used) return step;
    const exact = Math.max(0, (step - origin + 1) / width), at = Math.min(used - 1, Math.floor(exact));
    const steps = Math.min(width, Math.max(1, last - origin - at * width + 1)) / width;
    return ends[at] + (ends[at + 1] - ends[at]) * Math.min(1, (exact - at) / steps);
  };
  const step = (seconds) => {
    let low = origin, high = last;
    while (high - low > 0.01) {
      const middle = (low + high) / 2;
      if (of(middle) < seconds) low = middle;
      else high = middle;
    }
    return high;
  };
  return { label: "time", of, step, format: duration, write: () => shortTime, marks: timeMarks };
}

const ROUND_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function timeMarks(low, high, count) {
  const wanted = (high - low) / Math.max(1, count), every = ROUND_S.find((v) => v >= wanted);
  if (wanted < 1 || !every) return ticks(low, high, count);
  const found = [];
  for (let k = Math.ceil(low / every); k * every <= high; k++) found.push(k * every);
  return found;
}
export function shortTime(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 60 || (seconds < 120 && seconds % 30)) return `${+seconds.toPrecision(3)} s`;
  return seconds < 7200 ? `${+(seconds / 60).toPrecision(3)} min` : `${+(seconds / 3600).toPrecision(3)} h`;
}
