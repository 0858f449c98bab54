// How often a page draws what messages bring. A training on the same cores is slower by what the page takes, so drawing
// keeps to a small share of one core. What a person does, and what they wait for, is drawn in the next frame.

// Shares of the page's own thread; the browser's other threads, and the notebook, take more than that again. With the
// engines on all cores, they all wait while one gives way, so that short steps lose as much time as is taken from a core.
// The shortest interval is a little less than a dispatch, so that each dispatch may be drawn when it ends.
const BUSY = { share: 0.01, shortestMs: 750 }, SPARE = { share: 0.1, shortestMs: 250 };
export const LONGEST_MS = 2500; // between two drawings, however long they take
const MEASURED = 5;

/**
 * Return {soon(), now()}. `redraw()` asks all views to draw in the next frame: soon() calls it within the share, and now()
 * at once. Where `hasSpareCore()`, the share is larger. `report(ms)` is called when the time between two drawings has
 * changed much. A drawing costs the least that the last ones took: another process that interrupts one makes it longer,
 * but not more work. The first ones, which make the panels, count only once there are enough.
 */
export function newPacer(redraw, report, hasSpareCore = () => false) {
  let costs = [], drawnAt = -Infinity, timer = null, isAsked = false, reported = 0;
  const interval = () => {
    const { share, shortestMs } = hasSpareCore() ? SPARE : BUSY, cost = costs.length < MEASURED ? 0 : Math.min(...costs);
    return Math.round(Math.max(shortestMs, Math.min(LONGEST_MS, cost / share)));
  };
  const measure = (cost) => {
    costs = [...costs, cost].slice(-MEASURED);
    const every = interval();
    reported ||= (hasSpareCore() ? SPARE : BUSY).shortestMs; // as the notebook begins
    if (every > 1.5 * reported || every < reported / 1.5) report((reported = every));
  };
  const now = () => {
    clearTimeout(timer);
    timer = null;
    if (isAsked) return;
    isAsked = true;
    let began = 0;
    requestAnimationFrame(() => { began = drawnAt = performance.now(); });
    redraw();
    requestAnimationFrame(() => { isAsked = false; afterPainting(() => measure(performance.now() - began)); });
  };
  const soon = () => {
    if (isAsked || timer !== null) return;
    const wait = drawnAt + interval() - performance.now();
    if (wait <= 0) now();
    else timer = setTimeout(now, wait);
  };
  return { soon, now };
}

/** Call a function after the browser has laid out and painted this frame. */
function afterPainting(call) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); call(); };
  port2.postMessage(null);
}
