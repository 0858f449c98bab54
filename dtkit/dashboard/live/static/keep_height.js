// The height of elements whose texts come and go.

const HELD_MS = 10_000;

/**
 * Let an element keep its height for a while after its content has become lower, so that messages that come and go don't
 * move what is below. hold(isNews) does so, and returns whether the element still keeps a height. It forgets the former
 * height where `isNews`, and in another width. isHeld() returns whether hold() would change nothing for the same content.
 */
export function keepHeight(el) {
  let tall = 0, until = 0, wide = 0, isNatural = true;
  const hold = (isNews) => {
    el.style.minHeight = "";
    if (isNews || el.offsetWidth !== wide) tall = 0;
    wide = el.offsetWidth;
    const now = el.offsetHeight;
    isNatural = now >= tall || Date.now() > until;
    if (isNatural) [tall, until] = [now, Date.now() + HELD_MS];
    el.style.minHeight = tall ? `${tall}px` : "";
    return tall > 0;
  };
  const isHeld = () => {
    if (isNatural) until = Date.now() + HELD_MS;
    return Date.now() <= until;
  };
  return { hold, isHeld };
}
