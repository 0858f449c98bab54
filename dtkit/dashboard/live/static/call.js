// The browser's half of the charts of a call (call_widget.py): those that a run's dashboard has for logged numbers.

import { h, setAttr } from "./elements.js";
import { mountViews } from "./mount.js";
import { scalars } from "./panels/scalars.js";
import { apply, newStore } from "./store.js";
import { followTheme } from "./theme.js";
import { toolbar } from "./toolbar.js";

function openCall(store) {
  const root = h("div", { class: "dtkit", "data-testid": "dtkit-call", "data-state": "", "data-seq": 0, "data-lm-suppress-shortcuts": "true", role: "region", "aria-label": "numbers logged by a function" });
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

export default () => {
  const store = newStore(), views = new Set();
  store.redraw = () => { for (const redraw of views) redraw(); };
  const receive = (content, buffers) => { apply(store, content, buffers); store.redraw(); };
  return {
    initialize({ model }) {
      model.on("msg:custom", receive);
      for (const { content, buffers } of model.get("opening")) receive(content, buffers);
      views.add(mountViews(model.get("place"), () => openCall(store)));
      model.send({ hello: "opened" });
    },
    render({ el }) {
      const { root, redraw, dispose } = openCall(store);
      el.append(root);
      views.add(redraw);
      return () => { views.delete(redraw); dispose(); };
    },
  };
};
