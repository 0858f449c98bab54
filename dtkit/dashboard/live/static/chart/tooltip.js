// A box at the pointer that names what is below it. It is for the eye: charts describe themselves to screen readers.

import { h, setAttr, setText } from "../elements.js";
import { runLine } from "../run_line.js";

/** Return {show(x, y, title, rows), hide()} for a panel. A row is {label, value, mark, run}; `mark` is the class of its swatch, which is a line for a `run`. */
export function newTooltip(panel) {
  const title = h("div", { class: "dtk-tip-title" }), list = h("div", { class: "dtk-tip-rows" });
  const el = h("div", { class: "dtk-tip", "aria-hidden": "true", "data-testid": "tooltip", hidden: "" }, title, list);
  panel.append(el);
  let shown = "", size = [0, 0];
  const show = (x, y, text, rows) => {
    const now = JSON.stringify([text, rows, panel.clientWidth]), isNew = el.hidden || now !== shown;
    if (isNew) write(text, rows);
    if (isNew) [shown, size] = [now, [el.offsetWidth, el.offsetHeight]];
    const [left, top] = placeTip(x, y, size, [panel.clientWidth, panel.clientHeight]);
    el.style.transform = `translate(${left.toFixed(1)}px, ${top.toFixed(1)}px)`; // the browser need not lay out anything
  };
  const write = (text, rows) => {
    el.hidden = false;
    setText(title, text);
    while (list.children.length > rows.length) list.lastChild.remove();
    while (list.children.length < rows.length) list.append(h("div", {}, h("i"), h("span"), h("b")));
    rows.forEach(({ label, value, mark, run = null }, k) => {
      const [swatch, name, number] = list.children[k].children, line = run === null ? "" : String(run);
      setAttr(swatch, "class", line ? "dtk-swatch-line" : mark ? `dtk-swatch ${mark}` : "");
      if ((swatch.dataset.run ?? "") !== line) swatch.replaceChildren(...(line ? [runLine(run)] : []));
      swatch.dataset.run = line;
      setText(name, label);
      setText(number, value);
    });
  };
  return { show, hide: () => { if (!el.hidden) el.hidden = true; } };
}
const ASIDE = 14, TICKS_PX = 22; // below a plot, as BOTTOM in chart.js

/** Return [left, top] of a box next to a point, on the side with more room; above or below it where neither side has enough. Beside it, the box ends above the labels of the x axis. */
export function placeTip(x, y, [width, height], [wide, high]) {
  const isRight = x < wide / 2, room = Math.max(x, wide - x) - ASIDE, inside = Math.max(0, Math.min(y - 10, high - TICKS_PX - height));
  if (width <= room) return [isRight ? x + ASIDE : x - ASIDE - width, inside];
  return [Math.max(0, Math.min(x - width / 2, wide - width)), y < high / 2 ? y + ASIDE : y - ASIDE - height];
}
/** Return the position of an event within the panel. */
export function within(panel, event) {
  const box = panel.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
