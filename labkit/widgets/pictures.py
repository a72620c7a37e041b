"""The live pictures of the cockpit: figures that `show` drew, sent to the page whole.

plotly's own live widget is not used: it reaches the page empty and is filled by differences, which a busy page loses
(its 5 MB of code must be ready within two seconds, or the figure stays as it is). Here the small part comes first and
every message is a whole figure.
"""

import pathlib
import threading

import anywidget
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

TIMELINES = ("predicted", "measured")


class Pictures(anywidget.AnyWidget):  # type: ignore[misc]
    """Two timelines and the losses, one below the other, as wide as their place. Any thread may draw.

    Attributes:
        figures: what is shown, by name.
    """

    _esm = pathlib.Path(__file__).with_name("pictures.js")
    plotly = traitlets.Unicode().tag(sync=True)
    predicted = traitlets.Unicode().tag(sync=True)
    measured = traitlets.Unicode().tag(sync=True)
    losses = traitlets.Unicode().tag(sync=True)

    def __init__(self, *, predicted: go.Figure, measured: go.Figure, losses: go.Figure) -> None:
        self.figures: dict[str, go.Figure] = {"predicted": predicted, "measured": measured, "losses": losses}
        self._drawing = threading.RLock()
        super().__init__(
            plotly=get_plotlyjs(),
            layout={"flex": "1 1 0", "min_width": "0"},
            **{name: figure.to_json() for name, figure in self.figures.items()},
        )

    def draw(self, name: str, figure: go.Figure) -> None:
        """Show this figure in place of the one of that name."""
        with self._drawing:
            self.figures[name] = figure
            for each in share_scale(self.figures) | {name}:
                setattr(self, each, self.figures[each].to_json())


def share_scale(figures: dict[str, go.Figure]) -> set[str]:
    """Let paced timelines end at the same time, so that their bars compare by eye; returns which of them moved.

    Where one is not paced, or in another unit, each keeps its own scale: what `show.timeline` noted as its end.
    """
    timelines = {name: figures[name].layout for name in TIMELINES}
    paced = all("paced" in layout.title.text for layout in timelines.values())
    shared = paced and len({layout.xaxis.ticksuffix for layout in timelines.values()}) == 1
    last = max(layout.meta["end"] for layout in timelines.values())
    moved = set()
    for name, layout in timelines.items():
        end = last if shared else layout.meta["end"]
        if layout.xaxis.range[1] != end:
            layout.xaxis.range = [0, end]
            moved.add(name)
    return moved
