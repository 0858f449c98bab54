// A button with a small box below it, which Escape, a click elsewhere, or leaving it by the keyboard closes.

import { h, setAttr } from "./elements.js";

/** Return {el, box, close} for a button with the text or element `face`. */
export function popover(face, label, testid, role = "group") {
  const box = h("div", { class: "dtk-pop", role, "aria-label": label, hidden: "" });
  const button = h("button", { type: "button", class: "dtk-tool", "aria-haspopup": role === "menu" ? "menu" : "dialog", "aria-expanded": "false", "aria-label": label, title: label, "data-testid": testid }, face);
  const el = h("span", { class: "dtk-popover" }, button, box);
  const open = (wanted) => {
    box.hidden = !wanted;
    el.classList.remove("dtk-from-left");
    const view = el.closest(".dtkit"); // a narrow one may have the button at its left edge
    if (wanted && view) el.classList.toggle("dtk-from-left", box.getBoundingClientRect().left < view.getBoundingClientRect().left);
    setAttr(button, "aria-expanded", wanted);
  };
  const close = () => {
    const inside = box.contains(el.getRootNode().activeElement);
    open(false);
    if (inside) button.focus();
  };
  button.addEventListener("click", () => {
    open(box.hidden);
    if (!box.hidden) box.querySelector("button, input")?.focus();
  });
  el.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !box.hidden) { event.stopPropagation(); close(); }
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || box.hidden) return;
    event.preventDefault();
    const stops = [...box.querySelectorAll("button, input")].filter((stop) => !stop.disabled && stop.getClientRects().length);
    stops[(stops.indexOf(el.getRootNode().activeElement) + by + stops.length) % stops.length]?.focus();
  });
  el.addEventListener("focusout", (event) => { if (event.relatedTarget && !el.contains(event.relatedTarget)) open(false); });
  el.ownerDocument.addEventListener("pointerdown", (event) => { if (!box.hidden && !el.contains(event.target)) open(false); });
  return { el, box, button, close };
}
