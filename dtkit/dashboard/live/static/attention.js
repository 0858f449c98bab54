// Whether a person is at the page: they have moved the pointer, typed, scrolled or touched it a short while ago. Where a
// training pays for each message, the kernel sends fewer of them to a page that nobody watches (attention.py).

const QUIET_MS = 30_000;
const SIGNS = ["pointermove", "pointerdown", "keydown", "wheel"];

/** Call `tell({page, isWatched})` now, and whenever a person comes or has gone. Return a function that ends this. */
export function followAttention(tell) {
  const page = Math.random().toString(36).slice(2);
  let seenAt = 0, timer = null;
  const look = () => {
    const left = document.hidden ? 0 : seenAt + QUIET_MS - Date.now();
    timer = left > 0 ? setTimeout(look, left) : null;
    if (timer === null) tell({ page, isWatched: false });
  };
  const see = () => {
    seenAt = Date.now();
    if (timer !== null) return;
    tell({ page, isWatched: true });
    timer = setTimeout(look, QUIET_MS);
  };
  const turn = () => { if (!document.hidden) see(); };
  const options = { passive: true, capture: true };
  for (const sign of SIGNS) document.addEventListener(sign, see, options);
  document.addEventListener("visibilitychange", turn);
  see();
  return () => {
    for (const sign of SIGNS) document.removeEventListener(sign, see, options);
    document.removeEventListener("visibilitychange", turn);
    clearTimeout(timer);
  };
}
