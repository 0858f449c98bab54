// The grid of panels: those of half the width are next to each other in pairs, in one order. Small ones have rows of their own.
//
// A chart has its half of a row also while it has no neighbor. A strip, which is as low as a line of text, has a whole one.

const SHOWN_PANEL = ".dtk-panel:not([hidden])", TWO_COLUMNS = 760; // pixels, as in dashboard.css
export const LONE = "dtk-lone"; // the class of a panel without a neighbor
const HEIGHTS = new WeakMap(); // by panel: {own, row}, pixels of a chart or a picture, and of the higher one in its row

/** Note how high a panel's chart or picture is by itself. Return how high its row lets it be. */
export function rowHeight(panel, own) {
  if (!HEIGHTS.has(panel)) HEIGHTS.set(panel, { own, row: 0 });
  const heights = HEIGHTS.get(panel);
  heights.own = own;
  return Math.max(own, heights.row);
}

/** Return a function that lays out the rows, and returns whether this changed a panel, which then is to be drawn again. */
export function newRows(body, redraw) {
  let width = 0;
  new ResizeObserver(([{ borderBoxSize: [{ inlineSize }] }]) => {
    if ((width < TWO_COLUMNS) !== (inlineSize < TWO_COLUMNS)) redraw();
    width = inlineSize;
  }).observe(body);
  return () => {
    const groups = groupHalves([...body.querySelectorAll(SHOWN_PANEL)].filter((el) => !el.closest(".dtk-off")));
    return groups.flatMap((group) => [markLone(group, width >= TWO_COLUMNS), levelRows(group, width >= TWO_COLUMNS)]).some(Boolean);
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

/** Mark the panels without a neighbor: the last of an odd number, and all in one column. */
function markLone(group, hasRows) {
  const isLone = (k) => !hasRows || (k === group.length - 1 && k % 2 === 0);
  const changed = group.filter((panel, k) => panel.classList.contains(LONE) !== isLone(k));
  for (const panel of changed) panel.classList.toggle(LONE);
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
