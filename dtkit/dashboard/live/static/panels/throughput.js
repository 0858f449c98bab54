// Samples per second of each node without waiting, and of all with it, by replica; the figure has panels/throughput.py.

import { chart } from "../chart.js";
import { number } from "../numbers.js";

export function throughputChart(store, _send, redraw) {
  return chart(store, "throughput", {
    title: "Throughput",
    testid: "throughput-chart",
    fromZero: true,
    merged: 64, // single steps of a few milliseconds show the scheduler's noise (as in throughput.py)
    inverted: true, // the store has seconds per sample
    note: describeRates,
    overall: (head) => head.overall,
    overallName: (head) => head.overall,
    right: (head) => Math.max(72, 16 + 6.9 * head.overall.length),
    unit: "samples/s",
  }, redraw);
}

/** Say what the band is, and how the nodes' rates add up to the tile's. */
function describeRates({ replicas, overall }, layout, { store, grain }) {
  const band = grain.wide > 1 && !layout.banded ? ", band 10 to 90 %" : "";
  if (layout.nodes < 2 && !layout.banded) return `samples/s${band}`;
  const rate = replicas > 1 ? store.throughput / replicas : NaN;
  return `samples/s without waiting${band}${rate > 0 ? ` · ${overall} ${replicas} × ${number(rate)}` : ""}`;
}
