"""The controls of the live curves: axis, smoothing, and the part of the run that is shown; and the list of changes.

Core ipywidgets, since their messages are handled while the cell runs, and a script is not allowed everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from nbtools.live.columns import Columns
from nbtools.live.picture import SCALES, Look, worded

SMOOTHING = {"none": 0.0, "light": 0.4, "medium": 1.0, "strong": 4.0}
HELP = {
    "scale": "Axes of loss and lr. auto: logarithmic once the loss has fallen to a thirtieth or less",
    "smoothing": "Of the train loss and the machine's readings; medium averages over 5 % of the curve",
    "part": "The part of the run that the curves show, in % of its steps so far",
}


class Looks:
    """Controls in one row, `box`, and what they are set to, `look`. changed: called after each change."""

    def __init__(self, changed: Callable[[], None] = lambda: None):
        from ipywidgets import Dropdown, HBox, IntRangeSlider, Layout

        free, narrow = {"description_width": "initial"}, Layout(width="auto", max_width="170px", margin="0 16px 0 0")
        self.scale = Dropdown(options=SCALES, description="axis", style=free, layout=narrow)
        self.smoothing = Dropdown(
            options=[*SMOOTHING], value="medium", description="smoothing", style=free, layout=narrow
        )
        wide: Any = {"style": free, "layout": Layout(width="350px", max_width="100%", margin="0 16px 0 0")}
        self.part = IntRangeSlider(
            value=(0, 100), min=0, max=100, readout_format="d", description="part shown, %", **wide
        )
        for name, help in HELP.items():
            widget = getattr(self, name)
            entitle(widget, help)
            widget.observe(lambda _: changed(), names="value")
        self.box = HBox(
            [self.scale, self.smoothing, self.part],
            layout=Layout(flex_flow="row wrap", align_items="center", overflow="visible"),
        )
        self.box.add_class("nbtools-looks")

    @property
    def look(self) -> Look:
        low, high = self.part.value
        low = min(low, 99)  # at least a hundredth of the run
        return Look(str(self.scale.value), SMOOTHING[str(self.smoothing.value)], low / 100, max(high, low + 1) / 100)


def entitle(widget: Any, text: str) -> None:
    """Give an input its name, for a screen reader and on hover."""
    widget.set_trait("tooltip" if widget.has_trait("tooltip") else "description_tooltip", text)  # ipywidgets 8, or 7


def changes(columns: Columns) -> str:
    """All changes of settings as HTML to unfold, the newest first; nothing before the first."""
    rows: list[Any] = [f"<div>step {row['step']:,}: {escape(worded(row))}</div>" for row in columns.changes[::-1]]
    if not rows:
        return ""
    return f'<details class="nbt"><summary>Changes ({len(rows)})</summary>{"".join(rows)}</details>'
