// Samples per second of each node without waiting, and of all with it, by replica; the figure has panels/throughput.py.

import { chart } from "../chart.js";
import { number } from "../numbers.js";

const NARROW = 320, NARROWEST = 250, LONG_RATE = 1000; // pixels of a plot; samples/s

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
    unit: "samples/s",
    help: (head) => `Lines of nodes: samples per second of their own work. "${head.overall}": the same with the time in which they wait for each other; the nodes together make a multiple of it. Bands: from 10 to 90 % of the steps at each point.`,
  }, redraw);
}

/** Say how the nodes' rates add up to the tile's, in short where the panel is narrow. */
function describeRates({ replicas, overall }, layout, { store, frame }) {
  if (layout.nodes < 2 && !layout.banded) return "samples/s";
  const rate = replicas > 1 && !store.view.zoom ? store.throughput / replicas : NaN;
  if (rate >= LONG_RATE && frame?.width < NARROWEST) return `${replicas}\u00a0×\u00a0${number(rate)} samples/s`;
  const unit = rate > 0 && frame?.width < NARROW ? "samples/s" : "samples/s without waiting";
  return `${unit}${rate > 0 ? ` · ${overall} ${replicas}\u00a0×\u00a0${number(rate)}` : ""}`;
}
