// The grid of panels: those of half the width are next to each other in pairs. Small ones have rows of their own.

const HALF = ".dtk-panel:not(.dtk-wide, [hidden])", ALONE = "dtk-alone";

/** Widen the last of an odd number of half-wide panels, so that no half of a row is empty. Return whether this changed. */
export function fillRow(body) {
  const shown = [...body.querySelectorAll(HALF)].filter((el) => !el.closest(".dtk-off, .dtk-small"));
  const lone = shown.length % 2 ? shown.at(-1) : null, before = body.querySelector(`.${ALONE}`);
  if (lone === before) return false;
  before?.classList.remove(ALONE);
  lone?.classList.add(ALONE);
  return true;
}
