// Rows of a table in the order of a column, in a report and in a live comparison. A click on a column's name, or a key, changes the order.
// The table of settings follows the table of runs.

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

/** Return a table in the order that a person chose, with the numbers of its runs, the order of each column, and how to sort it. */
export function sortTable(table, sorting) {
  const column = table.header.indexOf(sorting?.name), values = new Map((table.values ?? []).map(([row, k, value]) => [`${row} ${k}`, value]));
  const cells = table.rows.map((row, k) => ({ value: values.get(`${k} ${column}`), text: column ? row[column] ?? "" : `${table.runs[k] + 1}: ${row[0]}` })); // as it is shown, and as a report sorts it
  const order = column < 0 ? "none" : sorting.order, places = sortCells(cells, order), at = (row) => places.indexOf(row), runs = sorting ? places.map((k) => table.runs[k]) : table.runs;
  return {
    ...table,
    rows: places.map((k) => table.rows[k]),
    bold: table.bold.map(([row, k]) => [at(row), k]),
    small: table.small.map(([row, k, text]) => [at(row), k, text]),
    runs,
    sorted: order === "none" ? table.sorted : table.header.map((_, k) => (k === column ? order : "none")), // as written, by sort_by=
    sorting: runs.length > 1 ? sorting : undefined,
  };
}
/** Return a table of settings with its runs in another order: its rows, or its columns after the first. */
export function arrangeRuns(table, runs) {
  const places = runs.map((run) => table.runs.indexOf(run)), arrange = ([first, ...cells]) => [first, ...places.map((k) => cells[k])];
  const arranged = hasRunRows(table.header[0]) ? { rows: places.map((k) => table.rows[k]) } : { header: arrange(table.header), rows: table.rows.map(arrange) };
  return { ...table, ...arranged, runs };
}
/** Return whether a table of settings has a row for each run, by the name of its first column. Otherwise it has a column for each. */
export function hasRunRows(name) {
  return name === "run";
}
/** Put the name of a column into a button that sorts by it, and return the button. */
export function addSortButton(head, order, sort) {
  const button = h("button", { type: "button", title: "sort by this column" }, ...head.childNodes);
  button.addEventListener("click", sort);
  head.setAttribute("aria-sort", order);
  head.append(button);
  return button;
}

/** Let each name of a column sort the rows of a table; `onSort` gets the {name, order} of a column, and the places of the rows. */
export function makeSortable(table, onSort = () => {}) {
  const heads = [...table.tHead.rows[0].cells], orders = heads.map((head) => head.getAttribute("aria-sort") ?? "none"), names = heads.map(({ textContent }) => textContent), body = table.tBodies[0], written = [...body.rows];
  const sortBy = (column) => {
    const order = chooseNextOrder(heads[column].getAttribute("aria-sort"), heads[column].dataset.best === "highest");
    heads.forEach((head, k) => head.setAttribute("aria-sort", order === "none" ? orders[k] : k === column ? order : "none"));
    const cells = written.map((row) => ({ value: row.cells[column].dataset.value, text: row.cells[column].textContent }));
    const places = sortCells(cells, order);
    body.append(...places.map((k) => written[k]));
    onSort({ name: names[column], order }, places);
  };
  heads.forEach((head, column) => addSortButton(head, orders[column], () => sortBy(column)));
}

/** Return a function that arranges the runs of a report's table of settings by their places in it as written. */
export function makeArrangeable(table) {
  const body = table.tBodies[0], written = [...body.rows], cells = [...table.rows].map((row) => [...row.cells].slice(1));
  if (hasRunRows(table.rows[0].cells[0].textContent)) return (places) => body.append(...places.map((k) => written[k]));
  return (places) => [...table.rows].forEach((row, at) => row.append(...places.map((k) => cells[at][k])));
}
