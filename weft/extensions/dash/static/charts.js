// Line charts of the selected runs: which columns, and how uPlot draws them.
/* global uPlot */
import { h, css, colour, figure, human, percent, duration } from "./dom.js";
import { state, xOf, xOfStep, smoothed } from "./store.js";

const share = { form: (v) => percent(v), zero: true };
const seconds = { form: (v) => figure(v, 3) + " s", zero: true };
const gib = { form: (v) => figure(v, 3) + " GiB", zero: true };
const ofTheStep = { ...share, unit: "share of the step" };
// `unit` is the title of the y axis.
export const CHARTS = [
  { id: "loss", title: "Loss", unit: "loss", keys: ["loss"], names: ["training"], wide: true, validation: true, smooth: true, loggable: true },
  { id: "throughput", title: "Throughput", unit: () => rateUnit(), keys: ["tokens_per_s"], form: human, zero: true, smooth: true },
  { id: "mfu", title: "Model FLOPs utilisation", unit: "share of the peak", keys: ["mfu"], ...share, smooth: true },
  { id: "step", title: "Step time", unit: "seconds", keys: ["step_time_s"], ...seconds, smooth: true },
  { id: "grad", title: "Gradient norm", unit: "norm of all gradients", keys: ["grad_norm"], smooth: true, log: true },
  { id: "lr", title: "Learning rate", unit: "learning rate", keys: ["lr"], form: (v) => (v ? v.toExponential(2) : "0"), zero: true },
  { id: "memory", title: "Peak memory", unit: "GiB a rank", keys: ["peak_memory_gib", "ranks.memory_gib"], names: ["rank 0", "mean of ranks"], ...gib },
  { id: "comm", title: "Communication", keys: ["comm_share", "exposed_share"], names: ["all", "exposed"], ...ofTheStep },
  { id: "axes", title: "Waiting for messages, by axis", match: /^ranks\.wait_s\.(.+)$/, per: "step_time_s", ...ofTheStep },
  { id: "bandwidth", title: "Communication speed", unit: "GB/s", keys: ["comm_gb_per_s"], match: /^(?:comm_axes\.([^.]+)\.gb_per_s|(?:comm|link)_gb_per_s\.(.+))$/, zero: true },
  { id: "data", title: "Waiting for data", unit: "seconds, mean of ranks", keys: ["ranks.data_s"], ...seconds },
  { id: "bubble", title: "Pipeline bubble", keys: ["bubble", "bubble_share"], ...ofTheStep },
  { id: "experts", title: "Most loaded expert", unit: "times the mean", keys: ["experts.max_over_mean"], form: (v) => figure(v, 3) + "×" },
  { id: "dropped", title: "Dropped tokens of experts", unit: "share of the tokens", keys: ["experts.dropped_share"], ...share },
];
const HIDDEN = /^(step|tokens|elapsed_s|wall_time|val_loss|skipped|comm_mib|comm_between_mib|comm_axes\..*|experts\..*|ranks\..*)$/;
const unit = (name) => ({ unit: name, form: (v) => `${figure(v, 3)} ${name}` });
const UNITS = [[/_gb_per_s$/, unit("GB/s")], [/_ms$/, unit("ms")], [/(_s|_seconds)$/, { unit: "seconds", form: seconds.form }], [/_gib$/, unit("GiB")], [/_mib$/, unit("MiB")], [/_c$/, unit("°C")], [/_w$/, unit("W")], [/_j$/, unit("J")],
  [/_kwh$/, unit("kWh")], [/^co2_g$/, unit("g")], [/_usd$/, unit("USD")], [/(_share|util|utilisation|utilization)$/, { unit: "share", form: share.form }], [/_percent$/, unit("%")],
  [/tokens_per_joule$/, { unit: "tokens/J" }]];
const GROUPS = [[/^(?:gpu|cpu|disk|net|network|nvlink|pcie).*(util|share|percent)/, "Utilisation"], [/temp/, "Temperature"], [/(power|_w$)/, "Power"],
  [/(energy|joule|kwh|co2|_j$)/, "Energy"]];

// Every chart that has data: the known ones, then one for each other number in the records.
export function available() {
  const present = new Set();
  for (const name of state.selected) for (const key of Object.keys(state.metrics.get(name)?.columns || {})) present.add(key);
  const used = new Set(), found = [];
  for (const chart of CHARTS) {
    const keys = (chart.keys || []).filter((k) => present.has(k) && hasValues(k));
    const names = keys.map((k) => chart.names?.[chart.keys.indexOf(k)] || (chart.match ? "all" : ""));
    for (const key of present) { const m = chart.match?.exec(key); if (m && hasValues(key)) { keys.push(key); names.push(m[1] || m[2]); } }
    keys.forEach((k) => used.add(k));
    if (keys.length) found.push({ ...chart, keys, names });
  }
  for (const key of [...present].sort()) {
    if (used.has(key) || HIDDEN.test(key) || !hasValues(key)) continue;
    const group = GROUPS.find(([pattern]) => pattern.test(key))?.[1], name = words(key);
    found.push({ id: key, title: group && !name.startsWith(group) ? `${group}: ${name}` : name, keys: [key], names: [""], ...unitOf(key) });
  }
  return found.map((chart) => ({ ...chart, unit: typeof chart.unit === "function" ? chart.unit() : chart.unit }));
}

const unitOf = (key) => UNITS.find(([pattern]) => pattern.test(key))?.[1] || {};
const NAMES = { co2_g: "CO₂ so far", cost_usd: "Cost so far", energy_kwh: "Energy so far", tokens_per_joule: "Tokens per joule", "ranks.core_wait_s": "Waiting for a core, mean of ranks", "ranks.cpu_s": "Processor time, mean of ranks",
  "ranks.core_idle_s": "Idle time of all cores, mean of ranks", "ranks.busy_s": "Computing, mean of ranks", "ranks.slack_s": "Time ahead of the device, mean of ranks", energy_measured_share: "Measured part of the energy" };
// A key as a title: without its unit, which the axis has.
function words(key) {
  if (NAMES[key]) return NAMES[key];
  const text = key.replace(/_(gb_per_s|ms|s|gib|mib|c|w|j|kwh|usd|percent)$/, "").replace(/\./g, " · ").replace(/_/g, " ").replace(/\b(gpu|cpu|nvlink|pcie)\b/g, (word) => word.toUpperCase());
  return text[0].toUpperCase() + text.slice(1);
}
const rateUnit = () => { const units = new Set(state.selected.map((n) => state.runs.get(n)?.unit || "tokens")); return (units.size === 1 ? [...units][0] : "tokens or samples") + " a second"; };

// Charts that change, and those whose every line has kept one value for a while, which the page lists in a table.
const STEADY_POINTS = 5;
export function split(charts) {
  const steady = (chart) => !chart.wide && chart.keys.every((key) => state.selected.every((name) => {
    const columns = state.metrics.get(name)?.columns || {}, values = (columns[key] || []).filter((v) => v !== null && v !== undefined);
    return !values.length || (values.length >= STEADY_POINTS && values.every((v) => v === values[0]));
  }));
  return [charts.filter((c) => !steady(c)), charts.filter(steady)];
}
export const steadyValue = (chart, name) => chart.keys.map((key) => { const v = state.metrics.get(name)?.columns[key]?.find((x) => x !== null && x !== undefined); return v === undefined ? "–" : (chart.form || figure)(v); }).join(", ");
const hasValues = (key) => state.selected.some((n) => state.metrics.get(n)?.columns[key]?.some((v) => v !== null && v !== undefined));

const MAX_UNION = 6000, RESAMPLED = 600, RAW_RUNS = 3, BAND_RUNS = 2;
const powers = (...from) => Array.from({ length: 16 }, (_, i) => from.map((n) => n * 10 ** i)).flat();
const INCREMENTS = { step: powers(1, 2, 5), tokens: powers(1, 2, 5),
  time: [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, ...[1, 2, 5, 10, 20, 50, 100].map((d) => d * 86400)] };
const X_TITLES = { step: "step", tokens: "tokens", time: "time since the start" };
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

// One table for uPlot: the common x values and a column for each line.
export function tableOf(chart) {
  const lines = [], tables = [];
  const smooth = chart.smooth ? state.smooth : 0;
  state.selected.forEach((name, i) => {
    const found = state.metrics.get(name);
    if (!found || !found.columns.step?.length) return;
    const xs = xOf(found), table = [xs];
    chart.keys.forEach((key, k) => {
      let ys = found.columns[key];
      if (!ys) return;
      if (chart.per) { const by = found.columns[chart.per]; ys = ys.map((v, j) => (v === null || v === undefined || !by?.[j] ? null : Math.min(1, v / by[j]))); }
      const own = chart.keys.length > 1 || state.selected.length === 1 ? chart.names[k] : "";
      const label = [state.selected.length > 1 ? name : "", own].filter(Boolean).join(" · ") || chart.title;
      const stroke = colour(state.selected.length > 1 ? i : k);
      const dash = state.selected.length > 1 ? DASHES[k % 4] : [];
      if (state.selected.length <= BAND_RUNS && found.min[key] && !smooth && !chart.per && chart.keys.length === 1) {
        lines.push({ label, stroke: "transparent", quiet: true }, { label, stroke: "transparent", quiet: true, band: stroke + "26" });
        table.push(found.min[key], found.max[key]);
      }
      if (smooth && state.selected.length <= RAW_RUNS) {
        lines.push({ label, stroke: stroke + "44", width: 1, quiet: true });
        table.push(ys);
      }
      lines.push({ label, stroke, width: state.selected.length > 20 ? 1 : 1.8, dash });
      table.push(smoothed(ys, smooth));
    });
    if (table.length > 1) tables.push(sorted(table));
    if (chart.validation) {
      const val = (state.events.get(name) || []).filter((e) => e.val_loss !== null && e.step !== null);
      const by = new Map(val.map((e) => [xOfStep(found, e.step), e.val_loss]));
      const places = [...by.keys()].filter((x) => x !== null && x !== undefined).sort((a, b) => a - b);
      if (places.length) {
        const many = state.selected.length > 1;
        lines.push({ label: (many ? name + " · " : "") + "validation", stroke: colour(many ? i : 1), dash: [3, 3], width: 1.2, points: places.length < 60 });
        tables.push([places, places.map((x) => by.get(x))]);
      }
    }
  });
  return { lines, data: tables.length ? join(tables) : [[]] };
}

function sorted(table) {
  const xs = table[0];
  const keep = []; let last = -Infinity;
  for (let i = 0; i < xs.length; i++) if (xs[i] !== null && xs[i] !== undefined && xs[i] > last) { keep.push(i); last = xs[i]; }
  return keep.length === xs.length ? table : table.map((column) => keep.map((i) => column[i]));
}

function join(tables) {
  if (tables.length === 1) return tables[0];
  const length = tables.reduce((n, t) => n + t[0].length, 0);
  if (length <= MAX_UNION) return uPlot.join(tables, tables.map((t) => t.slice(1).map(() => 2)));
  const low = Math.min(...tables.map((t) => t[0][0])), high = Math.max(...tables.map((t) => t[0].at(-1)));
  const xs = Array.from({ length: RESAMPLED }, (_, i) => low + ((high - low) * i) / (RESAMPLED - 1));
  return [xs, ...tables.flatMap((t) => t.slice(1).map((ys) => resample(t[0], ys, xs)))];
}

function resample(from, ys, xs) {
  let j = 0;
  return xs.map((x) => {
    while (j < from.length - 1 && from[j + 1] <= x) j++;
    return x < from[0] || x > from.at(-1) ? null : ys[j];
  });
}

const MARKS = { fault: "--bad", diverged: "--bad", failed: "--bad", alert: "--warn", recovered: "--good", resume: "--accent", restart: "--accent",
  rebalance: "--accent", compression: "--accent", checkpoint: "--faint", health: "--warn", throttle: "--warn" };

const SEVERITY = ["--faint", "--good", "--accent", "--warn", "--bad"];

function marksOf() {
  const marks = [];
  for (const name of state.selected.slice(0, 4)) {
    const found = state.metrics.get(name);
    if (!found) continue;
    for (const e of state.events.get(name) || []) {
      if (!(e.event in MARKS) || e.step === null) continue;
      const x = xOfStep(found, e.step);
      if (x !== null && x !== undefined) marks.push({ x, event: e, name, calm: e.event === "checkpoint", stroke: css(MARKS[e.event]) });
    }
  }
  return marks.sort((a, b) => SEVERITY.indexOf(MARKS[a.event.event]) - SEVERITY.indexOf(MARKS[b.event.event])); // the worst is drawn last, above the others
}

export class Chart {
  constructor(chart, zoomed) {
    this.chart = chart;
    this.zoomed = zoomed;
    this.box = h("div", { class: "plot", role: "img", "aria-label": chart.title });
    this.keys = h("div", { class: "keys-line" });
    this.tip = h("div", { class: "tip" });
    this.node = h("section", { class: "card" + (chart.wide ? " wide" : ""), "data-chart": chart.id },
      h("h2", {}, chart.title), this.keys, this.box, this.tip);
    this.visible = false;
    new IntersectionObserver(([entry]) => { this.visible = entry.isIntersecting; if (this.visible && this.stale) this.draw(); }, { rootMargin: "200px" }).observe(this.box);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    this.stale = true;
  }

  size() { return { width: Math.max(120, this.box.clientWidth), height: this.box.clientHeight || 220 }; }

  refresh(rebuild) {
    if (rebuild) this.shape = null;
    this.stale = true;
    if (this.visible) this.draw();
  }

  draw() {
    this.stale = false;
    const { lines, data } = tableOf(this.chart);
    this.marks = marksOf();
    const log = this.chart.log || (this.chart.loggable && state.log);
    const shape = JSON.stringify([lines, state.x, log, document.documentElement.dataset.theme]);
    if (this.plot && this.shape === shape) { this.plot.setData(data, false); this.rescale(data); return; }
    this.plot?.destroy();
    this.shape = shape;
    this.legend(lines);
    this.plot = new uPlot(this.options(lines, log), data, this.box);
    this.rescale(data);
  }

  rescale(data) {
    const xs = data[0];
    if (!xs.length) return;
    const full = [xs[0], xs.at(-1)];
    const [min, max] = state.zoom || full;
    this.plot.setScale("x", { min, max: max > min ? max : min + 1 });
  }

  legend(lines) {
    const shown = lines.filter((l) => !l.quiet);
    this.keys.replaceChildren(...(shown.length > 1 ? shown.slice(0, 8) : []).map((l) => h("span", {}, h("i", { style: { background: l.dash?.length ? `repeating-linear-gradient(90deg, ${l.stroke} 0 4px, transparent 4px 6px)` : l.stroke } }), l.label)),
      shown.length > 8 ? h("span", {}, `and ${shown.length - 8} more`) : "");
  }

  options(lines, log) {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 2 };
    const form = this.chart.form || ((v) => figure(v));
    const xform = { step: (v) => (v < 1e5 ? Math.round(v).toLocaleString("en") : human(v)), tokens: human, time: duration }[state.x];
    const zero = this.chart.zero;
    return {
      ...this.size(), padding: [10, 14, 0, 0], legend: { show: false }, cursor: { sync: { key: "weft", setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false, auto: false }, y: log ? { distr: 3 } : { range: (u, min, max) => (min === null ? [0, 1] : zero && min >= 0 ? [0, (max || 1) * 1.06] : uPlot.rangeNum(min, max, 0.08, true)) } },
      axes: [{ ...axis, size: 30, label: X_TITLES[state.x], values: (u, ticks) => ticks.map(xform), space: 70, incrs: INCREMENTS[state.x] }, { ...axis, size: 54, label: this.chart.unit || undefined, values: (u, ticks) => ticks.map((v) => (v === null ? "" : form(v).replace(/ [^\d%]+$/, ""))), space: 36 }],
      series: [{}, ...lines.map((l) => ({ label: l.label, stroke: l.stroke, width: l.width || 0, dash: l.dash, spanGaps: true, points: { show: Boolean(l.points), size: 6, fill: l.stroke } }))],
      bands: lines.flatMap((l, i) => (l.band ? [{ series: [i + 1, i], fill: l.band }] : [])),
      hooks: { draw: [(u) => this.drawMarks(u)], setCursor: [(u) => this.showTip(u, lines, form, xform)], setSelect: [(u) => this.select(u)] },
      plugins: [{ hooks: { ready: [(u) => u.over.addEventListener("dblclick", () => this.zoomed(null))] } }],
    };
  }

  select(u) {
    if (u.select.width < 8) return;
    const zoom = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoomed(zoom);
  }

  drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    for (const mark of this.marks) {
      const x = Math.round(u.valToPos(mark.x, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = mark.stroke;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(mark.calm ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, mark.calm ? bbox.top + bbox.height - 7 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!mark.calm) { ctx.beginPath(); ctx.arc(x, bbox.top + 3 * devicePixelRatio, 3.2 * devicePixelRatio, 0, 7); ctx.fill(); }
    }
    ctx.restore();
  }

  showTip(u, lines, form, xform) {
    const { left, top, idx } = u.cursor;
    if (left === undefined || left < 0 || idx === null || idx === undefined || !this.box.matches(":hover")) { this.tip.style.display = "none"; return; }
    const rows = lines.flatMap((l, i) => { const v = valueNear(u.data[i + 1], idx); return l.quiet || v === null ? [] : [{ l, v }]; });
    rows.sort((a, b) => b.v - a.v);
    const near = this.marks.filter((m) => Math.abs(u.valToPos(m.x, "x") - left) < 7).slice(0, 4);
    const x = state.x === "step" ? Math.round(u.data[0][idx]).toLocaleString("en") : xform(u.data[0][idx]);
    this.tip.replaceChildren(h("div", {}, h("span", {}, state.x), h("b", {}, x)),
      ...rows.slice(0, 12).map(({ l, v }) => h("div", {}, h("span", { style: { color: l.stroke } }, l.label), h("b", {}, form(v)))),
      rows.length > 12 ? h("div", {}, `and ${rows.length - 12} more`) : "",
      ...near.map((m) => h("div", { class: "mark" + (m.calm ? " calm" : "") }, `${m.event.fault ? m.event.event + " " + m.event.fault : m.event.event} at step ${m.event.step}: ${m.event.text}`.slice(0, 220))));
    const flip = left > this.box.clientWidth - 260;
    Object.assign(this.tip.style, { display: "block", top: Math.min(top + 60, this.box.clientHeight) + "px", left: flip ? "auto" : left + 90 + "px", right: flip ? this.box.clientWidth - left - 30 + "px" : "auto" });
  }
}

function valueNear(column, idx) {
  for (let d = 0; d < 40; d++) for (const i of [idx - d, idx + d]) if (column[i] !== null && column[i] !== undefined) return column[i];
  return null;
}
