"""What the cockpit looks like: its widgets and where they stand. No behaviour."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

import ipywidgets as ipw

from labkit.widgets.choices import Choices
from labkit.widgets.pictures import Pictures

_LABELS = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline",
    "num_microbatches": "micro-batches",
    "schedule": "schedule",
    "precision": "precision",
}
_TONES = {"quiet": "#57606a", "good": "#0a7d4f", "bad": "#b3261e"}
_FULL = {"width": "100%"}
_FILL = {"flex": "1 1 auto", "width": "auto"}


@dataclass(slots=True, kw_only=True)
class View:
    """The widgets of one cockpit.

    Attributes:
        axes: the control of each axis of a layout.
        paced: whether durations are declared.
        num_steps: how many steps a run takes.
        run: starts a run.  stop: ends it after its step.
        layout_text: the layout as text.  status: what happens, or what went wrong.
        pictures: the live figures.
        box: everything, arranged.
    """

    axes: dict[str, ipw.SelectionSlider | ipw.ToggleButtons]
    paced: ipw.Checkbox
    num_steps: ipw.BoundedIntText
    run: ipw.Button
    stop: ipw.Button
    layout_text: ipw.HTML
    status: ipw.HTML
    pictures: Pictures
    box: ipw.Widget = field(init=False)

    def __post_init__(self) -> None:
        controls = ipw.VBox(
            [
                self.layout_text,
                *(_row(axis, control) for axis, control in self.axes.items()),
                self.paced,
                ipw.HBox([ipw.Label("steps", layout={"width": "104px"}), self.num_steps]),
                ipw.HBox([self.run, self.stop]),
                self.status,
            ],
            layout={"width": "330px", "min_width": "330px", "padding": "12px 12px 12px 4px"},
        )
        self.box = ipw.HBox([controls, self.pictures], layout=_FULL)

    def say(self, text: str, tone: str = "quiet") -> None:
        """Show one message; its line breaks are kept, nothing in it is markup."""
        style = f"color:{_TONES[tone]};line-height:1.4;white-space:pre-wrap;overflow-wrap:anywhere"
        self.status.value = f"<div style='{style}'>{html.escape(text)}</div>"

    def name_layout(self, text: str, world: str) -> None:
        """Show the layout as text, and below it the ranks it runs on."""
        self.layout_text.value = (
            f"<div style='font-size:15px;font-weight:600;font-family:monospace'>{html.escape(text)}</div>"
            f"<div style='color:{_TONES['quiet']};line-height:1.5;white-space:pre-line'>{html.escape(world)}</div>"
        )

    def close(self) -> None:
        """Take every widget out of the page and of memory."""
        for widget in _family(self.box):
            widget.close()


def build_view(choices: Choices, pictures: Pictures, num_steps: int) -> View:
    """Make the widgets; the sliders' scales are the values that some layout has."""
    return View(
        axes={axis: _control(axis, choices.values(axis)) for axis in _LABELS},
        paced=ipw.Checkbox(value=True, description="paced: durations as declared", indent=False),
        num_steps=ipw.BoundedIntText(value=num_steps, min=1, max=10_000, layout={"width": "90px"}),
        run=ipw.Button(description="Run", button_style="success", icon="play", layout={"width": "110px"}),
        stop=ipw.Button(description="Stop", icon="stop", disabled=True, layout={"width": "110px"}),
        layout_text=ipw.HTML(),
        status=ipw.HTML(layout={"margin": "8px 0 0 0"}),
        pictures=pictures,
    )


def _control(axis: str, values: Sequence[int] | Sequence[str]) -> ipw.SelectionSlider | ipw.ToggleButtons:
    options = list(values)
    if axis in ("schedule", "precision"):
        return ipw.ToggleButtons(options=options, style={"button_width": "76px"}, disabled=len(options) == 1)
    return ipw.SelectionSlider(options=options, disabled=len(options) == 1, layout=_FILL)


def _row(axis: str, control: ipw.Widget) -> ipw.HBox:
    """A label and its control, so that all labels stand in one column."""
    return ipw.HBox([ipw.Label(_LABELS[axis], layout={"width": "104px"}), control], layout=_FULL)


def _family(widget: ipw.Widget) -> list[ipw.Widget]:
    children = getattr(widget, "children", ())
    return [widget, *(member for child in children for member in _family(child))]
