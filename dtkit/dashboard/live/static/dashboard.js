// The browser's half of the live view; widget.py is the other half, and messages.py builds the messages.
//
//   store.js    the state of a run; one for each model, so that all its views show the same
//   chart.js    SVG lines over the steps, from the store's buckets
//   panels/     one file and one function each: build(store, send, redraw) returns {el, update}
//   pacing.js   how often messages are drawn, sight.js which panels, and frames.js how much of them
//   this file   receives messages and redraws at most once a frame
//
// There is no dependency and no build step: bundle.py puts the files into one module.

import { followAttention } from "./attention.js";
import { h, keepKeys, setAttr, setText } from "./elements.js";
import { afterPainting, drawPointed, listParts, newFrames } from "./frames.js";
import { newRows } from "./grid.js";
import { joinPage } from "./live_views.js";
import { mountViews } from "./mount.js";
import { banner } from "./panels/banner.js";
import { controls } from "./panels/controls.js";
import { gradientNormChart } from "./panels/gradient_norm.js";
import { header } from "./panels/header.js";
import { learningRateChart } from "./panels/learning_rate.js";
import { log } from "./panels/log.js";
import { lossChart } from "./panels/loss.js";
import { metrics } from "./panels/metrics.js";
import { memory } from "./panels/memory.js";
import { nodesTable } from "./panels/nodes.js";
import { pictures } from "./panels/pictures.js";
import { progress } from "./panels/progress.js";
import { notices } from "./panels/notices.js";
import { scalars } from "./panels/scalars.js";
import { stepTime } from "./panels/step_time.js";
import { summary } from "./panels/summary.js";
import { system } from "./panels/system.js";
import { throughputChart } from "./panels/throughput.js";
import { tiles } from "./panels/tiles.js";
import { timeline } from "./panels/timeline.js";
import { waffle } from "./panels/waffle.js";
import { newPacer } from "./pacing.js";
import { newPictureSight } from "./picture_sight.js";
import { newSight } from "./sight.js";
import { toolbar } from "./toolbar.js";
import { apply, isLost, isTicking, LIVE, newStore, pressing, refreshMs } from "./store.js";
import { followTheme } from "./theme.js";
import { restoreChoices, saveChoices } from "./view_choices.js";

/**
 * What is above the charts, and the panels below their tools. The order of charts is that in which runs mostly get their
 * numbers, so that a late one moves few others: the rate changes last. Until then it is a strip, unless it has a neighbor.
 */
const TOP_PANELS = [header, progress, banner, controls, tiles, notices];
const PANELS = [
  waffle, lossChart, throughputChart, gradientNormChart, scalars, pictures, metrics, learningRateChart, stepTime, timeline, system, memory, nodesTable,
  log,
];

/** Show an error of a panel in that panel only. */
function guarded(panel) {
  return () => {
    try {
      panel.update();
      panel.broken?.remove();
      panel.broken = null;
    } catch (error) {
      panel.broken ??= panel.el.appendChild(h("p", { class: "dtk-broken" }));
      setText(panel.broken, `this panel failed: ${error.message}`);
    }
  };
}

/** Draw the chart at the pointer, which a person looks at, although the others wait for their turn. */
function drawHovered({ seq }, panels) {
  for (const part of panels.filter(({ el }) => el.matches(":hover")).flatMap(listParts)) {
    if (part.shownSeq === seq || !part.el.matches(":hover")) continue;
    part.shownSeq = seq;
    guarded(part)();
  }
}

/** Write the last values in the titles of charts, which the tiles have already. */
function rewriteTitles(panels) {
  for (const { rewrite } of panels.flatMap(listParts)) rewrite?.();
}

/** Return whether a panel needs no drawing. An element without a box of its own is never in sight. */
function isAway(store, el) {
  return !el.classList.contains("dtk-several") && store.sight.isAway(el);
}

function buildView(store, send) {
  const root = h("div", { class: "dtkit", "data-testid": "dtkit-dashboard", "data-state": "", "data-seq": 0, role: "region", "aria-label": "training dashboard" });
  keepKeys(root);
  const body = h("div", { class: "dtk-body" });
  root.append(body);
  const redraw = newFrames((asked) => draw(asked));
  const make = (build) => build(store, send, redraw);
  const panels = PANELS.map(make), all = [...TOP_PANELS.map(make), toolbar(store, panels), ...panels, summary(store)];
  body.append(...all.map((panel) => panel.el));
  for (const panel of panels) store.sight.watch(panel.el);
  const fillRows = newRows(body, redraw);
  const updates = all.map((panel) => [panel, guarded(panel)]), headUpdates = updates.filter(([panel], k) => k < TOP_PANELS.length || panel.isCheap);
  const isDrawn = ({ el }) => !el.classList.contains("dtk-off") && !isAway(store, el);
  const draw = (asked) => {
    if (!store.head) return;
    const isWhole = asked.has("all");
    saveChoices(store);
    if (!isWhole && asked.has("pointed")) drawPointed(panels.filter(isDrawn));
    if (!isWhole && !asked.has("head")) return;
    store.lost = isLost(store);
    store.page.tell();
    for (const [panel, update] of isWhole ? updates : headUpdates) if (isDrawn(panel)) update();
    if (!isWhole) drawHovered(store, panels.filter(isDrawn));
    if (!isWhole) rewriteTitles(panels.filter(isDrawn));
    setAttr(root, "data-state", store.lost ? "lost" : store.status.state);
    setAttr(root, "data-warned", store.status.end === "learned nothing");
    setAttr(root, "data-stepping", Boolean(store.status.stepping) && !store.lost);
    setAttr(root, "data-bad", Boolean(store.error) || ["diverged", "differs", "mismatch"].some((kind) => store.notices.some((notice) => notice.kind === kind)));
    if (!isWhole) return;
    if (fillRows()) redraw();
    setAttr(root, "data-step", store.status.step);
    setAttr(root, "data-seq", store.seq);
  };
  return { root, redraw };
}

/** Send a message. The comm of a kernel that was just shut down throws; the view soon says itself that the kernel is gone. */
function sendTo(model, message) {
  try {
    model.send(message);
  } catch (error) {
    console.warn("dtkit: a message was not sent", error);
  }
}

const CHEAP = ["text", "picture", "no picture"]; // kinds of messages without curves: they are drawn with the head
const NEXT_MS = 3500; // a little longer than the longest interval between two messages

/** Return whether a message will soon redraw the clock, on cores that are all busy or where a person chose to wait for it. */
function isMessageDue(store) {
  const { head, status, received } = store, chosen = refreshMs(store);
  return (chosen || !head?.has_spare_core) && status?.state === "running" && Date.now() - received < chosen + NEXT_MS;
}

// A front end finds no output of before the reload, and so keeps the picture below it in the notebook.
const RESTORED = "Saved pictures stop here after a reload of the page. Show the run in a new cell for a newer one.";

/** Return a note on the picture of a restored view, and a function that hides it while the notebook has the picture of the end. */
function newRestoredNote(store, readKeptEnd) {
  const note = h("p", { class: "dtk-note dtk-restored", "data-testid": "restored", hidden: "" }, RESTORED);
  const update = () => {
    const { state, step } = store.status ?? {};
    note.hidden = !LIVE.includes(state) && readKeptEnd() === step;
  };
  return { note, update };
}

/** Return a view that follows the theme and its size: {root, redraw, dispose}. */
function openView(store, model, readKeptEnd = null) {
  const { root, redraw: redrawParts } = buildView(store, (message) => sendTo(model, message)), stopTheme = followTheme(root);
  const restored = readKeptEnd && newRestoredNote(store, readKeptEnd);
  if (restored) root.prepend(restored.note);
  const redraw = (isHeadOnly) => {
    restored?.update();
    redrawParts(isHeadOnly);
  };
  let width = 0;
  const size = new ResizeObserver(([{ contentRect }]) => { // also after the page had taken it out
    if (contentRect.width && contentRect.width !== width) redraw();
    width = contentRect.width;
  });
  size.observe(root);
  const tick = () => {
    if (!root.isConnected || !isTicking(store) || store.attention.isHidden()) return;
    if (store.lost !== isLost(store)) store.pacer.now();
    else if (!isMessageDue(store)) store.pacer.soon(false);
  };
  const ticking = setInterval(tick, 1000); // the elapsed time of a long step
  store.attention.watch(root);
  store.page.add(root);
  redraw();
  return { root, redraw, dispose: () => { stopTheme(); size.disconnect(); clearInterval(ticking); store.attention.forget(root); store.page.remove(root); } };
}

export default () => {
  const store = newStore(), views = new Set();
  let asked = 0;
  store.redraw = (isHeadOnly) => { for (const redraw of views) redraw(isHeadOnly); };
  store.sight = newSight(store.redraw);
  store.pictureSight = newPictureSight(store);
  const redrawAll = (isHeadOnly) => {
    store.redraw(isHeadOnly);
    if (!isHeadOnly) requestAnimationFrame(store.sight.drawn);
  };
  store.pacer = newPacer(redrawAll, () => Boolean(store.head?.has_spare_core), () => refreshMs(store));
  store.setRefresh = (seconds) => {
    store.view.refresh = seconds;
    store.attention.update();
    store.pacer.now();
  };
  const receive = (model, content, buffers) => {
    const before = pressing(store);
    if (!apply(store, content, buffers) && Date.now() - asked > 1000) {
      asked = Date.now();
      model.send({ hello: "gap" });
    }
    restoreChoices(store);
    if (content.kind === "alive" && !store.lost) return;
    if (pressing(store) === before) store.pacer.soon(!CHEAP.includes(content.kind));
    else {
      store.sight.drawAll();
      store.redraw(true); // the header first: to draw all the rest takes longer
      requestAnimationFrame(() => afterPainting(() => {
        store.sight.drawAll();
        store.pacer.now();
      }));
    }
  };
  return {
    initialize({ model }) {
      store.send = (message) => sendTo(model, message);
      store.page = joinPage(store);
      model.on("msg:custom", (content, buffers) => receive(model, content, buffers));
      model.on("comm_live_update", () => { // JupyterLab cuts all models off when a person restarts the kernel
        store.gone = true;
        store.redraw();
      });
      const { content, buffers } = model.get("opening");
      receive(model, content, buffers);
      model.send({ hello: "opened" }); // the kernel then forgets what pages reported before
      store.attention = followAttention((attention) => store.send({ attention }), () => store.view.refresh);
      views.add(mountViews(model.get("place"), (readKeptEnd) => openView(store, model, readKeptEnd)));
      return () => { store.attention.end(); store.page.end(); };
    },
    render({ model, el }) {
      const { root, redraw, dispose } = openView(store, model);
      el.append(root);
      views.add(redraw);
      return () => { views.delete(redraw); dispose(); };
    },
  };
};
