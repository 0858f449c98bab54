// Loss per node and mean, with validation; the figure has panels/loss.py.

import { chart } from "../chart.js";
import { lastEvaluated } from "../store.js";

export function lossChart(store, _send, redraw) {
  return chart(store, "loss", {
    title: "Loss",
    testid: "loss-chart",
    canLog: true,
    pointName: "◇ validation",
    note: (_head, layout) => (layout.banded ? "mean, and the band from lowest to highest node" : layout.nodes > 1 ? "per node and mean" : ""),
    overall: () => "mean",
    points: (st) => st.evaluations.filter((e) => e.step <= lastEvaluated(st) && Number.isFinite(e.values.loss ?? NaN)).map((e) => ({ step: e.step, value: e.values.loss })),
  }, redraw);
}
