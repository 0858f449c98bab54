// What a person chose for the charts of a run, kept for its later views: in the page, and in the browser where that may
// keep something, so that a reload loses nothing. The menu of panels keeps its own choice, for all runs.

import { AXES } from "./chart/axis.js";

const KEPT_KEY = "dtkit-views", MOST_RUNS = 20, IN_PAGE = Symbol.for("dtkit views");
/** The kept settings of store.view, and which values each of them may have. What is in sight, as by a zoom, is not kept. */
const KEPT = {
  x: (v) => AXES.includes(v), smooth: (v) => v >= 0 && v < 1, log: (v) => v === null || typeof v === "boolean",
  robust: (v) => typeof v === "boolean", refresh: (v) => v >= 0 && v < Infinity,
};

/** Return the kept settings as text by run, the newest last. A browser that keeps nothing has those of this page. */
function readKept() {
  const kept = (globalThis[IN_PAGE] ??= new Map());
  try {
    for (const [id, text] of JSON.parse(window.localStorage.getItem(KEPT_KEY) ?? "[]")) if (!kept.has(id)) kept.set(id, text);
  } catch {
    // A page in a sandbox, or another program's entry.
  }
  return kept;
}
function writeKept(kept) {
  try {
    window.localStorage.setItem(KEPT_KEY, JSON.stringify([...kept]));
  } catch {
    // A page in a sandbox, or with its storage full.
  }
}

/** Return the settings of a view as text. */
function writeChoices(view) {
  const plain = Object.fromEntries(Object.keys(KEPT).map((key) => [key, view[key]]));
  return JSON.stringify({ ...plain, ownLog: [...view.ownLog], hidden: [...view.hidden] });
}

/** Continue, once, with what a person chose in an earlier view of the run, which has an id from its first event on. */
export function restoreChoices(store) {
  const { view, head } = store;
  if (!head?.id || store.choices !== undefined) return;
  const text = readKept().get(head.id);
  store.choices = text ?? writeChoices(view);
  if (text === undefined) return;
  try {
    const { ownLog, hidden, ...plain } = JSON.parse(text);
    for (const [key, isValid] of Object.entries(KEPT)) if (isValid(plain[key])) view[key] = plain[key];
    [view.ownLog, view.hidden] = [new Map(ownLog), new Set(hidden)];
  } catch {
    // Another version's settings.
  }
}

/** Keep what a person chose since the last call for later views of the run. */
export function saveChoices(store) {
  if (store.choices === undefined) return;
  const text = writeChoices(store.view);
  if (text === store.choices) return;
  store.choices = text;
  const kept = readKept();
  kept.delete(store.head.id); // to be the newest
  kept.set(store.head.id, text);
  while (kept.size > MOST_RUNS) kept.delete(kept.keys().next().value);
  writeKept(kept);
}
