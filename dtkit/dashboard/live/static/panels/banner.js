// The error that failed or paused the run, and a kernel that is gone.

import { h, setProse } from "../elements.js";

const GONE = "The kernel doesn't answer: this is the last that was heard of the run. After a restart of the kernel, " +
  "import dtkit and call dtkit.attach(): it takes the engines over, and its current_run shows the run again.";

const SHOWN_ELSEWHERE = "The kernel that had this run is gone. Another cell of this notebook shows the run live.";

/** Return whether a run has a box with its error, or with what became of its kernel. */
export function hasBanner({ lost, error }) {
  return Boolean(lost || error);
}

export function banner(store) {
  const words = h("span"), jump = h("button", { type: "button", class: "dtk-tool", "data-testid": "show-live" }, "show it");
  const el = h("div", { class: "dtk-banner", role: "alert", "data-testid": "error", hidden: "" }, words);
  jump.addEventListener("click", () => store.page.find()?.scrollIntoView({ block: "start" }));
  const update = () => {
    const isElsewhere = store.lost && store.page?.find() != null, text = isElsewhere ? SHOWN_ELSEWHERE : store.lost ? GONE : store.error;
    el.hidden = !text;
    el.classList.toggle("dtk-good", isElsewhere);
    setProse(words, text ?? "");
    if (isElsewhere !== (jump.parentNode === el)) el.replaceChildren(words, ...(isElsewhere ? [" ", jump] : []));
  };
  return { el, update };
}
