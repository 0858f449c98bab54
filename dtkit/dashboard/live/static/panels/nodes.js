// A row for each engine, with its current metrics.

import { h, setAttr, setText } from "../elements.js";
import { bytes, numberColumn } from "../numbers.js";
import { CONDITION_GLYPH, condition, describeCondition, pick, pickedClass } from "../picking.js";

const COLUMNS = ["node", "engine", "host", "pid", "device", "memory", "threads", "loss", "samples/s"];

const MOST_IN_SIGHT = 8; // that are all in sight

export function nodesTable(store) {
  const body = h("tbody"), note = h("span", { class: "dtk-note" });
  const ended = h("p", { class: "dtk-ended", role: "status", "data-testid": "ended-engines", hidden: "" });
  const table = h("table", { class: "dtk-nodes" }, h("thead", {}, h("tr", {}, ...COLUMNS.map((c) => h("th", { scope: "col" }, c)))), body);
  const scroll = h("div", { class: "dtk-scroll", tabindex: "0", role: "region", "aria-label": "table of nodes" }, table);
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "nodes-table" }, h("h3", {}, "Nodes ", note), ended, scroll);
  let built = null;
  const update = () => {
    if (built !== store.nodes) {
      body.replaceChildren(...store.nodes.map((node) => nodeRow(store, node)));
      built = store.nodes;
      setText(note, describeNodes(store.nodes));
      scroll.classList.toggle("dtk-long", store.nodes.length > MOST_IN_SIGHT);
    }
    const { reasons: text } = store.nodesNow;
    setText(ended, text ? `✕ ${text.replaceAll("\n", "\n✕ ")}` : "");
    ended.hidden = !text;
    const [losses, rates] = [0, 1].map((place) => numberColumn(store.nodes.map(({ rank }) => store.ranks[3 * rank + place] ?? NaN)));
    store.nodes.forEach((node, k) => {
      const memory = store.ranks[3 * node.rank + 2];
      const row = body.children[k], cells = row.children;
      drawNodeState(store, row, node.rank);
      setText(cells[5], `${bytes(memory ?? NaN)} of ${bytes(node.memory_total)}`); // of the process; none is known before the first step
      setText(cells[7], losses[k]); setText(cells[8], rates[k]);
    });
  };
  return { el, update, title: "Nodes" };
}
function describeNodes(nodes) {
  const hosts = new Set(nodes.map(({ host }) => host)).size;
  if (!hosts) return "";
  const parts = [`${nodes.length} on ${hosts} ${hosts === 1 ? "host" : "hosts"}`];
  if (nodes.length > MOST_IN_SIGHT) parts.push("scroll for all");
  if (nodes.length > 1) parts.push("loss of the last step, samples/s without waiting for others");
  return parts.join(" · ");
}
function nodeRow(store, node) {
  const many = store.head.ranks > 8, swatch = many ? [] : [h("span", { class: `dtk-swatch dtk-n${node.rank}`, "aria-hidden": "true" })];
  // For many nodes the keyboard uses the squares above, so that there are no 256 stops here.
  const button = h("button", { type: "button", class: "dtk-pick", ...(many ? { tabindex: -1 } : {}) }, String(node.rank));
  button.addEventListener("click", () => pick(store, node.rank));
  return h("tr", { "data-rank": node.rank }, h("th", { scope: "row" }, ...swatch, button),
    ...[node.engine_id, node.host, node.pid, node.device, "", node.threads, "", ""].map((v) => h("td", {}, String(v))));
}
/** Return the state of a row. An engine that ended after its run is marked here only: the run stays as it was. */
function rowCondition(store, rank) {
  const what = condition(store, rank);
  return what !== "lost" && store.nodesNow.ended?.includes(rank) ? "ended" : what;
}
function drawNodeState(store, row, rank) {
  const what = rowCondition(store, rank), button = row.querySelector("button"), picked = store.selected === rank;
  setAttr(row, "class", `${what ? `dtk-is-${what}` : ""}${picked ? " dtk-picked" : ""}`);
  setText(button, `${CONDITION_GLYPH[what]} ${rank}`.trim());
  setAttr(button, "aria-pressed", picked);
  setAttr(button, "aria-label", `highlight node ${rank}${what ? `, ${describeCondition(store, rank, what)}` : ""}`);
}
