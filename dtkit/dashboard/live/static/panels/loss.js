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
    measured: "loss",
    note: (_head, layout) => (layout.banded ? "mean, and the band from lowest to highest node" : layout.nodes > 1 ? "per node and mean" : ""),
    newest: () => meanTile(store),
    overall: (_head, last) => nameMean(store.view.zoom || store.view.smooth ? number(last) : meanTile(store) ?? number(last)),
    points: (st) => evaluatedPoints(st, "loss"),
  }, redraw);
}

const MOST_DIGITS = 7; // next to its name

/** Return the mean loss that the tiles have, so that both places show one number; null where there are no tiles. */
function meanTile({ tiles }) {
  return tiles.find(({ label }) => label === "mean loss")?.value ?? null;
}
/** Return the mean's name with its value, or its name alone where both have no room at a line's end. */
function nameMean(text) {
  return Number.isFinite(parseFloat(text)) && text.length <= MOST_DIGITS ? `mean ${text}` : "mean";
}
