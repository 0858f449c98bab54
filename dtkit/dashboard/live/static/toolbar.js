// The tools of all charts, in one line: a legend that hides lines, the key of the marks, the axis, smoothing, scale, limits,
// zoom, and panels.

import { AXES } from "./chart/axis.js";
import { describeMarks } from "./chart/marks.js";
import { zoomTo } from "./chart/pointer.js";
import { h, setAttr, setText } from "./elements.js";
import { nodeName } from "./picking.js";
import { panelsMenu } from "./panels_menu.js";
import { runLine } from "./run_line.js";
import { sortTable } from "./sorting.js";
import { LIVE, countLog, evaluatedPoints, isLogAuto, isLogShown, wholeSteps } from "./store.js";
import { hasZoomed, ZOOM_HINT } from "./zoom_hint.js";

const SCALE_HELP = "logarithmic scale of losses, norms and logged numbers; a chart chooses it by itself where its smallest values would touch 0 on a linear one";
const AUTO_HELP = "logarithmic scale, chosen by itself since the smallest values would touch 0 on a linear scale";

/** Return the toolbar; `panels` are those of the menu, and `scaleOf` is {is, can, isAuto, set} of the scale of one chart, or of all with count(). */
export function toolbar(store, panels, scaleOf = scaleOfAll(store)) {
  const axis = axisField(store), smooth = smoothField(store);
  const { view } = store;
  const scale = scaleButton(scaleOf, "scale");
  const robust = toggle(["trim", h("span", { class: "dtk-word" }, "\u00a0outliers")], "limits of the y axes without the rarest values", "robust", () => view.robust, (isOn) => { view.robust = isOn; store.redraw(); });
  const reset = h("button", { type: "button", class: "dtk-tool", "data-testid": "reset-zoom", title: "show all steps (double click, or 0 in a chart); drag over a chart to zoom" }, "↔ all steps");
  reset.addEventListener("click", () => zoomTo(store, null));
  const menu = panels ? panelsMenu(store, panels) : null, legend = legendField(store), refresh = panels && store.setRefresh ? refreshField(store) : null;
  const key = h("span", { class: "dtk-marks-key", "data-testid": "marks-key" }), range = h("span", { class: "dtk-range", role: "status", "data-testid": "range" });
  const line = h("div", { class: "dtk-toolline" }, key, range, reset); // its place is kept: they come and go, and move nothing
  const el = h("div", { class: "dtk-toolbar", role: "toolbar", "aria-label": "chart tools", "data-testid": "toolbar" },
    legend.el, line, h("span", { class: "dtk-toolset" }, axis.el, smooth.el, scale.el, robust.el, ...[refresh, menu].filter(Boolean).map(({ el: part }) => part)));
  const update = () => {
    el.hidden = !store.curves.used && !LIVE.includes(store.status.state);
    reset.hidden = !store.view.zoom;
    const said = describeMarksOrHint(store, panels !== null);
    setText(key, said);
    key.classList.toggle("dtk-quiet", said === NO_MARKS);
    line.classList.toggle("dtk-zoomed", Boolean(store.view.zoom));
    setAttr(key, "title", store.marks.length ? key.textContent : "");
    setText(range, describeRange(store));
    for (const part of [axis, smooth, scale, robust, legend, refresh, menu]) part?.update();
  };
  return { el, update };
}

const NO_MARKS = "no marks yet"; // shown only where the key has a line of its own

/** Return the key of the marks, unless the page has another one, or before the first mark how to zoom. */
function describeMarksOrHint({ marks, view }, hasKey) {
  if (hasKey && marks.length) return `marks:  ${keepEntriesWhole(describeMarks(marks))}`;
  if (!view.zoom && !hasZoomed()) return ZOOM_HINT;
  return hasKey ? NO_MARKS : "";
}
/** Return a key in which no line ends between a sign and its words. */
function keepEntriesWhole(text) {
  return text.split(" · ").map((entry) => entry.replaceAll(" ", "\u00a0")).join(" · ");
}

/** Say what charts that are zoomed in leave out; an empty text where they show all. */
function describeRange({ view: { zoom, x }, head, status }) {
  if (!zoom) return "";
  if (head.runs && x !== "step") return "only a part is shown";
  const [first, last] = wholeSteps(zoom).map((step) => step.toLocaleString("en-US")); // as the bars have it
  return `only steps ${first} to ${last}${LIVE.includes(status.state) ? "; newer hidden" : ""}`;
}

function axisField(store) {
  const select = h("select", { "data-testid": "x-axis", "aria-label": "x axis" }, ...AXES.map((name) => h("option", { value: name }, name === "time" ? "time in steps" : name)));
  const el = h("label", { class: "dtk-field" }, "x", select);
  select.addEventListener("change", () => {
    store.view.x = select.value;
    if (store.head.runs) [store.view.zoom, store.hover] = [null, null]; // they were positions on the last axis
    store.redraw();
  });
  const update = () => {
    const { head } = store, { epoch, time, samples } = head.axes ?? { epoch: head.steps_per_epoch, time: head.charts.step_s, samples: head.batch };
    [epoch, time, samples].forEach((known, k) => { select.children[k + 1].disabled = !known; });
    el.hidden = [...select.children].slice(1).every((option) => option.disabled); // there is no choice
    if (select.value !== store.view.x) select.value = store.view.x;
  };
  return { el, update };
}

const REFRESH_S = [0, 5, 15];

/** How often a run in progress is updated: each update takes time of the processors that its training may need. */
function refreshField(store) {
  const select = h("select", { "data-testid": "refresh", "aria-label": "refresh", title: "how often all of the dashboard is updated: each update takes time of processors that the training may need. States, alarms and answers come at once" },
    ...REFRESH_S.map((seconds) => h("option", { value: seconds }, seconds ? `${seconds} s` : "live")));
  const el = h("label", { class: "dtk-field" }, h("span", { class: "dtk-word" }, "refresh"), select);
  select.addEventListener("change", () => store.setRefresh(Number(select.value)));
  const update = () => {
    el.hidden = !LIVE.includes(store.status.state);
    if (Number(select.value) !== store.view.refresh) select.value = store.view.refresh;
  };
  return { el, update };
}

/** The slider's square root makes room near 1, where a change is large. */
function smoothField(store) {
  const slider = h("input", { type: "range", min: 0, max: 1, step: 0.05, value: 0, "data-testid": "smoothing", "aria-label": "smoothing", title: "exponential moving average over steps, alike in all charts; the raw line stays, pale" });
  const shown = h("span", { class: "dtk-amount" });
  const weight = () => Number(slider.value) && Math.min(0.995, 1 - (1 - Number(slider.value)) ** 2);
  slider.addEventListener("input", () => {
    store.view.smooth = weight();
    store.redraw();
  });
  const update = () => {
    const { smooth } = store.view;
    if (weight() !== smooth) slider.value = smooth === 0.995 ? 1 : 1 - Math.sqrt(1 - smooth); // another toolbar's choice
    setText(shown, smooth ? smooth.toFixed(smooth > 0.985 ? 3 : 2) : "off");
    setAttr(slider, "aria-valuetext", shown.textContent);
  };
  return { el: h("label", { class: "dtk-field" }, "smooth", slider, shown), update };
}

function toggle(label, title, testid, isOn, set) {
  const el = h("button", { type: "button", class: "dtk-tool", title, "data-testid": testid }, ...[label].flat());
  el.addEventListener("click", () => set(!isOn()));
  return { el, update: () => setAttr(el, "aria-pressed", isOn()) };
}

function scaleOfAll(store) {
  const { view } = store;
  return { is: () => isLogShown(view), can: () => true, isAuto: () => isLogAuto(view), count: () => countLog(view), set: (isLog) => { view.log = isLog; view.ownLog.clear(); store.redraw(); } };
}
/** Return a button that shows the scale of one chart or of all, and changes it; hidden where there is no choice. */
export function scaleButton({ is, can, isAuto, set, count }, testid, label = "log y") {
  const { el, update } = toggle(label, "", testid, is, set);
  return { el, update: () => {
    update();
    setText(el, count ? describeScale(label, count(), isAuto()) : label); // a single chart has no room, but its own title
    setAttr(el, "title", (isAuto() ? AUTO_HELP : SCALE_HELP) + (count ? describeClicks(...count()) : isAuto() ? "; a click ends that, and your choice stays" : ""));
    el.hidden = !can();
  } };
}
/** Return what clicks on the button for all charts do: the first one ends the scales that single charts have. */
function describeClicks(logarithmic, all) {
  if (!logarithmic || all < 2) return logarithmic ? "; a click ends that, and your choice stays" : "";
  const now = logarithmic < all ? `. ${logarithmic} of ${all} charts ${logarithmic === 1 ? "has" : "have"} it now` : "";
  return `${now}. A click makes all charts linear, and another one all logarithmic; your choice stays`;
}
/** Return the text of the button for all charts, which says how many of them are logarithmic where the others are not. */
function describeScale(label, [logarithmic, all], isAuto) {
  if (logarithmic && logarithmic < all) return `${label} (${logarithmic} of ${all})`;
  return isAuto ? `${label} (auto)` : label;
}

/** Return {key, label, hue} of each line that can be hidden, in all charts. */
function legendEntries(store) {
  const { head } = store, layout = head.charts.loss, nodes = [];
  if (head.runs) return head.runs.length > 1 ? sortTable(head.table, store.view.sorting).runs.map((k) => ({ key: `n${k}`, label: `${k + 1}: ${head.runs[k]}`, run: k })) : [];
  if (!layout) return [];
  for (let line = 0; line < layout.nodes; line++) nodes.push({ key: layout.banded ? "band" : `n${line}`, label: layout.banded ? "all nodes" : nodeName(store, line), hue: layout.banded ? "crowd" : `n${line % 8}` });
  if (store.spot?.ranks.length && layout.banded) nodes.push({ key: "spots", label: "outliers", hue: "s0" });
  if (layout.nodes > 1 || layout.banded) nodes.push({ key: "all", label: "mean", hue: "all" });
  if (["loss", ...store.series.keys()].some((name) => evaluatedPoints(store, name).length)) nodes.push({ key: "valid", label: "◇ validation", hue: "" });
  return nodes.length > 1 ? nodes : [];
}

function legendField(store) {
  const el = h("span", { class: "dtk-lines-legend", role: "group", "aria-label": "lines; press one to hide it", "data-testid": "legend" }), buttons = new Map();
  const update = () => {
    const entries = legendEntries(store);
    for (const { key } of entries) if (!buttons.has(key)) buttons.set(key, legendButton(store, key));
    const wanted = entries.map(({ key }) => buttons.get(key));
    if (wanted.some((button, k) => el.children[k] !== button) || el.children.length !== wanted.length) el.replaceChildren(...wanted);
    for (const { key, label, hue, run } of entries) {
      const button = buttons.get(key), shown = !store.view.hidden.has(key);
      setAttr(button, "aria-pressed", shown);
      if (run !== undefined && button.firstChild.localName === "i") button.firstChild.replaceWith(runLine(run)); // its dashes, too
      if (run === undefined) setAttr(button.firstChild, "class", hue ? `dtk-swatch dtk-${hue}` : "");
      setText(button.lastChild, label);
    }
  };
  return { el, update };
}
function legendButton(store, key) {
  const button = h("button", { type: "button", class: "dtk-line-button", "data-key": key, title: "point at it to see its lines in all charts; a click hides or shows them, with Shift all others" }, h("i", { "aria-hidden": "true" }), h("span"));
  const point = (key) => { if (store.pointed !== key) { store.pointed = key; store.redraw(); } };
  for (const [sign, pointed] of Object.entries({ pointerenter: key, pointerleave: null, blur: null })) button.addEventListener(sign, () => point(pointed));
  button.addEventListener("focus", () => { if (button.matches(":focus-visible")) point(key); });
  button.addEventListener("click", (event) => {
    const { hidden } = store.view;
    if (event.shiftKey) {
      const others = legendEntries(store).map((entry) => entry.key).filter((other) => other !== key);
      const alone = !hidden.has(key) && others.every((other) => hidden.has(other));
      hidden.clear();
      if (!alone) for (const other of others) hidden.add(other);
    } else if (!hidden.delete(key)) hidden.add(key);
    store.redraw();
  });
  return button;
}
