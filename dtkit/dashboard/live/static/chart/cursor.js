// The line and the dot at the pointed step of a chart. They lie over it and are moved by transforms alone: an element within
// the picture would make the browser paint all of its lines again with each move.

import { h } from "../elements.js";

/** Return {el, show(x, y, top, bottom, height), hide()}. `el` belongs behind the picture, whose height is `height`; y may be NaN. */
export function newCursor() {
  const line = h("i", { class: "dtk-cross" }), dot = h("i", { class: "dtk-dot-at" });
  const el = h("div", { class: "dtk-cursor", "aria-hidden": "true", hidden: "" }, line, dot);
  let long = NaN;
  const show = (x, y, top, bottom, height) => {
    if (el.hidden) el.hidden = false;
    if (long !== bottom - top) line.style.height = `${(long = bottom - top)}px`;
    line.style.transform = `translate(${x.toFixed(1)}px, ${(top - height).toFixed(1)}px)`;
    dot.style.transform = `translate(${x.toFixed(1)}px, ${(Number.isNaN(y) ? -1e4 : y - height).toFixed(1)}px)`;
  };
  return { el, show, hide: () => { if (!el.hidden) el.hidden = true; } };
}
