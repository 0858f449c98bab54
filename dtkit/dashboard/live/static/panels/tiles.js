// The large numbers; summary/metrics.py has their text.

import { h, setAttr, setText } from "../elements.js";

const HELP = {
  throughput: "Samples per second of all nodes together. \"overall\" counts the time between steps, too.",
  "mean loss": "Mean over the samples of all nodes. Spread: the largest loss of a node in the last step, less the smallest.",
  "mean step time": "From the beginning of a step to its end, with waiting for other nodes.",
  waiting: "Part of all nodes' time in which they wait for a slower node.",
}; // by label

export function tiles(store) {
  const el = h("div", { class: "dtk-tiles", role: "list", "data-testid": "tiles" }); // JupyterLab styles dl, dt and dd
  const update = () => {
    while (el.children.length < store.tiles.length) {
      el.append(h("div", { role: "listitem", class: "dtk-tile" }, h("div", { class: "dtk-note" }), h("div", { class: "dtk-value" }),
        h("div", { class: "dtk-note" }, h("span"), h("span"), h("span", { class: "dtk-since" }))));
    }
    el.style.setProperty("--columns", store.tiles.length);
    store.tiles.forEach((tile, k) => {
      const [label, value, note] = el.children[k].children, [, steps = "", text, since = ""] = /^(\d+ steps, |validation, )?(.*?)(,? since the repair)?$/.exec(tile.note);
      setAttr(note.children[0], "class", steps === "validation, " ? "dtk-evaluated" : "dtk-window");
      setText(label, tile.label); setText(value, tile.value); setText(note.children[0], steps); setText(note.children[1], text); setText(note.children[2], since);
      setAttr(el.children[k], "title", HELP[tile.label] ?? "");
      setAttr(note, "class", `dtk-note${tile.alert ? " dtk-alert" : ""}`);
    });
  };
  return { el, update };
}
