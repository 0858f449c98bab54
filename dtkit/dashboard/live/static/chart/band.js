// What the bands of a chart are: in the box at the pointer, and as a key below the names of the lines.

const MIDDLE_KEY = "10–90 %", KEY_LETTER_PX = 7.2, SWATCH_PX = 14, SWATCH_GAP_PX = 4, KEY_EDGE_PX = 2; // widths in a wide font

/** Return the name of the values between which bands are. Merged buckets leave out the rarest ones (MIDDLE in grain.js). */
export function bandName({ grain, options }) {
  return options.merged && grain.wide > 1 ? "10 to 90 %" : "lowest to highest";
}

/** Return the row of the box at the pointer that says what the bands there are; none without a band. */
export function bandRows(view, at) {
  const { grain, layout, options } = view, [first, last] = grain.span(at), steps = last - first + 1;
  if (grain.wide === 1 || steps < 2 || options.spanned) return []; // a spanned chart has both values in its line's row
  return [{ label: layout.nodes > 1 ? "bands" : "band", value: `${bandName(view)} of ${steps.toLocaleString("en-US")} steps`, mark: "" }];
}

/** Return the key of bands that leave out the rarest values, for the lower right corner of a chart, as parts of its grid. */
export function bandKey({ grain, height, options }, width) {
  if (!options.merged || grain.wide === 1) return [];
  const text = width - KEY_EDGE_PX, left = text - KEY_LETTER_PX * MIDDLE_KEY.length - SWATCH_GAP_PX - SWATCH_PX;
  return [
    ["rect", { class: "dtk-band-key", x: left.toFixed(1), y: height - 13, width: SWATCH_PX, height: 8 }],
    ["text", { x: text, y: height - 5, "text-anchor": "end" }, MIDDLE_KEY],
  ];
}
