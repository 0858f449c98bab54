// A sample of a run's line, as its charts have it, next to its name in a table or a legend.

import { runDash } from "./chart/lines.js";
import { s } from "./elements.js";

export function runLine(k) {
  return s("svg", { width: 34, height: 10, "aria-hidden": "true" }, s("path", { d: "M1,5h32", class: `dtk-line dtk-n${k % 8} dtk-dash${runDash(k)}` }));
}
