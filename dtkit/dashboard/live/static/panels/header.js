// Model, strategy, and state of the run.

import { h, setText } from "../elements.js";
import { clock } from "../numbers.js";
import { isReady } from "../store.js";

const STATE_GLYPH = { pending: "…", running: "▶", paused: "‖", completed: "✓", stopped: "■", failed: "✕", diverged: "✕", "kernel gone": "✕" };

/** Return whether a run that took all its steps has a loss that is useless, as name_state of summary/activity.py does. */
function hasDivergedAtEnd({ status: { state }, notices }) {
  return ["completed", "stopped"].includes(state) && notices.some(({ kind }) => kind === "diverged");
}

export function header(store) {
  const name = h("h2"), what = h("span", { class: "dtk-note" }), chip = h("span", { class: "dtk-chip" });
  const update = () => {
    const { head, status } = store;
    setText(name, head.name);
    const { world } = store.nodesNow, was = head.ranks > world ? ` (was ${head.ranks})` : "";
    setText(what, `${head.strategy} · ${world} ${world === 1 ? "node" : "nodes"}${was} · batch ${head.batch.toLocaleString("en-US")}`);
    const state = store.lost ? "kernel gone" : isReady(store) ? "ready" : hasDivergedAtEnd(store) ? "diverged" : status.state, doing = store.lost ? null : status.activity;
    setText(chip, doing ? `${doing.glyph} ${doing.text}, ${clock(doing.seconds + (Date.now() - store.received) / 1000)}` : `${STATE_GLYPH[state] ?? ""} ${state}`);
    chip.classList.toggle("dtk-busy", Boolean(doing));
  };
  return { el: h("header", {}, name, what, chip), update };
}
