// Notices on lost and stuck nodes, agreement, and delays; summary/notices.py has their text.

import { h, setProse } from "../elements.js";
import { keepHeight } from "../keep_height.js";
import { newWidth } from "../width.js";

const GLYPH = { lost: "✕", stuck: "⊘", differs: "✕", diverged: "✕", overfits: "▲", unlearned: "▲", ended: "✕", identical: "✓", fewer: "○", slowed: "▼", repaired: "+", stopped: "■" }, URGENT = ["lost", "stuck", "differs", "diverged"];

/** Alerts are separate: a screen reader reads them at once, and only when their text is new. */
export function notices(store, _send, redraw) {
  const alerts = h("div", { class: "dtk-banner", role: "alert", "data-testid": "alert", hidden: "" });
  const quiet = h("ul", { class: "dtk-notices", "data-testid": "notices", "aria-label": "notices" });
  const el = h("div", { class: "dtk-notice-panel" }, alerts, quiet);
  const { hold, isHeld } = keepHeight(quiet);
  let drawn = null, shape = null;
  newWidth(el, () => { drawn = shape = null; redraw(); });
  const update = () => {
    const now = JSON.stringify(store.notices), before = shape;
    if (now === drawn && isHeld()) return;
    drawn = now;
    shape = now.replace(/\d/g, "0"); // all digits are equally wide
    const urgent = store.notices.filter((notice) => URGENT.includes(notice.kind));
    // A repair takes the place of the loss, so that nothing below moves.
    const boxed = urgent.length ? urgent : store.notices.filter((notice) => notice.kind === "repaired");
    const text = boxed.map((notice) => `${GLYPH[notice.kind]} ${notice.text}`).join("\n");
    const isNews = alerts.hidden === Boolean(text); // then all may move, and no room is kept
    alerts.hidden = !text;
    setProse(alerts, text);
    alerts.classList.toggle("dtk-good", !urgent.length);
    const others = store.notices.filter((notice) => !URGENT.includes(notice.kind) && !boxed.includes(notice));
    while (quiet.children.length > others.length) quiet.lastChild.remove();
    while (quiet.children.length < others.length) quiet.append(h("li"));
    others.forEach((notice, k) => {
      quiet.children[k].className = `dtk-notice-${notice.kind}`;
      setProse(quiet.children[k], `${GLYPH[notice.kind] ?? "•"} ${notice.text}`);
    });
    if (shape === before && isHeld()) return; // to measure its height again would make the browser lay out the page
    quiet.hidden = el.hidden = false;
    quiet.hidden = !hold(isNews) && !others.length;
    el.hidden = quiet.hidden && !text;
  };
  return { el, update };
}
