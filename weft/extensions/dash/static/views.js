// The views of one run: ranks, events, logs, plan, checkpoints.
import { $, h, css, dark, colour, figure, human, percent, clock, ago } from "./dom.js";
import { state, ofRun, loadEvents } from "./store.js";
import { rankMap, straggler, expertMap, vectors, vectorName } from "./heat.js";

const card = (title, ...inner) => h("section", { class: "card" }, title ? h("h2", {}, title) : null, ...inner);
const note = (text) => h("div", { class: "empty" }, text);
const table = (heads, rows) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...heads.map(([t, c]) => h("th", { class: c }, t)))), h("tbody", {}, ...rows)));

let measure = "ranks.busy_s";
export async function ranks(name, redraw) {
  const { records } = await ofRun(name, "samples", { points: 240 });
  const paths = [...vectors(records).keys()];
  const parts = [];
  if (paths.length) {
    if (!paths.includes(measure)) measure = paths[0];
    const found = straggler(records);
    const choice = h("select", { class: "field", "aria-label": "Figure", onchange: (e) => { measure = e.target.value; redraw(); } },
      ...paths.map((p) => h("option", { value: p, selected: p === measure }, vectorName(p))));
    parts.push(card("Every rank, step by step", found ? h("p", { class: "say" + (found.slow ? " why" : ""), id: "straggler" }, found.text) : null, h("div", { class: "tools" }, h("label", {}, "Show", choice)), rankMap(records, measure)));
    const last = records.at(-1).ranks?.memory_gib;
    if (last) parts.push(card("Peak memory by rank", bars(last, (v) => figure(v, 3) + " GiB")));
  }
  const experts = expertMap(records);
  if (experts) parts.push(card("Load of the experts", h("p", {}, "Tokens of each expert relative to an even share: 1 is even. Rows are block·expert."), experts));
  return parts.length ? parts : [note("This run has no figures of single ranks: it has one rank, or was made by an older version.")];
}

function bars(values, form) {
  const most = Math.max(...values) || 1;
  return h("table", {}, ...values.slice(0, 256).map((v, r) => h("tr", {}, h("td", { class: "t" }, `rank ${r}`),
    h("td", { class: "any" }, h("div", { class: "bar", style: { height: "10px", margin: "4px 0" } }, h("i", { style: { width: (100 * v) / most + "%" } }))), h("td", { class: "n" }, form(v)))));
}

const TONES = { fault: "bad", diverged: "bad", failed: "bad", alert: "bad", recovered: "good", done: "good", resume: "info", start: "info", checkpoint: "", eval: "" };
let kind = "";
export async function events(name, redraw) {
  await loadEvents(name);
  const all = state.events.get(name), kinds = [...new Set(all.map((e) => e.event))].sort();
  if (!all.length) return [note("No event has been recorded.")];
  const shown = all.filter((e) => !kind || e.event === kind).reverse();
  const choice = h("select", { class: "field", "aria-label": "Kind of event", onchange: (e) => { kind = e.target.value; redraw(); } },
    h("option", { value: "" }, `all (${all.length})`), ...kinds.map((k) => h("option", { value: k, selected: k === kind }, `${k} (${all.filter((e) => e.event === k).length})`)));
  const rows = shown.slice(0, 1000).map((e) => h("tr", { class: "event" }, h("td", { class: "t" }, clock(e.time)), h("td", { class: "t kind " + (TONES[e.event] || "") }, e.event + (e.fault ? " · " + e.fault : "")),
    h("td", { class: "n", "data-name": "step" }, e.step === null ? "–" : e.step.toLocaleString("en")), h("td", { class: "n", "data-name": "rank" }, e.rank === null ? "" : String(e.rank)), h("td", { class: "any" }, e.text)));
  return [h("div", { class: "tools" }, h("label", {}, "Show", choice)), card("", table([["time (UTC)"], ["event"], ["step", "n"], ["rank", "n"], ["details"]], rows))];
}

const log = { run: null, file: null, next: null, follow: true, search: "", pre: null };
const MAX_SHOWN = 5000;
export async function logs(name) {
  const { files } = await ofRun(name, "logs");
  if (!files.length) return [note("This run has no logs.")];
  if (log.run !== name || !files.some((f) => f.file === log.file)) { log.run = name; log.file = files.find((f) => f.file === "rank-0.log")?.file || files[0].file; }
  log.pre = h("pre", { class: "log", tabindex: 0, role: "log", "aria-label": "Log" });
  log.next = null;
  const pick = h("select", { class: "field", "aria-label": "Log file", onchange: (e) => { log.file = e.target.value; log.next = null; log.pre.replaceChildren(); readLog(); } },
    ...files.map((f) => h("option", { value: f.file, selected: f.file === log.file }, `${f.file} · ${human(f.bytes)}B`)));
  let timer;
  const find = h("input", { class: "field", type: "search", id: "search", placeholder: "Search  ( / )", "aria-label": "Search in the log", value: log.search,
    oninput: (e) => { clearTimeout(timer); timer = setTimeout(() => { log.search = e.target.value; log.next = null; log.pre.replaceChildren(); readLog(); }, 200); } });
  const follow = h("input", { type: "checkbox", id: "follow", checked: log.follow, onchange: (e) => { log.follow = e.target.checked; if (log.follow) readLog(); } });
  await readLog();
  requestAnimationFrame(() => { log.pre.scrollTop = log.pre.scrollHeight; });
  return [h("div", { class: "tools" }, pick, h("div", { style: { flex: "1", "max-width": "360px" } }, find), h("label", {}, follow, "follow")), log.pre];
}

export async function readLog(poll = false) {
  if (!log.pre || (poll && (!log.follow || !log.pre.isConnected))) return;
  const { file, search, pre, next } = log;
  const found = await ofRun(log.run, "logs", { file, search, from: next });
  // another answer may have come first, with the same lines
  if (file !== log.file || search !== log.search || pre !== log.pre || next !== log.next) return;
  if (next === null && found.truncated) pre.append(h("div", { class: "small" }, "… earlier lines are left out"));
  log.next = found.next;
  if (!found.lines.length && !pre.childNodes.length) { if (search) pre.append(h("div", { class: "small" }, "no line has this text")); return; }
  for (const line of found.lines) pre.append(h("div", { class: /\b(ERROR|CRITICAL|Traceback)\b/.test(line) ? "e" : /\bWARNING\b/.test(line) ? "w" : "" }, ...highlight(line, search)));
  while (pre.childNodes.length > MAX_SHOWN) pre.firstChild.remove();
  if (log.follow && found.lines.length) pre.scrollTop = pre.scrollHeight;
}

function highlight(line, search) {
  if (!search) return [line + "\n"];
  const parts = [], low = line.toLowerCase(), want = search.toLowerCase();
  let at = 0, i;
  while ((i = low.indexOf(want, at)) >= 0 && parts.length < 100) { parts.push(line.slice(at, i), h("mark", {}, line.slice(i, i + want.length))); at = i + want.length; }
  return [...parts, line.slice(at) + "\n"];
}
export const toggleFollow = () => { document.querySelector("#follow")?.click(); };

const SHOWN = { peak_memory_gib: (v) => (v < 1 ? figure(1024 * v) + " MiB" : figure(v) + " GiB"), step_time_s: (v) => figure(v) + " s", tokens_per_s: human, mfu: (v) => percent(v) };
const SETTINGS = { device_name: (v) => v, precision: (v) => v, backend: (v) => v, zero: (v) => `ZeRO ${v}`, accumulation: (v) => `${v} microbatches a step`, microbatch: (v) => `microbatch of ${v}` };
export async function plan(name) {
  const found = await ofRun(name, "plan"), row = state.runs.get(name) || {}, parts = [];
  const axes = Object.entries(found.axes).filter(([, n]) => n > 1);
  const chips = [...axes.map(([k, n]) => `${k} ${n}`), ...Object.entries(found.settings).map(([k, v]) => (SETTINGS[k] ? SETTINGS[k](v) : `${k.replace(/_/g, " ")} ${v}`))];
  parts.push(card("Layout", h("p", { class: "say" }, found.sentence), h("div", { class: "row", style: { "flex-wrap": "wrap" } }, ...chips.map((c) => h("span", { class: "chip plain" }, c))),
    ...found.reasons.map((r) => h("p", {}, r))));
  const predicted = found.figures.map((f) => { const seen = f.measured ? row[f.measured] : null;
    return h("tr", {}, h("td", {}, f.name), h("td", { class: "n" }, f.text), h("td", { class: "n" }, seen ? SHOWN[f.measured](seen) : "–"), h("td", { class: "n" }, seen ? (seen / found.predicted[f.key]).toFixed(2) + "×" : "–")); });
  if (predicted.length) parts.push(card("Predicted beside measured", table([["figure"], ["predicted", "n"], ["last step", "n"], ["ratio", "n"]], predicted)));
  if (found.ranks.length) {
    parts.push(card("What lives where", h("p", {}, "Each rank, its place on the axes, and the parameters it holds. Colours are pipeline stages, or replicas."),
      h("div", { class: "ranks" }, ...found.ranks.slice(0, 512).map((r) => h("div", { class: "rank", style: { "--color": colour(r.coords.pp ?? r.coords.dp_replicate ?? r.coords.dp_shard ?? 0) } }, h("b", {}, `rank ${r.rank}`),
        h("div", {}, Object.entries(r.coords).filter(([k]) => (found.axes[k] ?? 2) > 1).map(([k, v]) => `${k} ${v}`).join(" · ")), h("div", {}, `${human(r.parameters)} parameters`), r.blocks ? h("div", {}, `blocks ${r.blocks}`) : null)))));
  }
  for (const which of ["simulated", "measured"]) if (found.pipeline[which]) parts.push(card(`Pipeline, ${which} step`, h("p", {}, `${found.pipeline.schedule}${bubbleOf(found.pipeline[which])}`), h("div", { class: "scroll" }, gantt(found.pipeline[which].spans))));
  if (found.job) parts.push(card("The job as resolved", h("pre", { class: "scroll" }, found.job)));
  return parts;
}

function bubbleOf({ spans, bubble }) {
  const length = Math.max(...spans.map((s) => s[5])), ranks = new Set(spans.map((s) => s[0])).size;
  const worked = spans.filter((s) => "FBIW".includes(s[1])).reduce((t, s) => t + s[5] - s[4], 0);
  const part = bubble ?? (length > 0 ? 1 - worked / (ranks * length) : null);
  return part === null ? "" : `, bubble ${percent(part)} of ${figure(length, 3)} s`;
}

// One row a rank; a step of many microbatches is as wide as its numbers need, and scrolls.
const MAX_WIDTH = 16000, BLOCK = 26, NAMES = 52;
function gantt(spans) {
  const length = Math.max(...spans.map((s) => s[5])) || 1, ranks = Math.max(...spans.map((s) => s[0])) + 1, height = 22;
  const times = spans.filter((s) => "FBIW".includes(s[1])).map((s) => s[5] - s[4]).sort((a, b) => a - b), typical = times[times.length >> 1] || length;
  const room = Math.max(320, $("#content").clientWidth - 80 - NAMES), width = Math.min(MAX_WIDTH, Math.max(room, Math.round((BLOCK * length) / typical)));
  const ratio = width > MAX_WIDTH / 2 ? 1 : 2, canvas = h("canvas", { class: "gantt", width: (width + NAMES) * ratio, height: ranks * height * ratio, role: "img", "aria-label": "Time line of the pipeline" });
  canvas.style.height = ranks * height + "px";
  canvas.style.width = width + NAMES + "px";
  const ctx = canvas.getContext("2d"), looks = { F: 0, B: 1, I: 1, W: 2 };
  ctx.scale(ratio, ratio);
  ctx.font = "11px system-ui";
  ctx.fillStyle = css("--soft");
  for (let rank = 0; rank < ranks; rank++) ctx.fillText(`rank ${rank}`, 0, rank * height + 15);
  for (const [rank, what, , micro, start, end] of spans) {
    ctx.fillStyle = what in looks ? colour(looks[what]) : "#88888855";
    const x = NAMES + (width * start) / length, w = Math.max(1, (width * (end - start)) / length - 1), y = rank * height + 2;
    ctx.fillRect(x, y, w, height - 4);
    const text = String(micro);
    if (what in looks && w > 7 * text.length + 2) { ctx.fillStyle = dark() ? "#14171a" : "#fff"; ctx.fillText(text, x + (w - 6.4 * text.length) / 2, y + 13); }
  }
  return canvas;
}

export async function checkpoints(name) {
  const found = (await ofRun(name, "checkpoints")).checkpoints;
  if (!found.length) return [note("This run has no checkpoint yet.")];
  const rows = found.map((c) => h("tr", {}, h("td", { class: "n" }, c.step.toLocaleString("en")), h("td", {}, c.name), h("td", { class: "n" }, human(c.bytes) + "B"), h("td", { class: "n" }, String(c.files)),
    h("td", { class: "t" }, ago(c.time)), h("td", { class: "kind " + (c.complete ? "good" : "bad") }, c.complete ? "complete" : "not complete")));
  return [card("Checkpoints", table([["step", "n"], ["folder"], ["size", "n"], ["files", "n"], ["written"], [""]], rows))];
}
