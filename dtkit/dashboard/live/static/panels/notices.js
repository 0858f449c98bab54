// Alerts on lost and stuck nodes, the verdict, and quiet notices: each has a place that is there from the start.
// summary/notices.py has the text of alerts and notices.

import { h, setAttr, setProse } from "../elements.js";
import { keepHeight } from "../keep_height.js";
import { LIVE } from "../store.js";
import { newWidth } from "../width.js";
import { hasBanner } from "./banner.js";
import { verdict } from "./verdict.js";

export const NOTICE_GLYPH = { lost: "✕", stuck: "⊘", differs: "✕", mismatch: "✕", diverged: "✕", overfits: "▲", unlearned: "▲", ended: "✕", identical: "✓", verified: "✓", fewer: "○", slowed: "▼", repaired: "+", stopped: "■" }, URGENT_NOTICES = ["lost", "stuck", "differs", "mismatch", "diverged"];
const BRIEF = ["identical", "verified", "repaired"];

/** Alerts are separate: a screen reader reads them at once, and only when their text is new. */
export function notices(store, _send, redraw) {
  const alerts = h("div", { class: "dtk-banner", role: "alert", "data-testid": "alert", hidden: "" });
  const quiet = h("ul", { class: "dtk-notices", "data-testid": "notices", "aria-label": "notices" });
  const line = verdict(store), el = h("div", { class: "dtk-notice-panel" }, alerts, line.el, quiet);
  const { hold, isHeld } = keepHeight(quiet);
  let drawn = null, shape = null, isKept = false;
  newWidth(el, () => { drawn = shape = null; redraw(); });
  const drawNotices = () => {
    const now = JSON.stringify(store.notices), before = shape;
    if (now === drawn && isHeld()) return;
    drawn = now;
    shape = now.replace(/\d/g, "0"); // all digits are equally wide
    const urgent = store.notices.filter((notice) => URGENT_NOTICES.includes(notice.kind));
    const text = urgent.map((notice) => `${NOTICE_GLYPH[notice.kind]} ${notice.text}`).join("\n");
    const isNews = alerts.hidden === Boolean(text); // then all may move, and no room is kept
    alerts.hidden = !text;
    setProse(alerts, text);
    const others = store.notices.filter((notice) => !URGENT_NOTICES.includes(notice.kind));
    const isBrief = others.length > 1 && others.every(({ kind }) => BRIEF.includes(kind)); // one line, in which the longer text is cut
    quiet.classList.toggle("dtk-brief", isBrief);
    while (quiet.children.length > others.length) quiet.lastChild.remove();
    while (quiet.children.length < others.length) quiet.append(h("li"));
    others.forEach((notice, k) => {
      quiet.children[k].className = `dtk-notice-${notice.kind}`;
      setProse(quiet.children[k], `${NOTICE_GLYPH[notice.kind] ?? "•"} ${notice.text}`);
      setAttr(quiet.children[k], "title", isBrief ? notice.text : "");
    });
    if (shape === before && isHeld()) return; // to measure its height again would make the browser lay out the page
    quiet.hidden = false;
    quiet.hidden = !hold(isNews) && !others.length;
  };
  const update = () => {
    isKept ||= LIVE.includes(store.status.state) && store.nodesNow.world > 1; // replicas are compared, nodes are replaced
    quiet.classList.toggle("dtk-kept", isKept);
    drawNotices();
    if (isKept) quiet.hidden = false;
    line.update(!alerts.hidden || hasBanner(store));
    el.hidden = [...el.children].every((part) => part.hidden);
  };
  return { el, update };
}
