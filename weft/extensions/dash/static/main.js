// The page: list of runs, tabs, live updates and keyboard.
import { $, h, colour, figure, human, percent, duration, ago } from "./dom.js";
import { state, get, putRuns, load, saveState, readState, loadEvents } from "./store.js";
import { Chart, available, split, steadyValue } from "./charts.js";
import * as views from "./views.js";

const TABS = [["charts", "Charts"], ["ranks", "Ranks"], ["events", "Events"], ["logs", "Logs"], ["plan", "Plan"], ["checkpoints", "Checkpoints"]];
const FIRST_RUNS = 4;
const charts = new Map();
const main = $("#content");

const rate = (row) => (row.unit === "samples" ? "samples/s" : "tok/s");

// list of runs

function listRuns() {
  const wanted = state.filter.toLowerCase();
  const shown = state.order.filter((n) => n.toLowerCase().includes(wanted));
  $("#count").textContent = `${shown.length} run${shown.length === 1 ? "" : "s"}, ${[...state.runs.values()].filter((r) => r.live).length} live`;
  $("#runs").replaceChildren(...shown.map(runRow));
}

function runRow(name) {
  const row = state.runs.get(name), at = state.selected.indexOf(name);
  const tone = row.live ? "live" : row.tone;
  return h("li", { class: name === state.focus ? "focus" : "", style: { "--color": at < 0 ? "var(--faint)" : colour(at) }, "data-run": name, onclick: (e) => { if (e.target.tagName !== "INPUT") focusRun(name); } },
    h("input", { type: "checkbox", checked: at >= 0, "aria-label": `overlay ${name}`, onchange: () => toggle(name) }),
    h("button", { class: "name", title: `${name}\n${row.path}`, "aria-current": name === state.focus ? "true" : null }, name),
    h("div", { class: "facts" }, h("span", { class: "dot " + tone, title: row.status }), h("span", { class: "num" }, row.step === null ? "no step" : `${human(row.step)}${row.steps ? "/" + human(row.steps) : ""}`),
      h("span", { class: "num" }, row.loss === null ? "" : figure(row.loss)), h("span", { class: "grow" }), h("span", { class: "what" }, row.live ? `${human(row.tokens_per_s)} ${rate(row)}` : ago(row.updated))),
    row.steps ? h("div", { class: "bar" }, h("i", { style: { width: Math.min(100, (100 * (row.step || 0)) / row.steps) + "%" } })) : null);
}

async function toggle(name) {
  state.selected = state.selected.includes(name) ? state.selected.filter((n) => n !== name) : [...state.selected, name];
  await changed();
}

async function focusRun(name) {
  const alone = state.selected.length <= 1;
  state.focus = name;
  if (!state.selected.includes(name)) state.selected = alone ? [name] : [...state.selected, name];
  document.body.classList.remove("opened");
  await changed();
}

async function changed() {
  listRuns();
  saveState();
  await Promise.all(state.selected.map((n) => (state.metrics.has(n) ? null : load(n).catch(() => {}))));
  render(true);
}

// head and tiles

function headOf(row) {
  const left = row.live && row.steps && row.step_time_s ? (row.steps - row.step) * row.step_time_s : null;
  const tile = (name, value, small) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, small) : null));
  return [
    h("div", { class: "head" }, h("h1", {}, row.name), h("span", { class: "chip " + (row.live ? "live" : row.tone) }, row.status),
      row.layout ? h("span", { class: "chip plain" }, row.layout) : null, row.world ? h("span", { class: "chip plain" }, `${row.world} rank${row.world === 1 ? "" : "s"}${row.device ? " · " + row.device : ""}`) : null,
      row.faults ? h("span", { class: "chip bad" }, `${row.faults} fault${row.faults === 1 ? "" : "s"}`) : null),
    row.tone === "bad" && row.detail ? h("p", { class: "why" }, row.detail) : null,
    h("dl", { class: "tiles" }, tile("Step", row.step === null ? "–" : row.step.toLocaleString("en"), row.steps ? `of ${row.steps.toLocaleString("en")}` : ""), tile("Loss", figure(row.loss)),
      row.val_loss !== null ? tile("Validation loss", figure(row.val_loss)) : null, tile("Throughput", human(row.tokens_per_s), rate(row)), row.mfu !== null ? tile("MFU", percent(row.mfu)) : null,
      tile("Step time", row.step_time_s === null ? "–" : figure(row.step_time_s, 3) + " s"), tile("Peak memory", row.peak_memory_gib === null ? "–" : figure(row.peak_memory_gib, 3), "GiB"), tile(row.unit === "samples" ? "Samples" : "Tokens", human(row.tokens)),
      row.live ? tile("Time left", duration(left)) : tile("Last change", ...ago(row.updated).split(/ (?=ago)/))),
  ];
}

function tools() {
  const press = (x, label) => h("button", { "aria-pressed": String(state.x === x), onclick: () => setX(x) }, label);
  return h("div", { class: "tools" }, h("div", { class: "row" }, "x axis", h("div", { class: "choice", role: "group", "aria-label": "x axis" }, press("step", "step"), press("tokens", "tokens"), press("time", "time"))),
    h("label", {}, "smoothing", h("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: state.smooth, oninput: (e) => setSmooth(+e.target.value) })),
    h("label", {}, h("input", { type: "checkbox", id: "log", checked: state.log, onchange: (e) => { state.log = e.target.checked; render(true); } }), "log scale"),
    state.zoom ? h("button", { class: "button", onclick: () => zoomed(null) }, "reset zoom") : null);
}

const setX = (x) => { state.x = x; state.zoom = null; render(true); };
const setSmooth = (value) => { state.smooth = Math.min(0.99, Math.max(0, value)); const slider = $("#smooth"); if (slider) slider.value = state.smooth; saveState(); for (const chart of charts.values()) chart.refresh(false); };

let zoomTimer;
function zoomed(zoom) {
  const was = state.zoom;
  state.zoom = zoom;
  if (!was !== !zoom) render(true); else for (const chart of charts.values()) chart.refresh(false);
  if (state.x !== "step") return;
  clearTimeout(zoomTimer); // records of the part that is shown, in more detail
  zoomTimer = setTimeout(async () => { await Promise.all(state.selected.map((n) => load(n, true).catch(() => {}))); render(false); }, 150);
}

// drawing

let drawn = 0;
async function render(rebuild) {
  saveState();
  const row = state.runs.get(state.focus);
  const turn = ++drawn;
  for (const [id] of TABS) $(`#tab-${id}`).setAttribute("aria-selected", String(id === state.tab));
  document.title = row ? `${row.name} · Weft` : "Weft dashboard";
  if (!row) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No run here yet"), h("p", {}, "Start one, and it appears by itself: ", h("code", {}, "weft train demo")), h("p", {}, `Runs are looked for in ${state.roots.join(", ")}.`))); return; }
  const head = headOf(row);
  if (state.tab === "charts") {
    drawCharts(head, rebuild);
    return;
  }
  try {
    const parts = await views[state.tab](state.focus, () => render(true));
    if (turn === drawn) main.replaceChildren(...head.filter(Boolean).slice(0, state.tab === "logs" ? 1 : 9), ...parts.filter(Boolean));
  } catch (error) {
    if (turn === drawn) main.replaceChildren(h("div", { class: "empty" }, `The server does not answer: ${error.message}`));
  }
}

function drawCharts(head, rebuild) {
  const [wanted, steady] = split(available()), top = h("div", { id: "head" }, ...head.filter(Boolean));
  const same = wanted.length && [...charts.keys()].join() === wanted.map((c) => c.id + c.keys).join() && main.querySelector(".grid");
  if (same) {
    $("#head").replaceWith(top);
    main.querySelector("#steady")?.remove();
    main.append(...steadyTable(steady));
    if (rebuild) main.querySelector(".tools").replaceWith(tools());
  } else {
    for (const chart of charts.values()) chart.plot?.destroy();
    charts.clear();
    for (const chart of wanted) charts.set(chart.id + chart.keys, new Chart(chart, zoomed));
    const none = state.selected.length ? "No step has been recorded yet." : "Choose a run on the left.";
    main.replaceChildren(top, tools(), wanted.length ? h("div", { class: "grid" }, ...[...charts.values()].map((c) => c.node)) : h("div", { class: "empty" }, none), ...steadyTable(steady));
  }
  for (const chart of charts.values()) chart.refresh(rebuild && same);
}

let openSteady = false;
function steadyTable(steady) {
  if (!steady.length) return [];
  const rows = steady.map((chart) => h("tr", {}, h("td", {}, chart.title), ...state.selected.slice(0, 6).map((n) => h("td", { class: "n" }, steadyValue(chart, n)))));
  const heads = state.selected.length > 1 ? [h("thead", {}, h("tr", {}, h("th", {}, "figure"), ...state.selected.slice(0, 6).map((n) => h("th", { class: "n" }, n))))] : [];
  return [h("details", { id: "steady", class: "card", open: openSteady, ontoggle: (e) => { openSteady = e.target.open; } },
    h("summary", {}, `${steady.length} figure${steady.length === 1 ? " that does" : "s that do"} not change`), h("div", { class: "scroll" }, h("table", {}, ...heads, h("tbody", {}, ...rows))))];
}

// live updates

function connect() {
  const source = new EventSource("/api/stream");
  source.onopen = () => { $("#connection").textContent = "live"; $("#connection").className = ""; };
  source.onerror = () => { $("#connection").textContent = "not connected"; $("#connection").className = "off"; };
  source.addEventListener("runs", async (message) => {
    const { runs, gone } = JSON.parse(message.data), names = runs.map((r) => r.name);
    const empty = !state.runs.size;
    putRuns(runs, gone);
    if (empty && state.focus) { await focusRun(state.focus); return; }
    listRuns();
    const touched = state.selected.filter((n) => names.includes(n));
    await Promise.all(touched.flatMap((n) => [load(n).catch(() => {}), loadEvents(n).catch(() => {})]));
    if (state.tab === "charts" ? touched.length : names.includes(state.focus) && state.tab !== "logs") render(false);
  });
}

async function refineSampled() { // large files are sampled first, and read completely in the background
  for (const name of state.selected) if (state.metrics.get(name)?.sampled) { await load(name, true).catch(() => {}); if (!state.metrics.get(name)?.sampled && state.tab === "charts") render(false); }
  setTimeout(refineSampled, 1500);
}

// keyboard and buttons

function setTheme(theme) { document.documentElement.dataset.theme = theme; }
const flipTheme = () => { const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; setTheme(theme); localStorage.setItem("weft-theme", theme); listRuns(); render(true); };
const setTab = (tab) => { state.tab = tab; render(true); main.scrollTop = 0; };
const move = (by) => { const shown = [...document.querySelectorAll("#runs li")].map((li) => li.dataset.run); const at = shown.indexOf(state.focus) + by; if (shown[at]) { if (state.selected.length === 1) state.selected = []; focusRun(shown[at]).then(() => $("#runs .focus")?.scrollIntoView({ block: "nearest" })); } };
const KEYS = { j: () => move(1), k: () => move(-1), " ": () => toggle(state.focus), x: () => setX({ step: "tokens", tokens: "time", time: "step" }[state.x]), l: () => { state.log = !state.log; render(true); }, s: () => setSmooth(state.smooth + 0.1), S: () => setSmooth(state.smooth - 0.1),
  d: flipTheme, f: views.toggleFollow, "?": () => $("#keys").showModal(), "/": () => (state.tab === "logs" ? $("#search") : $("#filter"))?.focus() };

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || $("#keys").open) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName) && e.target.type !== "checkbox" && e.target.type !== "range";
  if (e.key === "Escape" && typing) { e.target.blur(); return; }
  if (typing || (e.key === " " && /^(BUTTON|INPUT)$/.test(e.target.tagName))) return;
  const action = TABS[+e.key - 1] ? () => setTab(TABS[+e.key - 1][0]) : KEYS[e.key];
  if (action) { e.preventDefault(); action(); }
});
$("#tabs").append(...TABS.map(([id, title], i) => h("button", { id: `tab-${id}`, role: "tab", "aria-selected": "false", title: `${title} (${i + 1})`, onclick: () => setTab(id) }, title)));
$("#menu").onclick = () => { const narrow = matchMedia("(max-width: 760px)").matches; document.body.classList.toggle(narrow ? "opened" : "closed"); };
$("#theme").onclick = flipTheme;
$("#help").onclick = () => $("#keys").showModal();
$("#filter").oninput = (e) => { state.filter = e.target.value; listRuns(); };
$("#all").onclick = () => { const wanted = state.filter.toLowerCase(); state.selected = state.order.filter((n) => n.toLowerCase().includes(wanted)); changed(); };
$("#none").onclick = () => { state.selected = []; changed(); };
const asked = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem("weft-theme") || (asked.matches ? "dark" : "light"));
asked.addEventListener("change", (e) => { if (!localStorage.getItem("weft-theme")) { setTheme(e.matches ? "dark" : "light"); render(true); } });

const { run, chosen } = readState();
if (!TABS.some(([id]) => id === state.tab)) state.tab = "charts";
const first = await get("/api/runs");
state.roots = first.roots;
putRuns(first.runs);
state.selected = chosen.filter((n) => state.runs.has(n));
if (!state.selected.length) state.selected = state.runs.has(run) ? [run] : state.order.filter((n, i) => i < FIRST_RUNS && (i === 0 || state.runs.get(n).live));
state.focus = state.runs.has(run) ? run : state.selected[0] || state.order[0] || null;
await changed();
document.body.dataset.ready = "true";
connect();
refineSampled();
setInterval(() => views.readLog(true).catch(() => {}), 1000);
setInterval(listRuns, 30000);
