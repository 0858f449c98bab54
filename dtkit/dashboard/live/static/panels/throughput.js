// Samples per second of each node without waiting, and of all with it, by replica; the figure has panels/throughput.py.

import { chart } from "../chart.js";
import { number } from "../numbers.js";

const NARROW = 320;

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

/** Say what the band is, and how the nodes' rates add up to the tile's, in short where the panel is narrow. */
function describeRates({ replicas, overall }, layout, { store, frame, grain }) {
  const isNarrow = frame?.width < NARROW;
  const band = grain.wide > 1 && !layout.banded && !isNarrow ? ", band 10 to 90 %" : "";
  if (layout.nodes < 2 && !layout.banded) return `samples/s${band}`;
  const rate = replicas > 1 ? store.throughput / replicas : NaN;
  const unit = rate > 0 && isNarrow ? "samples/s" : "samples/s without waiting";
  return `${unit}${band}${rate > 0 ? ` · ${overall} ${replicas} × ${number(rate)}` : ""}`;
}
