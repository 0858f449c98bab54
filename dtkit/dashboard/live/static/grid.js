// The grid of panels: those of half the width are next to each other in pairs, in one order. Small ones have rows of their own.

const SHOWN_PANEL = ".dtk-panel:not([hidden])", ALONE = "dtk-alone", TWO_COLUMNS = 760; // pixels, as in dashboard.css
const HEIGHTS = new WeakMap(); // by panel: {own, row}, pixels of a chart or a picture, and of the higher one in its row

/** Note how high a panel's chart or picture is by itself. Return how high its row lets it be. */
export function rowHeight(panel, own) {
  if (!HEIGHTS.has(panel)) HEIGHTS.set(panel, { own, row: 0 });
  const heights = HEIGHTS.get(panel);
  heights.own = own;
  return Math.max(own, heights.row);
}

/** Return a function that leaves no part of a row empty, and returns whether this changed a panel, which then is to be drawn again. */
export function newRows(body, redraw) {
  let width = 0;
  new ResizeObserver(([{ borderBoxSize: [{ inlineSize }] }]) => {
    if ((width < TWO_COLUMNS) !== (inlineSize < TWO_COLUMNS)) redraw();
    width = inlineSize;
  }).observe(body);
  return () => {
    const groups = groupHalves([...body.querySelectorAll(SHOWN_PANEL)].filter((el) => !el.closest(".dtk-off")));
    return groups.flatMap((group) => [widenLast(group), levelRows(group, width >= TWO_COLUMNS)]).some(Boolean);
  };
}

/** Return the panels of half the width between those of the whole width, in groups. */
function groupHalves(panels) {
  const groups = [[]];
  for (const panel of panels) {
    if (panel.closest(".dtk-wide, .dtk-small")) groups.push([]);
    else groups.at(-1).push(panel);
  }
  return groups;
}

/**
 * Widen the last of an odd number of panels: it has no neighbor, and what is below keeps its place when one comes. A picture
 * keeps its size, or its letters would change theirs until it is drawn again.
 */
function widenLast(group) {
  const isAlone = (panel, k) => k === group.length - 1 && k % 2 === 0 && panel.dataset.testid !== "custom-panel";
  const changed = group.filter((panel, k) => panel.classList.contains(ALONE) !== isAlone(panel, k));
  for (const panel of changed) panel.classList.toggle(ALONE);
  return changed.length > 0;
}

/** Let the lower panel of each row be as high as the other one. */
function levelRows(shown, hasRows) {
  let isChanged = false;
  for (const [k, panel] of shown.entries()) {
    const other = HEIGHTS.get(shown[k % 2 ? k - 1 : k + 1]), heights = HEIGHTS.get(panel);
    if (!heights) continue;
    const row = hasRows && other ? Math.max(other.own, heights.own) : 0;
    isChanged ||= Math.max(row, heights.own) !== Math.max(heights.row, heights.own);
    heights.row = row;
  }
  return isChanged;
}
