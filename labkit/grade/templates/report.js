"use strict";
// Draws the plots in the colours of the page, and sorts the table by the column whose heading is pressed.
(() => {
  const { figures, dark } = JSON.parse(document.getElementById("figures").textContent);
  const places = [...document.querySelectorAll(".plot")];
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const PAPER_WIDTH = 480;

  function draw(isDark, width) {
    places.forEach((place, index) => {
      let layout = JSON.stringify(figures[index].layout);
      if (isDark) for (const [light, darker] of Object.entries(dark)) layout = layout.replaceAll(light, darker);
      layout = JSON.parse(layout);
      if (width) layout.width = width;
      Plotly.react(place, figures[index].data, layout, { displayModeBar: false, responsive: !width });
    });
  }
  draw(scheme.matches);
  scheme.addEventListener("change", () => draw(scheme.matches));
  // Paper is white, and half of a landscape page is as wide as this.
  addEventListener("beforeprint", () => draw(false, PAPER_WIDTH));
  addEventListener("afterprint", () => draw(scheme.matches));

  const order = new Intl.Collator(undefined, { numeric: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      const value = row => row.cells[column].dataset;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => direction * (order.compare(value(a).sort, value(b).sort)
        || order.compare(value(a).then || "", value(b).then || "")));
      table.tBodies[0].append(...rows);
      heads.forEach(one => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    }));
  }
})();
