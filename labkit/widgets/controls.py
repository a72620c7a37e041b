"""The controls of a layout: one row for each axis, and beside it the reason when a choice is refused."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ipywidgets as ipw

from labkit.widgets.choices import NUMBERS, Choices, Refusal

GROUPS = (
    ("dp", "tp", "sequence_parallel", "pp"),
    ("schedule", "num_virtual_stages", "num_microbatches"),
    ("zero_stage", "recompute", "offload"),
    ("precision", "engine"),
)
LABELS = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "sequence_parallel": "sequence",
    "pp": "pipeline",
    "schedule": "schedule",
    "num_virtual_stages": "stages per rank",
    "num_microbatches": "micro-batches",
    "zero_stage": "ZeRO stage",
    "recompute": "recompute",
    "offload": "offload",
    "precision": "precision",
    "engine": "engine",
}
LABEL_WIDTH = "102px"


@dataclass(slots=True, kw_only=True)
class Row:
    """A label, its control, and a card that says why a choice is refused.

    Attributes:
        control: what a hand moves.
        use: takes the nearest layout instead; in the card, so the next key of the keyboard's way after the control.
        box: all of it. The card lies over what stands to the right: nothing moves when it comes.
    """

    axis: str
    control: Any
    use: ipw.Button = field(init=False)
    box: ipw.HBox = field(init=False)
    _reason: ipw.HTML = field(init=False)
    _card: ipw.VBox = field(init=False)

    def __post_init__(self) -> None:
        self.use = ipw.Button(layout={"width": "auto"})
        self._reason = ipw.HTML()
        self._card = ipw.VBox([self._reason, self.use], layout={"display": "none"})
        self._card.add_class("labkit-refusal")
        self.box = ipw.HBox([ipw.Label(LABELS[self.axis], layout={"width": LABEL_WIDTH}), self.control, self._card])
        self.box.add_class("labkit-row")

    def refuse(self, refusal: Refusal) -> None:
        """Say why what the control stands at does not exist, and what does."""
        name, why = html.escape(str(refusal.wish)), html.escape(refusal.reason)
        self._reason.value = f"<div role='status'><code>{name}</code> does not run.<br>{why}</div>"
        self.use.description = f"Use {refusal.nearest}"
        self.use.tooltip = self.use.description
        self.box.add_class("labkit-refused")
        self._card.layout.display = "flex"

    def accept(self) -> None:
        """Take the card away."""
        if self._card.layout.display != "none":
            self.box.remove_class("labkit-refused")
            self._card.layout.display = "none"


def build_rows(choices: Choices) -> dict[str, Row]:
    """A row for every axis; the scales hold the values that some layout has, and every word there is."""
    axes = [axis for group in GROUPS for axis in group]
    return {axis: Row(axis=axis, control=_control(axis, choices.values(axis))) for axis in axes}


def arranged(rows: dict[str, Row]) -> ipw.VBox:
    """All rows, in groups."""
    boxes = [ipw.VBox([rows[axis].box for axis in group]) for group in GROUPS]
    for box in boxes:
        box.add_class("labkit-group")
    return ipw.VBox(boxes)


def _control(axis: str, options: Sequence[Any]) -> ipw.Widget:
    if axis in NUMBERS:
        fill = {"flex": "1 1 auto", "width": "auto"}
        return ipw.SelectionSlider(options=options, disabled=len(options) == 1, layout=fill)
    if axis == "sequence_parallel":
        return ipw.Checkbox(value=False, description="split within tensor parallel", indent=False)
    if axis == "schedule":
        return ipw.Dropdown(
            options=[(str(name).replace("_", " "), name) for name in options],
            layout={"width": "auto", "flex": "1 1 auto"},
        )
    return ipw.ToggleButtons(options=options, style={"button_width": "auto"})
