// What a person may see of the views of a page: "watched" where they moved the pointer, typed, scrolled or touched it a short
// while ago, "hidden" where no view is in sight, and "open" otherwise. Where a training pays for each message, the kernel
// sends fewer of them to a page that is not watched, and hardly any to one that is hidden (attention.py). A person may choose
// to get fewer in any case.

const QUIET_MS = 30_000;
const AWAY_MS = 1000; // a reader who scrolls past a view, or back to it
const SIGNS = ["pointermove", "pointerdown", "keydown", "wheel"];

/**
 * Call `tell({page, level, refresh})` now, and whenever the level is another one, or update() finds another getRefresh(): the
 * seconds between two updates that a person chose, or 0. Return {watch(el), forget(el), update(), isHidden(), end()}; a page is
 * not hidden before `watch` got a view.
 */
export function followAttention(tell, getRefresh = () => 0) {
  const page = Math.random().toString(36).slice(2), inSight = new Map();
  let seenAt = Date.now(), told = "", toldRefresh = 0, timer = null, observer = null, awaySince = null;
  const isAway = () => inSight.size > 0 && ![...inSight.values()].some(Boolean);
  const isHidden = () => document.hidden || (awaySince !== null && Date.now() - awaySince >= AWAY_MS);
  const update = () => {
    awaySince = isAway() ? awaySince ?? Date.now() : null;
    const left = seenAt + QUIET_MS - Date.now(), level = isHidden() ? "hidden" : left > 0 ? "watched" : "open";
    clearTimeout(timer);
    const wait = awaySince !== null && level !== "hidden" ? AWAY_MS : level === "watched" ? left : null;
    timer = wait === null ? null : setTimeout(update, wait);
    if (level === told && getRefresh() === toldRefresh) return;
    [told, toldRefresh] = [level, getRefresh()];
    tell({ page, level, refresh: toldRefresh });
  };
  const see = () => {
    seenAt = Date.now();
    if (told !== "watched") update();
  };
  const turn = () => (document.hidden ? update() : see());
  const look = (entries) => {
    for (const { target, isIntersecting } of entries) if (inSight.has(target)) inSight.set(target, isIntersecting);
    update();
  };
  const options = { passive: true, capture: true };
  for (const sign of SIGNS) document.addEventListener(sign, see, options);
  document.addEventListener("visibilitychange", turn);
  update();
  return {
    watch: (el) => {
      inSight.set(el, true);
      (observer ??= new IntersectionObserver(look)).observe(el);
    },
    forget: (el) => {
      inSight.delete(el);
      observer?.unobserve(el);
      update();
    },
    update,
    isHidden,
    end: () => {
      for (const sign of SIGNS) document.removeEventListener(sign, see, options);
      document.removeEventListener("visibilitychange", turn);
      observer?.disconnect();
      clearTimeout(timer);
    },
  };
}
