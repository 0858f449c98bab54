// Names of runs at the ends of their lines. Those of the longest runs are right of the plot. A run that ends earlier has
// its name within the plot while all such names have room beside the lines. Otherwise it has its number in the legend.

import { s } from "../elements.js";
import { LABEL_GAP, SHORT_PX, spread } from "./lines.js";

const LETTER_PX = 6.6, AWAY_LABEL_PX = 7, BADGE_HEIGHT = 14, BADGE_APART = 16;
/** Where a badge may be, next to the end of its line, in its own size: the nearest places first. */
const BADGE_PLACES = [1, 2, 3].flatMap((far) => [[1, 0], [0, -1], [0, 1], [1, -1], [1, 1], [-1, -1], [-1, 1], [-1, 0]].map(([x, y]) => [far * x, far * y]));

/** Write names or numbers of runs at their lines' ends; `ends` has the end of each. */
export function drawRunLabels(view, ends, box) {
  const isShort = ({ x }) => box.left - x > SHORT_PX, short = ends.filter(isShort), late = ends.filter((end) => !isShort(end));
  const named = view.hasBadges ? null : placeNames(view, short, box);
  view.hasBadges = named === null; // for good, so that a growing chart doesn't change its looks again and again
  const badges = named ? [] : placeBadges(view, short, box), names = [...placeBeyond(view, late, box), ...(named ?? [])];
  view.layers.labels.replaceChildren(...badges.flatMap(drawLeader), ...badges.map(drawBadge), ...names.flatMap(drawName));
}

function drawName({ x, y, at, height, label, lines, hue, isWithin }) {
  return [
    ...(isWithin ? [s("circle", { cx: x, cy: y, r: 3, class: `dtk-${hue}` })] : []),
    ...(!isWithin && Math.abs(height - y) > LABEL_GAP / 2 ? [s("path", { d: `M${x},${y}L${at - 2},${height}`, class: "dtk-leader" })] : []),
    s("g", {}, s("title", {}, label), s("text", { class: `dtk-${hue} dtk-halo` },
      ...lines.map((text, k) => s("tspan", { x: at, y: height + 4 + LABEL_GAP * (k - (lines.length - 1) / 2) }, text)))),
  ];
}

/** Draw the end of a run whose number is not there, and a line to the number. */
function drawLeader({ x, y, at, height, hue, isMoved }) {
  return isMoved ? [s("path", { d: `M${x},${y}L${at},${height}`, class: "dtk-leader" }), s("circle", { cx: x, cy: y, r: 3, class: `dtk-${hue}` })] : [];
}
/** Draw a run's number in a box. */
function drawBadge({ at, height, wide, label, text, hue }) {
  return s("g", { class: "dtk-badge" }, s("title", {}, label),
    pill(at, height, wide, 0, `dtk-${hue}`), pill(at, height, wide, EDGE_PX, "dtk-inner"), s("text", { x: at, y: height + 3.5, "text-anchor": "middle" }, text));
}
const EDGE_PX = 1.5;
function pill(at, height, wide, inset, hue) {
  const tall = BADGE_HEIGHT - 2 * inset;
  return s("rect", { x: at - wide / 2 + inset, y: height - tall / 2, width: wide - 2 * inset, height: tall, rx: tall / 2, class: hue });
}

function newLabel(view, end, room, { top }) {
  const isBeyond = end.y < top - LABEL_GAP, lines = view.options.labelLines(view.store, end.line, room, view.width);
  if (isBeyond) lines[0] = `↑ ${lines[0]}`;
  return { ...end, y: isBeyond ? top : end.y, isBeyond, lines, wide: LETTER_PX * Math.max(...lines.map((text) => text.trimEnd().length)) };
}

/** Return the names right of the plot, apart from each other. */
function placeBeyond(view, ends, box) {
  const { left, top, bottom } = box, most = Math.floor((bottom - top) / LABEL_GAP) + 1;
  const room = Math.floor((bottom - top) / LABEL_GAP / Math.max(1, ends.length));
  const group = keepFitting(ends.map((end) => ({ ...newLabel(view, end, room, box), at: left })), most, bottom);
  group.sort((a, b) => a.y - b.y); // which of them is higher is what a reader looks for
  const gap = LABEL_GAP * Math.max(1, ...group.map(({ lines }) => lines.length)), rest = (gap - LABEL_GAP) / 2;
  spread(group.map(({ y }) => y), gap, top + rest, bottom - rest).forEach((height, k) => { group[k].height = height; });
  return group;
}
/** Return as many labels as have room, those of the first runs. The last one counts the others. */
function keepFitting(labels, most, bottom) {
  if (labels.length <= most) return labels;
  const kept = [...labels].sort((a, b) => a.line - b.line).slice(0, most), last = kept.at(-1);
  const names = labels.filter((one) => one === last || !kept.includes(one)).map(({ label }) => label);
  Object.assign(last, { lines: [`+${names.length} more`], hue: "many", label: names.join("\n"), y: bottom });
  return kept;
}

/** Return the names within the plot, each beside the end of its line; null unless none lies on a line or on another one. */
function placeNames(view, ends, box) {
  const placed = [], dots = ends.map(({ x, y }) => ({ from: x - 4, to: x + 4, top: y - 4, bottom: y + 4 }));
  for (const [k, end] of ends.entries()) {
    const one = newLabel(view, end, 2, box), tall = LABEL_GAP * one.lines.length, taken = [...placed.map(({ area }) => area), ...dots.filter((_, other) => other !== k)];
    const free = listPlaces(one, tall).map(([at, height]) => ({ at, height, area: { from: at, to: at + one.wide, top: height - tall / 2, bottom: height + tall / 2 } }))
      .find(({ area }) => isInside(area, box) && !taken.some((other) => isOnLabel(area, other)) && !isCrossed(view, area));
    if (!free) return null;
    placed.push({ ...one, ...free, isWithin: true });
  }
  return placed;
}
/** Return places for a name: right of a line's end, above and below it, and then left of it. */
function listPlaces({ x, y, wide }, tall) {
  const up = y - tall / 2 - AWAY_LABEL_PX, down = y + tall / 2 + AWAY_LABEL_PX, right = x + AWAY_LABEL_PX, left = x - wide - AWAY_LABEL_PX;
  return [[right, y], [right, up], [right, down], [x - wide / 2, up], [x - wide / 2, down], [left, up], [left, down]];
}
function isInside({ from, to, top, bottom }, box) { // and not on the numbers of the axis
  return from >= box.from && to <= box.left - AWAY_LABEL_PX && top >= box.top - LABEL_GAP / 2 && bottom <= box.bottom + LABEL_GAP / 2;
}
function isOnLabel(a, b) {
  return a.from < b.to && b.from < a.to && a.top < b.bottom && b.top < a.bottom;
}
/** Return whether a line that is drawn crosses an area. */
function isCrossed(view, area) {
  const { grain, layout } = view, { x, y } = view.frame;
  for (let line = 0; line <= layout.nodes; line++) {
    if (!view.shown(line)) continue;
    let before = null;
    for (let at = 0; at < grain.used; at++) {
      const value = grain.value(line, at, 1);
      if (Number.isNaN(value)) continue;
      const point = [x(grain.step(at)), y(value)];
      if (crosses(before ?? point, point, area)) return true;
      before = point;
    }
  }
  return false;
}
/** Return whether a short piece of a line is in an area, or passes it. */
function crosses([x0, y0], [x1, y1], { from, to, top, bottom }) {
  if (x1 < from || x0 > to) return false;
  const heightAt = (x) => (x1 > x0 ? y0 + (y1 - y0) * (Math.max(x0, Math.min(x1, x)) - x0) / (x1 - x0) : y1);
  const ends = x1 > x0 ? [heightAt(from), heightAt(to)] : [y0, y1];
  return Math.max(...ends) > top && Math.min(...ends) < bottom;
}

/** Return the number of each run at the end of its line, or as near to it as others leave room. */
function placeBadges(view, ends, box) {
  const placed = [];
  for (const end of [...ends].sort((a, b) => a.x - b.x)) {
    const y = Math.max(box.top, Math.min(box.bottom, end.y)), text = `${end.y < box.top - LABEL_GAP ? "↑" : ""}${end.line + 1}`;
    const wide = Math.max(BADGE_HEIGHT, LETTER_PX * text.length + 6), step = [wide + 2, BADGE_APART];
    const places = [[0, 0], ...BADGE_PLACES].map(([right, down]) => [end.x + right * step[0], y + down * step[1]])
      .filter(([at, height]) => at - wide / 2 >= box.from && at + wide / 2 < box.left && height >= box.top && height <= box.bottom);
    const isFree = ([at, height]) => placed.every((other) => Math.abs(at - other.at) >= (wide + other.wide) / 2 + 1 || Math.abs(height - other.height) >= BADGE_HEIGHT + 1);
    const [at, height] = places.find(isFree) ?? [end.x, y];
    placed.push({ ...end, y, text, wide, at, height, isMoved: at !== end.x || height !== y });
  }
  return placed;
}
