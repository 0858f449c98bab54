// A chart of each number that the user logs in a training, by node and as a mean; the figure has panels/scalars.py.

import { chart } from "../chart.js";
import { seriesGrain } from "../chart/grain.js";
import { h } from "../elements.js";
import { number } from "../numbers.js";

export function scalars(store, _send, redraw) {
  return seriesPanel(store, redraw, { title: "Logged numbers", testid: "scalars", pick: (series) => !series.system, height: 130 });
}

/** Return a panel with a chart for each series of the store that `pick` takes. */
export function seriesPanel(store, redraw, { title, testid, pick, height }) {
  const el = h("div", { class: "dtk-several", "data-testid": testid }), shown = new Map();
  const update = () => {
    for (const [name, series] of store.series) {
      if (!pick(series) || shown.has(name)) continue;
      shown.set(name, seriesChart(store, name, { height, testid: `${testid}-chart` }, redraw));
      el.append(shown.get(name).el);
      store.sight.watch(shown.get(name).el);
    }
    for (const one of shown.values()) if (!store.sight.isAway(one.el)) one.update();
  };
  return { el, update, title };
}

function seriesChart(store, name, { height, testid }, redraw) {
  const { title: own, unit, system } = store.series.get(name), of = () => store.series.get(name), title = unit ? `${own} (${unit})` : own;
  return chart(store, name, {
    title, unit, testid, height,
    fromZero: system, exact: system, joined: true,
    isFlat: () => system && of().points < 2, // the first seconds have one sample
    note: () => note(of()),
    layout: () => ({ name, first: 0, nodes: of().lines - 1, banded: false }),
    grain: () => seriesGrain(of()),
    overall: (_head, last) => (of().lines > 1 ? "mean" : number(last)),
  }, redraw);
}
function note({ points, lines, values }) {
  return `${lines > 1 ? "mean " : ""}${number(values[points * (lines + 1) - 1])}`;
}
