// The browser's half of a live comparison; comparison_widget.py is the other half. Runs take the place of nodes.

import { chart } from "./chart.js";
import { h, s, setAttr, setText } from "./elements.js";
import { mountViews } from "./mount.js";
import { apply, newStore } from "./store.js";
import { followTheme } from "./theme.js";
import { toolbar } from "./toolbar.js";

const COLUMNS_OF_RUNS = [["run", "label"], ["state", "state"], ["steps", "steps"], ["loss", "loss"], ["samples/s", "rate"], ["sent per node", "sent"]];

function runsTable(store) {
  const body = h("tbody");
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "runs-table" }, h("div", { class: "dtk-scroll", tabindex: "0", role: "region", "aria-label": "table of runs" },
    h("table", {}, h("thead", {}, h("tr", {}, ...COLUMNS_OF_RUNS.map(([name]) => h("th", { scope: "col" }, name)))), body)));
  const update = () => {
    const { runs } = store.head;
    while (body.children.length < runs.length) body.append(runRow(body.children.length));
    runs.forEach((run, k) => COLUMNS_OF_RUNS.forEach(([, key], column) => {
      const cell = body.children[k].children[column];
      setText(column ? cell : cell.lastChild, column ? run[key] : `${k + 1}: ${run[key]}`);
    }));
  };
  return { el, update };
}
function runRow(k) {
  const line = s("svg", { width: 34, height: 10, "aria-hidden": "true" }, s("path", { d: "M1,5h32", class: `dtk-line dtk-n${k % 8} dtk-dash${k % 4}` }));
  return h("tr", { "data-run": k }, h("th", { scope: "row" }, line, " ", h("span")), ...COLUMNS_OF_RUNS.slice(1).map(() => h("td")));
}

function buildComparison(store) {
  const root = h("div", { class: "dtkit", "data-testid": "dtkit-comparison", "data-state": "", "data-lm-suppress-shortcuts": "true", role: "region", "aria-label": "comparison of runs" });
  const redraw = () => requestAnimationFrame(draw);
  const lines = chart(store, "loss", {
    title: "Loss", testid: "comparison-chart", height: 260,
    note: () => "mean over all nodes, on the same steps", overall: () => "", lineName: (_store, line) => `run ${line + 1}`,
  }, redraw);
  const tools = toolbar(store, null), table = runsTable(store);
  lines.el.classList.add("dtk-wide");
  root.append(h("div", { class: "dtk-body" }, tools.el, lines.el, table.el));
  function draw() {
    if (!store.head) return;
    tools.update();
    lines.update();
    table.update();
    setAttr(root, "data-state", store.status.state);
    setAttr(root, "data-seq", store.seq);
  }
  return { root, redraw };
}

function openComparison(store) {
  const { root, redraw } = buildComparison(store), stopTheme = followTheme(root), size = new ResizeObserver(redraw);
  size.observe(root);
  redraw();
  return { root, redraw, dispose: () => { stopTheme(); size.disconnect(); } };
}

export default () => {
  const store = newStore(), views = new Set();
  store.redraw = () => { for (const redraw of views) redraw(); };
  const receive = (content, buffers) => { apply(store, content, buffers); store.redraw(); };
  return {
    initialize({ model }) {
      model.on("msg:custom", receive);
      const { content, buffers } = model.get("opening");
      receive(content, buffers);
      views.add(mountViews(model.get("place"), () => openComparison(store)));
      model.send({ hello: "opened" });
    },
    render({ el }) {
      const { root, redraw, dispose } = openComparison(store);
      el.append(root);
      views.add(redraw);
      return () => { views.delete(redraw); dispose(); };
    },
  };
};
