// Loss per node and mean, with validation; the figure has panels/loss.py.

import { chart } from "../chart.js";
import { number } from "../numbers.js";
import { evaluatedPoints } from "../store.js";

export function lossChart(store, _send, redraw) {
  return chart(store, "loss", {
    title: "Loss",
    testid: "loss-chart",
    canLog: true,
    pointName: "◇ validation",
    note: (_head, layout) => (layout.banded ? "mean, and the band from lowest to highest node" : layout.nodes > 1 ? "per node and mean" : ""),
    overall: (_head, last) => nameMean(last),
    points: (st) => evaluatedPoints(st, "loss"),
  }, redraw);
}

const MOST_DIGITS = 7; // next to its name

/** Return the mean's name with its last value, or its name alone where both have no room at a line's end. */
function nameMean(last) {
  const text = number(last);
  return Number.isFinite(last) && text.length <= MOST_DIGITS ? `mean ${text}` : "mean";
}
