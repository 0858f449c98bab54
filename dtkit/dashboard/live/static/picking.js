// The highlighted node of all panels, and the glyphs of nodes, which differ without colors too.

/** Highlight a node, or end that. This page does so at once; the kernel sends it to other pages, with the lines. */
export function pick(store, rank) {
  store.selected = store.selected === rank ? null : rank;
  store.picking = true;
  store.send({ select: store.selected });
  store.redraw();
}
/** Return "", or " dtk-picked" or " dtk-faded" while some node is highlighted. */
export function pickedClass(store, rank) {
  if (store.selected === null || rank === undefined) return "";
  return store.selected === rank ? " dtk-picked" : " dtk-faded";
}
/** Return "", or " dtk-pointed" or " dtk-unpointed" in a chart that has the lines which a person points at in the legend. */
export function pointedClass({ store, isPointed }, key) {
  return isPointed ? store.pointed === key ? " dtk-pointed" : " dtk-unpointed" : "";
}
/** Return the state of a node: lost, stuck (or stopped), left out, slow (keeps the others waiting), slowed on purpose, or none. */
export function condition(store, rank) {
  const { world, lost, stuck, slow, slowed } = store.nodesNow;
  if (lost.includes(rank)) return "lost";
  if (stuck.includes(rank)) return "stuck";
  return rank >= world ? "out" : slow.includes(rank) ? "slow" : slowed.includes(rank) ? "slowed" : "";
}
export const CONDITION_GLYPH = { lost: "✕", ended: "✕", stuck: "⊘", out: "○", slow: "▲", slowed: "▼", "": "" };
const CONDITION_WORDS = { lost: "lost", ended: "its engine has ended", stuck: "stuck", out: "left out", slow: "keeps the others waiting", slowed: "slowed on purpose", "": "" };

/** Return the state of a node in words, in those of the head and the alert: a process that was stopped is not stuck. */
export function describeCondition(store, rank, what = condition(store, rank)) {
  return what === "stuck" && store.nodesNow.stopped.includes(rank) ? "stopped" : CONDITION_WORDS[what];
}

/** Return a node's name with its glyph: "▲ node 3". */
export function nodeName(store, rank) {
  return `${CONDITION_GLYPH[condition(store, rank)]} node ${rank}`.trim();
}
