// The error that failed or paused the run, and a kernel that is gone.

import { h, setProse } from "../elements.js";

const GONE = "The kernel doesn't answer: this is the last that was heard of the run. After a restart of the kernel, " +
  "dtkit.attach() takes the engines over, and its current_run shows the run again.";

export function banner(store) {
  const el = h("div", { class: "dtk-banner", role: "alert", "data-testid": "error", hidden: "" });
  const update = () => {
    const text = store.lost ? GONE : store.error;
    el.hidden = !text;
    setProse(el, text ?? "");
  };
  return { el, update };
}
