// How often a page draws what messages bring. A training on the same cores is slower by what the page takes, so drawing
// keeps to a small share of one core. What a person does, and what they wait for, is drawn in the next frame.

// Shares of the page's own thread; the browser's other threads and processes take more than that again. The credit may be
// spent at once, so that single messages are drawn without delay.
const BUSY = { share: 0.006, creditMs: 40, shortestMs: 1000 }, SPARE = { share: 0.1, creditMs: 300, shortestMs: 250 };
export const LONGEST_MS = 2500; // between two drawings in the long run

/**
 * Return {soon(), now()}. `redraw()` asks all views to draw in the next frame: soon() calls it within the share, and now()
 * at once. On cores that are all busy a frame takes longer, so frames are rarer there. Where `hasSpareCore()`, the share
 * is larger. `report(ms)` is called when the time between two drawings in the long run has changed much.
 */
export function newPacer(redraw, report, hasSpareCore = () => false) {
  const getPace = () => (hasSpareCore() ? SPARE : BUSY);
  let credit = SPARE.creditMs, at = performance.now(), drawnAt = -Infinity, timer = null, isAsked = false, mean = 0, reported = 0;
  const earn = () => {
    const now = performance.now(), { share, creditMs } = getPace();
    [credit, at] = [Math.min(creditMs, credit + share * (now - at)), now];
  };
  const spend = (cost) => {
    earn();
    const { share, shortestMs } = getPace();
    credit = Math.max(-share * LONGEST_MS, credit - cost);
    mean = mean ? 0.7 * mean + 0.3 * cost : cost;
    const every = Math.round(Math.max(shortestMs, Math.min(LONGEST_MS, mean / share)));
    reported ||= shortestMs; // as the notebook begins
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
    requestAnimationFrame(() => { isAsked = false; afterPainting(() => spend(performance.now() - began)); });
  };
  const soon = () => {
    if (isAsked || timer !== null) return;
    earn();
    const { share, shortestMs } = getPace(), wait = Math.max(-credit / share, drawnAt + shortestMs - performance.now());
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
