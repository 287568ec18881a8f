"use strict";
// Draws every figure of the page, again when its width changes, and saves its data on request.
(function () {
  const figureOf = (id) => JSON.parse(document.getElementById(id + "-data").textContent);

  function download(id) {
    const figure = figureOf(id);
    const series = figure.data.map((t) => ({ name: t.name, x: t.x, y: t.y, z: t.z, text: t.text }));
    const blob = new Blob([JSON.stringify({ figure: figure.title, series }, null, 1)], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = id + ".json";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  document.querySelectorAll(".plot").forEach((place) => {
    const figure = figureOf(place.id);
    let width = place.parentElement.clientWidth;
    drawFigure(place, figure);
    new ResizeObserver(() => {
      if ([width, 0].includes(place.parentElement.clientWidth)) return;
      width = place.parentElement.clientWidth;
      drawFigure(place, figure);
    }).observe(place.parentElement);
  });
  document.querySelectorAll("button[data-figure]").forEach((b) =>
    b.addEventListener("click", () => download(b.dataset.figure)));
})();
