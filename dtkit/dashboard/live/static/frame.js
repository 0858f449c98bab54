// The head of a panel: its title, a note, and its tools, which show while the panel has the pointer or the focus.

import { h, s, setAttr } from "./elements.js";
import { saveCsv, savePng, saveSvg } from "./export.js";
import { popover } from "./popover.js";

const FULL_ROOM = 190; // pixels of a full screen around the chart and its tools

/**
 * Return {head, attach(panel, redraw), add(button), height()} of a panel. `exports` has its `svg`, the key() of its picture and
 * `csv()`, rows of a table, or `saves`: [label, save()] of each download. The height is that of a chart on the full screen; null elsewhere.
 */
export function newFrame(title, note, { svg, csv, about = () => "", key = () => [], saves = chartSaves(title, { svg, csv, about, key }) }) {
  const head = h("h3", {}, h("span", { class: "dtk-title" }, title), " ", note);
  const tools = h("span", { class: "dtk-tools", role: "group", "aria-label": `tools of ${title}` });
  let panel = null;
  const isFull = () => panel !== null && panel.ownerDocument.fullscreenElement === panel;
  const full = h("button", { type: "button", class: "dtk-tool", "aria-label": `${title}: full screen`, title: "full screen", "data-testid": "full-screen" }, icon("M1,5V1H5M9,1H13V5M13,9V13H9M5,13H1V9"));
  full.addEventListener("click", () => (isFull() ? panel.ownerDocument.exitFullscreen() : panel.requestFullscreen()));
  tools.append(downloads(title, saves), full);
  const attach = (el, redraw) => {
    panel = el;
    el.append(tools);
    el.addEventListener("fullscreenchange", () => {
      setAttr(full, "aria-pressed", isFull());
      if (!isFull()) full.focus({ preventScroll: true }); // where the reader was before, also after Escape
      redraw();
    });
    el.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && isFull()) panel.ownerDocument.exitFullscreen(); // a page in a frame may get the key first
    });
  };
  return { head, attach, add: (button) => tools.prepend(button), height: () => (isFull() ? Math.max(240, panel.clientHeight - FULL_ROOM) : null) };
}

function chartSaves(title, { svg, csv, about, key }) {
  const heading = (isDrawn) => [title, about(isDrawn)].filter(Boolean).join(" · ");
  return [["PNG picture", () => savePng(svg, heading(true), key())], ["SVG picture", () => saveSvg(svg, heading(true), key())], ["CSV table", () => saveCsv(csv(), heading(false))]];
}
function downloads(title, saves) {
  const menu = popover(icon("M7,1V9M3.5,6L7,9.5L10.5,6M1.5,13H12.5"), `download ${title}`, "download", "menu");
  for (const [label, save] of saves) {
    const item = h("button", { type: "button", role: "menuitem", "data-testid": `save-${label.slice(0, 3).toLowerCase()}` }, label);
    item.addEventListener("click", () => { save(); menu.close(); });
    menu.box.append(item);
  }
  return menu.el;
}

/** Return a picture of 14 by 14 pixels for a button. */
export function icon(d) {
  return s("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true", class: "dtk-icon" }, s("path", { d }));
}
