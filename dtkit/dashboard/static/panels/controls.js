// Buttons and the learning rate. They only ask: what took effect comes back with the next message.

import { h, setAttr, setText } from "../elements.js";
import { LIVE } from "../store.js";

const BUTTONS = [
  { command: "pause", glyph: "‖", label: "Pause", asking: "Pausing…", when: ["pending", "running"] },
  { command: "resume", glyph: "▶", label: "Resume", asking: "Resuming…", when: ["paused"] },
  { command: "step", glyph: "▸|", label: "Step", asking: "Stepping…", when: ["paused"] },
  { command: "stop", glyph: "■", label: "Stop", asking: "Stopping…", when: LIVE },
];

export function controls(store, send, redraw) {
  const ask = (command, value) => {
    store.asked.set(command, { state: store.status.state, step: store.status.step, lr: store.lr });
    store.refused = null;
    send({ command, value });
    redraw();
  };
  const buttons = BUTTONS.map((b) => {
    const glyph = h("span", { "aria-hidden": "true" }, b.glyph), label = h("span", {}, b.label);
    const el = h("button", { type: "button", "data-testid": b.command, class: `dtk-${b.command}` }, glyph, label);
    el.addEventListener("click", () => ask(b.command, null));
    return { ...b, el, text: label };
  });
  const rate = rateField(store, ask);
  const said = h("span", { class: "dtk-said", role: "alert" });
  const el = h("div", { class: "dtk-controls", role: "group", "aria-label": "controls" },
    ...buttons.map((b) => b.el), rate.el, said);
  const update = () => {
    const { status } = store;
    forgetAnswered(store);
    const active = el.getRootNode().activeElement;
    for (const b of buttons) {
      const asked = store.asked.has(b.command);
      setText(b.text, asked ? b.asking : b.label);
      b.el.disabled = asked || !b.when.includes(status.state);
    }
    // A button that the keyboard stood on and that went dead hands the focus on.
    if (active?.disabled && el.contains(active)) buttons.find((b) => !b.el.disabled)?.el.focus();
    rate.update();
    setText(said, store.refused?.text ?? "");
  };
  return { el, update };
}
/** What was asked and has taken effect is no longer being asked. */
function forgetAnswered(store) {
  const { asked, status, lr } = store;
  for (const [command, then] of asked) {
    const moved = status.state !== then.state || (command === "step" && status.step !== then.step);
    if (moved || (command === "lr" && lr !== then.lr)) asked.delete(command);
  }
}

function rateField(store, ask) {
  const input = h("input", { type: "number", step: "any", min: "0", "data-testid": "lr", title: "Enter applies it from the next dispatch on; arrow keys change it by a tenth" });
  const el = h("label", { class: "dtk-rate" }, "learning rate", input);
  let edited = false;
  const current = () => (store.lr === null ? "" : String(+store.lr.toPrecision(6)));
  const reset = () => { edited = false; input.value = current(); input.removeAttribute("aria-invalid"); };
  input.addEventListener("input", () => { edited = true; });
  input.addEventListener("blur", reset);
  input.addEventListener("keydown", (event) => {
    const value = input.valueAsNumber;
    if (event.key === "Escape") reset();
    else if (event.key === "Enter") {
      const good = Number.isFinite(value) && value >= 0;
      setAttr(input, "aria-invalid", !good);
      if (good) { edited = false; if (value !== store.lr) ask("lr", value); }
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      event.preventDefault();
      edited = true;
      input.value = String(+((value || 0) * (event.key === "ArrowUp" ? 1.1 : 1 / 1.1)).toPrecision(3));
    }
  });
  const update = () => {
    input.disabled = !LIVE.includes(store.status.state) || store.lr === null;
    if (!edited && !store.asked.has("lr") && input.value !== current()) input.value = current();
  };
  return { el, update };
}
