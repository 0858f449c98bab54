// The engines, a row each, with what each does now.

import { h, setText } from "../elements.js";
import { bytes, number } from "../numbers.js";

const COLUMNS = ["node", "engine", "host", "pid", "device", "memory", "threads", "loss", "samples/s"];

export function nodesTable(store) {
  const body = h("tbody"), note = h("span", { class: "dtk-note" });
  const table = h("table", {}, h("thead", {}, h("tr", {}, ...COLUMNS.map((c) => h("th", { scope: "col" }, c)))), body);
  const el = h("section", { class: "dtk-panel dtk-wide", "data-testid": "nodes-table" }, h("h3", {}, "Nodes ", note),
    h("div", { class: "dtk-scroll", tabindex: "0", role: "region", "aria-label": "table of nodes" }, table));
  let built = null;
  const update = () => {
    if (built !== store.nodes) {
      body.replaceChildren(...store.nodes.map((node) => nodeRow(node, store.head.ranks > 8)));
      built = store.nodes;
      const hosts = new Set(store.nodes.map((n) => n.host)).size;
      setText(note, hosts ? `${store.nodes.length} on ${hosts} ${hosts === 1 ? "host" : "hosts"}${store.nodes.length > 1 ? " · samples/s without waiting for others" : ""}` : "");
    }
    store.nodes.forEach((node, k) => {
      const [loss, rate, memory] = store.ranks.subarray(3 * node.rank, 3 * node.rank + 3);
      const cells = body.children[k].children;
      const used = Number.isFinite(memory) ? memory : node.memory_total - node.memory_free;
      setText(cells[5], `${bytes(used)} of ${bytes(node.memory_total)}`);
      setText(cells[7], number(loss ?? NaN)); setText(cells[8], number(rate ?? NaN));
    });
  };
  return { el, update };
}
function nodeRow(node, banded) {
  const swatch = banded ? [] : [h("span", { class: `dtk-swatch dtk-n${node.rank}`, "aria-hidden": "true" })];
  return h("tr", { "data-rank": node.rank }, h("th", { scope: "row" }, ...swatch, String(node.rank)),
    ...[node.engine_id, node.host, node.pid, node.device, "", node.threads, "", ""].map((v) => h("td", {}, String(v))));
}
