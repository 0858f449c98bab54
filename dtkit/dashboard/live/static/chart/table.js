// The values of a chart as a table, for a download, and what a downloaded picture has to say besides its title.

import { smoothing } from "./lines.js";

/** Return the drawn values as rows of a table, the first with the names of the columns. Single points have a column of their own. Runs have no line over all. */
export function listValues(view, overall) {
  const { grain, layout, options, store, axis, points = [] } = view, last = options.lineName ? layout.nodes - 1 : layout.nodes, [low, high] = options.merged && grain.wide > 1 ? ["10 %", "90 %"] : ["lowest", "highest"];
  const parts = grain.wide > 1 || layout.banded ? [1, 0, 2] : [1], names = [], hasPoints = Boolean(options.pointName && points.length);
  for (let line = 0; line <= last; line++) {
    const name = line === layout.nodes ? overall : layout.banded ? "band" : options.lineName?.(store, line) ?? `node ${line}`;
    names.push(...[name, `${name} ${low}`, `${name} ${high}`].slice(0, parts.length));
  }
  const places = options.axis ? [`from (${axis.unit})`, `to (${axis.unit})`] : ["first step", "last step"], isStep = axis.label === "step";
  const rows = [[...places, ...(isStep ? [] : [axis.label]), ...names, ...(hasPoints ? ["validation"] : [])]];
  for (let at = 0; at < grain.used; at++) {
    const span = grain.span(at), values = [], next = at + 1 < grain.used ? grain.span(at + 1)[0] : Infinity;
    for (let line = 0; line <= last; line++) values.push(...parts.map((which) => grain.value(line, at, which)));
    if (hasPoints) values.push(points.filter(({ step }) => step >= span[0] && step < next).at(-1)?.value ?? NaN);
    rows.push([...span, ...(isStep ? [] : [axis.of(span[1])]), ...values.map((v) => (Number.isNaN(v) ? "" : v))]);
  }
  return rows;
}

/** Return the name of the run, and the smoothing of the lines, for the title and the name of a file. */
export function describeExport(view) {
  const { name } = view.store.head, weight = smoothing(view);
  return [name, weight ? `smooth ${weight.toFixed(weight > 0.985 ? 3 : 2)}` : ""].filter(Boolean).join(" · ");
}
