// The log of events.

import { h, setText } from "../elements.js";

export function log(store) {
  const lines = h("div", { class: "dtk-log", role: "log", "aria-live": "off", tabindex: "0", "data-testid": "log", "aria-label": "log" });
  const el = h("details", { class: "dtk-panel dtk-wide", open: "" }, h("summary", {}, "Log"), lines);
  let shown = null;
  const update = () => {
    if (shown === store.log || !store.log.length && !shown) return;
    const pinned = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    lines.replaceChildren(...store.log.map(logLine));
    if (pinned) lines.scrollTop = lines.scrollHeight;
    shown = store.log;
  };
  return { el, update };
}
function logLine(event) {
  const at = new Date(event.time * 1000).toLocaleTimeString("en-GB");
  const who = event.rank === null ? "" : `[${event.rank}] `;
  return h("div", { class: `dtk-event-${event.kind}` }, h("time", {}, at), h("span", { class: "dtk-at" }, `step ${event.step}`), `${who}${event.text}`);
}
