// The node that is highlighted in all panels, and what stands before its name: nothing is told by colour alone.

/** Highlight a node, or no longer. At once on this page; the kernel tells the others, and sends its lines. */
export function pick(store, rank) {
  store.selected = store.selected === rank ? null : rank;
  store.picking = true;
  store.send({ select: store.selected });
  store.redraw();
}
/** "", or " dtk-picked" and " dtk-faded" where some node is highlighted. */
export function pickedClass(store, rank) {
  if (store.selected === null || rank === undefined) return "";
  return store.selected === rank ? " dtk-picked" : " dtk-faded";
}
/** What is the matter with a node: lost, stuck, left out, slow (keeps the others waiting), slowed on purpose; or nothing. */
export function condition(store, rank) {
  const { world, lost, stuck, slow, slowed } = store.nodesNow;
  if (lost.includes(rank)) return "lost";
  if (stuck.includes(rank)) return "stuck";
  return rank >= world ? "out" : slow.includes(rank) ? "slow" : slowed.includes(rank) ? "slowed" : "";
}
export const CONDITION_GLYPH = { lost: "✕", stuck: "⊘", out: "○", slow: "▲", slowed: "▼", "": "" };
export const CONDITION_WORDS = { lost: "lost", stuck: "stuck", out: "left out", slow: "keeps the others waiting", slowed: "slowed on purpose", "": "" };

/** A node's name with its sign: "▲ node 3". */
export function nodeName(store, rank) {
  return `${CONDITION_GLYPH[condition(store, rank)]} node ${rank}`.trim();
}
