// Draws the figures of labkit.widgets.pictures: whole figures in, plotly out. A view begins with what the model holds now
// and is drawn anew at every change, so nothing is lost however late the page is.

const NAMES = ["predicted", "measured", "losses"];
const CONFIG = { displaylogo: false };

// Figures come in the colours of labkit.show.palette, for white paper: what a dark page shows instead.
const DARK = {
  "#24292f": "#e4e7ea",
  "#6a737d": "#9aa4ae",
  "#e8eaed": "#3b4149",
  "#eceef1": "#2c3138",
  "#aab1ba": "#56606b",
  "#ffffff": "rgba(0,0,0,0)",
};

function isDark() {
  return document.body.dataset.jpThemeLight === "false";
}

// Paper, grid and words change with the page, colours that mean something do not, nor what is written on them.
function darkened({ data, layout }) {
  const swap = (value) => {
    if (typeof value === "string") return value.replace(/#[0-9a-f]{6}/g, (color) => DARK[color] ?? color);
    if (Array.isArray(value)) return value.map(swap);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, member]) => [key, swap(member)]));
  };
  const { template, ...rest } = layout;
  const page = swap(rest);
  page.hoverlabel = { ...page.hoverlabel, bgcolor: "#1f2328" };
  const traces = data.map((trace) => (trace.marker ? { ...trace, marker: swap(trace.marker) } : trace));
  return { data: traces, layout: { ...page, template } };
}

// plotly is large: it is read once in a page, however many cockpits there are.
function plotlyOf(source) {
  const known = (window.labkitPlotly ??= new Map());
  if (!known.has(source.length)) {
    const module = { exports: {} };
    new Function("module", "exports", "define", source)(module, module.exports, undefined);
    known.set(source.length, module.exports);
  }
  return known.get(source.length);
}

function render({ model, el }) {
  const plotly = plotlyOf(model.get("plotly"));
  const pictures = NAMES.map((name) => {
    const place = document.createElement("div");
    place.dataset.picture = name;
    el.append(place);
    const draw = () => {
      const figure = JSON.parse(model.get(name));
      const { data, layout } = isDark() ? darkened(figure) : figure;
      plotly.react(place, data, layout, CONFIG);
    };
    model.on(`change:${name}`, draw);
    draw();
    return { name, place, draw };
  });
  const fit = () => {
    for (const { place } of pictures) {
      if (place.clientWidth && Math.abs(place._fullLayout.width - place.clientWidth) > 1) plotly.Plots.resize(place);
    }
  };
  const watcher = new ResizeObserver(fit);
  watcher.observe(el);
  const theme = new MutationObserver(() => pictures.forEach(({ draw }) => draw()));
  theme.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  return () => {
    watcher.disconnect();
    theme.disconnect();
    for (const { name, place, draw } of pictures) {
      model.off(`change:${name}`, draw);
      plotly.purge(place);
    }
  };
}

export default { render };
