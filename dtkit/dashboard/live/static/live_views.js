// The views in a page that show a run live, so that one whose kernel is gone can lead to them. Each output may have loaded
// this module by itself: they share a list in the page.

const LIVE_VIEWS = Symbol.for("dtkit live views"), CHANGED = "dtkit-live-views";

/**
 * Enter the views of a store in the page's list. Return {add(root), remove(root), tell(), find(), end()}: tell() lets the
 * others know whether the store's run is live, and find() returns a view of another store that shows the same run live.
 */
export function joinPage(store) {
  const list = (globalThis[LIVE_VIEWS] ??= new Set()), roots = new Set(), own = { id: null, roots };
  const isInPage = () => [...roots].some((root) => root.isConnected);
  let told = "";
  const tell = () => {
    own.id = store.lost ? null : store.head?.id ?? null;
    const now = `${own.id} ${isInPage()}`;
    if (now === told) return;
    told = now;
    document.dispatchEvent(new Event(CHANGED));
  };
  const find = () => {
    const id = store.head?.id, same = [...list].filter((other) => other !== own && id && other.id === id);
    return same.flatMap((other) => [...other.roots]).find((root) => root.isConnected) ?? null;
  };
  const listen = () => { if (store.lost) store.redraw(); };
  list.add(own);
  document.addEventListener(CHANGED, listen);
  const end = () => {
    list.delete(own);
    document.removeEventListener(CHANGED, listen);
    document.dispatchEvent(new Event(CHANGED));
  };
  return { add: (root) => roots.add(root), remove: (root) => { roots.delete(root); tell(); }, tell, find, end };
}
