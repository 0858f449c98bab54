// Rows of a report's table in the order of a column. A click on its name, or a key, changes the order.

import { h } from "./elements.js";

const LOWEST_FIRST = { none: "ascending", ascending: "descending", descending: "none" }; // "none" is the order as written
const HIGHEST_FIRST = { none: "descending", descending: "ascending", ascending: "none" };

/** Return the order after a click: the first click has the best on top, where Python knows that it is the highest. */
function chooseNextOrder(head) {
  return (head.dataset.best === "highest" ? HIGHEST_FIRST : LOWEST_FIRST)[head.getAttribute("aria-sort")];
}

/** Return whether cells have numbers, which Python writes beside their text. */
function isNumber(cell) {
  return cell.dataset.value !== undefined;
}
/** Compare two cells, numbers by value. One without a number is the last in both orders. */
function compareCells(first, second, sign) {
  if (isNumber(first) && isNumber(second)) return sign * (first.dataset.value - second.dataset.value);
  if (isNumber(first) !== isNumber(second)) return isNumber(first) ? -1 : 1;
  return sign * first.textContent.localeCompare(second.textContent, "en", { numeric: true });
}

/** Let each name of a column sort the rows of a table. */
export function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], written = [...body.rows];
  const sortBy = (column) => {
    const order = chooseNextOrder(heads[column]), sign = order === "ascending" ? 1 : -1;
    for (const head of heads) head.setAttribute("aria-sort", head === heads[column] ? order : "none");
    const compareRows = (first, second) => compareCells(first.cells[column], second.cells[column], sign);
    body.append(...(order === "none" ? written : written.toSorted(compareRows)));
  };
  heads.forEach((head, column) => {
    const button = h("button", { type: "button", title: "sort by this column" }, ...head.childNodes);
    button.addEventListener("click", () => sortBy(column));
    head.setAttribute("aria-sort", "none");
    head.append(button);
  });
}
