// Downloads of a chart: a picture as it is drawn, with its colors and their key, or its values.

import { s } from "./elements.js";

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-weight", "font-family", "text-anchor"];
const SHARPER = 2, HEAD = 26, PICTURE_WIDTH = 616, PICTURE_KEY = { row: 18, edge: 8, sample: 20, beside: 6, apart: 16 }, NS = "http://www.w3.org/2000/svg";

/** Add a key of {sample, text} entries below a chart in the page, whose styles it takes. Return {el, height}. */
function addKey(svg, entries, width, top) {
  const el = s("g");
  let [x, y] = [PICTURE_KEY.edge, top];
  svg.append(el);
  for (const { sample, text } of entries) {
    const name = s("text", { x: PICTURE_KEY.sample + PICTURE_KEY.beside, y: 10 }, text), entry = s("g", {}, sample, name);
    el.append(entry);
    const wide = PICTURE_KEY.sample + PICTURE_KEY.beside + name.getComputedTextLength();
    if (x > PICTURE_KEY.edge && x + wide > width - PICTURE_KEY.edge) [x, y] = [PICTURE_KEY.edge, y + PICTURE_KEY.row];
    entry.setAttribute("transform", `translate(${x.toFixed(1)} ${y + 3})`);
    x += wide + PICTURE_KEY.apart;
  }
  return { el, height: entries.length ? y + PICTURE_KEY.row + 4 - top : 0 };
}

/** Return the chart as SVG that needs no style sheet, between its title and its key. */
export function svgText(svg, title, entries = []) {
  const width = Number(svg.getAttribute("width")), drawn = Number(svg.getAttribute("height")), key = addKey(svg, entries, width, drawn + 4);
  try {
    return copySvg(svg, title, width, drawn + (key.height && key.height + 4));
  } finally {
    key.el.remove();
  }
}
function copySvg(svg, title, width, height) {
  const copy = svg.cloneNode(true);
  const originals = svg.querySelectorAll("*"), look = getComputedStyle(svg.closest(".dtkit") ?? svg);
  copy.querySelectorAll("*").forEach((el, k) => {
    const style = getComputedStyle(originals[k]);
    for (const name of STYLES) if (style.getPropertyValue(name)) el.style.setProperty(name, style.getPropertyValue(name));
  });
  copy.querySelectorAll(".dtk-dragged").forEach((el) => el.remove());
  const add = (name, attributes, text = "") => {
    const el = copy.ownerDocument.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) el.setAttribute(key, value);
    el.textContent = text;
    return el;
  };
  const heading = add("text", { x: 8, y: -9, fill: look.color, "font-family": look.fontFamily, "font-size": 14, "font-weight": 700 }, title);
  copy.prepend(add("rect", { x: 0, y: -HEAD, width, height: height + HEAD, fill: look.backgroundColor }), heading);
  for (const [key, value] of Object.entries({ xmlns: NS, width, height: height + HEAD, viewBox: `0 ${-HEAD} ${width} ${height + HEAD}` })) copy.setAttribute(key, value);
  return new XMLSerializer().serializeToString(copy);
}

export function saveSvg(svg, title, entries) {
  offer(new Blob([svgText(svg, title, entries)], { type: "image/svg+xml" }), title, "svg");
}
export function savePng(svg, title, entries) {
  const picture = new Image(), url = URL.createObjectURL(new Blob([svgText(svg, title, entries)], { type: "image/svg+xml" }));
  picture.onload = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [SHARPER * picture.width, SHARPER * picture.height];
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(url);
    canvas.toBlob((blob) => offer(blob, title, "png"));
  };
  picture.src = url;
}
/** Save a picture on white, as the kernel drew it, below its title. */
export function savePicture(image, title) {
  const canvas = document.createElement("canvas"), sharper = image.naturalWidth / PICTURE_WIDTH, pen = canvas.getContext("2d");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight + HEAD * sharper];
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  [pen.fillStyle, pen.font] = ["#1a1a1a", `700 ${14 * sharper}px ${getComputedStyle(image).fontFamily}`];
  pen.fillText(title, 8 * sharper, (HEAD - 9) * sharper);
  pen.drawImage(image, 0, HEAD * sharper);
  canvas.toBlob((blob) => offer(blob, title, "png"));
}
export function saveCsv(rows, title) {
  offer(new Blob([rows.map((row) => row.map(cellText).join(",")).join("\r\n")], { type: "text/csv" }), title, "csv");
}
function cellText(value) {
  const text = String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function offer(blob, title, ending) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chart"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
