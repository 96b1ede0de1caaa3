"""The picture of a run: live in a notebook's widget while it lasts, and a PNG that stays.

SVG in a core HTML widget takes about 1 ms a frame where a matplotlib figure takes 50 or more, but it does not survive
saving; so the last frame is a PNG, which GitHub and every reader of notebooks shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.data import in_notebook
from nbtools.live import png, samples, svg
from nbtools.live.picture import About, Columns, picture
from nbtools.live.samples import Preview
from nbtools.train import History

PERIOD = 0.25  # seconds between frames: quicker ones hang a Colab tab (lightning#2517)
COST = 0.006  # share of the time that drawing may take, of the 0.01 that the whole surface may


class LivePlot:
    """The picture of a run while it lasts. It draws what is new at most 4 times a second, and more rarely where that
    would take above COST of the time; `due = 0.0` has the next update draw in any case.

    about: may be replaced while the run lasts. widget: what to display in a notebook; None elsewhere, where only the
    last picture is drawn.
    """

    def __init__(self, title: str = "", epochs: int | None = None, epoch_samples: int | None = None, best: str = ""):
        self.about = About(title, epochs, epoch_samples, best)
        self.columns = Columns()
        self.previews: Sequence[Preview] = ()
        self.widget: Any = None
        self.due = 0.0
        self.drawn: tuple[Any, ...] = ()
        if in_notebook():
            from ipywidgets import HTML, Layout, VBox

            style = HTML(f"<style>{svg.STYLE}{samples.STYLE}</style>")
            self.charts, self.cards = (HTML(layout=Layout(width="100%", margin="0")) for _ in range(2))
            self.widget = VBox([style, self.charts, self.cards], layout=Layout(width="100%"))

    def update(self, history: History, status: str = "") -> None:
        """Draw when it is time to. Call it as often as you like: else it costs a look at the clock."""
        if self.widget is None or time.monotonic() < self.due:
            return
        self.columns.follow(history)  # paid once a row, and not for the frame: a resumed run brings thousands
        start = time.thread_time()  # what others do meanwhile on these cores is no cost of drawing
        news = (id(self.columns.seen), self.about, status)
        if not self.due or news != self.drawn:
            self.charts.value = svg.frame(picture(self.columns, self.about, status))
            self.drawn = news
        self.due = time.monotonic() + max(PERIOD, (time.thread_time() - start) / COST)

    def show(self, previews: Sequence[Preview]) -> None:
        """The newest samples with their answers; in a widget of their own, so that frames do not send images again."""
        self.previews = tuple(previews)
        if self.widget is not None:
            self.cards.value = samples.html(self.previews)

    def finish(self, history: History, path: str | os.PathLike[str] | None = None, over: bool = True) -> bytes:
        """The frame and samples as PNG, also written to `path`; over: whether it is the run's last. Raises OSError."""
        image = png.draw(picture(self.columns.follow(history), self.about, over=over), self.previews)
        if path is not None:
            disk.write_atomic(Path(path), image)
        return image
