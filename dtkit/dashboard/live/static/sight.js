// Panels out of sight: they aren't drawn until they come into sight, except now and then, for searches of the page's text.

const ALL_MS = 60_000;

/** Return {watch(el), isAway(el), drawAll(), drawn()}: until drawn(), drawAll() lets no panel be away. */
export function newSight(redraw) {
  const away = new WeakSet();
  let isAll = true, allAt = 0, observer = null;
  const look = (entries) => {
    let isBack = false;
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) away.add(target);
      else if (away.delete(target)) isBack = true;
    }
    if (isBack) redraw();
  };
  return {
    watch: (el) => (observer ??= new IntersectionObserver(look)).observe(el),
    isAway: (el) => !isAll && !el.hidden && away.has(el), // a hidden one may be about to show itself
    drawAll: () => { isAll = true; },
    drawn: () => {
      if (isAll) allAt = Date.now();
      isAll = Date.now() - allAt > ALL_MS;
    },
  };
}
