// Rows of a table in the order of a column, in a report and in a live comparison. A click on a column's name, or a key, changes the order.

import { h } from "./elements.js";

const LOWEST_FIRST = { none: "ascending", ascending: "descending", descending: "none" }; // "none" is the order as written
const HIGHEST_FIRST = { none: "descending", descending: "ascending", ascending: "none" };

/** Return the order after a click: the first click has the best on top, where Python knows that it is the highest. */
export function chooseNextOrder(order, isHighestBest) {
  return (isHighestBest ? HIGHEST_FIRST : LOWEST_FIRST)[order];
}

/** Return the indices of cells, {value, text} each, in an order: numbers by value. One without a number is the last in both orders. */
export function sortCells(cells, order) {
  const sign = order === "ascending" ? 1 : -1, places = [...cells.keys()];
  return order === "none" ? places : places.sort((a, b) => compareCells(cells[a], cells[b], sign));
}
function compareCells(first, second, sign) {
  const [isNumber, isOtherNumber] = [first, second].map(({ value }) => value !== undefined);
  if (isNumber && isOtherNumber) return sign * (first.value - second.value);
  if (isNumber !== isOtherNumber) return isNumber ? -1 : 1;
  return sign * first.text.localeCompare(second.text, "en", { numeric: true });
}

/** Put the name of a column into a button that sorts by it, and return the button. */
export function addSortButton(head, order, sort) {
  const button = h("button", { type: "button", title: "sort by this column" }, ...head.childNodes);
  button.addEventListener("click", sort);
  head.setAttribute("aria-sort", order);
  head.append(button);
  return button;
}

/** Let each name of a column sort the rows of a table. */
export function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], written = [...body.rows];
  const sortBy = (column) => {
    const order = chooseNextOrder(heads[column].getAttribute("aria-sort"), heads[column].dataset.best === "highest");
    for (const head of heads) head.setAttribute("aria-sort", head === heads[column] ? order : "none");
    const cells = written.map((row) => ({ value: row.cells[column].dataset.value, text: row.cells[column].textContent }));
    body.append(...sortCells(cells, order).map((k) => written[k]));
  };
  heads.forEach((head, column) => addSortButton(head, "none", () => sortBy(column)));
}
