"""What the cockpit looks like: its widgets and where they stand. No behaviour."""

import html
import pathlib
from dataclasses import dataclass, field
from typing import Any

import ipywidgets as ipw

from labkit.widgets.choices import Choices, Refusal
from labkit.widgets.controls import LABEL_WIDTH, Row, arranged, build_rows
from labkit.widgets.pictures import Pictures

_CSS = pathlib.Path(__file__).with_name("cockpit.css")


@dataclass(slots=True, kw_only=True)
class View:
    """The widgets of one cockpit.

    Attributes:
        rows: the row of each axis of a layout.
        begin: whether a run starts afresh or goes on with the live training, under whatever layout.
        paced: whether durations are declared.
        num_steps: how many steps a run takes.
        run: starts a run.  stop: ends it after its step.
        layout_text: the layout as text.  status: what happens, or what went wrong.
        pictures: the live figures.
        box: everything, arranged.
    """

    rows: dict[str, Row]
    begin: ipw.ToggleButtons
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
                ipw.HTML(f"<style>{_CSS.read_text(encoding='utf-8')}</style>", layout={"display": "none"}),
                self.layout_text,
                arranged(self.rows),
                _line("training", self.begin),
                _line("steps", self.num_steps, self.paced),
                _line("", self.run, self.stop),
                self.status,
            ]
        )
        controls.add_class("labkit-controls")
        self.box = ipw.HBox([controls, self.pictures], layout={"width": "100%"})
        self.box.add_class("labkit-cockpit")

    @property
    def axes(self) -> dict[str, Any]:
        """The control of each axis."""
        return {axis: row.control for axis, row in self.rows.items()}

    def say(self, text: str, tone: str = "quiet") -> None:
        """Show one message; its line breaks are kept, nothing in it is markup."""
        self.status.value = f"<div class='labkit-status labkit-{tone}' role='status'>{html.escape(text)}</div>"

    def name_layout(self, text: str, world: str) -> None:
        """Show the layout as text, and below it the ranks it runs on."""
        self.layout_text.value = (
            f"<div class='labkit-head'><div class='labkit-layout'>{html.escape(text)}</div>"
            f"<div class='labkit-quiet'>{html.escape(world)}</div></div>"
        )

    def show_refusal(self, axis: str | None, refusal: Refusal | None) -> None:
        """Show beside one control why it is refused; no other control keeps such a card."""
        for name, row in self.rows.items():
            if refusal is not None and name == axis:
                row.refuse(refusal)
            else:
                row.accept()

    def close(self) -> None:
        """Take every widget out of the page and of memory."""
        for widget in _family(self.box):
            widget.close()


def build_view(choices: Choices, pictures: Pictures, num_steps: int) -> View:
    """Make the widgets."""
    return View(
        rows=build_rows(choices),
        begin=ipw.ToggleButtons(
            options=[("afresh", "fresh"), ("go on", "live")],
            tooltips=["from step 0, with new weights", "with the weights there are; a change of layout moves them"],
            style={"button_width": "auto"},
        ),
        paced=ipw.Checkbox(value=True, description="paced", indent=False, tooltip="durations as declared"),
        num_steps=ipw.BoundedIntText(value=num_steps, min=1, max=10_000, layout={"width": "90px"}),
        run=ipw.Button(description="Run", button_style="success", icon="play", layout={"width": "104px"}),
        stop=ipw.Button(description="Stop", icon="stop", disabled=True, layout={"width": "104px"}),
        layout_text=ipw.HTML(),
        status=ipw.HTML(),
        pictures=pictures,
    )


def _line(label: str, *controls: ipw.Widget) -> ipw.HBox:
    """A label and controls, so that all labels stand in one column."""
    line = ipw.HBox([ipw.Label(label, layout={"width": LABEL_WIDTH}), *controls])
    line.add_class("labkit-row")
    return line


def _family(widget: ipw.Widget) -> list[ipw.Widget]:
    children = getattr(widget, "children", ())
    return [widget, *(member for child in children for member in _family(child))]
