// The large numbers; summary/metrics.py has their text.

import { h, setAttr, setText } from "../elements.js";

const HELP = {
  throughput: "Samples per second of all nodes together. \"overall\" counts the time between steps, too.",
  "mean loss": "Mean over the samples of all nodes in the last steps, 20 at most, as at the end of the chart's line. Spread: the largest loss of a node in the last step, less the smallest.",
  "mean step time": "From the beginning of a step to its end, with waiting for other nodes.",
  waiting: "Part of all nodes' time in which they wait for a slower node.",
}; // by label
/** What notes are where five tiles share a narrow row, so that none has a second line. */
const SHORTER = [[/^(samples\/s), .*/, "$1"], [/^of all nodes' time$/, "of the time"], [/^▲ slowest: /, "▲ "], [/^validation (?=\S)/, "val. "]];
/** The parts of a note: the steps of a mean, or where a value is from; the text; and the steps of a rate. */
const NOTE_PARTS = /^(\d+ steps, |validation, )?(.*?)(, [\d,]+ steps?|,? since the repair|, all steps but the first)?$/;

export function tiles(store) {
  const el = h("div", { class: "dtk-tiles", role: "list", "data-testid": "tiles" }); // JupyterLab styles dl, dt and dd
  const update = () => {
    while (el.children.length < store.tiles.length) {
      el.append(h("div", { role: "listitem", class: "dtk-tile" }, h("div", { class: "dtk-note" }), h("div", { class: "dtk-value" }),
        h("div", { class: "dtk-note" }, h("span"), h("span"), h("span", { class: "dtk-since" }))));
    }
    el.style.setProperty("--columns", store.tiles.length);
    store.tiles.forEach((tile, k) => {
      const [label, value, note] = el.children[k].children, [, steps = "", text, since = ""] = NOTE_PARTS.exec(tile.note);
      setAttr(note.children[0], "class", steps === "validation, " ? "dtk-evaluated" : "dtk-window");
      setText(label, tile.label); setText(value, tile.value); setText(note.children[0], steps); setText(note.children[1], text); setText(note.children[2], since);
      setAttr(el.children[k], "title", HELP[tile.label] ?? "");
      setAttr(note, "class", `dtk-note${tile.alert ? " dtk-alert" : ""}`);
      setAttr(note, "data-short", shortenNote(text));
    });
  };
  return { el, update };
}

function shortenNote(text) {
  return SHORTER.reduce((short, [pattern, words]) => short.replace(pattern, words), text);
}
