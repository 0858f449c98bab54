// The log: events, or evaluations as a table, and a filter by kind and text.

import { h, prose, setAttr, setText } from "../elements.js";
import { numberColumn } from "../numbers.js";

const KINDS = { all: () => true, alerts: (e) => ["error", "lost", "stuck", "diverged"].includes(e.kind), control: (e) => ["pause", "resume", "stop", "lr", "start", "save", "repair", "done"].includes(e.kind), prints: (e) => e.kind === "print" };

export function log(store) {
  const lines = h("div", { class: "dtk-log", role: "log", "aria-live": "off", tabindex: "0", "data-testid": "log", "aria-label": "log of events" });
  const table = h("div", { class: "dtk-scroll", tabindex: "0", role: "region", "data-testid": "evaluations", "aria-label": "table of evaluations" });
  const kind = h("select", { "data-testid": "log-kind", "aria-label": "kinds of events" }, ...Object.keys(KINDS).map((name) => h("option", { value: name }, name)));
  const find = h("input", { type: "search", placeholder: "filter", "data-testid": "log-filter", "aria-label": "show events with this text" });
  const tabs = ["events", "evaluations"].map((name) => h("button", { type: "button", role: "tab", class: "dtk-tool", "data-testid": `tab-${name}` }));
  const head = h("div", { class: "dtk-log-head" }, h("span", { role: "tablist", "aria-label": "log" }, ...tabs), kind, find);
  const el = h("details", { class: "dtk-panel dtk-wide", open: "" }, h("summary", {}, "Log"), head, lines, table);
  const view = { store, lines, table, kind, find, shown: null, tab: 0, isPinned: true };
  lines.addEventListener("scroll", () => { view.isPinned = isAtEnd(lines); });
  new ResizeObserver(() => showEnd(view)).observe(lines); // lines of another width; JupyterLab takes a cell out and back
  tabs.forEach((tab, k) => {
    tab.addEventListener("click", () => { view.tab = k; update(); });
    tab.addEventListener("keydown", (event) => { if (["ArrowLeft", "ArrowRight"].includes(event.key)) { view.tab = 1 - k; update(); tabs[view.tab].focus(); } });
  });
  for (const field of [kind, find]) field.addEventListener("input", () => { view.shown = null; update(); });
  const update = () => {
    tabs.forEach((tab, k) => {
      setText(tab, k ? `evaluations ${store.evaluations.length}` : "events");
      setAttr(tab, "aria-selected", view.tab === k);
      setAttr(tab, "aria-pressed", view.tab === k);
      setAttr(tab, "tabindex", view.tab === k ? 0 : -1);
    });
    tabs[1].hidden = !store.evaluations.length;
    lines.hidden = kind.hidden = find.hidden = view.tab === 1;
    table.hidden = view.tab === 0;
    if (view.tab === 0) drawEvents(view);
    else drawEvaluations(view);
  };
  return { el, update, title: "Log" };
}

function drawEvents(view) {
  const { store, lines, kind, find } = view, wanted = find.value.toLowerCase();
  lines.style.setProperty("--step-width", `${"step ".length + Math.max(5, store.status.steps.toLocaleString("en-US").length)}ch`); // an extended run may have more digits
  if (view.shown === store.log) return;
  const events = store.log.filter((event) => KINDS[kind.value](event) && event.text.toLowerCase().includes(wanted));
  lines.replaceChildren(...events.map(logLine));
  showEnd(view);
  view.shown = store.log;
}
function isAtEnd(lines) {
  return lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
}
/** Show the newest lines, unless a reader has scrolled away from them. */
function showEnd({ lines, isPinned }) {
  if (isPinned) lines.scrollTop = lines.scrollHeight;
}
function logLine(event) {
  const at = new Date(event.time * 1000).toLocaleTimeString("en-GB");
  const who = event.rank === null || event.text.startsWith(`node ${event.rank} `) ? "" : `[${event.rank}] `;
  return h("div", { class: `dtk-event-${event.kind}` }, h("time", {}, at), h("span", { class: "dtk-at" }, `step ${event.step.toLocaleString("en-US")}`), ...prose(`${who}${event.text}`));
}

const MOST_ROWS = 200;

/** Draw the last evaluations, the newest first. */
function drawEvaluations(view) {
  const { store: { evaluations }, table } = view;
  if (view.drawn === evaluations) return;
  view.drawn = evaluations;
  const last = evaluations.slice(-MOST_ROWS).reverse(), names = [...new Set(last.flatMap(({ values }) => Object.keys(values)))];
  const head = h("tr", {}, ...["step", ...names].map((name) => h("th", { scope: "col" }, name)));
  const columns = names.map((name) => numberColumn(last.map(({ values }) => values[name] ?? NaN)));
  const rows = last.map(({ step }, k) => h("tr", {}, h("th", { scope: "row" }, step.toLocaleString("en-US")), ...columns.map((texts) => h("td", {}, texts[k]))));
  table.replaceChildren(h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}
