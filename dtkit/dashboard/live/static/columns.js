// The tables of a report in two columns that end at about one height. Without scripts, and on paper, the browser fills the
// first column before the second one, so that a table with no room left in it leaves a hole.

const WIDE_PAGE = "screen and (min-width: 1300px)"; // as in report_page.py
const MOST_SECTIONS = 16; // all ways to divide them are tried

/** Return the sections of the left column as [bool]: the way to divide the heights with the least difference, the first one left. */
export function divideHeights(heights) {
  const whole = heights.reduce((sum, height) => sum + height, 0);
  let best = heights.map((_, k) => k === 0), least = Infinity;
  for (let chosen = 0; chosen < 2 ** (heights.length - 1); chosen++) {
    const isLeft = heights.map((_, k) => k === 0 || Boolean(chosen & (1 << (k - 1))));
    const left = heights.reduce((sum, height, k) => sum + (isLeft[k] ? height : 0), 0), difference = Math.abs(whole - 2 * left);
    if (difference < least) [best, least] = [isLeft, difference];
  }
  return best;
}

function measureHeights(sections) {
  return sections.map((section) => [...section.getClientRects()].reduce((sum, { height }) => sum + height, 0));
}
/** Return by how much one column ends before the other. */
function measureHole(sections) {
  const boxes = sections.flatMap((section) => [...section.getClientRects()]), left = Math.min(...boxes.map(({ x }) => x));
  const ends = [true, false].map((isLeft) => Math.max(...boxes.filter(({ x }) => (x === left) === isLeft).map(({ bottom }) => bottom)));
  return Number.isFinite(ends[1]) ? Math.abs(ends[0] - ends[1]) : Infinity;
}

/** Divide the sections of `el` where that leaves a smaller hole, once the page is wide. */
export function balanceColumns(el) {
  const sections = [...(el?.children ?? [])], wide = window.matchMedia(WIDE_PAGE);
  const balance = () => {
    if (!wide.matches || sections.length < 2 || sections.length > MOST_SECTIONS) return;
    wide.removeEventListener("change", balance);
    const before = measureHole(sections), isLeft = divideHeights(measureHeights(sections));
    const columns = [true, false].map((side) => {
      const column = document.createElement("div");
      column.append(...sections.filter((_, k) => isLeft[k] === side));
      return column;
    });
    sections.forEach((section, k) => { section.style.order = k; }); // of a narrow page
    el.replaceChildren(...columns);
    el.classList.add("balanced");
    if (measureHole(sections) < before) return;
    el.classList.remove("balanced"); // a long table goes on in the next column
    el.replaceChildren(...sections);
  };
  wide.addEventListener("change", balance);
  balance();
}
