// The signs of events above a chart, and their key.

import { MARKED } from "../store.js";

const URGENT_MARKS = ["error", "lost", "stuck", "diverged"], MOST_GLYPHS = 5;
const MARK_WORDS = {
  pause: "paused", resume: "resumed", lr: "new learning rate", error: "error", stop: "stopped", lost: "lost", repair: "repaired", save: "saved", stuck: "stuck", diverged: "diverged",
}; // as in summary/event_marks.py, which has the same key

/** Return a legend of the marks {kind, text, rank} that are there, with their nodes; an empty text without marks. */
export function describeMarks(marks) {
  return listMarkWords(marks).map(({ glyph, words }) => `${glyph} ${words}`).join(" · ");
}
/** Return {kind, glyph, words} of each kind of the marks. */
export function listMarkWords(marks) {
  const ranks = new Map();
  for (const { kind, text, rank } of marks) {
    const word = kind === "stuck" && text.includes("is stopped (SIGSTOP)") ? "stopped" : MARK_WORDS[kind], key = `${kind} ${word}`;
    ranks.set(key, (ranks.get(key) ?? new Set()).add(rank));
  }
  return [...ranks].map(([key, found]) => {
    const nodes = [...found].filter((rank) => rank !== null).sort((a, b) => a - b), [kind, word] = key.split(/ (.*)/);
    return { kind, glyph: MARKED[kind], words: [...(nodes.length ? [formatRanks(nodes)] : []), word].join(" ") };
  });
}

function formatRanks(ranks) {
  if (ranks.length === 1) return `node ${ranks[0]}`;
  const [first, last] = ranks.length <= 4 ? [ranks.slice(0, -1), ranks.at(-1)] : [ranks.slice(0, 3), `${ranks.length - 3} more`];
  return `nodes ${first.join(", ")} and ${last}`;
}

const GLYPH_LETTER_PX = 6, GLYPH_SYMBOL_PX = 9, GLYPH_SPACE_PX = 12, SIGN_GAP_PX = 3; // widths in a wide font

/**
 * Return the signs {at, half, glyphs, marks} of marks {at, glyph, kind}, both with positions in pixels and in the order of events.
 * Signs that would be drawn over each other are one, with each glyph once; of many, those of failures and the last ones.
 * Its `marks` are numbers of the given ones, and `half` is half of its width. A sign is over the middle of its lines, or as near to it as `from` and `to` allow.
 */
export function mergeSigns(marks, from = -Infinity, to = Infinity) {
  const signs = [];
  for (const [order, { at, glyph, kind }] of [...marks.entries()].sort(([, a], [, b]) => a.at - b.at)) {
    signs.push({ at, until: at, marks: [[order, glyph, URGENT_MARKS.includes(kind)]] });
    while (signs.length > 1 && isOver(signs.at(-2), signs.at(-1))) {
      const later = signs.pop(), sign = signs.at(-1);
      sign.until = later.until;
      sign.marks.push(...later.marks);
    }
  }
  return signs.map((sign) => {
    const half = widthOfSign(sign) / 2;
    return { at: keepWithin(middleOf(sign), half, from, to), half, glyphs: glyphsOf(sign), marks: sign.marks.map(([order]) => order).sort((a, b) => a - b) };
  });
}
function keepWithin(at, half, from, to) {
  return Math.max(from + half, Math.min(to - half, at));
}
/** Between glyphs of one sign, which are of several events, as in the key. Without it, they would be read as one glyph. */
export const GLYPH_SPACE = "\u00a0·\u00a0";

/** Return the glyphs of a sign in the order of events. */
function glyphsOf({ marks }) {
  const ordered = [...marks].sort(([a], [b]) => a - b), all = [...new Set(ordered.map(([, glyph]) => glyph))];
  const urgent = new Set(ordered.filter(([, , isUrgent]) => isUrgent).map(([, glyph]) => glyph));
  const kept = [...urgent, ...all.filter((glyph) => !urgent.has(glyph)).reverse()].slice(0, MOST_GLYPHS);
  return all.filter((glyph) => kept.includes(glyph));
}
function middleOf({ at, until }) {
  return (at + until) / 2;
}
function isOver(left, right) {
  return middleOf(right) - middleOf(left) < SIGN_GAP_PX + (widthOfSign(left) + widthOfSign(right)) / 2;
}
function widthOfSign(sign) {
  const glyphs = glyphsOf(sign), widths = [...glyphs.join("")].map((each) => (/[a-z]/.test(each) ? GLYPH_LETTER_PX : GLYPH_SYMBOL_PX));
  return widths.reduce((sum, width) => sum + width, GLYPH_SPACE_PX * (glyphs.length - 1));
}
