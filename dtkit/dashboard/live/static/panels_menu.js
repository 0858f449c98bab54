// A menu of the panels to show. The page remembers the choice, where it may, also for later runs: so the menu says how many are hidden.

import { h, setAttr, setText } from "./elements.js";
import { popover } from "./popover.js";

const KEY = "dtkit-hidden-panels";

/** Return the names of hidden panels. A page without storage forgets them. */
function readChoice() {
  try {
    const kept = JSON.parse(window.localStorage.getItem(KEY) ?? "[]");
    return new Set(Array.isArray(kept) ? kept : []);
  } catch {
    return new Set();
  }
}
function keepChoice(hidden) {
  try {
    window.localStorage.setItem(KEY, JSON.stringify([...hidden]));
  } catch {
    // A page in a sandbox, or with its storage full.
  }
}

/** Return the menu of `panels`, {title, el} or, of several ones, {parts()}: update() hides those that aren't wanted. A run may have no panel of a kind: isAbsent(). */
export function panelsMenu(store, panels) {
  const face = h("span", {}, "panels ▾"), hidden = readChoice(), labels = new Map();
  const menu = popover(face, "choose panels", "panels-menu");
  const showCount = (count) => {
    setText(face, count ? `panels · ${count} hidden ▾` : "panels ▾");
    for (const name of ["aria-label", "title"]) setAttr(menu.button, name, count ? `choose panels: ${count} hidden` : "choose panels");
  };
  const newLabel = ({ title, key = title }) => {
    const box = h("input", { type: "checkbox", "data-panel": title });
    box.checked = !hidden.has(key);
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(key);
      else hidden.add(key);
      keepChoice(hidden);
      store.redraw();
    });
    return h("label", {}, box, title);
  };
  const update = () => {
    const all = panels.flatMap((panel) => panel.parts?.() ?? [panel]).filter((panel) => !panel.isAbsent?.());
    for (const { title, key = title, el } of all) {
      if (!labels.has(key)) labels.set(key, newLabel({ title, key }));
      el.classList.toggle("dtk-off", hidden.has(key));
    }
    showCount(all.filter(({ title, key = title }) => hidden.has(key)).length);
    const wanted = all.map(({ title, key = title }) => labels.get(key));
    if (wanted.length !== menu.box.children.length || wanted.some((label, k) => menu.box.children[k] !== label)) menu.box.replaceChildren(...wanted);
  };
  return { el: menu.el, update };
}
