// A button that asks before it acts. Its question stays until it is answered, or until Escape, a click elsewhere, or leaving
// the button by the keyboard takes it back.

/** Return {isOpen(), answer(), end()} of a button's question: answer() opens it, and returns true where it was open already. */
export function newQuestion(button, redraw) {
  let isOpen = false;
  const takeBack = (event) => { if (!event.composedPath().includes(button)) set(false); };
  const set = (wanted) => {
    if (isOpen === wanted) return;
    isOpen = wanted;
    if (isOpen) document.addEventListener("pointerdown", takeBack);
    else document.removeEventListener("pointerdown", takeBack);
    redraw();
  };
  button.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isOpen) return;
    event.stopPropagation();
    set(false);
  });
  button.addEventListener("focusout", (event) => { if (event.relatedTarget) set(false); });
  const answer = () => {
    const wasOpen = isOpen;
    set(!wasOpen);
    return wasOpen;
  };
  return { isOpen: () => isOpen, answer, end: () => set(false) };
}
