// Buttons, the learning rate, and fault injection. They send commands; a message reports the effect and its step.

import { h, setAttr, setText } from "../elements.js";
import { newQuestion } from "../question.js";
import { isReady, LIVE } from "../store.js";

const BUTTONS = [
  { command: "pause", glyph: "‖", label: "Pause", asking: "Pausing…", when: ["pending", "running"] },
  { command: "lower", glyph: "↓", label: "Lower rate", asking: "Lowering…", when: ["paused"] },
  { command: "resume", glyph: "▶", label: "Resume", asking: "Resuming…", when: ["paused"], duringStep: true },
  { command: "step", glyph: "▸|", label: "Step", asking: "Stepping…", when: ["paused"] },
  { command: "stop", glyph: "■", label: "Stop", asking: "Stopping…", when: LIVE },
  { command: "save", glyph: "↓", label: "Save", asking: "Saving…", when: [...LIVE, "completed", "stopped"], offered: true },
];
const ASKED_STOP = "Stop?"; // short, so that the button keeps its width
const STOP_HELP = "Stop ends the run; run.extend() can continue it later.";
const BUTTON_HELP = {
  stop: STOP_HELP,
  save: "Save writes a checkpoint of the training, in checkpoint_dir= or in a folder of the run's own in \"checkpoints\". cluster.train(resume_from=...) goes on from it.",
}; // by command
const LOWER = 10; // how many times lower the rate is that a diverged run is offered
const SURE_MS = 5000;
const SURE_FACTOR = 100; // of a rate, from which the box asks, since it may be mistyped; as in rate_jump.py
const TOLERANCE = 1 + 1e-9, MAX_SHOWN_FACTOR = 1e6; // both as there
const EFFECT_MS = 15_000; // as EFFECT_SHOWN_S; the log keeps it

export function controls(store, send, redraw) {
  const ask = (command, value) => {
    const { status: { state, step }, lr, effect: { count } } = store;
    store.asked.set(command, { state, step, lr, count, value });
    store.refused = null;
    send({ command, value });
    redraw();
  };
  const click = (command) => {
    if (command === "stop" && !stopping.answer()) return;
    if (command === "lower") ask("lr", lowerRate(store));
    else ask(command, null);
  };
  const buttons = BUTTONS.map((b) => {
    const glyph = h("span", { "aria-hidden": "true" }, b.glyph), label = h("span", {}, b.label);
    const el = h("button", { type: "button", "data-testid": b.command, class: `dtk-${b.command}` }, glyph, label);
    el.addEventListener("click", () => click(b.command));
    return { ...b, el, text: label };
  });
  const stop = buttons.find(({ command }) => command === "stop").el, stopping = newQuestion(stop, redraw);
  const label = (b) => {
    if (b.command === "stop" && stopping.isOpen()) return ASKED_STOP;
    if (b.command === "lower") return `Lower rate to ${rateText(lowerRate(store))}`;
    return b.command === "resume" && isReady(store) ? "Start" : b.label;
  };
  const rate = rateField(store, ask, redraw), faults = faultField(store, ask, redraw);
  const refusal = h("span", { class: "dtk-refusal", role: "alert" });
  const effect = h("span", { class: "dtk-effect dtk-note", role: "status", "data-testid": "effect" });
  const answer = h("div", { class: "dtk-answer" }, effect, " ", refusal); // its place is kept while answers may come
  const line = h("div", { class: "dtk-answered" }, rate.el, answer); // no line is kept for the answer alone
  const el = h("div", { class: "dtk-controls", role: "group", "aria-label": "controls" },
    ...buttons.map((b) => b.el), line, faults.el);
  const update = () => {
    const { status } = store;
    forgetAnswered(store);
    const primary = primaryCommand(store), active = el.getRootNode().activeElement, hadFocus = active && el.contains(active);
    for (const b of buttons) {
      const asked = store.asked.has(b.command === "lower" ? "lr" : b.command);
      setText(b.text, asked && !store.lost && !store.gone ? b.asking : label(b));
      setAttr(b.el, "title", store.gone ? "the kernel that had the run was restarted" : helpFor(b.command, status));
      const isOffered = !b.offered || store.head.offers.includes(b.command);
      b.el.hidden = !isOffered || (hasEnded(store) && !b.when.includes(status.state)); // an ended run takes few commands
      if (b.command === "lower") b.el.hidden = primary !== "lower";
      if (b.command === "pause" && primary === "lower") b.el.hidden = true; // its place is needed
      b.el.classList.toggle("dtk-primary", b.command === primary);
      b.el.disabled = asked || store.lost || store.gone || !(b.when.includes(status.state) || (b.duringStep && status.stepping));
    }
    if (stop.disabled) stopping.end();
    rate.update();
    faults.update();
    answer.classList.toggle("dtk-live", !hasEnded(store));
    if (store.refused?.command === "lr" && hasEnded(store)) store.refused = null; // there is no rate any more
    // One answer at a time: a check mark next to a refusal would read as if the refused command had worked.
    const isRefused = store.refused && store.refusedAt >= store.effectAt;
    const isNew = store.effect.text && !isRefused && Date.now() - store.effectAt < EFFECT_MS;
    const isAsking = stopping.isOpen() && !isRefused, question = rate.question(), isAnswered = isNew && status.state !== "failed";
    const retry = status.remedy && status.state === "paused" && !isRefused ? `Resume and Step take step ${status.step.toLocaleString("en-US")} again, ${describeRetry(status)}.` : "";
    setText(effect, question ? "" : isAsking ? STOP_HELP : isAnswered ? `✓ ${store.effect.text}` : retry);
    effect.classList.toggle("dtk-asking", isAsking || !isAnswered);
    refusal.classList.toggle("dtk-sure", Boolean(question));
    setText(refusal, question ? `▲ ${question}` : isRefused ? `✕ ${store.refused.text}` : "");
    line.hidden = rate.el.hidden && !effect.textContent && !refusal.textContent;
    el.hidden = hasEnded(store) && !effect.textContent && !refusal.textContent && buttons.every((b) => b.el.hidden); // its gap, too
    if (hadFocus && (active.disabled || !active.getClientRects().length)) passFocusOn(el, buttons);
  };
  return { el, update };
}
/**
 * Move the focus from a button that is disabled or hidden: to the next one, or to the view. A page whose body has it leaves
 * keys such as Ctrl+S to the browser.
 */
function passFocusOn(el, buttons) {
  const next = buttons.find((b) => !b.el.disabled && b.el.getClientRects().length)?.el ?? el.closest(".dtkit");
  if (next.classList.contains("dtkit")) setAttr(next, "tabindex", -1);
  next.focus({ preventScroll: true });
}
/** Return the command that helps: what the error advises, or else what a run mostly needs. */
function primaryCommand(store) {
  const { state, remedy, stepping } = store.status;
  if (remedy === "lr" && store.lr > 0) return "lower"; // resuming would fail again
  if (remedy) return remedy === "lr" ? "" : "stop";
  return state === "paused" || stepping ? "resume" : "pause";
}
/** Return what a button's tooltip says. */
function helpFor(command, status) {
  const isRetry = status.remedy && ["resume", "step"].includes(command);
  return isRetry ? `Takes the step that was not finite again, ${describeRetry(status)}.` : BUTTON_HELP[command] ?? "";
}
const RETRY_ENDS = { lr: "at this learning rate", data: "unless its data or the loss change", train: "with these parameters" }; // by remedy

/** Return what becomes of a step that was not finite, which stays the next one, if it is taken again. */
function describeRetry({ remedy }) {
  return `which fails again ${RETRY_ENDS[remedy]}`;
}
function lowerRate(store) {
  return +((store.lr ?? 0) / LOWER).toPrecision(6);
}
/** Return whether a run has ended for good, as far as a page knows. */
function hasEnded(store) {
  return !store.lost && !LIVE.includes(store.status.state);
}
/** Draw the question now, and take it back when its time is over. */
function redrawUntilSure(redraw) {
  redraw();
  setTimeout(redraw, SURE_MS + 1);
}
/** End the pending state of commands that took effect. */
function forgetAnswered(store) {
  const { asked, status, lr, effect } = store;
  for (const [command, then] of asked) {
    const moved = status.state !== then.state || effect.count !== then.count || (command === "step" && status.step !== then.step);
    if (moved || (command === "lr" && lr !== then.lr)) asked.delete(command);
  }
}

/** Fault injection for lessons: slow a node down, or end one, which needs a second click. */
function faultField(store, ask, redraw) {
  const node = h("select", { "data-testid": "fault-node", "aria-label": "which node" });
  const factor = h("select", { "data-testid": "fault-factor", "aria-label": "how much slower" },
    ...[1, 1.5, 2, 4, 10].map((f) => h("option", { value: f, ...(f === 2 ? { selected: "" } : {}) }, f === 1 ? "full speed" : `×${f}`)));
  const slow = h("button", { type: "button", "data-testid": "slow" }, "▼ Slow down");
  const kill = h("button", { type: "button", "data-testid": "kill" }, "✕ Kill");
  const el = h("span", { class: "dtk-faults", role: "group", "aria-label": "inject a fault" }, "inject a fault", node, factor, slow, kill);
  const killing = newQuestion(kill, redraw);
  slow.addEventListener("click", () => ask("slow", { rank: Number(node.value), factor: Number(factor.value) }));
  kill.addEventListener("click", () => {
    if (killing.answer()) ask("kill", { rank: Number(node.value) });
  });
  const update = () => {
    const { offers } = store.head, { world: ranks } = store.nodesNow, live = LIVE.includes(store.status.state) && !store.lost;
    el.hidden = hasEnded(store) || (!offers.includes("slow") && !offers.includes("kill"));
    while (node.children.length > ranks) node.lastChild.remove();
    while (node.children.length < ranks) node.append(h("option", { value: node.children.length }, `node ${node.children.length}`));
    slow.hidden = factor.hidden = !offers.includes("slow");
    kill.hidden = !offers.includes("kill");
    for (const control of [node, factor, slow, kill]) control.disabled = !live;
    slow.disabled ||= store.asked.has("slow");
    kill.disabled ||= store.asked.has("kill");
    if (kill.disabled) killing.end();
    setAttr(kill, "title", "Kill ends the node's process, as a crash would.");
    setText(kill, killing.isOpen() ? `✕ Kill node ${node.value}?` : "✕ Kill");
  };
  return { el, update };
}

const RATE_HELP = "Enter sends it; it applies once the steps that are under way are done, after about a second. Arrow keys change it by a tenth.";

const RATE_CHARS = 9; // that the box has room for

/** Return a rate as it fits the box: with six digits, or with four and a power of ten, as in "1e+9". */
export function rateText(value) {
  const number = +value.toPrecision(6), plain = String(number);
  if (plain.length <= RATE_CHARS) return plain;
  const short = number.toExponential();
  return short.length <= RATE_CHARS ? short : String((+number.toPrecision(4)).toExponential());
}

/** Return whether a rate is far from all that the run had: a hundredfold, or below a hundredth. The kernel warns of the same. */
function isFar({ rates }, value) {
  const isNear = (rate) => value < SURE_FACTOR * rate && value * SURE_FACTOR * TOLERANCE >= rate;
  return value > 0 && rates.length > 0 && !rates.some(isNear);
}
/** Return a far rate as a multiple of the nearest one, as in "500 times as much". */
function describeJump({ rates }, value) {
  const [log, isHigher] = rates.map((rate) => Math.log(value) - Math.log(rate)).map((log) => [Math.abs(log), log > 0]).sort(([a], [b]) => a - b)[0];
  if (log > Math.log(MAX_SHOWN_FACTOR) + 1e-9) return isHigher ? "over a million times as much" : "below a millionth of that";
  const factor = (+Math.exp(log).toPrecision(3)).toLocaleString("en-US");
  return isHigher ? `${factor} times as much` : `1/${factor} of that`;
}

function rateField(store, ask, redraw) {
  const input = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false", "data-testid": "lr", title: RATE_HELP }); // a number's field keeps what it can't read to itself
  const unsent = h("span", { class: "dtk-note", hidden: "", "data-testid": "lr-unsent" });
  const label = h("label", { class: "dtk-rate" }, "learning rate", input);
  const el = h("span", { class: "dtk-rate-field" }, label, unsent); // the note alone takes another line where it has no room
  let edited = false;
  const same = { text: "", at: 0 }; // the answer to the rate that the run has already
  const isSame = () => Date.now() - same.at < SURE_MS;
  const sure = { value: null, at: 0 }; // the far rate that was entered once
  const isSure = () => Date.now() - sure.at < SURE_MS;
  const current = () => (store.lr === null ? "" : rateText(store.lr));
  const remains = () => { // a change may be under way
    const asked = store.asked.get("lr");
    if (asked) return ` The change to ${rateText(asked.value)} goes on.`;
    return store.lr === null ? "" : ` It stays ${current()}.`;
  };
  const refuse = (text) => {
    if (text !== null) [store.refused, store.refusedAt] = [{ command: "lr", text }, Date.now()];
    else if (store.refused?.command === "lr") store.refused = null;
    setAttr(input, "aria-invalid", text !== null);
  };
  const edit = () => { edited = true; sure.at = same.at = 0; refuse(null); redraw(); };
  const answerSame = () => {
    if (store.asked.has("lr")) return; // another rate is under way
    [same.text, same.at] = [`already ${current()}`, Date.now()];
    redrawUntilSure(redraw);
  };
  const send = (value) => {
    const asks = isFar(store, value) && !(isSure() && value === sure.value);
    [sure.value, sure.at] = [value, asks ? Date.now() : 0];
    if (asks) return redrawUntilSure(redraw);
    edited = false;
    if (value !== store.lr) ask("lr", value);
    else answerSame();
  };
  const rule = (typed, value) => {
    if (/^\d*,\d+$/.test(typed)) return `use a point, as in ${typed.replace(",", ".")}.`;
    return `it must be 0 or more${value === Infinity ? ", and less than 1.8e308" : ""}, such as 0.01.`;
  };
  const reset = () => { edited = false; sure.at = 0; input.value = current(); setAttr(input, "aria-invalid", false); redraw(); }; // what was refused stays to be read
  input.addEventListener("input", edit);
  input.addEventListener("blur", reset);
  input.addEventListener("keydown", (event) => {
    const typed = input.value.trim(), value = typed ? Number(typed) : NaN;
    if (event.key === "Escape") { refuse(null); reset(); }
    else if (event.key === "Enter") {
      const good = Number.isFinite(value) && value >= 0;
      refuse(good ? null : `${typed.slice(0, 40) || "nothing"} is not a learning rate: ${rule(typed, value)}${remains()}`);
      if (good && edited) send(value);
      else if (good) answerSame(); // an untouched box may be rounded
      redraw();
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      event.preventDefault();
      input.value = rateText(+((value || 0) * (event.key === "ArrowUp" ? 1.1 : 1 / 1.1)).toPrecision(3));
      edit();
    }
  });
  const update = () => {
    el.hidden = hasEnded(store);
    input.disabled = !LIVE.includes(store.status.state) || store.lost || store.lr === null;
    if (!edited && !store.asked.has("lr") && input.value !== current()) input.value = current();
    const isBad = input.getAttribute("aria-invalid") === "true";
    unsent.hidden = isBad || isSure() || (!edited && !isSame()); // the answer's line says it
    setText(unsent, isSame() ? same.text : "Enter sends it");
  };
  return { el, update, question: () => (isSure() ? `${describeJump(store, sure.value)}? Enter again, or Escape` : "") };
}
