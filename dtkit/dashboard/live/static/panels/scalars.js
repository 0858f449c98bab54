// A chart of each number that the user logs in a training, by node and as a mean, with its validations; the figure has panels/scalars.py.

import { chart } from "../chart.js";
import { seriesGrain } from "../chart/grain.js";
import { h } from "../elements.js";
import { number } from "../numbers.js";
import { evaluatedPoints } from "../store.js";

const CORE_WAIT = "system/waiting for a core (%)", LONG_WAIT = 10, NARROW_PLOT = 320; // percent, as MIN_GAIN in summary/verdict.py; pixels

export function scalars(store, _send, redraw) {
  return seriesPanel(store, redraw, { title: "Logged numbers", testid: "scalars", pick: (series) => !series.system, height: 130 });
}

/** Return a panel with a chart for each series of the store that `pick` takes, by `order` of their names. */
export function seriesPanel(store, redraw, { title, testid, pick, height, order = () => 0 }) {
  const el = h("div", { class: "dtk-several", "data-testid": testid }), shown = new Map();
  const inOrder = () => [...shown.keys()].sort((a, b) => order(a) - order(b)).map((name) => shown.get(name));
  const update = () => {
    for (const [name, series] of store.series) {
      if (!pick(series) || shown.has(name)) continue;
      shown.set(name, seriesChart(store, name, { height, testid: `${testid}-chart` }, redraw));
      el.append(...inOrder().map((one) => one.el));
      store.sight.watch(shown.get(name).el);
      redraw(); // the menu of panels, which is above
    }
    for (const one of shown.values()) if (!store.sight.isAway(one.el)) one.update();
  };
  return { el, update, parts: inOrder, partsInSight: () => [...shown.values()].filter((one) => !store.sight.isAway(one.el)), title };
}

function seriesChart(store, name, { height, testid }, redraw) {
  const { title: own, unit, system } = store.series.get(name), of = () => store.series.get(name), title = unit ? `${own} (${unit})` : own;
  const last = () => (system ? lastPoint(of()) : store.newest.numbers[name] ?? of().last); // a tile has the exact one, but for machines
  return chart(store, name, {
    title, unit, testid, height,
    fromZero: system, exact: system, joined: true, canLog: system ? false : "positive",
    isFlat: () => system && (!of().points || hasFirstSamples(store) || (name === CORE_WAIT && isShort(of()))),
    points: (st) => (system ? [] : evaluatedPoints(st, name)),
    pointName: "◇ validation",
    measured: name,
    note: (_head, _layout, view) => note({ ...of(), last: last() }, system ? NaN : lastValidation(store, name), view.frame?.width < NARROW_PLOT, store.view.zoom !== null),
    help: (_head, whole) => explainLast(of(), whole),
    layout: () => ({ name, first: 0, nodes: of().lines - 1, banded: false }),
    grain: () => seriesGrain(of()),
    newest: last,
    overall: (_head, drawn) => (of().lines > 1 ? "mean" : number(store.view.zoom ? drawn : last() ?? drawn)),
  }, redraw);
}
/** Return whether no number of the machines has a second sample, as in the first seconds. Next to a line, the only one is a point. */
function hasFirstSamples({ series }) {
  return [...series.values()].every(({ system, points }) => !system || points < 2);
}
/** Return the value over all nodes at which a line ends, a mean of the samples there; NaN without one. */
function lastPoint({ points, lines, values }) {
  for (let at = points; at--; ) {
    const value = values[at * (lines + 1) + lines];
    if (Number.isFinite(value)) return value;
  }
  return NaN;
}
/** Return whether no value of a series is a share that a verdict would name. */
function isShort({ points, lines, values }) {
  for (let at = 0; at < points; at++) for (let line = 1; line <= lines; line++) if (values[at * (lines + 1) + line] >= LONG_WAIT) return false;
  return true;
}
/** Return the last validation of a number, which the tiles have; NaN without one. */
function lastValidation({ evaluations, newest }, name) {
  return [...evaluations, ...newest.evaluations].findLast(({ values }) => Number.isFinite(values[name] ?? NaN))?.values[name] ?? NaN;
}

/** Return the caption, with why a line of means may not end at the last value, which may be that of a short batch. */
function explainLast({ merged: [width] = [1], system }, caption) {
  if (width === 1 || system || !caption.includes("last ")) return caption;
  return `${caption}. The last value is that of one step; a point of the line is the mean of up to ${width.toLocaleString("en-US")} steps, so the line may end at another one.`;
}

/** Say what the last values over all nodes are, in short where the panel is narrow. A point is a mean of several steps. */
function note({ points, lines, last: exact }, validation, isNarrow, isZoomed) {
  if (!points) return ""; // all were undone
  if (isZoomed) return lines < 2 ? "" : "mean of the nodes"; // the last value may be out of sight
  const last = number(exact ?? NaN);
  if (Number.isFinite(validation)) return `last ${last}, ◇ validation ${number(validation)}`;
  if (lines < 2) return `last ${last}`;
  return isNarrow ? `last ${last}` : `last ${last}, mean of the nodes`;
}
