// Elements of the page. Text of engines is set as textContent only, and never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element with attributes and children; strings become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(el, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) el.setAttribute(name, value);
  el.append(...children);
  return el;
}
/** Write an element's text. A new text node would make the browser look for all rules on children again, of the whole page. */
export function setText(el, text) {
  const { firstChild: node } = el;
  if (node !== null && node === el.lastChild && node.nodeType === Node.TEXT_NODE && text) {
    if (node.data !== text) node.data = text;
  } else if (el.textContent !== text) el.textContent = text;
}
const SOURCE_LINE = /(?<=^ {2}\S.*, line \d+, in .*\n)( {4}.+)$/m; // below its place, as errors.py writes both

/** Return a text as nodes: lines of source are in the font of code, and no line breaks within a `command`. */
export function prose(text) {
  return text.split(SOURCE_LINE).flatMap((part, k) => (k % 2 ? [h("span", { class: "dtk-source" }, part)] : withCommands(part)));
}
/** Return a text as nodes, in which the parts of a `command` are typed together. */
function withCommands(text) {
  return text.split(/(`[^`\n]+`)/).filter(Boolean).map((part) => (/^`.+`$/.test(part) ? h("span", { class: "dtk-command" }, part) : part));
}
export function setProse(el, text) {
  if (el.textContent !== text) el.replaceChildren(...prose(text));
}
export function setAttr(el, name, value) {
  if (el.getAttribute(name) !== String(value)) el.setAttribute(name, value);
}
/**
 * Draw `parts`, [tag, attributes, text] each, in a layer of an SVG. Elements that are there already stay, and only what is
 * another attribute or text is written: new elements in each drawing cost the browser far more.
 */
export function drawParts(layer, parts) {
  parts.forEach(([tag, attributes, text], k) => {
    const known = layer.children[k], el = known?.tagName === tag ? known : s(tag);
    for (const name in attributes) setAttr(el, name, attributes[name]);
    if (text !== undefined) setText(el, text);
    if (el === known) return;
    if (known) known.replaceWith(el);
    else layer.append(el);
  });
  while (layer.children.length > parts.length) layer.lastChild.remove();
}
/**
 * Let keys in a view be its own: JupyterLab looks for this mark at the focused element first, and then at those around.
 * Shortcuts with Ctrl or Cmd, such as that for saving, stay JupyterLab's.
 */
export function keepKeys(view) {
  const mark = (el) => el.setAttribute("data-lm-suppress-shortcuts", "true");
  mark(view);
  view.addEventListener("focusin", ({ target }) => mark(target));
  view.addEventListener("keydown", (event) => passShortcut(view, event));
}
const EDITS_TEXT = /^[acvxyz]$/; // with Ctrl or Cmd, also of a text that is selected outside of fields

/** Send a copy of a shortcut's key to the notebook around the view. What is done with it there isn't done by the browser, too. */
function passShortcut(view, event) {
  const { key, ctrlKey, metaKey, defaultPrevented } = event;
  if (!(ctrlKey || metaKey) || defaultPrevented || key.length !== 1 || EDITS_TEXT.test(key)) return;
  const isFree = view.parentElement?.dispatchEvent(new KeyboardEvent("keydown", event)) ?? true;
  if (!isFree) event.preventDefault();
}
