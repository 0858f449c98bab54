// How often a page draws what messages bring. A training on the same cores is slower by what the page takes, so drawing
// keeps to a small share of one core. What a person does, and what they wait for, is drawn in the next frame.

// Shares of the page's own thread; the browser's other threads and processes take more than that again.
const SHARE = 0.01, SHARE_OF_SPARE_CORE = 0.1;
const CREDIT_MS = 300; // may be spent at once, so that single messages are drawn without delay
const SHORTEST_MS = 250, LONGEST_MS = 2500; // between two drawings in the long run

/**
 * Return {soon(), now()}. `redraw()` asks all views to draw in the next frame: soon() calls it within the share, and now()
 * at once. On cores that are all busy a frame takes longer, so frames are rarer there. Where `hasSpareCore()`, the share
 * is larger. `report(ms)` is called when the time between two drawings in the long run has changed much.
 */
export function newPacer(redraw, report, hasSpareCore = () => false) {
  let credit = CREDIT_MS, at = performance.now(), timer = null, isAsked = false, mean = 0, reported = SHORTEST_MS;
  const getShare = () => (hasSpareCore() ? SHARE_OF_SPARE_CORE : SHARE);
  const earn = () => {
    const now = performance.now();
    [credit, at] = [Math.min(CREDIT_MS, credit + getShare() * (now - at)), now];
  };
  const spend = (cost) => {
    earn();
    credit = Math.max(-getShare() * LONGEST_MS, credit - cost);
    mean = mean ? 0.7 * mean + 0.3 * cost : cost;
    const every = Math.round(Math.max(SHORTEST_MS, Math.min(LONGEST_MS, mean / getShare())));
    if (every > 1.5 * reported || every < reported / 1.5) report((reported = every));
  };
  const now = () => {
    clearTimeout(timer);
    timer = null;
    if (isAsked) return;
    isAsked = true;
    let began = 0;
    requestAnimationFrame(() => { began = performance.now(); });
    redraw();
    requestAnimationFrame(() => { isAsked = false; afterPainting(() => spend(performance.now() - began)); });
  };
  const soon = () => {
    if (isAsked || timer !== null) return;
    earn();
    if (credit >= 0) now();
    else timer = setTimeout(now, -credit / getShare());
  };
  return { soon, now };
}

/** Call a function after the browser has laid out and painted this frame. */
function afterPainting(call) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); call(); };
  port2.postMessage(null);
}
