"""The bell: says in the browser's title, and as a desktop notification where that is allowed, that a run has ended
while its page is not looked at. In front ends that run no scripts, or show outputs in a sandbox (Colab), nothing."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from nbtools.data import on_colab

SCRIPT = escape(Path(__file__).with_name("bell.js").read_text("utf-8"))
IMAGE = f'<img hidden src="data:," onerror="{SCRIPT}">'  # a widget's markup runs no <script>; this is no image
ASK = f'<button style="display:none" class="jupyter-button">Notify me when it ends</button>{IMAGE}'


class Bell:
    """box: the widget, empty but for a button where the browser has yet to be allowed to show notifications."""

    def __init__(self) -> None:
        from ipywidgets import HTML, Layout

        self.box: Any = HTML("" if on_colab() else f"<div>{ASK}</div>", layout=Layout(margin="0"))

    def ring(self, title: str, text: str = "") -> None:
        """Tell a page that is not looked at."""
        if not on_colab():
            self.box.value = f'<div data-title="{escape(title)}" data-text="{escape(text)}">{IMAGE}</div>'
