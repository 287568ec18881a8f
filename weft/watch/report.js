"use strict";
(function () {
  const NAMES = ["blue", "orange", "purple", "green", "quiet", "text", "soft", "line", "grid", "card"];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(NAMES.map((n) => ["@" + n, style.getPropertyValue("--" + n).trim()]));
  }

  function paint(value, theme) {
    if (typeof value === "string") return Object.hasOwn(theme, value) ? theme[value] : value;
    if (Array.isArray(value)) return value.map((v) => paint(v, theme));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v, theme)]));
    }
    return value;
  }

  function template(theme) {
    const axis = {
      gridcolor: theme["@grid"], linecolor: theme["@line"], zerolinecolor: theme["@line"], tickcolor: theme["@line"],
      automargin: true, title: { standoff: 12, font: { size: 13, color: theme["@soft"] } },
    };
    return { layout: {
      font: { color: theme["@text"], family: getComputedStyle(document.body).fontFamily, size: 13 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
      hoverlabel: {
        align: "left", bgcolor: theme["@card"], bordercolor: theme["@line"], font: { color: theme["@text"], size: 13 },
      },
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme["@soft"], activecolor: theme["@text"] },
      margin: { l: 70, r: 20, t: 40, b: 48 },
    } };
  }

  function draw(place) {
    const figure = JSON.parse(document.getElementById(place.id + "-data").textContent);
    const theme = colours();
    const layout = Object.assign({ template: template(theme), autosize: true, height: figure.height },
      paint(figure.layout, theme));
    // The data goes in a copy: plotly writes into what it is given
    Plotly.react(place, paint(figure.data, theme), layout, {
      responsive: true, displaylogo: false,
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    });
  }

  function download(id) {
    const figure = JSON.parse(document.getElementById(id + "-data").textContent);
    const series = figure.data.map((t) => ({ name: t.name, base: t.base, x: t.x, y: t.y, z: t.z, text: t.text }));
    const blob = new Blob([JSON.stringify({ figure: figure.title, series }, null, 1)], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = id + ".json";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  const places = document.querySelectorAll(".plot");
  places.forEach(draw);
  dark.addEventListener("change", () => places.forEach(draw));
  document.querySelectorAll("button[data-figure]").forEach((b) =>
    b.addEventListener("click", () => download(b.dataset.figure)));
})();
