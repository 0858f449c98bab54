// The learning rate; the figure has panels/learning_rate.py.

import { chart } from "../chart.js";
import { exponent } from "../numbers.js";
import { known } from "./gradient_norm.js";

export function learningRateChart(store, _send, redraw) {
  return chart(store, "lr", {
    title: "Learning rate",
    testid: "learning-rate-chart",
    height: 130,
    fromZero: true,
    exact: true,
    note: (_head, layout) => (changed(store, layout.first) ? "the same on all nodes" : `${shortRate(store.lr)}, the same since the first step`),
    overall: (_head, last) => shortRate(last),
    format: shortRate,
    shown: (st) => known(st, st.head.charts.lr.first),
    isFlat: (st) => !changed(st, st.head.charts.lr.first),
  }, redraw);
}

function shortRate(value) {
  if (value === null) return "";
  return value >= 1e5 ? exponent(value, 4) : String(+value.toPrecision(4));
}
/** Return whether the learning rate changes. */
function changed(store, column) {
  const { data, used } = store.curves, { columns } = store.head;
  let [low, high] = [Infinity, -Infinity];
  for (let b = 0; b < used; b++) {
    const at = (b * columns + column) * 3;
    if (!Number.isNaN(data[at])) [low, high] = [Math.min(low, data[at]), Math.max(high, data[at + 2])];
  }
  return high > low;
}
