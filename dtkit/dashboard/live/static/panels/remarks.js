// Notices on lost and stuck nodes, agreement, and delays; summary/notices.py has their text.

import { h, setText } from "../elements.js";

const GLYPH = { lost: "✕", stuck: "⊘", differs: "✕", identical: "✓", fewer: "○", slowed: "▼", repaired: "+" }, URGENT = ["lost", "stuck", "differs"];

/** Alerts are separate: a screen reader reads them at once, and only when their text is new. */
export function remarks(store) {
  const alerts = h("div", { class: "dtk-banner", role: "alert", "data-testid": "alert", hidden: "" });
  const quiet = h("ul", { class: "dtk-remarks", "data-testid": "remarks", "aria-label": "remarks" });
  const el = h("div", { class: "dtk-said-of-all" }, alerts, quiet);
  const hold = keepHeight(el);
  const update = () => {
    const urgent = store.remarks.filter((remark) => URGENT.includes(remark.kind));
    const text = urgent.map((remark) => `${GLYPH[remark.kind]} ${remark.text}`).join("\n");
    alerts.hidden = !text;
    setText(alerts, text);
    const others = store.remarks.filter((remark) => !URGENT.includes(remark.kind));
    quiet.hidden = !others.length;
    while (quiet.children.length > others.length) quiet.lastChild.remove();
    while (quiet.children.length < others.length) quiet.append(h("li"));
    others.forEach((remark, k) => {
      quiet.children[k].className = `dtk-remark-${remark.kind}`;
      setText(quiet.children[k], `${GLYPH[remark.kind] ?? "•"} ${remark.text}`);
    });
    el.hidden = false;
    el.hidden = !hold() && !store.remarks.length;
  };
  return { el, update };
}

const HELD_MS = 10_000;

/**
 * Let an element keep its height for a while after its content has become lower, so that messages that come and go don't
 * move what is below. Return a function that does so, and says whether the element still keeps a height.
 */
function keepHeight(el) {
  let tall = 0, until = 0;
  return () => {
    el.style.minHeight = "";
    const now = el.offsetHeight;
    if (now >= tall || Date.now() > until) [tall, until] = [now, Date.now() + HELD_MS];
    el.style.minHeight = tall ? `${tall}px` : "";
    return tall > 0;
  };
}
