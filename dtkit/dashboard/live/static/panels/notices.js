// Notices on lost and stuck nodes, agreement, and delays; summary/notices.py has their text.

import { h, setText } from "../elements.js";

const GLYPH = { lost: "✕", stuck: "⊘", differs: "✕", diverged: "✕", identical: "✓", fewer: "○", slowed: "▼", repaired: "+" }, URGENT = ["lost", "stuck", "differs", "diverged"];

/** Alerts are separate: a screen reader reads them at once, and only when their text is new. */
export function notices(store) {
  const alerts = h("div", { class: "dtk-banner", role: "alert", "data-testid": "alert", hidden: "" });
  const quiet = h("ul", { class: "dtk-notices", "data-testid": "notices", "aria-label": "notices" });
  const el = h("div", { class: "dtk-notice-panel" }, alerts, quiet);
  const hold = keepHeight(el);
  const update = () => {
    const urgent = store.notices.filter((notice) => URGENT.includes(notice.kind));
    const text = urgent.map((notice) => `${GLYPH[notice.kind]} ${notice.text}`).join("\n");
    alerts.hidden = !text;
    setText(alerts, text);
    const others = store.notices.filter((notice) => !URGENT.includes(notice.kind));
    quiet.hidden = !others.length;
    while (quiet.children.length > others.length) quiet.lastChild.remove();
    while (quiet.children.length < others.length) quiet.append(h("li"));
    others.forEach((notice, k) => {
      quiet.children[k].className = `dtk-notice-${notice.kind}`;
      setText(quiet.children[k], `${GLYPH[notice.kind] ?? "•"} ${notice.text}`);
    });
    el.hidden = false;
    el.hidden = !hold() && !store.notices.length;
  };
  return { el, update };
}

const HELD_MS = 10_000;

/**
 * Let an element keep its height for a while after its content has become lower, so that messages that come and go don't
 * move what is below. The returned function does so, and returns whether the element still keeps a height.
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
