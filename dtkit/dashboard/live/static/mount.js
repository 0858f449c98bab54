// Puts a view into each of its places in the page (placement.py), and hides the picture below the place.
//
// JupyterLab removes a cell from the page while the cell is out of sight, and puts the same elements back later.

const PLACE = "dtkit-live", MOUNTED = "dtkit-mounted", GONE_MS = 300_000;
// The output with the view, whose next one is the picture. A rule with `:has` would make the browser compute the styles of
// the whole view again whenever an element in it is new: 6 to 15 ms.
const OUTPUT = ".jp-OutputArea-child, .output_area", SHOWN = "dtkit-shown";

const MAX_CLOCK_DIFFERENCE_MS = 2000; // of kernel and browser

/**
 * Put a view into each place with this name, also into places that appear later.
 * Return a function that redraws all views in the page.
 *
 * `build(readKeptEnd)` makes a view and returns its {root, redraw, dispose}. `readKeptEnd` is null for a place that was made
 * after the page was loaded. For an older place, it is a function. This function returns the last step in the saved picture
 * of an ended run, or NaN.
 */
export function mountViews(name, build) {
  const views = new Map(); // by place
  const scan = () => {
    for (const place of views.keys()) mark(place, true);
    for (const place of document.getElementsByClassName(PLACE)) {
      if (place.dataset.dtkitLive !== name || views.has(place)) continue;
      const isRestored = 1000 * Number(place.dataset.dtkitShown) + MAX_CLOCK_DIFFERENCE_MS < performance.timeOrigin;
      const view = build(isRestored ? () => readEnd(place) : null);
      views.set(place, { ...view, seen: Date.now() });
      place.replaceChildren(view.root);
      place.classList.add(MOUNTED);
      mark(place, true);
      view.redraw();
    }
  };
  const isOwn = ({ target }) => target.nodeType === Node.ELEMENT_NODE && target.closest(".dtkit") !== null;
  const observer = new MutationObserver((changes) => { if (!changes.every(isOwn)) scan(); });
  observer.observe(document.body, { childList: true, subtree: true });
  scan();
  setInterval(() => sweep(views), GONE_MS / 5);
  return (isHeadOnly) => { for (const [place, view] of views) if (place.isConnected) view.redraw(isHeadOnly); };
}

/** Return the last step in the picture after a place; NaN unless the picture shows the end of a run (kept_picture.py). */
function readEnd(place) {
  const kept = place.closest(OUTPUT)?.nextElementSibling?.querySelector("[data-dtkit-end]");
  return Number(kept?.dataset.dtkitEnd ?? NaN);
}

/** Hide the picture after a place while its view is shown. */
function mark(place, isShown) {
  const output = place.closest(OUTPUT);
  if (output && output.classList.contains(SHOWN) !== isShown) output.classList.toggle(SHOWN, isShown);
}

/** Dispose of the views whose places left the page some time ago. */
function sweep(views) {
  for (const [place, view] of views) {
    if (place.isConnected) view.seen = Date.now();
    else if (Date.now() - view.seen > GONE_MS) {
      views.delete(place);
      view.dispose();
      place.replaceChildren();
      place.classList.remove(MOUNTED);
      mark(place, false);
    }
  }
}
