"use strict";
// Draws figures (see figures/figure.py) as SVG: lines, marks and bars on axes, and heat maps. Colours such as @blue are
// variables of the page's style, so they follow light and dark by themselves. Text is always set as text, never as HTML.
const drawFigure = (function () {
  const NAMESPACE = "http://www.w3.org/2000/svg", FONT = "12px system-ui, sans-serif", LINE = 16;
  const MAX_RECTANGLES = 8000, MIN_CELL = 6, NARROW = 560;
  const DASHES = { dash: "6 4", dot: "2 3", solid: "none" };
  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = FONT;

  const widthOf = (text) => ruler.measureText(text).width;
  const paint = (colour) => (colour && colour[0] === "@" ? `var(--${colour.slice(1)})` : colour || "var(--blue)");
  const known = (v) => typeof v === "number" && isFinite(v);
  const clamp = (v, low, high) => Math.min(high, Math.max(low, v));

  function create(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "style") for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
    }
    element.append(...children.filter((c) => c !== null));
    return element;
  }
  const svg = (tag, attributes = {}, ...children) => create(document.createElementNS(NAMESPACE, tag), attributes, children);
  const html = (tag, attributes = {}, ...children) => create(document.createElement(tag), attributes, children);

  // numbers as text

  function plain(v, digits = 4) {
    if (!known(v)) return typeof v === "string" ? v : "–";
    const size = Math.abs(v);
    if (size !== 0 && (size < 1e-4 || size >= 1e15)) return v.toExponential(digits - 2);
    return size >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(digits));
  }

  // How an axis writes its numbers: the ticks with as many digits as their distance needs, other values with more.
  function writer(axis, ticks) {
    const form = axis.tickformat || "", step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 0;
    const decimals = (unit) => (step ? clamp(Math.ceil(-Math.log10(step / unit) - 1e-6), 0, 6) : 1);
    const most = Math.max(0, ...ticks.map(Math.abs));
    if (form.endsWith("%")) return { tick: (v) => (100 * v).toFixed(decimals(0.01)) + " %", value: (v) => (100 * v).toFixed(1) + " %" };
    if (form.endsWith("e")) return { tick: (v) => (v ? v.toExponential(step && most / step > 9 ? 1 : 0) : "0"), value: (v) => (v ? v.toExponential(2) : "0") };
    const [unit, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => most >= 10 * size || (axis.type === "log" && most >= size)) || [1, ""];
    if (axis.type === "log") return { tick: (v) => short(v), value: plain };
    if (most && most < 1e-3) return { tick: (v) => (v ? v.toExponential(1) : "0"), value: plain };
    return { tick: (v) => (v ? (v / unit).toFixed(decimals(unit)) + letter : "0"), value: plain };
  }

  function short(v) {
    const [unit, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => v >= size) || [1, ""];
    return v < 1e-3 ? v.toExponential(0) : +(v / unit).toPrecision(3) + letter;
  }

  // axes

  function steps(low, high, count) {
    const rough = (high - low) / Math.max(1, count), size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * size).find((s) => s >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => +((first + i) * step).toPrecision(12));
  }

  function powers(low, high, count) {
    const decades = Math.log10(high / low), found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) for (const f of decades < count / 3 ? [1, 2, 5] : [1]) found.push(f * 10 ** p);
    const inside = found.filter((v) => v >= low * 0.999 && v <= high * 1.001), every = Math.ceil(inside.length / Math.max(1, count));
    return inside.filter((_, i) => i % every === 0);
  }

  // The values that an axis has to show. Names are at 0, 1, 2, …
  function extent(figure, which, zoom) {
    const axis = figure.layout[which + "axis"] || {}, values = [], names = [], sums = new Map();
    for (const trace of figure.data) {
      const along = trace.type === "bar" && (trace.orientation === "h" ? which === "x" : which === "y");
      (trace[which] || []).forEach((v, i) => {
        if (typeof v === "string") { if (!names.includes(v)) names.push(v); return; }
        if (!known(v)) return;
        if (!along) { values.push(v); if (trace.type === "bar") values.push(v - barWidth(trace) / 2, v + barWidth(trace) / 2); return; }
        const key = figure.layout.barmode === "stack" ? String((which === "x" ? trace.y : trace.x)[i]) : `${i} ${trace.name}`;
        sums.set(key, (sums.get(key) || 0) + v);
        values.push(0, sums.get(key));
      });
    }
    if (names.length) return { names, low: -0.5, high: names.length - 0.5 };
    for (const shape of figure.layout.shapes || []) if ((shape[which + "ref"] || "") !== "paper") values.push(...[shape[which + "0"], shape[which + "1"]].filter(known));
    if (axis.range) return { low: axis.range[0], high: axis.range[1] };
    if (zoom && which === "x") return { low: zoom[0], high: zoom[1] };
    let kept = axis.type === "log" ? values.filter((v) => v > 0) : values;
    if (zoom) kept = visible(figure, zoom, axis.type === "log");
    let low = kept.reduce((a, b) => Math.min(a, b), Infinity), high = kept.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low > high) [low, high] = [0, 1];
    if (axis.type === "log") return low === high ? { low: low / 2, high: high * 2 } : { low: low / (which === "y" ? 1.15 : 1), high: high * (which === "y" ? 1.15 : 1) };
    const zero = (axis.rangemode === "tozero" && low >= 0) || (sums.size > 0 && low >= 0), marked = figure.data.some((t) => (t.mode || "").includes("markers"));
    const room = which === "y" || marked ? (high - low || Math.abs(high) || 1) * (which === "y" ? 0.07 : 0.03) : 0;
    if (low === high) return zero ? { low: 0, high: high * 1.2 || 1 } : { low: low - (Math.abs(low) * 0.1 || 1), high: high + (Math.abs(high) * 0.1 || 1) };
    return { low: zero ? 0 : low - room, high: high + room };
  }

  function visible(figure, [from, to], positive) {
    return figure.data.flatMap((t) => (t.y || []).filter((v, i) => known(v) && t.x[i] >= from && t.x[i] <= to && (v > 0 || !positive)));
  }

  function scaleOf(axis, range, from, to) {
    const log = axis.type === "log" && !range.names, f = log ? Math.log10 : (v) => v, names = new Map((range.names || []).map((n, i) => [n, i]));
    const a = f(range.low), b = f(range.high), length = (to - from) / (b - a);
    const at = (v) => from + (f(typeof v === "string" ? names.get(v) : v) - a) * length;
    const back = (px) => { const v = a + (px - from) / length; return log ? 10 ** v : v; };
    const room = Math.abs(to - from), low = Math.min(range.low, range.high), high = Math.max(range.low, range.high);
    const across = from < to;
    const fitting = Math.max(3, Math.floor(room / (across ? 75 : 36)));
    const ticks = axis.tickvals || (range.names ? range.names.map((_, i) => i) : log ? powers(low, high, fitting) : steps(low, high, fitting));
    const write = writer(axis, ticks.filter(known));
    const label = (v, i) => (axis.ticktext ? axis.ticktext[i] : range.names ? range.names[v] : write.tick(v));
    let labels = ticks.map((v, i) => ({ at: at(v), text: label(v, i), line: !range.names && axis.showgrid !== false })).filter((t) => t.at >= Math.min(from, to) - 1 && t.at <= Math.max(from, to) + 1);
    if (across && labels.length > 1) {
      const widest = Math.max(...labels.map((t) => widthOf(t.text))) + 12, every = Math.ceil((widest * labels.length) / room);
      labels = labels.filter((_, i) => i % every === 0);
    }
    return { at, back, labels, value: write.value, from, to };
  }

  const barWidth = (trace) => trace.width ?? 0.8;

  // legend and hover

  function legendOf(figure) {
    if (!figure.layout.showlegend) return null;
    const entries = figure.data.filter((t) => t.showlegend !== false && t.name).map((t) => [t.name, t.line?.color || t.marker?.color, t.type === "bar" ? "block" : t.mode === "markers" ? "point" : t.line?.dash || "solid"]);
    for (const s of figure.layout.shapes || []) if (s.showlegend && s.name) entries.push([s.name, s.line.color, s.line.dash]);
    const look = { block: { height: "10px", width: "10px" }, point: { height: "10px", width: "10px", "border-radius": "50%" } };
    return html("div", { class: "legend" }, ...entries.map(([name, colour, kind]) => html("span", {},
      html("i", { style: look[kind] ? { ...look[kind], background: paint(colour) } : { "border-top": `3px ${{ dash: "dashed", dot: "dotted" }[kind] || "solid"} ${paint(colour)}` } }), name)));
  }

  function say(place, x, y, lines) {
    const tip = place.querySelector(".tip");
    if (!lines) { tip.style.display = "none"; return; }
    tip.replaceChildren(...lines.map((line) => (Array.isArray(line) ? html("div", {}, html("span", { style: { color: paint(line[2]) } }, line[0]), html("b", {}, line[1])) : html("div", {}, line))));
    tip.style.display = "block";
    tip.style.left = clamp(x + 14, 0, Math.max(0, place.clientWidth - tip.offsetWidth - 2)) + "px";
    tip.style.top = (y + tip.offsetHeight + 20 > place.clientHeight ? Math.max(0, y - tip.offsetHeight - 12) : y + 16) + "px";
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  // lines, marks and bars

  function drawAxes(place, figure, zoom) {
    const { layout } = figure, xaxis = layout.xaxis || {}, yaxis = layout.yaxis || {}, width = place.clientWidth;
    const legend = legendOf(figure);
    place.replaceChildren(...(legend ? [legend] : []), html("div", { class: "tip" }));
    const height = Math.max(120, figure.height - (legend ? legend.offsetHeight : 0));
    const top = yaxis.title ? 26 : 12, bottom = height - (xaxis.title ? 42 : 24);
    const yrange = extent(figure, "y", zoom), xrange = extent(figure, "x", zoom);
    const y = scaleOf(yaxis, yrange, bottom, top);
    const left = Math.ceil(Math.max(...y.labels.map((t) => widthOf(t.text)), 8)) + 10, right = width - 14;
    const x = scaleOf(xaxis, xrange, left, right);
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    for (const t of y.labels) root.append(...(t.line ? [svg("line", { class: "grid", x1: left, x2: right, y1: t.at, y2: t.at })] : []), svg("text", { class: "ytick", x: left - 7, y: t.at + 4, "text-anchor": "end" }, t.text));
    for (const t of x.labels) {
      const half = widthOf(t.text) / 2;
      root.append(svg("line", { class: "tick", x1: t.at, x2: t.at, y1: bottom, y2: bottom + 4 }), svg("text", { class: "xtick", x: clamp(t.at, half, width - half - 1), y: bottom + 17, "text-anchor": "middle" }, t.text));
    }
    root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    if (yaxis.title) root.append(svg("text", { class: "title", x: 0, y: 13 }, yaxis.title.text));
    if (xaxis.title) root.append(svg("text", { class: "title", x: right, y: bottom + 36, "text-anchor": "end" }, xaxis.title.text));
    const clip = `${place.id}-clip`;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: left - 1, y: top - 6, width: right - left + 2, height: bottom - top + 7 })));
    const drawing = svg("g", { class: "drawing", "clip-path": `url(#${clip})` });
    const hits = [], stacked = new Map();
    for (const trace of figure.data) if (trace.type === "bar") drawBars(trace, x, y, drawing, hits, stacked, layout.barmode === "stack");
    for (const trace of figure.data) if (trace.type === "scatter") drawLine(trace, x, y, drawing, hits);
    for (const s of layout.shapes || []) {
      const at = (scale, ref, v) => (ref === "paper" ? scale.from + v * (scale.to - scale.from) : scale.at(v));
      drawing.append(svg("line", { class: "mark", x1: at(x, s.xref, s.x0), x2: at(x, s.xref, s.x1), y1: at(y, s.yref, s.y0), y2: at(y, s.yref, s.y1), style: { stroke: paint(s.line.color), "stroke-width": s.line.width, "stroke-dasharray": DASHES[s.line.dash] } }));
    }
    for (const a of layout.annotations || []) drawing.append(svg("text", { class: "note", x: right - 4, y: y.at(a.y) - 6, "text-anchor": "end" }, a.text));
    const cross = svg("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" }), chosen = svg("rect", { class: "chosen", y: top, height: bottom - top, visibility: "hidden" });
    root.append(drawing, cross, chosen);
    place.insertBefore(root, place.querySelector(".tip"));
    if (zoom) place.append(html("button", { type: "button", class: "reset" }, "reset zoom"));
    place.querySelector(".reset")?.addEventListener("click", () => drawAxes(place, figure, null));
    follow(place, figure, root, { x, y, left, right, hits, cross, chosen, numeric: !xrange.names });
  }

  function drawLine(trace, x, y, drawing, hits) {
    const mode = trace.mode || "lines", places = trace.x.map((v, i) => (known(trace.y[i]) ? [x.at(v), y.at(trace.y[i])] : null));
    if (mode.includes("lines")) {
      let path = "", open = false;
      for (const p of places) {
        if (p && isFinite(p[1])) path += `${open ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`;
        open = Boolean(p && isFinite(p[1]));
      }
      drawing.append(svg("path", { class: "line", d: path, style: { stroke: paint(trace.line?.color), "stroke-width": trace.line?.width || 1.5, "stroke-dasharray": DASHES[trace.line?.dash] || "none" } }));
    }
    places.forEach((p, i) => {
      if (!p) return;
      const size = Array.isArray(trace.marker?.size) ? trace.marker.size[i] : trace.marker?.size || 6;
      if (mode.includes("markers")) drawing.append(svg("circle", { cx: p[0].toFixed(1), cy: p[1].toFixed(1), r: size / 2, style: { fill: paint(trace.marker?.color || trace.line?.color), "fill-opacity": trace.marker?.opacity ?? 1 } }));
      if (trace.hovertext) hits.push({ x: p[0], y: p[1], text: trace.hovertext[i] });
    });
  }

  function drawBars(trace, x, y, drawing, hits, stacked, stack) {
    const flat = trace.orientation === "h", [value, place] = flat ? [x, y] : [y, x], half = barWidth(trace) / 2;
    const [values, places] = flat ? [trace.x, trace.y] : [trace.y, trace.x];
    values.forEach((v, i) => {
      if (!known(v) || v === 0) return;
      const key = String(places[i]), base = stack ? stacked.get(key) || 0 : 0;
      stacked.set(key, base + v);
      const center = place.at(places[i]), band = Math.abs(place.to - place.from) / new Set(places).size;
      const deep = typeof places[i] === "string" ? Math.min(90, 0.7 * band) : Math.max(1, 2 * Math.abs(place.at(places[i] + half) - center) - 1);
      const a = value.at(base), b = value.at(base + v), low = Math.min(a, b), size = Math.abs(b - a);
      const box = flat ? { x: low, y: center - deep / 2, width: size, height: deep } : { x: center - deep / 2, y: low, width: deep, height: size };
      drawing.append(svg("rect", { class: "bar", ...box, style: { fill: paint(trace.marker?.color) } }));
      const label = trace.text?.[i];
      if (label && flat && size > widthOf(label) + 10) drawing.append(svg("text", { class: "inside", x: low + size / 2, y: center + 4, "text-anchor": "middle" }, label));
      hits.push({ box, text: trace.hovertext?.[i] || `${trace.name ? trace.name + ": " : ""}${value.value(v)}${flat ? "" : ` at ${place.value(places[i])}`}` });
    });
  }

  function follow(place, figure, root, { x, y, left, right, hits, cross, chosen, numeric }) {
    let start = null;
    const lines = figure.data.filter((t) => t.type === "scatter" && !t.hovertext && t.x.length);
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
      const above = box.top - place.getBoundingClientRect().top;
      if (start !== null && Math.abs(px - start) > 6) {
        chosen.setAttribute("x", clamp(Math.min(px, start), left, right));
        chosen.setAttribute("width", Math.abs(clamp(px, left, right) - clamp(start, left, right)));
        chosen.setAttribute("visibility", "visible");
        say(place);
        return;
      }
      const bar = hits.find((h) => h.box && px >= h.box.x && px <= h.box.x + h.box.width && py >= h.box.y && py <= h.box.y + h.box.height);
      const near = hits.filter((h) => !h.box).map((h) => [Math.hypot(h.x - px, h.y - py), h]).sort((a, b) => a[0] - b[0])[0];
      if (bar || (near && near[0] < 30)) { say(place, px, py + above, (bar || near[1]).text.split("\n")); return; }
      if (!lines.length || px < left - 4 || px > right + 4) { say(place); cross.setAttribute("visibility", "hidden"); return; }
      const at = lines[0].x[nearest(lines[0].x, x.back(px))], over = x.at(at);
      cross.setAttribute("x1", over); cross.setAttribute("x2", over); cross.setAttribute("visibility", "visible");
      const named = (figure.layout.xaxis?.title?.text || "x");
      const rows = lines.map((t) => { const i = nearest(t.x, at); return [t, Math.abs(x.at(t.x[i]) - over) < 24 ? t.y[i] : null]; });
      say(place, over, py + above, [[named, x.value(at)], ...rows.filter(([, v]) => v !== null).map(([t, v]) => [t.name, y.value(v), t.line?.color])]);
    });
    root.addEventListener("pointerleave", () => { say(place); cross.setAttribute("visibility", "hidden"); chosen.setAttribute("visibility", "hidden"); start = null; });
    if (!numeric || !lines.length) return;
    root.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") { start = event.clientX - root.getBoundingClientRect().left; event.preventDefault(); } });
    root.addEventListener("pointerup", (event) => {
      const end = event.clientX - root.getBoundingClientRect().left, from = start;
      start = null;
      if (from !== null && Math.abs(end - from) > 8) drawAxes(place, figure, [Math.min(from, end), Math.max(from, end)].map((px) => x.back(clamp(px, left, right))));
    });
    root.addEventListener("dblclick", () => drawAxes(place, figure, null));
  }

  // heat maps

  function colourOf(scale, t) {
    const at = clamp(t, 0, 1), i = Math.max(1, scale.findIndex(([edge], j) => j > 0 && edge >= at)), [a, from] = scale[i - 1], [b, to] = scale[i];
    const share = b > a ? (at - a) / (b - a) : 0, part = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
    return [0, 1, 2].map((k) => Math.round(part(from, k) + (part(to, k) - part(from, k)) * share));
  }

  function drawHeat(place, figure) {
    const [trace] = figure.data, { layout } = figure, xaxis = layout.xaxis || {}, yaxis = layout.yaxis || {};
    const rows = trace.z, columns = trace.x.length, names = yaxis.ticktext || trace.y.map(String);
    const narrow = place.parentElement.clientWidth < NARROW, most = narrow ? 150 : 420;
    const bold = 1.15, cut = (text) => { let shown = text; while (shown.length > 4 && widthOf(shown) > most) shown = shown.slice(0, -2); return shown === text ? text : shown + "…"; };
    const left = Math.ceil(Math.max(8, ...names.map((n) => Math.min(most + 10, bold * widthOf(cut(n)))))) + 10;
    const width = Math.max(place.parentElement.clientWidth, left + (rows.length * columns <= MAX_RECTANGLES ? columns * MIN_CELL : 0) + 12);
    const legend = heatLegend(trace);
    place.replaceChildren(legend, html("div", { class: "tip" }));
    const above = xaxis.side === "top", top = above ? 40 : yaxis.title ? 22 : 4;
    const height = Math.max(60, figure.height - legend.offsetHeight), bottom = height - (above ? 6 : xaxis.title ? 40 : 22), right = width - 12;
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const wide = (right - left) / columns, tall = (bottom - top) / rows.length, gap = trace.xgap && wide > 8 ? trace.xgap : 0, gapY = trace.ygap && tall > 8 ? trace.ygap : 0;
    const fill = (v) => colourOf(trace.colorscale, (v - trace.zmin) / (trace.zmax - trace.zmin));
    if (rows.length * columns <= MAX_RECTANGLES) {
      rows.forEach((row, r) => row.forEach((v, c) => {
        if (v === null) return;
        root.append(svg("rect", { class: "cell", x: (left + c * wide + gap / 2).toFixed(2), y: (top + r * tall + gapY / 2).toFixed(2), width: Math.max(0.5, wide - gap).toFixed(2), height: Math.max(0.5, tall - gapY).toFixed(2), style: { fill: `rgb(${fill(v)})` } }));
        const label = trace.texttemplate ? trace.text[r][c] : "";
        if (label && widthOf(label) < wide - 6) root.append(svg("text", { class: "inside dark", x: left + (c + 0.5) * wide, y: top + (r + 0.5) * tall + 4, "text-anchor": "middle" }, label));
      }));
    } else {
      const canvas = html("canvas", { width: columns, height: rows.length }), image = new ImageData(columns, rows.length);
      rows.forEach((row, r) => row.forEach((v, c) => image.data.set(v === null ? [0, 0, 0, 0] : [...fill(v), 255], 4 * (r * columns + c))));
      canvas.getContext("2d").putImageData(image, 0, 0);
      root.append(svg("image", { href: canvas.toDataURL(), x: left, y: top, width: right - left, height: bottom - top, preserveAspectRatio: "none", style: { "image-rendering": "pixelated" } }));
    }
    const every = Math.max(1, Math.ceil(LINE / tall));
    names.forEach((name, r) => {
      if (r % every) return;
      root.append(svg("text", { class: rows[r].every((v) => v === null) ? "ytick heading" : "ytick", x: left - 8, y: top + (r + 0.5) * tall + 4, "text-anchor": "end" }, cut(name), svg("title", {}, name)));
    });
    const labels = xaxis.ticktext || trace.x.map((v) => (known(v) ? v.toLocaleString("en") : v)), at = xaxis.tickvals || trace.x.map((_, i) => i);
    const apart = Math.ceil(((Math.max(...labels.map(widthOf)) + 12) * labels.length) / (right - left));
    at.forEach((c, i) => {
      if (i % apart) return;
      const half = widthOf(labels[i]) / 2;
      root.append(svg("text", { class: "xtick", x: clamp(left + (c + 0.5) * wide, half, width - half), y: above ? top - 8 : bottom + 17, "text-anchor": "middle" }, labels[i]));
    });
    if (xaxis.title) root.append(svg("text", { class: "title", x: above ? left : right, y: above ? 13 : bottom + 36, "text-anchor": above ? "start" : "end" }, xaxis.title.text));
    if (yaxis.title) root.append(svg("text", { class: "title", x: 0, y: 13 }, yaxis.title.text));
    place.insertBefore(root, place.querySelector(".tip"));
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect(), c = Math.floor((event.clientX - box.left - left) / wide), r = Math.floor((event.clientY - box.top - top) / tall), v = rows[r]?.[c];
      say(place, event.clientX - box.left, event.clientY - place.getBoundingClientRect().top, v === undefined || v === null ? null : heatText(trace, figure, r, c, v));
    });
    root.addEventListener("pointerleave", () => say(place));
  }

  function heatText(trace, figure, r, c, v) {
    if (trace.cells) return [trace.rows[r], trace.columns[c], trace.cells[r][v]];
    if (trace.hovertext) return trace.hovertext[r][c].split("\n");
    const title = (axis) => figure.layout[axis]?.title?.text || "";
    return [[title("xaxis"), plain(trace.x[c])], [title("yaxis"), plain(trace.y[r])], [trace.colorbar?.title?.text || "value", plain(v, 3)]];
  }

  function heatLegend(trace) {
    const bar = trace.colorbar, span = trace.zmax - trace.zmin;
    if (!bar) return html("div", { class: "legend" });
    if (bar.ticktext && bar.ticktext.length <= 9 && !bar.continuous) return html("div", { class: "legend" }, bar.title.text, ...bar.ticktext.map((text, i) => html("span", {}, html("i", { style: { height: "10px", width: "10px", background: `rgb(${colourOf(trace.colorscale, (bar.tickvals[i] - trace.zmin) / span)})` } }), text)));
    const stops = Array.from({ length: 9 }, (_, i) => `rgb(${colourOf(trace.colorscale, i / 8)})`).join(", ");
    const ends = bar.ticktext ? [bar.ticktext[0], bar.ticktext.at(-1)] : [plain(trace.zmin), plain(trace.zmax)];
    return html("div", { class: "legend" }, bar.title.text, html("span", {}, ends[0], html("i", { style: { height: "10px", width: "120px", margin: "0 6px", background: `linear-gradient(90deg, ${stops})` } }), ends[1]));
  }

  return (place, figure) => (figure.data[0]?.type === "heatmap" ? drawHeat(place, figure) : drawAxes(place, figure, null));
})();
