// The charts of a report: those of the live views, from messages in the file. report_live.py writes the page around it.
//
// Without scripts, and on paper, the page has the charts that svg_chart.py drew.

import { balanceColumns } from "./columns.js";
import { buildComparison } from "./comparison.js";
import { h } from "./elements.js";
import { drawPointed, newFrames } from "./frames.js";
import { newRows } from "./grid.js";
import { gradientNormChart } from "./panels/gradient_norm.js";
import { learningRateChart } from "./panels/learning_rate.js";
import { lossChart } from "./panels/loss.js";
import { metrics } from "./panels/metrics.js";
import { scalars } from "./panels/scalars.js";
import { system } from "./panels/system.js";
import { throughputChart } from "./panels/throughput.js";
import { timeline } from "./panels/timeline.js";
import { makeArrangeable, makeSortable } from "./sorting.js";
import { apply, newStore } from "./store.js";
import { followTheme } from "./theme.js";
import { toolbar } from "./toolbar.js";

const CHARTS = [lossChart, throughputChart, gradientNormChart, scalars, metrics, changedRate, timeline, machines];

/** Return the chart of the learning rate; of one that never changes, the page has a line of text. */
function changedRate(...args) {
  return learningRateChart(...args, { onlyChanges: true });
}

/** Return the charts of the machines, which are small ones: all in one row of a wide page. */
function machines(...args) {
  const panel = system(...args);
  panel.el.classList.add("dtk-small");
  return panel;
}

/** Return {root, redraw} of a run's charts with their tools. */
function buildCharts(store) {
  const redraw = newFrames((asked) => { if (asked.has("pointed") && asked.size === 1) drawPointed(panels); else draw(); }), panels = [toolbar(store, null), ...CHARTS.map((build) => build(store, null, redraw))];
  const body = h("div", { class: "dtk-body" }, ...panels.map((panel) => panel.el));
  const root = h("div", { class: "dtkit", "data-testid": "report-charts", "data-state": "kept", role: "region", "aria-label": "charts" }, body);
  const fillRows = newRows(body, redraw);
  function draw() {
    for (const panel of panels) panel.update();
    if (fillRows()) redraw();
  }
  return { root, redraw };
}

function readMessages() {
  const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const messages = JSON.parse(document.getElementById("dtk-messages").textContent);
  return messages.map(({ content, buffers }) => [content, buffers.map(decode)]);
}

/** Let the page's choice of colors be that of the charts. */
function followPage() {
  const choose = () => {
    const { dataset } = document.body, isLight = document.getElementById("light").checked;
    if (isLight || document.getElementById("dark").checked) dataset.jpThemeLight = String(isLight);
    else delete dataset.jpThemeLight;
  };
  document.querySelector(".theme").addEventListener("change", choose);
  choose(); // a browser keeps it when a page is loaded again
}

function drawReport(store) {
  const place = document.getElementById("dtk-live");
  for (const [content, buffers] of readMessages()) apply(store, content, buffers);
  if (!store.curves.used) return; // there is no step to draw
  const { root, redraw } = store.head.runs ? buildComparison(store, { hasTables: false }) : buildCharts(store);
  if (store.head.steep) store.view.log = true;
  store.redraw = redraw;
  followPage();
  followTheme(root);
  place.append(root);
  document.documentElement.classList.add("dtk-is-live");
  new ResizeObserver(redraw).observe(root);
  redraw();
}

/** Let a person sort the table of runs. The legend of the charts and the table of settings follow. */
function sortRuns(store) {
  const arrange = [...document.querySelectorAll(".follows table")].map(makeArrangeable);
  const follow = (sorting, places) => {
    for (const each of arrange) each(places);
    store.view.sorting = sorting;
    store.redraw();
  };
  for (const table of document.querySelectorAll(".sortable table")) makeSortable(table, follow);
}

const shownStore = newStore();
sortRuns(shownStore);
balanceColumns(document.querySelector(".columns"));
drawReport(shownStore);
