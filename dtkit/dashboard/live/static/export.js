// Downloads of a chart: a picture as it is drawn, with its colors, or its values.

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-weight", "font-family", "text-anchor"];
const SHARPER = 2, HEAD = 26, PICTURE_WIDTH = 616, NS = "http://www.w3.org/2000/svg";

/** Return the chart as SVG that needs no style sheet, below its title. */
export function svgText(svg, title) {
  const copy = svg.cloneNode(true), width = Number(svg.getAttribute("width")), height = Number(svg.getAttribute("height"));
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

export function saveSvg(svg, title) {
  offer(new Blob([svgText(svg, title)], { type: "image/svg+xml" }), title, "svg");
}
export function savePng(svg, title) {
  const picture = new Image(), url = URL.createObjectURL(new Blob([svgText(svg, title)], { type: "image/svg+xml" }));
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
