// The user's own panels, drawn by matplotlib in the kernel (panel_renderer.py): a picture, an error, or a note if there is nothing to draw.

import { h, setText } from "../elements.js";
import { savePicture } from "../export.js";
import { newFrame } from "../frame.js";
import { rowHeight } from "../grid.js";

export function pictures(store, _send, redraw) {
  const el = h("div", { class: "dtk-several" }), shown = new Map();
  const add = (name) => {
    shown.set(name, newPicture(name, redraw));
    el.append(shown.get(name).el);
    store.pictureSight.watch(name, shown.get(name).el);
    redraw(); // the menu of panels, which is above
  };
  const remove = (name) => {
    store.pictureSight.forget(shown.get(name).el);
    shown.get(name).el.remove();
    shown.delete(name);
    redraw();
  };
  const update = () => {
    for (const name of [...shown.keys()]) if (!store.pictures.has(name)) remove(name);
    for (const [name, picture] of store.pictures) {
      if (!shown.has(name)) add(name);
      drawPicture(shown.get(name), picture);
    }
  };
  const parts = () => [...shown].map(([title, part]) => ({ title, key: `own ${title}`, el: part.el }));
  return { el, update, parts, isCheap: true };
}

function newPicture(name, redraw) {
  const image = h("img", { alt: `${name}: a picture that this notebook draws` }), broken = h("p", { class: "dtk-failed", role: "status" });
  const frame = newFrame(name, h("span", { class: "dtk-note" }), { saves: [["PNG picture", () => savePicture(image, name)]] });
  const el = h("section", { class: "dtk-panel", "data-testid": "custom-panel", "data-name": name }, frame.head, image, broken);
  frame.attach(el, redraw);
  new ResizeObserver(() => {
    const isFull = el.ownerDocument.fullscreenElement === el;
    if (!isFull) rowHeight(el, image.clientHeight);
    redraw(); // a chart beside it
  }).observe(image);
  return { el, image, broken, tools: el.querySelector(".dtk-tools"), drawn: null };
}

function drawPicture(view, picture) {
  if (view.drawn === picture) return;
  view.drawn = picture;
  view.el.classList.toggle("dtk-wide", picture.wide);
  view.image.hidden = view.tools.hidden = picture.bytes === null;
  view.broken.hidden = picture.bytes !== null;
  view.broken.classList.toggle("dtk-note", picture.note !== null);
  setText(view.broken, picture.note ?? (picture.error === null ? "" : `this panel failed: ${picture.error}`));
  if (picture.bytes === null) return;
  URL.revokeObjectURL(view.image.src);
  view.image.src = URL.createObjectURL(new Blob([picture.bytes], { type: "image/png" }));
}
