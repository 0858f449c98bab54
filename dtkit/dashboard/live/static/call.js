// The browser's half of the charts of a call (call_widget.py): those that a run's dashboard has for logged numbers.

import { h, keepKeys, setAttr } from "./elements.js";
import { messageWidget } from "./message_widget.js";
import { scalars } from "./panels/scalars.js";
import { followTheme } from "./theme.js";
import { toolbar } from "./toolbar.js";

function openCall(store) {
  const root = h("div", { class: "dtkit", "data-testid": "dtkit-call", "data-state": "", "data-seq": 0, role: "region", "aria-label": "numbers logged by a function" });
  keepKeys(root);
  const redraw = () => requestAnimationFrame(draw), tools = toolbar(store, null), panel = scalars(store, null, redraw);
  root.append(h("div", { class: "dtk-body" }, tools.el, panel.el));
  function draw() {
    if (!store.head) return;
    tools.update();
    panel.update();
    setAttr(root, "data-state", store.status.state);
    setAttr(root, "data-seq", store.seq);
  }
  const stopTheme = followTheme(root), size = new ResizeObserver(redraw);
  size.observe(root);
  redraw();
  return { root, redraw, dispose: () => { stopTheme(); size.disconnect(); } };
}

export default () => messageWidget(openCall);
