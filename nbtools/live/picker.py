"""Boxes to tick and a button: some of many, shown below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MOST = 30  # boxes


def picker(names: Sequence[str], parts: Callable[[list[str]], Sequence[Any]]) -> Any:
    """A widget with a box for each name, the first two ticked, and a button that displays `parts` of those ticked."""
    from ipywidgets import Button, Checkbox, HBox, Layout, Output, VBox

    box = Layout(width="auto", margin="0 16px 0 0")
    boxes = [Checkbox(value=k < 2, description=name, indent=False, layout=box) for k, name in enumerate(names[:MOST])]
    button, output = Button(description="Compare", tooltip="The ticked runs next to each other"), Output()

    def show(_: Any) -> None:
        output.outputs = ()
        for part in parts([str(box.description) for box in boxes if box.value]):
            output.append_display_data(part)

    button.on_click(show)
    return VBox([HBox([*boxes, button], layout=Layout(flex_flow="row wrap", align_items="center")), output])
