// A chart of each validation metric besides the loss. That of a number which the user also logs is in scalars.js. The figure has
// panels/metrics.py.

import { chart } from "../chart.js";
import { pointGrain } from "../chart/grain.js";
import { h } from "../elements.js";
import { number } from "../numbers.js";
import { isLogged, lastEvaluated } from "../store.js";

const MOST_METRICS = 6, ONE_LINE = { name: "metric", first: 0, nodes: 0, banded: false };

export function metrics(store, _send, redraw) {
  const el = h("div", { class: "dtk-several", "data-testid": "metrics" }), shown = new Map();
  let read = null, points = new Map();
  const readPoints = () => {
    if (read !== store.evaluations) [read, points] = [store.evaluations, collectMetrics(store.evaluations)];
    return points;
  };
  const update = () => {
    for (const name of [...shown.keys()].filter((one) => isLogged(store, one))) {
      shown.get(name).el.remove();
      shown.delete(name);
      redraw(); // the menu of panels, which is above
    }
    for (const name of readPoints().keys()) {
      if (shown.has(name) || isLogged(store, name)) continue;
      shown.set(name, metricChart(store, name, { all: () => readPoints().get(name) ?? [], further: () => collectMetrics(store.newest.evaluations).get(name) ?? [] }, redraw));
      el.append(shown.get(name).el);
      store.sight.watch(shown.get(name).el);
      redraw(); // the menu of panels, which is above
    }
    for (const one of shown.values()) if (!store.sight.isAway(one.el)) one.update();
  };
  return { el, update, parts: () => [...shown.values()], partsInSight: () => [...shown.values()].filter((one) => !store.sight.isAway(one.el)), title: "Metrics" };
}

/** Return the points of each metric by name. */
function collectMetrics(evaluations) {
  const found = new Map();
  for (const { step, values } of evaluations) {
    for (const [name, value] of Object.entries(values)) {
      if (name === "loss" || !Number.isFinite(value ?? NaN) || (!found.has(name) && found.size === MOST_METRICS)) continue;
      if (!found.has(name)) found.set(name, []);
      found.get(name).push({ step, value });
    }
  }
  for (const points of found.values()) points.sort((a, b) => a.step - b.step); // a run may have gone back
  return found;
}

function upTo(last, points) {
  return (points.at(-1)?.step ?? 0) <= last ? points : points.filter((point) => point.step <= last);
}

/** Return a chart of points() in sight. Its title and label are those of the tiles, which are ahead of the curves. */
function metricChart(store, name, { all, further }, redraw) {
  const points = () => upTo(lastEvaluated(store), all()), known = () => [...all(), ...further()], newest = () => known().at(-1)?.value;
  const note = () => {
    const { zoom } = store.view, [first, end] = zoom ?? [-Infinity, Infinity];
    const values = known().filter(({ step }) => step >= first && step <= end).map((point) => point.value);
    if (!values.length) return "validation, none in sight";
    return `validation, ${zoom ? "" : `last ${number(values.at(-1))}, `}from ${number(Math.min(...values))} to ${number(Math.max(...values))}`;
  };
  return chart(store, "metric", {
    title: name,
    testid: "metric-chart",
    height: 130,
    stepName: "after steps",
    exact: true, // a smoothed line would end far from the last value, which the tile shows
    note,
    layout: () => ONE_LINE,
    grain: () => pointGrain(points()),
    points,
    newest,
    overall: (_head, drawn) => number(store.view.zoom ? drawn : newest() ?? drawn),
    overallName: name,
    measured: name,
  }, redraw);
}
