// A menu of the panels to show. The page remembers the choice, where it may.

import { h } from "./elements.js";
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

/** Return the menu of `panels`, {title, el}: update() hides those that aren't wanted. */
export function panelsMenu(store, panels) {
  const menu = popover("panels ▾", "choose panels", "panels-menu"), hidden = readChoice();
  const boxes = panels.map(({ title }) => {
    const box = h("input", { type: "checkbox", "data-panel": title });
    box.checked = !hidden.has(title);
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(title);
      else hidden.add(title);
      keepChoice(hidden);
      store.redraw();
    });
    return box;
  });
  menu.box.append(...panels.map(({ title }, k) => h("label", {}, boxes[k], title)));
  const update = () => panels.forEach(({ title, el }) => el.classList.toggle("dtk-off", hidden.has(title)));
  return { el: menu.el, update };
}
