// The values of a chart as a table, for a download, and what a downloaded picture has to say besides its title.

import { smoothing } from "./lines.js";

/**
 * Return values in sight as rows of a table, the first with the names of the columns: a row for each step, or for several
 * ones, of which it has the mean, the lowest and the highest. Validations are in the row of the step before them.
 */
export function listValues(view, overall) {
  const { grain, layout, options, store, axis, points = [] } = view, isMean = hasSeveral(grain), isStep = axis.label === "step";
  const last = options.lineName ? layout.nodes - 1 : layout.nodes; // runs have no line over all
  const parts = grain.wide > 1 || layout.banded ? [1, 0, 2] : [1], names = [], hasPoints = Boolean(options.pointName && points.length);
  for (let line = 0; line <= last; line++) {
    const name = line === layout.nodes ? (parts.length > 1 && overall === "mean" ? "all nodes" : overall) : layout.banded ? "nodes" : options.lineName?.(store, line) ?? `node ${line}`;
    names.push(...(parts.length > 1 ? [`${name} mean`, `${name} lowest`, `${name} highest`] : [isMean && name !== "mean" ? `${name} mean` : name]));
  }
  const rows = [[...namePlaces(view, isMean), ...(isStep ? [] : [axis.label]), ...names, ...(hasPoints ? ["validation", "validation after steps"] : [])]];
  const write = (v) => (Number.isNaN(v) ? "" : v);
  for (let at = 0; at < grain.used; at++) {
    const span = grain.span(at);
    if (span[1] < view.frame.first || span[0] > view.frame.end) continue; // outside of a zoom
    const place = [...(isMean ? span : span.slice(1)), ...(isStep ? [] : [axis.of(span[1])])], values = [];
    for (let line = 0; line <= last; line++) values.push(...parts.map((which) => write(grain.value(line, at, which))));
    const validated = hasPoints ? pointsAfter(grain, at, points).map(({ step, value }) => [value, step]) : [], [own = hasPoints ? ["", ""] : [], ...further] = validated;
    rows.push([...place, ...values, ...own], ...further.map((point) => [...place, ...values.map(() => ""), ...point]));
  }
  return rows;
}
/** Return whether some row is of several steps. */
function hasSeveral(grain) {
  for (let at = 0; at < grain.used; at++) if (grain.span(at)[0] !== grain.span(at)[1]) return true;
  return false;
}
function namePlaces({ options: { axis, stepName = "step" } }, isMean) {
  if (axis) return isMean ? [`from (${axis.unit})`, `to (${axis.unit})`] : [`${axis.label} (${axis.unit})`];
  return isMean ? ["first step", "last step"] : [stepName];
}
/** Return the validations after the steps of a row: a validation's step is the number of steps before it, of which the first is step 0. */
function pointsAfter(grain, at, points) {
  const [first, last] = grain.span(at), next = at + 1 < grain.used ? grain.span(at + 1)[0] : last + 1;
  return points.filter(({ step }) => Math.max(0, step - 1) >= first && Math.max(0, step - 1) < next);
}

/** Return the name of the run, and the smoothing of drawn lines, for the title and the name of a file. Values are as they were measured. */
export function describeExport(view, isDrawn) {
  const { name } = view.store.head, weight = isDrawn ? smoothing(view) : 0;
  return [name, weight ? `smooth ${weight.toFixed(weight > 0.985 ? 3 : 2)}` : ""].filter(Boolean).join(" · ");
}
