// A chart of each validation metric besides the loss; the figure has panels/metrics.py.

import { h, s, setAttr, setText } from "../elements.js";
import { number, tick, ticks } from "../numbers.js";

const METRIC = { left: 46, right: 72, top: 10, bottom: 22, height: 130, most: 6, marks: 20 };

export function metrics(store) {
  const el = h("div", { class: "dtk-pictures", "data-testid": "metrics" }), shown = new Map();
  let drawn = null;
  const update = () => {
    const width = el.parentElement?.clientWidth;
    if (drawn?.evaluations === store.evaluations && drawn.step === store.status.step && drawn.width === width) return;
    drawn = { evaluations: store.evaluations, step: store.status.step, width };
    for (const [name, points] of collectMetrics(store.evaluations)) {
      if (!shown.has(name)) {
        shown.set(name, newMetricChart(name));
        el.append(shown.get(name).el);
      }
      drawMetric(shown.get(name), points, store.status.step);
    }
  };
  return { el, update };
}

/** Return the points of each metric by name. */
function collectMetrics(evaluations) {
  const found = new Map();
  for (const { step, values } of evaluations) {
    for (const [name, value] of Object.entries(values)) {
      if (name === "loss" || !Number.isFinite(value ?? NaN) || (!found.has(name) && found.size === METRIC.most)) continue;
      if (!found.has(name)) found.set(name, []);
      found.get(name).push({ step, value });
    }
  }
  return found;
}

function newMetricChart(name) {
  const note = h("span", { class: "dtk-note" }), svg = s("svg", { role: "img", class: "dtk-chart", height: METRIC.height });
  return { name, note, svg, el: h("section", { class: "dtk-panel", "data-testid": "metric-chart", "data-name": name }, h("h3", {}, name, " ", note), svg) };
}

function drawMetric(view, points, now) {
  const values = points.map((point) => point.value), low = Math.min(...values), high = Math.max(...values);
  const text = `last ${number(values.at(-1))} · lowest ${number(low)} · highest ${number(high)}`;
  setText(view.note, text);
  setAttr(view.svg, "aria-label", `validation ${view.name}: ${text}`);
  const width = Math.max(220, view.svg.parentElement.clientWidth || 0), room = (high - low || Math.abs(high) || 1) * 0.08;
  const end = Math.max(1, now, points.at(-1).step), first = 0;
  const x = (step) => METRIC.left + (step - first) / (end - first) * (width - METRIC.left - METRIC.right);
  const y = (v) => METRIC.top + (high + room - v) / (high - low + 2 * room) * (METRIC.height - METRIC.top - METRIC.bottom);
  setAttr(view.svg, "width", width);
  setAttr(view.svg, "viewBox", `0 0 ${width} ${METRIC.height}`);
  const grid = s("g", { class: "dtk-grid" }), lines = s("g", { class: "dtk-lines" }), marks = s("g", { class: "dtk-points" });
  for (const v of ticks(low - room, high + room, 4)) {
    grid.append(s("line", { x1: METRIC.left, x2: width - METRIC.right, y1: y(v), y2: y(v) }), s("text", { x: METRIC.left - 7, y: y(v) + 4, "text-anchor": "end" }, tick(v)));
  }
  for (const v of ticks(first, end, width > 420 ? 6 : 4).filter((v) => Number.isInteger(v) && v > 0)) {
    grid.append(s("text", { x: x(v), y: METRIC.height - 5, "text-anchor": "middle" }, tick(v)));
  }
  grid.append(s("text", { x: METRIC.left - 7, y: METRIC.height - 5, "text-anchor": "end" }, "step"));
  const path = points.map((p, k) => `${k ? "L" : "M"}${x(p.step).toFixed(1)},${y(p.value).toFixed(1)}`).join("");
  lines.append(s("path", { class: "dtk-line dtk-only", d: points.length > 1 ? path : `${path}h.01` }));
  const every = Math.ceil(points.length / METRIC.marks);
  points.forEach((p, k) => {
    if ((points.length - 1 - k) % every) return;
    marks.append(s("path", { d: `M${x(p.step)},${y(p.value)}m-3,0l3,-3l3,3l-3,3z` }, s("title", {}, `step ${p.step}: ${view.name} ${number(p.value)}`)));
  });
  view.svg.replaceChildren(grid, lines, marks);
}
