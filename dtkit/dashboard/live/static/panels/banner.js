// The error that failed or paused the run.

import { h, setText } from "../elements.js";

export function banner(store) {
  const el = h("div", { class: "dtk-banner", role: "alert", "data-testid": "error", hidden: "" });
  return { el, update: () => { el.hidden = !store.error; setText(el, store.error ?? ""); } };
}
