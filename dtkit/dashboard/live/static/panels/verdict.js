// The verdict in one line, and its arithmetic on demand; summary/verdict.py has the text.

import { h, setAttr, setText } from "../elements.js";
import { keepHeight } from "../keep_height.js";

export function verdict(store) {
  const line = h("summary", { "data-testid": "verdict" }), arithmetic = h("div", { class: "dtk-arithmetic" });
  const el = h("details", { class: "dtk-verdict" }, line, arithmetic), { hold } = keepHeight(line);
  const show = (text) => {
    if (line.textContent === text) return;
    setText(line, text);
    if (line.isConnected) hold(false); // of one line or of two
  };
  const update = () => {
    el.hidden = !store.verdict && (!line.textContent || store.status.state !== "running");
    setAttr(el, "class", `dtk-verdict${store.verdict ? "" : " dtk-none"}`);
    if (!store.verdict) {
      el.open = false;
      return show(line.textContent && "→ no verdict at the moment");
    }
    show(`→ ${store.verdict.text}`);
    setText(arithmetic, store.verdict.arithmetic.join("\n"));
  };
  return { el, update };
}
