// Use of the machines: CPU, network, memory and GPU of each node over the steps.

import { seriesPanel } from "./scalars.js";

export function system(store, _send, redraw) {
  return seriesPanel(store, redraw, { title: "System", testid: "system", pick: (series) => series.system, height: 110 });
}
