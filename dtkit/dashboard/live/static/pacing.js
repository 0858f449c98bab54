// How often a page draws what messages bring. A training on the same cores is slower by what the page takes, so drawing
// keeps to a small share of one core. What a person does, and what they wait for, is drawn in the next frame.

import { afterPainting } from "./frames.js";

// Shares of the page's own thread; the browser's other threads, and the notebook, take more than that again. With the
// engines on all cores, they all wait while one gives way, so that short steps lose as much time as is taken from a core.
// The shortest interval is a little less than a dispatch, so that each dispatch may be drawn when it ends.
const BUSY = { share: 0.02, shortestMs: 750 }, SPARE = { share: 0.1, shortestMs: 250 };
const LONGEST_MS = 2500; // between two drawings of the charts, however long they take
const PARTS_MS = 60; // the parts of a message come one after the other, and are drawn at once
const MEASURED = 5;
const EARLY_MS = 500, LATE_PARTS_MS = 250; // where a person chose an interval: a message that comes a little sooner is drawn, too

/**
 * Return {soon(), now()}. soon(false) asks for the numbers above the charts only, since nothing else is new. `redraw(isHeadOnly)` asks all views to draw in the next frame: now() calls it at once, and soon()
 * after the shortest interval. The numbers above the charts are drawn each time, and the charts within the share. Where
 * `hasSpareCore()`, the share is larger. A drawing costs the least that the last ones with the charts took: another process
 * that interrupts one makes it longer, but not more work. The first ones, which make the panels, count only once there
 * are enough. Where getRefreshMs() is not 0, all is drawn at that interval.
 */
export function newPacer(redraw, hasSpareCore = () => false, getRefreshMs = () => 0) {
  let costs = [], drawnAt = -Infinity, chartsAt = -Infinity, timer = null, isAsked = false, areChartsOld = false;
  /** Return the time to the next drawing, and whether that is one of the head only. The time between two drawings of the
   * charts is a multiple of the former. */
  const plan = () => {
    const refreshMs = getRefreshMs();
    if (refreshMs) return { wait: Math.max(LATE_PARTS_MS, drawnAt + refreshMs - EARLY_MS - performance.now()), isHeadOnly: !areChartsOld };
    const { share, shortestMs } = hasSpareCore() ? SPARE : BUSY, cost = costs.length < MEASURED ? 0 : Math.min(...costs);
    const chartsMs = Math.max(shortestMs, Math.min(LONGEST_MS, cost / share)), drawings = Math.round(chartsMs / shortestMs);
    const every = chartsMs / drawings, now = performance.now();
    return { wait: drawnAt + every - now, isHeadOnly: !areChartsOld || now + every / 2 < chartsAt + chartsMs };
  };
  const draw = (isHeadOnly) => {
    clearTimeout(timer);
    timer = null;
    if (isAsked) return void (isHeadOnly || redraw(false)); // the drawing that was asked for may be of the head only
    isAsked = true;
    areChartsOld &&= isHeadOnly;
    let began = 0;
    requestAnimationFrame(() => {
      began = drawnAt = performance.now();
      if (!isHeadOnly) chartsAt = began;
    });
    redraw(isHeadOnly);
    requestAnimationFrame(() => {
      isAsked = false;
      if (!isHeadOnly) afterPainting(() => { costs = [...costs, performance.now() - began].slice(-MEASURED); });
    });
  };
  const drawDue = () => draw(plan().isHeadOnly);
  const soon = (bringsCharts = true) => {
    areChartsOld ||= bringsCharts;
    if (isAsked || timer !== null) return;
    timer = setTimeout(drawDue, Math.max(PARTS_MS, plan().wait));
  };
  return { soon, now: () => draw(false) };
}
