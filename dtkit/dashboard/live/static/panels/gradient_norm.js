// The norm of the gradient, where it is measured; the figure has panels/gradient_norm.py.

import { chart } from "../chart.js";
import { number } from "../numbers.js";

const NARROW_NORM = 320; // pixels of a plot

export function gradientNormChart(store, _send, redraw) {
  return chart(store, "grad_norm", {
    title: "Gradient norm",
    testid: "gradient-norm-chart",
    height: 130,
    canLog: true,
    note: (_head, _layout, view) => (view.frame?.width < NARROW_NORM ? "before clipping" : "over all nodes, before clipping"),
    overall: (_head, last) => number(last),
    shown: (st) => !st.curves.used || known(st, st.head.charts.grad_norm.first), // before the first step its place is kept
  }, redraw);
}

/** Return whether a column of the curves has any number. */
export function known(store, column) {
  const { data, used } = store.curves, { columns } = store.head;
  for (let b = used - 1; b >= 0; b--) if (!Number.isNaN(data[(b * columns + column) * 3])) return true;
  return false;
}
