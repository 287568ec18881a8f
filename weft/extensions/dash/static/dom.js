// Elements and numbers as text. Content is always set as text, never as HTML: run folders may hold anything.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (key === "class") node.className = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export const $ = (selector) => document.querySelector(selector);
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function human(n) {
  if (n === null || n === undefined || !isFinite(n)) return "–";
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(n) >= size * 0.9995) return (n / size).toFixed(Math.abs(n) < size * 99.95 ? 1 : 0) + unit;
  }
  return Math.abs(n) >= 10 || Number.isInteger(n) ? n.toFixed(0) : String(+n.toPrecision(2));
}

export function figure(n, digits = 4) {
  if (n === null || n === undefined || !isFinite(n)) return "–";
  const size = Math.abs(n);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return n.toExponential(Math.max(1, digits - 2));
  return size >= 1000 ? Math.round(n).toLocaleString("en") : String(+n.toPrecision(digits));
}

export const percent = (n, digits = 1) => (n === null || n === undefined ? "–" : (100 * n).toFixed(digits) + " %");

export function duration(s) {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  if (s > 0 && s < 9.95) return s.toFixed(1) + " s";
  const whole = Math.max(0, Math.round(s));
  for (const [size, unit, small, sub] of [[86400, "d", 3600, "h"], [3600, "h", 60, "m"], [60, "m", 1, "s"]]) {
    if (whole >= size) return `${Math.floor(whole / size)}${unit} ${String(Math.floor((whole % size) / small)).padStart(2, "0")}${sub}`;
  }
  return whole + " s";
}

export function ago(t) {
  const s = Date.now() / 1000 - t;
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"], [5, "s"]]) if (s >= size) return `${Math.floor(unit === "s" ? s : s / size)} ${unit} ago`;
  return "now";
}
export const clock = (text) => String(text || "").slice(0, 19).replace("T", " ");

const LIGHT = ["#0072B2", "#D55E00", "#00795A", "#AA4499", "#B8860B", "#4455CC", "#C2185B", "#3E8E9E", "#6D6D6D", "#8B5A2B"];
const DARK = ["#56B4E9", "#E69F00", "#2fbf95", "#CC79A7", "#F0E442", "#8C9EFF", "#FF8FB1", "#7FD1DE", "#B0B0B0", "#D2A679"];
export const dark = () => document.documentElement.dataset.theme === "dark";
export const colour = (i) => (dark() ? DARK : LIGHT)[((i % 10) + 10) % 10];
