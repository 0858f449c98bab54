// Model, strategy, and state of the run.

import { h, setText } from "../elements.js";
import { clock } from "../numbers.js";
import { isReady, LIVE } from "../store.js";

export const STATE_GLYPH = { pending: "…", running: "▶", paused: "‖", completed: "✓", stopped: "■", failed: "✕" };

/** Return the state in words. A run whose loss diverged says so, and the notice has the numbers; at its end, what became of it is a part of its state, as name_state of summary/activity.py has it. */
function describeState(store) {
  const { status: { state, diverged, end, stepping } } = store;
  if (store.lost) return "✕ kernel gone";
  if (isReady(store)) return "ready";
  if (store.error?.startsWith("NonFiniteError") && !["pending", "running"].includes(state)) return `✕ ${state}, not finite`;
  if (store.error && state === "paused") return "✕ paused, error";
  if (stepping && !diverged) return "▸| stepping"; // it pauses by itself
  if (end && state !== "failed") return `${end === "diverged" ? "✕" : "▲"} ${state}, ${end}`;
  if (!diverged || state === "failed") return `${STATE_GLYPH[state] ?? ""} ${state}`;
  return LIVE.includes(state) ? `↗ ${state}, diverged` : "✕ diverged";
}

export function header(store) {
  const name = h("h2"), what = h("span", { class: "dtk-note" }), chip = h("span", { class: "dtk-chip" });
  const update = () => {
    const { head, status } = store;
    setText(name, head.name);
    const { world } = store.nodesNow, was = head.ranks > world ? ` (was ${head.ranks})` : "";
    setText(what, `${head.strategy} · ${world} ${world === 1 ? "node" : "nodes"}${was} · batch ${head.batch.toLocaleString("en-US")}`);
    const doing = store.lost ? null : status.activity;
    setText(chip, doing ? `${doing.glyph} ${doing.text}, ${clock(doing.seconds + (Date.now() - store.received) / 1000)}` : describeState(store));
    chip.classList.toggle("dtk-busy", Boolean(doing));
  };
  return { el: h("header", {}, name, what, chip), update };
}
