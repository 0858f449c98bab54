// Samples per second of each node and of all, divided by the number of replicas; the figure has panels/throughput.py.

import { chart } from "../chart.js";

export function throughputChart(store, _send, redraw) {
  return chart(store, "throughput", {
    title: "Throughput",
    testid: "throughput-chart",
    fromZero: true,
    merged: 64, // single steps of a few milliseconds show the scheduler's noise (as in throughput.py)
    note: (head, layout) => (layout.nodes > 1 || layout.banded ? "samples/s per node, without waiting" : "samples/s"),
    overall: (head) => head.overall,
    overallName: (head) => head.overall,
    right: (head) => Math.max(72, 16 + 6.9 * head.overall.length),
    unit: "samples/s",
  }, redraw);
}
