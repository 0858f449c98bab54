// Progress of the run, and the remaining time.

import { h, setAttr, setText } from "../elements.js";
import { clock, elapsedTime } from "../numbers.js";
import { isReady, LIVE } from "../store.js";

export function progress(store) {
  const bar = h("div", { class: "dtk-bar" }), left = h("span"), right = h("span");
  const track = h("div", { class: "dtk-track", role: "progressbar", "aria-label": "training progress", "data-testid": "progress", "aria-valuemin": 0 }, bar);
  const update = () => {
    const st = store.status, ticking = !store.lost && (st.state === "running" || (st.state === "pending" && st.elapsed > 0));
    const since = ticking ? (Date.now() - store.received) / 1000 : 0;
    const elapsed = elapsedTime((st.elapsed ?? 0) + since);
    const begun = st.step > 0 || !LIVE.includes(st.state) || isReady(store);
    bar.style.width = `${100 * Math.min(1, st.steps ? st.step / st.steps : 0)}%`;
    setAttr(track, "aria-valuemax", st.steps);
    setAttr(track, "aria-valuenow", st.step);
    setText(left, begun ? `step ${st.step.toLocaleString("en-US")} of ${st.steps.toLocaleString("en-US")} · epoch ${st.epoch.toLocaleString("en-US")} of ${st.epochs.toLocaleString("en-US")}` : `first step, ${elapsed}`);
    const remaining = st.remaining !== null && st.state === "running" && !store.lost ? ` · ${clock(st.remaining - since)} left` : "";
    setText(right, [st.message, begun ? `${elapsed} elapsed${remaining}` : ""].filter(Boolean).join(" · "));
    setAttr(track, "aria-valuetext", left.textContent);
  };
  return { el: h("div", { class: "dtk-progress" }, track, h("div", { class: "dtk-ends" }, left, right)), update };
}
