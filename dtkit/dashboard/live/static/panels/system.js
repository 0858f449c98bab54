// Use of the machines: CPU, network, memory and GPU of each node over the steps.

import { seriesPanel } from "./scalars.js";

export function system(store, _send, redraw) {
  return seriesPanel(store, redraw, { title: "System", testid: "system", pick: (series) => series.system, height: 110, order: placeOfMachineNumber });
}
const MACHINE_ORDER = ["CPU", "waiting for a core", "memory", "network cards", "GPU", "GPU memory"];

/** Return a number's place among those of the machines: it is the same in all runs, whatever was measured first. */
function placeOfMachineNumber(name) {
  const place = MACHINE_ORDER.indexOf(name.replace("system/", "").replace(/ \(.*\)$/, ""));
  return place < 0 ? MACHINE_ORDER.length : place;
}
