// The scale of one chart: logarithmic or not, by itself or as a person chose.

import { areShares, hasNegative, spansOrders } from "./grain.js";

/** Return {is, can, isAuto, set} of the scale of one chart. */
export function scaleOfOne(store, getView) {
  const set = (isLog) => { store.view.ownLog.set(scaleKey(getView()), isLog); store.redraw(); };
  const isAuto = () => Boolean(getView().isLog) && store.view.log === null && !store.view.ownLog.has(scaleKey(getView()));
  return { is: () => Boolean(getView().isLog), can: () => Boolean(getView().canLog), isAuto, set };
}
function scaleKey({ name, options }) {
  return options.testid + name;
}
/** Note the scale of a chart for the tools of all charts, which are drawn before it; null where it has no choice. */
export function noteScale(view, isLog, redraw) {
  const { shownLog } = view.store.view, key = scaleKey(view), before = shownLog.get(key) ?? null;
  if (isLog === null) shownLog.delete(key);
  else shownLog.set(key, isLog);
  if (isLog !== before) redraw();
}

/** Return whether a chart has numbers of the user's own that are shares: only its own button makes it logarithmic. */
export function staysLinear({ store, name, options, grain }) {
  return options.canLog === "positive" && !store.view.ownLog.has(scaleKey({ name, options })) && areShares(grain, name);
}

/** Return whether a chart is logarithmic: as chosen, or since its values once spanned many orders, until one is negative. */
export function isLogScale({ store, name, options, grain }) {
  const { view } = store, key = scaleKey({ name, options }), chosen = view.autoLog.get(key), picked = view.ownLog.get(key) ?? view.log;
  if (staysLinear({ store, name, options, grain })) return false;
  if (chosen && hasNegative(grain)) view.autoLog.set(key, false); // for good: a range in sight without one changes nothing
  if (chosen === undefined && picked === null && spansOrders(grain, options.most?.(store), Boolean(options.lineName))) view.autoLog.set(key, true);
  return picked ?? view.autoLog.get(key) ?? false;
}
