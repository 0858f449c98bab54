// Rows of a report's table in the order of a column. A click on its name, or a key, changes the order.

import { h } from "./elements.js";

const NEXT_ORDERS = { none: "ascending", ascending: "descending", descending: "none" }; // "none" is the order as written

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
    const order = NEXT_ORDERS[heads[column].getAttribute("aria-sort")], sign = order === "ascending" ? 1 : -1;
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
