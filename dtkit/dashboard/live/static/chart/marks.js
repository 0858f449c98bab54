// The signs of events above a chart.

const GLYPH_LETTER_PX = 6, GLYPH_SYMBOL_PX = 9, GLYPH_SPACE_PX = 4, SIGN_GAP_PX = 3; // widths in a wide font

/**
 * Return the signs {at, glyphs, marks} of marks {at, glyph}, both with positions in pixels and in the order of events.
 * Signs that would be drawn over each other are one, with each glyph once. Its `marks` are numbers of the given ones.
 */
export function mergeSigns(marks) {
  const signs = [];
  for (const [order, { at, glyph }] of [...marks.entries()].sort(([, a], [, b]) => a.at - b.at)) {
    signs.push({ at, until: at, marks: [[order, glyph]] });
    while (signs.length > 1 && isOver(signs.at(-2), signs.at(-1))) {
      const later = signs.pop(), sign = signs.at(-1);
      sign.until = later.until;
      sign.marks.push(...later.marks);
    }
  }
  return signs.map((sign) => ({ at: middleOf(sign), glyphs: glyphsOf(sign), marks: sign.marks.map(([order]) => order).sort((a, b) => a - b) }));
}
/** Return glyphs as one text, apart from each other: "‖" before an l would be read as a part of it. */
export function joinGlyphs(glyphs) {
  return glyphs.join("\u00a0");
}
function glyphsOf({ marks }) {
  return [...new Set([...marks].sort(([a], [b]) => a - b).map(([, glyph]) => glyph))];
}
function middleOf({ at, until }) {
  return (at + until) / 2;
}
function isOver(left, right) {
  return middleOf(right) - middleOf(left) < SIGN_GAP_PX + (widthOfSign(left) + widthOfSign(right)) / 2;
}
function widthOfSign(sign) {
  const widths = [...joinGlyphs(glyphsOf(sign))].map((each) => (each === "\u00a0" ? GLYPH_SPACE_PX : /[a-z]/.test(each) ? GLYPH_LETTER_PX : GLYPH_SYMBOL_PX));
  return widths.reduce((sum, width) => sum + width, 0);
}
