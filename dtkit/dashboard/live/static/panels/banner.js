// What failed the run, or made it pause.

import { h, setText } from "../elements.js";

export function banner(store) {
  const el = h("div", { class: "dtk-banner", role: "alert", "data-testid": "error", hidden: "" });
  return { el, update: () => { el.hidden = !store.error; setText(el, store.error ?? ""); } };
}
