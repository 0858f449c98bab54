// Widths of elements, as of the browser's last layout. To read one in the middle of a frame, after other panels were
// drawn, would make the browser lay out the page for each panel.

/** Return the width of an element without its padding, which a panel has on the full screen. */
function contentWidth(el) {
  const { paddingLeft, paddingRight } = getComputedStyle(el);
  return Math.floor(el.clientWidth - (parseFloat(paddingLeft) || 0) - (parseFloat(paddingRight) || 0));
}

/**
 * Return a function that returns the width of `el`, the last one while it has none, and calls `redraw()` when it has
 * another one. With `isMoved`, the element has just been given another place, and is measured at once.
 */
export function newWidth(el, redraw) {
  let width = 0;
  const look = () => {
    const now = contentWidth(el), isOther = now > 0 && now !== width; // none while the page reloads its styles, after a change of theme
    if (isOther) width = now;
    return isOther;
  };
  new ResizeObserver(() => { if (look()) redraw(); }).observe(el);
  return (isMoved = false) => {
    if (isMoved || !width) look();
    return width;
  };
}
