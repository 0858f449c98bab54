// Several runs in one view: charts with a line for each, and tables. Runs take the place of nodes.

import { chart } from "./chart.js";
import { MILLISECONDS } from "./chart/axis.js";
import { bucketGrain, seriesGrain } from "./chart/grain.js";
import { describeEqualLines } from "./chart/lines.js";
import { axisOfRuns, placedGrain, placedStore, withRunEnds, withSteps } from "./chart/run_axis.js";
import { h, keepKeys, setAttr, setText } from "./elements.js";
import { drawPointed, newFrames } from "./frames.js";
import { newRows } from "./grid.js";
import { number } from "./numbers.js";
import { runLine } from "./run_line.js";
import { addSortButton, arrangeRuns, chooseNextOrder, hasRunRows, sortTable } from "./sorting.js";
import { toolbar } from "./toolbar.js";

const MOST_LINES = 3, HEIGHT = 240;

function lineName({ head: { names } }, line) {
  return `${line + 1}: ${names[line]}`;
}
const BREAKS = /(?<=\s)(?!\d)|(?<=,)(?!\s)|(?<=\()(?!\))/; // after blanks, commas and brackets, but not within "()" or "lr 0.1"

/** Return a run's name from the last word on with which all names begin, and from the first that differs. */
function distinctNames(runs, line) {
  const words = runs.map((name) => name.split(BREAKS)), shortest = Math.min(...words.map((each) => each.length)) - 1;
  let common = 0;
  while (common < shortest && words.every((each) => each[common] === words[0][common])) common += 1;
  const ending = words[line].slice(common).join(""), isCommon = runs.length > 1;
  return [isCommon && common > 1 ? `…${words[line][common - 1]}${ending}` : runs[line], isCommon && common ? `…${ending}` : runs[line]];
}
/** Return how many words two names have in common at their beginning. The last word of each is never one of them. */
function countShared(words, other) {
  const most = Math.min(words.length, other.length) - 1, differing = words.slice(0, most).findIndex((word, k) => word !== other[k]);
  return differing < 0 ? Math.max(0, most) : differing;
}
/** Return the part of a run's name that tells it from the names that begin like it, such as "lr 0.1". */
function distinctPart(runs, line) {
  const [own, ...others] = [runs[line], ...runs.filter((_, other) => other !== line)].map((name) => name.split(BREAKS));
  const from = Math.max(0, ...others.map((other) => countShared(own, other))), like = others.filter((other) => countShared(own, other) === from);
  const rests = [own, ...like].map((words) => words.slice(from).reverse()), same = like.length ? Math.min(...rests.slice(1).map((rest) => countShared(rests[0], rest))) : 0;
  const part = own.slice(from, own.length - same).join("").trim().replace(/,$/, "");
  return part.includes("(") ? part : part.replace(/\)+$/, ""); // whose bracket is in the part before
}
/** Return a run's name at the end of its line, as lines of text. It begins with its number in the table, in all charts alike. */
function labelLines({ head: { runs } }, line, room, width) {
  if (width < SMALL_PX) return [shortName(runs, line, Math.floor((width / 5 - SMALL_ROOM.beside) / SMALL_ROOM.letter))];
  const most = Math.max(1, Math.min(MOST_LINES, room)), whole = wrapName(`${line + 1}: ${runs[line]}`, LONGEST);
  if (whole.length === 1) return whole;
  const names = distinctNames(runs, line).map((name) => wrapName(`${line + 1}: ${name}`, LONGEST)), cut = names[1].slice(0, most);
  const fitting = names.find((distinct) => distinct.length <= most);
  if (fitting) return fitting;
  if (most === 1) return [`${names[1].join("").slice(0, LONGEST - 1)}…`];
  return [...cut.slice(0, -1), `${cut.at(-1).trimEnd().slice(0, LONGEST - 1)}…`];
}
const LONGEST = 22; // letters of a line
const SMALL_PX = 580; // of a chart, below which names have a fifth of it at most; the legend has them whole
const ROOM = { beside: 24, letter: 7 }, SMALL_ROOM = { beside: 12, letter: 6.6 }; // pixels

/** Return a run's name for a small chart: its number with its name, or with what is distinct in it, or alone. */
function shortName(runs, line, longest) {
  const names = [runs[line], distinctPart(runs, line)].map((name) => `${line + 1}: ${name}`);
  return names.find((name) => name.length <= longest) ?? `${line + 1}`;
}
/** Return a name in lines, broken after blanks, commas and brackets; words that are written as one only where they must. */
function wrapName(name, longest) {
  const pieces = (part) => (part.trimEnd().length <= longest ? [part] : part.split(/(?<=[a-z])(?=[A-Z])/).flatMap((word) => word.match(new RegExp(`.{1,${longest}}`, "g"))));
  const lines = [""];
  for (const part of name.split(BREAKS).flatMap(pieces)) {
    if (lines.at(-1) && (lines.at(-1) + part).trimEnd().length > longest) lines.push("");
    lines.push(lines.pop() + part);
  }
  return lines;
}
const LINES = { height: HEIGHT, canLog: true, overall: () => "", lineName, labelLines, right: labelRoom, help: (head) => head.help };
const LATE = 0.85; // of the width: lines that end before have their names within the chart

/** Return the room for the names of those runs that reach the right end of a chart. */
function labelRoom(head, { grain, width }, label = labelLines) {
  const from = Math.floor(LATE * grain.used), late = head.runs.map((_, line) => line).filter((line) => {
    for (let at = from; at < grain.used; at++) if (!Number.isNaN(grain.value(line, at, 1))) return true;
    return false;
  });
  const { beside, letter } = width < SMALL_PX ? SMALL_ROOM : ROOM;
  return beside + letter * Math.max(5, ...late.flatMap((line) => label({ head }, line, MOST_LINES, width).map((text) => text.trimEnd().length)));
}

/** Return a run's name as lines of text, or where its loss left the chart, with the number that the run has in the legend. */
function lossLabelLines({ head }, line, room, width) {
  return head.left[line] ? [`${line + 1}: ${head.left[line]}`] : labelLines({ head }, line, room, width);
}
const LOSS_LINES = { ...LINES, labelLines: lossLabelLines, right: (head, view) => labelRoom(head, view, lossLabelLines) };

const AGAINST = { step: "steps", epoch: "epochs", time: "time", samples: "samples" };

/** Return a grain of means alone: bands of several runs would hide their lines, and other charts of the loss have none. */
function meansOf(grain) {
  return { ...grain, wide: 1, value: (line, at) => grain.value(line, at, 1) };
}

function mainChart(store, redraw) {
  const buckets = (st) => withRunEnds(st, meansOf(bucketGrain(st.curves, st.head.columns, st.head.charts.loss)));
  const panel = chart(placedStore(store), "loss", {
    ...LOSS_LINES,
    get title() { return `Loss against ${AGAINST[store.view.x]}`; },
    get axis() { return axisOfRuns(store); },
    get joined() { return axisOfRuns(store) !== undefined; },
    testid: "comparison-chart",
    most: (st) => st.head.most ?? Infinity,
    lead: (view) => describeLines(view, store.head.most),
    note: () => "mean of nodes",
    grain: () => (axisOfRuns(store) ? placedGrain(store, buckets(store), false) : buckets(store)),
  }, redraw);
  const heading = panel.el.querySelector(".dtk-title");
  return { ...panel, update: () => { setText(heading, `Loss against ${AGAINST[store.view.x]}`); panel.update(); } };
}

/** Return above which value a chart leaves values out, and which runs have one line; an empty text where there is no such thing. */
function describeLines(view, most) {
  return [most == null ? "" : `above ${number(most)} left out`, describeEqualLines(view)].filter(Boolean).join(" · ");
}

/** Return the chart of a series: the loss against time, a validation metric, or a number that runs logged. */
function comparedChart(store, name, redraw) {
  const of = () => store.series.get(name), isTime = name === "time", isLogged = name.startsWith("dtkit.log/"), isRate = name === "dtkit.rate", own = isTime ? timedStore(store) : placedStore(store);
  const axis = () => (isTime ? MILLISECONDS : axisOfRuns(store)), isExact = !isTime && !isLogged && !isRate;
  return chart(own, name, {
    ...(isTime || name === "loss" ? LOSS_LINES : LINES),
    title: of().title,
    testid: isTime ? "time-chart" : isRate ? "rate-chart" : isLogged ? "logged-chart" : "metric-chart",
    canLog: isLogged ? "positive" : isTime || name === "loss",
    fromZero: isRate,
    unit: isRate ? "samples/s" : undefined,
    exact: isExact,
    help: isExact || isLogged ? undefined : LINES.help,
    shown: () => !isTime || store.view.x !== "time",
    joined: true,
    get axis() { return axis(); },
    most: () => of().most ?? Infinity,
    lead: (view) => describeLines(view, of().most),
    note: () => (isTime ? "time in steps only" : isRate ? "samples/s of all nodes" : isLogged ? "logged, mean of nodes" : ""),
    layout: () => ({ name, first: 0, nodes: of().lines - 1, banded: false }),
    grain: () => (!isTime && axis() ? placedGrain(store, seriesGrain(of()), isExact) : withSteps(store, seriesGrain(of()), isTime ? "time" : "step")),
    format: number,
  }, redraw);
}
/** Return a store with its own pointer and range in sight: positions are milliseconds there, and not steps. */
function timedStore(store) {
  const of = () => store.series.get("time"), end = () => of().values[(of().points - 1) * (of().lines + 1)];
  return Object.create(store, {
    view: { value: Object.create(store.view, { zoom: { value: null, writable: true } }) },
    hover: { value: null, writable: true },
    status: { get: () => ({ ...store.status, step: 0 }) },
    curves: { get: () => ({ origin: 0, width: 1, used: end() + 1, data: store.curves.data }) },
  });
}

function comparedCharts(store, redraw) {
  const el = h("div", { class: "dtk-several" }), shown = new Map();
  const update = () => {
    for (const name of store.series.keys()) {
      if (shown.has(name)) continue;
      shown.set(name, comparedChart(store, name, redraw));
      el.append(shown.get(name).el);
    }
    for (const one of shown.values()) one.update();
  };
  return { el, update, parts: () => [...shown.values()] };
}

/**
 * Return a table with number and line of each run, as in the charts. Only a legend may be turned. `sorting` has the
 * column by which a person sorts it, {name, order}, and `sort(name, order)`; it is left out where none may.
 */
function tableOf(read, { testid, label, isLegend, sorting }) {
  const scroll = h("div", { class: "dtk-scroll dtk-high", tabindex: "0", role: "region", "aria-label": label }), note = h("p", { class: "dtk-note dtk-table-note" });
  const causes = h("ul", { class: "dtk-notices", "data-testid": "causes", "aria-label": "runs that failed or diverged" });
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": testid }, scroll, causes, note);
  let shown = "";
  const update = () => {
    const { table, text, names, ends = [] } = read();
    el.hidden = !table;
    const now = JSON.stringify([table, text, ends, el.clientWidth, sorting]);
    if (!table || now === shown || scroll.querySelector("button:active")) return; // a new button would miss the click
    shown = now;
    setText(note, text ?? "");
    causes.hidden = !ends.length;
    causes.replaceChildren(...ends.map((line) => h("li", {}, line)));
    const sorted = sortTable(table, sorting);
    fitTable(scroll, isLegend ? [[sorted, false], [turned(sorted), true]] : [[sorted, !hasRunRows(table.header[0])]], names);
  };
  return { el, update };
}
/** Show the first of the tables that fits: with narrow cells if need be. If none does, the narrowest scrolls. */
function fitTable(scroll, tables, names) {
  const { scrollLeft } = scroll, focused = scroll.querySelector("button:focus")?.dataset.column;
  const keepPlace = () => { // which new elements lost
    scroll.scrollLeft = scrollLeft;
    if (focused !== undefined) [...scroll.querySelectorAll("button")].find(({ dataset }) => dataset.column === focused)?.focus({ preventScroll: true });
  };
  let best = null;
  for (const isNarrow of [false, true]) {
    for (const [table, isTurned] of tables) {
      const show = () => { scroll.classList.toggle("dtk-narrow", isNarrow); scroll.replaceChildren(tableElement(table, isTurned, names)); };
      show();
      const beyond = scroll.scrollWidth - scroll.clientWidth;
      if (beyond <= 0) return keepPlace();
      if (!best || beyond < best.beyond) best = { beyond, show };
    }
  }
  best.show();
  keepPlace();
}
/** Return the element of a table whose first cell of each row names a run, or of each column if it is turned. */
function tableElement(table, isTurned, names) {
  const runAt = (row, column) => (isTurned ? (row < 0 && column > 0 ? table.runs[column - 1] : null) : isTurned === false && row >= 0 && !column ? table.runs[row] : null);
  const headAt = (row, column) => (isTurned ? (column ? null : row + 1) : row < 0 ? column : null);
  const tr = (cells, row) => tableRow(table, cells, row, { runAt, headAt, names });
  return h("table", {}, h("thead", {}, tr(table.header, -1)), h("tbody", {}, ...table.rows.map(tr)));
}
const CODE_BREAKS = /(?<=[(._=])(?!\))|(?<=[a-z])(?=[A-Z])/; // a strategy breaks after its bracket
const NUMBER_BLANK = / (?=\d)/g; // as in "lr 0.02", which stays on one line
const NAME_BREAKS = /(?<=[(=,])(?!\))|(?<=[a-z])(?=[A-Z])/;

/**
 * Return a row of cells. `runAt(row, column)` is the number of the run that a cell names, or null; `headAt` that of the
 * kind of number whose name it has.
 */
function tableRow({ texts, bold, small, high, sorted, sorting }, cells, row, { runAt, headAt, names }) {
  return h("tr", row < 0 ? {} : { "data-row": row }, ...cells.map((text, column) => {
    const isBold = bold.some(([r, c]) => r === row && c === column), isText = texts.includes(column), run = runAt(row, column), head = headAt(row, column);
    const cell = h(row < 0 || !column ? "th" : "td", { class: `${isText ? "" : "dtk-number"}${isBold ? " dtk-best" : ""}`, ...(row < 0 ? { scope: "col" } : column ? {} : { scope: "row" }) });
    if (run !== null) { cell.classList.add("dtk-run"); cell.append(runLine(run), h("span", {}, ` ${run + 1}:\u00a0`, ...text.replace(NUMBER_BLANK, "\u00a0").split(NAME_BREAKS).flatMap((part) => [part, h("wbr")]))); if (names[run] !== text) setAttr(cell, "title", names[run]); }
    else cell.append(...(isText ? text.split(CODE_BREAKS) : [text]).flatMap((part) => [part, h("wbr")]));
    for (const [, , change] of small.filter(([r, c]) => r === row && c === column)) cell.append(h("small", { class: "dtk-change" }, change));
    if (sorting && head !== null) addSortButton(cell, sorted[head], () => sorting.sort(text, chooseNextOrder(sorted[head], high.includes(head)))).dataset.column = text;
    return cell;
  }));
}
/** Return a table with its rows as columns. */
function turned({ header, rows, bold, small, ...rest }) {
  const [corner, ...names] = header;
  return {
    ...rest,
    header: [corner, ...rows.map(([run]) => run)],
    rows: names.map((name, column) => [name, ...rows.map((cells) => cells[column + 1])]),
    texts: [0],
    bold: bold.map(([row, column]) => [column - 1, row + 1]),
    small: small.map(([row, column, text]) => [column - 1, row + 1, text]),
  };
}
/** Return the column by which all views of a comparison are sorted, and how to choose another one. */
function newSorting(redraw) {
  const sorting = { name: null, order: "none" };
  sorting.sort = (name, order) => {
    Object.assign(sorting, { name, order });
    redraw();
  };
  return sorting;
}

/** Mark the last three of an odd number of charts: they have a row of their own, so that none is beside an empty half. */
function markThirds(body) {
  const charts = [...body.querySelectorAll(".dtk-panel:not(.dtk-wide, [hidden])")], first = charts.length % 2 ? charts.length - 3 : charts.length;
  charts.forEach((chart, k) => chart.classList.toggle("dtk-third", first >= 0 && k >= first));
}

/** Return {root, redraw} of a view of several runs: tables unless the page has them, tools, and charts. */
export function buildComparison(store, { hasTables = true } = {}) {
  const root = h("div", { class: "dtkit", "data-testid": "dtkit-comparison", "data-state": "", role: "region", "aria-label": "comparison of runs" });
  keepKeys(root);
  const redraw = newFrames((asked) => { if (asked.has("pointed") && asked.size === 1) drawPointed(panels); else draw(); });
  const charts = [toolbar(store, null), mainChart(store, redraw), comparedCharts(store, redraw)]; // below the tables, which have the answer
  const readSettings = ({ settings, table }) => settings && arrangeRuns(settings, sortTable(table, store.view.sorting).runs);
  const tables = hasTables ? [
    tableOf(() => ({ table: store.head.table, text: store.head.note, names: store.head.names, ends: store.head.ends }), { testid: "runs-table", label: "table of runs", isLegend: true, sorting: (store.view.sorting ??= newSorting(() => store.redraw())) }),
    tableOf(() => ({ table: readSettings(store.head), names: store.head.names }), { testid: "settings-table", label: "settings that differ" }),
  ] : [];
  const panels = [...tables, ...charts];
  const body = h("div", { class: "dtk-body" }, ...panels.map((panel) => panel.el));
  root.append(body);
  const fillRows = newRows(body, redraw);
  function draw() {
    if (!store.head) return;
    for (const panel of panels) panel.update();
    markThirds(body);
    if (fillRows()) redraw();
    setAttr(root, "data-state", store.status.state);
    setAttr(root, "data-seq", store.seq);
  }
  return { root, redraw };
}
