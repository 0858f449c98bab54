// For screen readers: changes of state at once, and the numbers every 15 seconds.

import { h, setText } from "../elements.js";

export function summary(store) {
  const el = h("div", { class: "dtk-hidden", role: "status", "aria-live": "polite", "data-testid": "summary" });
  let state = null, spoken = 0;
  const update = () => {
    const st = store.status;
    const now = `${st.state} ${store.nodesNow.stuck}`;
    if (now === state && Date.now() - spoken < 15000) return;
    [state, spoken] = [now, Date.now()];
    const numbers = store.tiles.slice(0, 2).map((tile) => `${tile.label} ${tile.value}`).join(", ");
    const alerts = store.tiles.filter((tile) => tile.alert).map((tile) => tile.note);
    const more = [...alerts, ...store.notices.map((notice) => notice.text), store.latest.time?.straggler].filter(Boolean).map((text) => `; ${text}`).join("");
    setText(el, `${store.head.name} ${st.state}, step ${st.step} of ${st.steps}, ${numbers}${more}`);
  };
  return { el, update };
}
