// The note next to a chart's title, in as many of its parts as there is room for.

const TITLE_PX = 8.2, NOTE_PX = 6.4, GAP_PX = 10; // of a character, in a wide font
const PART = /(?: · |, )/g, FEWEST = 8; // characters of a part that is cut

/**
 * Return a note without its last parts, which " · " or ", " separates, as far as one line of `width` pixels has no room for them.
 * A first part that is too long ends after one of its words.
 */
export function fitCaption(title, note, width) {
  const most = Math.floor((width - GAP_PX - TITLE_PX * title.length) / NOTE_PX);
  if (note.length <= most) return note;
  const ends = [...note.matchAll(PART)].map(({ index }) => index).filter((end) => end <= most);
  if (ends.length) return note.slice(0, ends.at(-1));
  return most < FEWEST ? "" : cutWords(note, most - 1);
}

/** Return the words that `most` characters have room for, and an ellipsis; a part of the first one if that is longer. */
function cutWords(note, most) {
  const end = note.lastIndexOf(" ", most);
  return `${note.slice(0, end > 0 ? end : most).trimEnd()}…`;
}
