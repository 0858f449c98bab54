// Pointing at a step, and zooming into a range of steps, by pointer and keyboard; all charts follow.

import { s, setAttr } from "../elements.js";
import { askForRange } from "../store.js";
import { noteZoom } from "../zoom_hint.js";

const DRAGGED_PX = 5;

/** Let the pointer and the keys act on the chart `view`; `view.point` has where the tooltip belongs. */
export function listenToChart(view, redraw) {
  listenToPointer(view, redraw);
  listenToKeys(view, redraw);
}

/** Show the steps of a range in all charts, and ask the kernel for what it knows of them; null shows all of them. */
export function zoomTo(store, range) {
  store.view.zoom = range && Math.abs(range[1] - range[0]) >= 1 ? [Math.min(...range), Math.max(...range)] : null;
  if (store.view.zoom) noteZoom();
  askForRange(store);
  store.redraw();
}

function listenToPointer(view, redraw) {
  const { store, svg } = view;
  const locate = (event) => event.clientX - svg.getBoundingClientRect().left;
  const to = (hover) => { store.hover = hover; redraw.pointed(); };
  let from = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button || !view.frame || event.target.closest(".dtk-labels")) return;
    from = locate(event);
  });
  svg.addEventListener("pointermove", (event) => {
    const x = locate(event);
    view.point = [event.clientX, event.clientY];
    if (from !== null && Math.abs(x - from) > DRAGGED_PX) {
      svg.setPointerCapture(event.pointerId);
      view.dragged = [from, x];
    }
    to(view.frame ? view.frame.stepAt(x) : null);
  });
  const end = (event) => {
    const { dragged } = view;
    [from, view.dragged] = [null, null];
    if (dragged && event.type === "pointerup") zoomTo(store, dragged.map((x) => view.frame.stepAt(x)));
    else redraw.pointed();
  };
  svg.addEventListener("pointerup", end);
  svg.addEventListener("pointercancel", end);
  svg.addEventListener("dblclick", () => zoomTo(store, null));
  svg.addEventListener("pointerleave", () => { view.point = null; if (!view.dragged) to(null); });
}

function listenToKeys(view, redraw) {
  const { store, svg } = view;
  const to = (hover) => { store.hover = hover; view.keyed = hover !== null; redraw.pointed(); };
  svg.addEventListener("blur", () => to(null));
  svg.addEventListener("keydown", (event) => {
    const { frame, grain } = view;
    if (event.key === "Escape" || event.key === "0") {
      if (event.key === "0" || store.hover === null) zoomTo(store, null);
      to(null);
      return;
    }
    if (!frame || !grain.used) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const scale = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (!by && !scale) return;
    event.preventDefault();
    const { first, end } = frame;
    if (scale) {
      const middle = store.hover ?? (first + end) / 2, half = (end - first) / 2 * scale, whole = view.whole;
      const range = [Math.max(whole[0], middle - half), Math.min(whole[1], middle + half)];
      zoomTo(store, range[0] <= whole[0] && range[1] >= whole[1] ? null : range);
      return;
    }
    const at = grain.find(store.hover ?? end);
    const next = Math.min(grain.find(end), Math.max(grain.find(first), at + by));
    to(Math.min(end, Math.max(first, grain.step(next))));
  });
}

/** Draw the range that is being dragged. */
export function drawDragged(view, top, bottom) {
  view.band ??= view.layers.dragged.appendChild(s("rect"));
  const { dragged, band } = view;
  const [a, b] = dragged ? [Math.min(...dragged), Math.max(...dragged)] : [0, 0];
  band.style.display = dragged ? "" : "none"; // or its edge would be seen
  for (const [name, value] of Object.entries({ x: a, width: b - a, y: top, height: bottom - top })) setAttr(band, name, value);
}
