// State of the page and data from the server.

export const state = {
  runs: new Map(), order: [], selected: [], focus: null, tab: "charts", x: "step", smooth: 0, log: false, zoom: null,
  metrics: new Map(), events: new Map(), filter: "", roots: [],
};
const LIVE_POINTS = 1200, MANY_POINTS = 400, MANY_RUNS = 8, REDRAW_AT = 3000;

const path = (name) => name.split("/").map(encodeURIComponent).join("/");

export async function get(url) {
  const answer = await fetch(url, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(`${answer.status} ${url}`);
  return answer.json();
}

export const ofRun = (name, part, query = {}) => {
  const search = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  return get(`/api/runs/${path(name)}/${part}?${search}`);
};

export function putRuns(rows, gone = []) {
  for (const row of rows) state.runs.set(row.name, row);
  for (const name of gone) { state.runs.delete(name); state.metrics.delete(name); }
  state.order = [...state.runs.values()].sort((a, b) => b.live - a.live || b.updated - a.updated || (a.name < b.name ? -1 : 1)).map((r) => r.name);
  state.selected = state.selected.filter((n) => state.runs.has(n));
  if (!state.runs.has(state.focus)) state.focus = state.selected[0] || state.order[0] || null;
}

// All points of a run, or only those after the last one known.
const loading = new Map();
export function load(name, again = false) {
  if (loading.has(name)) return loading.get(name).then(() => (again ? load(name, true) : undefined));
  const work = fetchMetrics(name, again).finally(() => loading.delete(name));
  loading.set(name, work);
  return work;
}

async function fetchMetrics(name, again) {
  const known = state.metrics.get(name);
  const points = state.selected.length > MANY_RUNS ? MANY_POINTS : LIVE_POINTS;
  const growing = known && !again && known.columns.step.length && !known.sampled && !known.zoomed;
  const row = state.runs.get(name);
  const last = growing ? known.columns.step.at(-1) : -1;
  if (growing && row && row.step !== null && row.step < last) return load_all(name, points); // rolled back
  if (!growing || known.columns.step.length > REDRAW_AT) return load_all(name, points);
  const fresh = await ofRun(name, "metrics", { from: last + 1, points });
  append(known, fresh);
}

async function load_all(name, points) {
  const range = state.zoom && state.x === "step" ? { from: Math.max(0, Math.floor(state.zoom[0])), to: Math.ceil(state.zoom[1]) } : {};
  const [found, events] = await Promise.all([ofRun(name, "metrics", { points, ...range }), loadEvents(name)]);
  found.zoomed = Boolean(range.to);
  state.metrics.set(name, found);
  return events;
}

export async function loadEvents(name) {
  state.events.set(name, (await ofRun(name, "events")).events);
}

function append(known, fresh) {
  const before = known.columns.step.length, more = fresh.columns.step || [];
  if (!more.length) return;
  for (const part of ["columns", "min", "max"]) {
    for (const key of new Set([...Object.keys(known[part]), ...Object.keys(fresh[part])])) {
      const old = known[part][key] || new Array(before).fill(null);
      const missing = part === "columns" ? new Array(more.length).fill(null) : fresh.columns[key] || new Array(more.length).fill(null);
      known[part][key] = old.concat(fresh[part][key] || missing);
    }
  }
}

// x values of a run on the chosen axis
export function xOf(found) {
  const c = found.columns;
  if (state.x === "tokens" && c.tokens) return c.tokens;
  if (state.x === "time" && c.elapsed_s) return c.elapsed_s;
  return c.step || [];
}

// the x of a step, for events
export function xOfStep(found, step) {
  const steps = found.columns.step || [], xs = xOf(found);
  if (state.x === "step" || !steps.length) return step;
  let low = 0, high = steps.length - 1;
  if (step <= steps[0]) return xs[0] === null ? null : xs[0] * (steps[0] ? step / steps[0] : 1);
  while (low < high) { const mid = (low + high) >> 1; if (steps[mid] < step) low = mid + 1; else high = mid; }
  return xs[low];
}

export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return null;
    mean = weight * mean + (1 - weight) * v;
    norm = weight * norm + 1 - weight;
    return mean / norm;
  });
}

export function saveState() {
  const hash = new URLSearchParams({ tab: state.tab, x: state.x });
  if (state.focus) hash.set("run", state.focus);
  for (const name of state.selected.slice(0, 50)) hash.append("with", name);
  if (state.smooth) hash.set("smooth", state.smooth);
  if (state.log) hash.set("log", 1);
  history.replaceState(null, "", "#" + hash);
}

export function readState() {
  const hash = new URLSearchParams(location.hash.slice(1));
  if (["step", "tokens", "time"].includes(hash.get("x"))) state.x = hash.get("x");
  state.tab = hash.get("tab") || state.tab;
  state.smooth = Math.min(0.99, Math.max(0, +hash.get("smooth") || 0));
  state.log = hash.has("log");
  return { run: hash.get("run"), chosen: hash.getAll("with") };
}
