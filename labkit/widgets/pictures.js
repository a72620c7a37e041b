// Draws the figures of labkit.widgets.pictures: whole figures in, plotly out. A view begins with what the model holds now
// and is drawn anew at every change, so nothing is lost however late the page is.

const NAMES = ["predicted", "measured", "losses"];
const CONFIG = { displaylogo: false };

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
      const { data, layout } = JSON.parse(model.get(name));
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
  return () => {
    watcher.disconnect();
    for (const { name, place, draw } of pictures) {
      model.off(`change:${name}`, draw);
      plotly.purge(place);
    }
  };
}

export default { render };
