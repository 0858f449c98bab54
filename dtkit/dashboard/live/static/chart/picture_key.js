// The key of a downloaded picture of a chart: the lines, bands, validations and marks that it shows.

import { s } from "../elements.js";
import { nodeName } from "../picking.js";
import { bandName } from "./band.js";
import { smoothing } from "./lines.js";
import { listMarkWords } from "./marks.js";

const PASSING = /\s*dtk-(dot|raw|faded|picked|pointed|unpointed)\b/g; // what isn't a line's own look

/** Return {sample, text} of each, with a sample of 20 by 12 pixels. A single line has its name in the title. */
export function listPictureKey(view, overall) {
  const { store, layout, options } = view, entries = [];
  for (let line = 0; line <= layout.nodes && layout.nodes > 0; line++) {
    const path = view.paths.get(`line${line}`), name = line === layout.nodes ? overall : options.lineName?.(store, line) ?? nodeName(store, line);
    if (path?.getAttribute("d")) entries.push({ sample: lineSample(path.getAttribute("class")), text: name });
  }
  return [...entries, ...spotEntries(view), ...bandEntries(view), ...smoothEntries(view), ...pointEntries(view), ...markEntries(view)];
}
function lineSample(look) {
  return s("path", { d: "M0,6h20", class: look.replace(PASSING, "") });
}
function spotEntries({ store, paths }) {
  const drawn = [...paths].filter(([key, path]) => key.startsWith("spot") && path.getAttribute("d"));
  return drawn.map(([, path]) => ({ sample: lineSample(path.getAttribute("class")), text: nodeName(store, Number(path.dataset.rank)) }));
}
function bandEntries(view) {
  const { grain, layout, paths } = view, drawn = [...paths].filter(([key, path]) => key.startsWith("band") && path.getAttribute("d"));
  if (!drawn.length) return [];
  const steps = grain.wide > 1 ? `${bandName(view)} of ${grain.wide.toLocaleString("en-US")} steps at a point` : "", nodes = layout.banded ? "lowest to highest node" : "";
  const look = layout.banded ? "dtk-band dtk-crowd" : "dtk-band-key";
  return [{ sample: s("rect", { y: 1, width: 20, height: 10, class: look }), text: `${drawn.length > 1 ? "bands" : "band"}: ${[nodes, steps].filter(Boolean).join(", ")}` }];
}
function smoothEntries(view) {
  const raw = smoothing(view) ? [...view.paths.values()].findLast((path) => path.classList.contains("dtk-raw") && path.getAttribute("d")) : null;
  return raw ? [{ sample: s("path", { d: "M0,6h20", class: `${raw.getAttribute("class").replace(PASSING, "")} dtk-raw` }), text: "pale: without smoothing" }] : [];
}
function pointEntries({ points = [], options, frame: { first, end } }) {
  const isSeen = Boolean(options.pointName) && points.some(({ step }) => step >= first && step <= end);
  return isSeen ? [{ sample: s("g", { class: "dtk-points" }, s("path", { d: "M6,6l4,-4l4,4l-4,4z" })), text: options.pointName.replace(/^◇ /, "") }] : [];
}
function markEntries({ store, whole, frame: { first, end } }) {
  const seen = store.marks.filter(({ step }) => step >= first && (end < whole[1] ? step : Math.min(step, end)) <= end);
  return listMarkWords(seen).map(({ kind, glyph, words }) => ({
    sample: s("g", { class: "dtk-sign" }, s("text", { x: 10, y: 10, "text-anchor": "middle" }, s("tspan", { class: `dtk-mark dtk-mark-${kind}` }, glyph))), text: words,
  }));
}
