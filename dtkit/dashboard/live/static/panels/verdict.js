// The verdict in one line, and its arithmetic on demand; summary/verdict.py has the text.

import { h, setAttr, setText } from "../elements.js";
import { keepHeight } from "../keep_height.js";
import { LIVE } from "../store.js";

/** Return {el, update(isReplaced)}: an alert or an error takes the place of a verdict that there is not. */
export function verdict(store) {
  const line = h("summary", { "data-testid": "verdict" }), arithmetic = h("div", { class: "dtk-arithmetic" });
  const el = h("details", { class: "dtk-verdict" }, line, arithmetic), { hold } = keepHeight(line);
  let wasKnown = false;
  const show = (text) => {
    if (line.textContent === text) return;
    setText(line, text);
    if (line.isConnected) hold(false); // of one line or of two
  };
  const update = (isReplaced) => {
    el.hidden = !store.verdict && (isReplaced || !LIVE.includes(store.status.state)); // its place is there from the start
    setAttr(el, "class", `dtk-verdict${store.verdict ? "" : " dtk-none"}`);
    wasKnown ||= Boolean(store.verdict);
    if (!store.verdict) {
      el.open = false;
      return show(wasKnown ? "no verdict at the moment" : "no verdict on the speed yet");
    }
    show(store.verdict.text);
    setText(arithmetic, store.verdict.arithmetic.join("\n"));
  };
  return { el, update };
}
