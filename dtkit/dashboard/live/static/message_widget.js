// A widget that draws what messages bring, in all its places of the page, and sends nothing but its opening.

import { mountViews } from "./mount.js";
import { newPacer } from "./pacing.js";
import { apply, newStore, pressing } from "./store.js";

/**
 * Return the module of a widget. `open(store)` returns {root, redraw, dispose} of a view; `afterFirst(store)` is called
 * once the first message is in the store.
 */
export function messageWidget(open, afterFirst = () => {}) {
  const store = newStore(), views = new Set();
  store.redraw = () => { for (const redraw of views) redraw(); };
  const pacer = newPacer(() => store.redraw(), () => Boolean(store.head?.has_spare_core));
  const receive = (content, buffers) => {
    const isFirst = !store.head, before = pressing(store);
    apply(store, content, buffers);
    if (isFirst) afterFirst(store);
    if (pressing(store) === before) pacer.soon();
    else pacer.now();
  };
  return {
    initialize({ model }) {
      model.on("msg:custom", receive);
      for (const { content, buffers } of [model.get("opening")].flat()) receive(content, buffers);
      views.add(mountViews(model.get("place"), () => open(store)));
      model.send({ hello: "opened" });
    },
    render({ el }) {
      const { root, redraw, dispose } = open(store);
      el.append(root);
      views.add(redraw);
      return () => { views.delete(redraw); dispose(); };
    },
  };
}
