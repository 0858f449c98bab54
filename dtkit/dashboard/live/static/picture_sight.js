// The user's own panels in sight: the kernel draws no others (sight.py). It hears of each change at once, and now and then
// that nothing has changed, because it forgets a page that says nothing.

import { LIVE } from "./store.js";

const AGAIN_MS = 30_000; // less than half of SIGHT_REPORT_LIFE_S: a page in the background may be called once a minute
const SETTLE_MS = 150, NEW_MS = 5000;

const STEP_PX = 20; // a picture is enlarged or shrunk by less than that

/** Return the widths of pictures by name, in larger steps, so that few changes need another drawing. */
function readWidths(watched) {
  const widths = {};
  for (const [el, { name }] of watched) {
    const width = el.ownerDocument.fullscreenElement === el ? 0 : STEP_PX * Math.round(el.clientWidth / STEP_PX);
    if (width) widths[name] = Math.max(width, widths[name] ?? 0);
  }
  return widths;
}

/**
 * Return {watch(name, el), forget(el)}: `store.send` gets {sight: {page, away, widths}}, the names of pictures that no view of
 * this page has in sight, and the widths of those that it shows.
 */
export function newPictureSight(store) {
  const page = Math.random().toString(36).slice(2), watched = new Map(); // by element: its name, and whether it is in sight
  let told = "[[],{}]", timer = null, observer = null, resized = null;
  const listAway = () => {
    const seen = new Set([...watched.values()].filter(({ isSeen }) => isSeen).map(({ name }) => name));
    const isDrawn = (name) => Date.now() - store.pictures.get(name).since > NEW_MS; // if it can be at all
    return [...store.pictures.keys()].filter((name) => document.hidden || (!seen.has(name) && isDrawn(name))).sort();
  };
  const tell = (isAgain) => {
    const away = listAway(), widths = readWidths(watched), text = JSON.stringify([away, widths]);
    if (store.pictures.size && (text !== told || isAgain)) store.send({ sight: { page, away, widths } });
    told = text;
  };
  const soon = () => { timer ??= setTimeout(() => { timer = null; tell(false); }, SETTLE_MS); };
  const look = (entries) => {
    for (const { target, isIntersecting } of entries) if (watched.has(target)) watched.get(target).isSeen = isIntersecting;
    soon();
  };
  const start = () => {
    observer = new IntersectionObserver(look);
    resized = new ResizeObserver(soon);
    document.addEventListener("visibilitychange", soon);
    setInterval(() => { if (LIVE.includes(store.status?.state)) tell(true); }, AGAIN_MS);
  };
  return {
    watch: (name, el) => {
      watched.set(el, { name, isSeen: true });
      if (observer === null) start();
      observer.observe(el);
      resized.observe(el);
      setTimeout(() => tell(false), NEW_MS + SETTLE_MS);
    },
    forget: (el) => {
      watched.delete(el);
      observer.unobserve(el);
      resized.unobserve(el);
    },
  };
}
