// The browser's half of a live comparison; comparison_widget.py is the other half.

import { buildComparison } from "./comparison.js";
import { messageWidget } from "./message_widget.js";
import { followTheme } from "./theme.js";

function openComparison(store) {
  const { root, redraw } = buildComparison(store), stopTheme = followTheme(root), size = new ResizeObserver(redraw);
  size.observe(root);
  redraw();
  return { root, redraw, dispose: () => { stopTheme(); size.disconnect(); } };
}

export default () => messageWidget(openComparison, (store) => { store.view.log = store.head?.steep ? true : null; });
