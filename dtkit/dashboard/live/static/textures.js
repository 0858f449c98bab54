// The color and the texture of each phase of a step. Textures are SVG patterns with names of one view.

import { h, s } from "./elements.js";

/** Paths of an 8 by 8 tile; phases without a path are plain. */
export const TEXTURE = {
  data: "M2,1v2h-2v-2zM6,5v2h-2v-2z",
  backward: "M-2,2l4,-4M0,8l8,-8M6,10l4,-4",
  "backward input": "M-2,2l4,-4M0,8l8,-8M6,10l4,-4",
  "backward weight": "M2,0v8M6,0v8",
  waiting: "M-2,6l4,4M0,0l8,8M6,-2l4,4",
  send: "M0,2l3,2l-3,2M4,2l3,2l-3,2",
  receive: "M2,2h2v2h-2zM6,6h2v2h-2z",
  communication: "M0,8l8,-8M0,0l8,8",
  update: "M0,2h8M0,6h8",
};
/** Return a prefix for the names of one view's patterns. A page may have views of several kernels, each with its module. */
export function newPrefix() {
  return `dtk${Math.random().toString(36).slice(2, 10)}`;
}
export function phaseClass(phase) {
  return `dtk-${phase.replace(" ", "-")}`;
}
/** Return the patterns of a view, for its SVG. */
export function textures(prefix) {
  return s("defs", {}, ...Object.entries(TEXTURE).map(([phase, d]) =>
    s("pattern", { id: `${prefix}-${phaseClass(phase)}`, width: 8, height: 8, patternUnits: "userSpaceOnUse", class: phaseClass(phase) },
      s("rect", { width: 8, height: 8, class: "dtk-ground" }), s("path", { d, class: "dtk-texture" }))));
}
/** Return the attributes of an element in a phase's style. */
export function phaseLook(prefix, phase) {
  return { class: `dtk-phase ${phaseClass(phase)}`, "data-phase": phase, fill: TEXTURE[phase] ? `url(#${prefix}-${phaseClass(phase)})` : "" };
}
/** Return the key of a downloaded picture with these phases. */
export function listPhaseKey(phases, prefix) {
  return phases.map((phase) => ({ sample: s("rect", { width: 20, height: 12, ...phaseLook(prefix, phase) }), text: phase }));
}
/** Draw the legend of the phases below a panel, when it changes. */
export function drawLegend(legend, phases, prefix) {
  if (legend.dataset.phases === String(phases)) return;
  legend.dataset.phases = String(phases);
  legend.replaceChildren(...phases.map((phase) => h("li", {},
    s("svg", { width: 20, height: 12, "aria-hidden": "true" }, s("rect", { width: 20, height: 12, ...phaseLook(prefix, phase) })), phase)));
}
