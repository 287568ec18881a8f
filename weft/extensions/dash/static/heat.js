// Heat maps on a canvas: figures of ranks over steps, and the load of experts.
import { h, dark, figure } from "./dom.js";

const LIGHT = [[247, 251, 255], [158, 202, 225], [49, 130, 189], [8, 48, 107]];
const DARK = [[20, 28, 38], [26, 82, 118], [86, 180, 233], [255, 236, 170]];
const EVEN = [[33, 102, 172], [247, 247, 247], [178, 24, 43]];

function shade(stops, t) {
  const at = Math.min(0.9999, Math.max(0, t)) * (stops.length - 1), i = Math.floor(at), f = at - i;
  return stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * f));
}

// rows: one array a row; xs: the step of each column; label(row): its name
export function heatMap({ rows, xs, label, low, high, form = (v) => figure(v, 3), even = false, unit = "" }) {
  const stops = even ? EVEN : dark() ? DARK : LIGHT;
  const canvas = h("canvas", { class: "heat", width: xs.length, height: rows.length, role: "img", "aria-label": `${rows.length} rows over steps ${xs[0]} to ${xs.at(-1)}` });
  canvas.style.height = Math.min(560, Math.max(70, rows.length * 16)) + "px";
  const image = new ImageData(xs.length, rows.length);
  rows.forEach((row, y) => row.forEach((v, x) => {
    const c = v === null || v === undefined || !isFinite(v) ? null : shade(stops, high > low ? (v - low) / (high - low) : 0);
    image.data.set(c ? [...c, 255] : [0, 0, 0, 0], 4 * (y * xs.length + x));
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
  const tip = h("div", { class: "tip" });
  canvas.addEventListener("mousemove", (e) => {
    const x = Math.floor((e.offsetX / canvas.clientWidth) * xs.length), y = Math.floor((e.offsetY / canvas.clientHeight) * rows.length);
    if (rows[y]?.[x] === undefined) return;
    tip.replaceChildren(h("div", {}, h("span", {}, label(y)), h("b", {}, form(rows[y][x]) + unit)), h("div", {}, h("span", {}, "step"), h("b", {}, xs[x].toLocaleString("en"))));
    Object.assign(tip.style, { display: "block", left: Math.min(e.offsetX + 60, canvas.clientWidth - 120) + "px", top: e.offsetY + 40 + "px" });
  });
  canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  const names = rows.length <= 24 ? rows.map((_, i) => label(i)) : [0, Math.floor(rows.length / 2), rows.length - 1].map(label);
  const gradient = `linear-gradient(90deg, ${stops.map((c) => `rgb(${c})`).join(", ")})`;
  return h("div", {}, h("div", { class: "heatbox" },
    h("div", { class: "ys" }, ...names.map((n) => h("span", {}, n))), canvas,
    h("div", { class: "xs" }, h("span", {}, `step ${xs[0].toLocaleString("en")}`), h("span", {}, xs.at(-1).toLocaleString("en")))),
  h("div", { class: "scale" }, form(low) + unit, h("i", { style: { background: gradient } }), form(high) + unit), tip);
}

const NAMES = { "ranks.busy_s": "computing", "ranks.data_s": "waiting for data", "ranks.memory_gib": "peak memory" };
const UNIT = (path) => (/_s(\.|$)/.test(path) ? " s" : /_gib/.test(path) ? " GiB" : /_c$/.test(path) ? " °C" : /_w$/.test(path) ? " W" : "");

// Every list with one number for each rank or device, by dotted path.
export function vectors(records) {
  const found = new Map();
  const visit = (value, path, i) => {
    if (Array.isArray(value)) {
      if (value.length && value.every((v) => typeof v === "number" || v === null)) {
        if (!found.has(path)) found.set(path, []);
        found.get(path).push([i, value]);
      }
    } else if (value && typeof value === "object") for (const [k, v] of Object.entries(value)) if (!path.startsWith("experts")) visit(v, path ? `${path}.${k}` : k, i);
  };
  records.forEach((r, i) => visit(r, "", i));
  return found;
}

export const vectorName = (path) => NAMES[path] || path.replace("ranks.wait_s.", "waiting on ").replace(/^ranks\./, "").replace(/[._]/g, " ");

export function rankMap(records, path) {
  const column = vectors(records).get(path);
  if (!column) return null;
  const ranks = Math.max(...column.map(([, v]) => v.length));
  const xs = column.map(([i]) => records[i].step);
  const rows = Array.from({ length: ranks }, (_, r) => column.map(([, v]) => v[r] ?? null));
  const all = rows.flat().filter((v) => v !== null).sort((a, b) => a - b);
  const high = all[Math.floor(0.98 * (all.length - 1))], low = /memory|temp/.test(path) ? all[0] : 0;
  return heatMap({ rows, xs, label: (r) => `rank ${r}`, low, high: high > low ? high : low + 1e-9, unit: UNIT(path) });
}

const SLOW = 1.15;
export function straggler(records) {
  const column = vectors(records).get("ranks.busy_s");
  if (!column || column[0][1].length < 2) return null;
  const recent = column.slice(-30).map(([, v]) => v), ranks = recent[0].length;
  const mean = Array.from({ length: ranks }, (_, r) => recent.reduce((s, v) => s + (v[r] || 0), 0) / recent.length);
  const slow = mean.indexOf(Math.max(...mean));
  const others = mean.filter((_, r) => r !== slow).sort((a, b) => a - b), median = others[Math.floor(others.length / 2)];
  const ratio = median > 0 ? mean[slow] / median : 1;
  return ratio > SLOW ? { slow: true, text: `Rank ${slow} is the straggler: it computes ${ratio.toFixed(2)} times as long as the median of the other ranks (${figure(mean[slow], 3)} s instead of ${figure(median, 3)} s a step).` }
    : { slow: false, text: `No straggler: the slowest rank, ${slow}, computes ${Math.max(0, 100 * (ratio - 1)).toFixed(0)} % longer than the median of the others.` };
}

export function expertMap(records) {
  const kept = records.filter((r) => Array.isArray(r.experts?.counts) && r.experts.counts.every((row) => Array.isArray(row) && row.length));
  if (!kept.length) return null;
  const blocks = kept.at(-1).experts.counts, names = kept.at(-1).experts.blocks || [];
  const rows = [], labels = [];
  blocks.forEach((block, b) => block.forEach((_, e) => {
    if (rows.length >= 256) return;
    rows.push(kept.map((r) => { const row = r.experts.counts[b] || []; const mean = row.reduce((s, v) => s + v, 0) / (row.length || 1); return mean ? (row[e] ?? 0) / mean : null; }));
    labels.push(`${names[b] ?? b}·${e}`);
  }));
  return heatMap({ rows, xs: kept.map((r) => r.step), label: (i) => labels[i], low: 0, high: 2, even: true, unit: "×" });
}
