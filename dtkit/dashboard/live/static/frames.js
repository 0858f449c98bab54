// Drawing at most once a frame, and no more of a view than has changed: a pointer that moves draws only what is at it.

/**
 * Return redraw(isHeadOnly), with redraw.pointed(). Each asks `draw(asked)` to draw in the next frame; `asked` has "all",
 * "head" or "pointed".
 */
export function newFrames(draw) {
  let asked = null;
  const ask = (part) => {
    if (asked) return void asked.add(part);
    asked = new Set([part]);
    requestAnimationFrame(() => {
      const parts = asked;
      asked = null;
      draw(parts);
    });
  };
  const redraw = (isHeadOnly) => ask(isHeadOnly === true ? "head" : "all"); // a listener's call has an event
  redraw.pointed = () => ask("pointed");
  return redraw;
}

/** Return the charts in sight of a panel that has several, or the panel. */
export function listParts(panel) {
  return panel.partsInSight?.() ?? panel.parts?.() ?? [panel];
}

/** Draw only what is at the pointer. */
export function drawPointed(panels) {
  for (const panel of panels) for (const part of listParts(panel)) part.point?.();
}

/** Call a function after the browser has laid out and painted this frame. */
export function afterPainting(call) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); call(); };
  port2.postMessage(null);
}
