// The learning rate; the figure has panels/learning_rate.py.

import { chart } from "../chart.js";
import { LONE } from "../grid.js";
import { shortRate } from "../numbers.js";
import { known } from "./gradient_norm.js";

/** Return the chart of the rate. With `onlyChanges`, there is none of a rate that never changes. */
export function learningRateChart(store, _send, redraw, { onlyChanges = false } = {}) {
  return chart(store, "lr", {
    title: "Learning rate",
    testid: "learning-rate-chart",
    height: 130,
    fromZero: true,
    exact: true,
    stepped: true, // it is set from one step to the next
    note: (_head, layout) => describeRate(store, layout.first),
    overall: (_head, last) => shortRate(lastRate(store, last)),
    spanned: true, // a mean of two rates is none that was ever set
    format: shortRate,
    shown: (st) => !st.curves.used || (onlyChanges ? isRateChanging(rateRange(st, st.head.charts.lr.first)) : known(st, st.head.charts.lr.first)), // before the first step its place is kept
    isFlat: (st, el) => el.classList.contains(LONE) && !isRateChanging(rateRange(st, st.head.charts.lr.first)),
  }, redraw);
}

const ROUNDING = 1e-5; // curves are float32

/** Return the last rate where the last bucket has two of them, so that their mean stands for neither. */
function lastRate({ curves: { data, used }, head: { columns, charts }, lr }, last) {
  const at = ((used - 1) * columns + charts.lr.first) * 3, edges = [data[at], data[at + 2]];
  if (lr === null || data[at + 1] !== last || edges[0] === edges[1]) return last;
  return edges.find((edge) => Math.abs(edge - lr) <= ROUNDING * Math.abs(lr)) ?? last;
}

function describeRate(store, column) {
  const [low, high] = rateRange(store, column), { lr } = store;
  if (store.view.zoom && isRateChanging([low, high])) return "the same on all nodes"; // the last rate may be out of sight
  if (isRateChanging([low, high])) return describeLast(store, column);
  if (!Number.isFinite(low)) return lr === null ? "no step yet" : `${shortRate(lr)} from the first step on`;
  if (lr !== null && Number.isFinite(low) && Math.abs(lr - low) > ROUNDING * Math.abs(low)) return `${shortRate(lr)} from the next step on, ${shortRate(low)} until now`;
  return `${shortRate(lr)}, the same since the first step`;
}
/** Return the last rate and where it begins: next to a far larger one, a step from a small one to 0 can't be seen. */
function describeLast({ curves: { data, used, origin, width }, head: { columns }, marks }, column) {
  const edges = (b) => [data[(b * columns + column) * 3], data[(b * columns + column) * 3 + 2]];
  const [least, rate] = edges(used - 1);
  let first = used - 1;
  while (first > 0 && edges(first - 1).every((edge) => edge === rate)) first--;
  if (least !== rate || used - first < 2) return "the same on all nodes"; // it changes all the time
  const from = origin + first * width, event = width > 1 ? findRateEvent(marks, rate, from - LATE_BUCKETS * width, from + width) : undefined;
  const about = width > 1 && event === undefined ? "about " : "";
  return `${shortRate(+rate.toPrecision(6))} since ${about}step ${(event ?? from).toLocaleString("en-US")}, the same on all nodes`;
}
const LATE_BUCKETS = 3; // dispatches in flight have the old rate

/** Return the step of the last event between two steps that set this rate. Buckets know it only roughly. */
function findRateEvent(marks, rate, low, high) {
  const isIts = ({ kind, step, text }) => kind === "lr" && step >= low && step <= high && Math.abs(Number(text.split(" ").at(-1).replaceAll(",", "")) - rate) <= ROUNDING * Math.abs(rate);
  return marks.findLast(isIts)?.step;
}
function isRateChanging([low, high]) {
  return high > low;
}
/** Return the lowest and the highest learning rate of all steps. */
function rateRange(store, column) {
  const { data, used } = store.curves, { columns } = store.head;
  let [low, high] = [Infinity, -Infinity];
  for (let b = 0; b < used; b++) {
    const at = (b * columns + column) * 3;
    if (!Number.isNaN(data[at])) [low, high] = [Math.min(low, data[at]), Math.max(high, data[at + 2])];
  }
  return [low, high];
}
