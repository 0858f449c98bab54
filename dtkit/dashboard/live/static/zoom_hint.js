// How to zoom, for readers who haven't done so yet. The browser remembers who has, where it may keep something.

const ZOOMED_KEY = "dtkit-has-zoomed", ZOOMED_IN_PAGE = Symbol.for("dtkit has zoomed");
export const ZOOM_HINT = "drag over a chart to zoom in";

/** Remember that this reader knows how to zoom. */
export function noteZoom() {
  if (hasZoomed()) return;
  globalThis[ZOOMED_IN_PAGE] = true;
  try {
    window.localStorage.setItem(ZOOMED_KEY, "true");
  } catch {
    // A page in a sandbox, or with its storage full.
  }
}

/** Return whether this reader has zoomed before, in this page or in another one. */
export function hasZoomed() {
  return (globalThis[ZOOMED_IN_PAGE] ??= readZoomed());
}
function readZoomed() {
  try {
    return window.localStorage.getItem(ZOOMED_KEY) !== null;
  } catch {
    return false; // a page in a sandbox
  }
}
