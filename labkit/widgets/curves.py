"""The loss curves of a cockpit: one for each training, which may go on over several runs and layouts."""

from collections.abc import Sequence

import plotly.graph_objects as go

from labkit import show

MOST = 4


class Curves:
    """The newest trainings by name, to lay one over the other. The last of them may go on."""

    def __init__(self) -> None:
        self._curves: dict[str, list[float]] = {}
        self._before: list[float] = []
        self._layout = ""
        self._changes: dict[int, str] = {}

    def begin(self, layout: str, losses: Sequence[float] = ()) -> None:
        """A new training, from its first step on; one under the same layout makes room for it."""
        self._layout, self._changes, self._before = layout, {}, []
        self._put(layout, list(losses))

    def go_on(self, layout: str) -> None:
        """The training of the last curve goes on, in another run and perhaps another layout."""
        name, losses = next(reversed(self._curves.items()))
        self._before = losses
        if layout != self._layout:
            self._layout = layout
            self._changes[len(losses)] = f"→ {layout}"
            del self._curves[name]
            self._put(f"{name} → {layout}", losses)

    def update(self, losses: Sequence[float]) -> None:
        """The losses of the run under way."""
        self._put(next(reversed(self._curves)), [*self._before, *losses])

    def figure(self) -> go.Figure:
        """All of them, with a mark wherever the layout of the last one changed."""
        return show.losses(self._curves, changes=self._changes)

    def _put(self, name: str, losses: list[float]) -> None:
        self._curves.pop(name, None)
        self._curves[name] = losses
        while len(self._curves) > MOST:
            del self._curves[next(iter(self._curves))]
