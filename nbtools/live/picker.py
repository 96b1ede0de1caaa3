"""Boxes to tick and a button: some of many, shown below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nbtools.table import note

MOST = 30  # boxes


def picker(names: Sequence[str], page: Callable[[list[str]], str]) -> Any:
    """A widget with a box for each name, the first two ticked, and a button that shows the HTML of those ticked: no
    Output, of which the classic notebook could not make a view."""
    from ipywidgets import HTML, Button, Checkbox, HBox, Layout, VBox

    box = Layout(width="auto", margin="0 16px 0 0")
    boxes = [Checkbox(value=k < 2, description=name, indent=False, layout=box) for k, name in enumerate(names[:MOST])]
    button, shown = Button(description="Compare", tooltip="The ticked runs next to each other"), HTML()
    if len(names) > MOST:
        shown.value = note(
            f"Boxes of the first {MOST} of {len(names)}; compare others by name: found['a', 'b'].compare()"
        )

    def show(_: Any) -> None:
        ticked = [str(box.description) for box in boxes if box.value]
        shown.value = page(ticked) if ticked else note("No run is ticked; tick those to compare.")

    button.on_click(show)
    return VBox([HBox([*boxes, button], layout=Layout(flex_flow="row wrap", align_items="center")), shown])
