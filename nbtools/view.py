"""What a person sees of a run: buttons, live picture and form in a notebook, a bar in a terminal, sentences in both."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from tqdm.auto import tqdm

from nbtools import disk
from nbtools.history import History, Record
from nbtools.panel import Panel
from nbtools.plan import Plan
from nbtools.plot import LivePlot, Preview, in_notebook
from nbtools.run import PLOT

WIDGET = "application/vnd.jupyter.widget-view+json"


class View:
    """A run's history, drawn as it grows. told: every sentence so far.

    count: samples an epoch. best: the metric that counts, as in `Task.BEST`. panel: the one to show; None makes one of
    the plan, in a notebook. show: False draws nothing and tells silently.
    """

    def __init__(
        self, folder: Path, history: History, plan: Plan, count: int, best: str, panel: Panel | None, show: bool
    ):
        self.folder, self.history, self.count, self.progress = folder, history, count, show
        self.plot = LivePlot(folder.name, plan.epochs, count, best)
        self.notebook = in_notebook()
        drawn = show and self.plot.widget is not None
        self.panel = Panel(plan) if panel is None and drawn else panel
        self.output = Output() if drawn else None
        self.told: list[str] = []
        self.bar = tqdm(
            total=count * plan.epochs,
            initial=history.rows[-1]["samples"] if history.rows else 0,
            unit=" samples",
            disable=not show or self.notebook,
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def start(self, status: str = "") -> None:
        """Put the live view into the output of the running cell."""
        if self.output is not None:
            self.plot.update(self.history, status)
            self.output.live(
                stacked(self.panel, self.plot.widget), f"{self.folder}: {PLOT} in it shows how the run went"
            )

    def draw(self, status: str = "") -> None:
        """A new frame, where it is time to."""
        if self.progress:
            self.plot.update(self.history, status)

    def advance(self, record: Record) -> None:
        """What a record brings to say, and the terminal's bar."""
        if record.kind in ("event", "change"):
            self.tell(record.values["what"])
        if self.bar.disable:
            return
        if record.kind == "step":
            self.bar.update(record.samples - self.bar.n)
        if record.kind in ("epoch", "evaluation"):
            self.bar.write(line_of(record))
        if record.values:
            shown = {
                n: v for n, v in record.values.items() if n == "loss" or (n.startswith("val_") and n != "val_loss")
            }
            self.bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()}, refresh=False)

    def turned(self, plan: Plan) -> None:
        """The run goes on with another plan."""
        self.plot.about = dataclasses.replace(self.plot.about, epochs=plan.epochs)
        self.bar.total = self.count * plan.epochs
        if self.panel is not None:
            self.panel.take(plan)

    def tell(self, sentence: str) -> None:
        self.told.append(sentence)
        if self.progress:
            tqdm.write(sentence, file=sys.stdout if self.notebook else sys.stderr)

    def tell_all(self, sentences: list[str]) -> None:
        """Tell and forget them."""
        while sentences:
            self.tell(sentences.pop(0))

    def finish(self, previews: list[Preview], path: Path | None = None) -> None:
        """The picture that stays, in the place of the live view; written to `path`. Raises DiskError."""
        self.bar.close()
        self.plot.show(previews)
        with disk.explained("writing the plot", self.folder):
            picture = self.plot.finish(self.history, path)
        if self.output is not None:
            self.output.picture(picture)


def stacked(panel: Panel | None, plot: Any) -> Any:
    """Buttons, picture and form below one another."""
    from ipywidgets import Layout, VBox

    parts = [plot] if panel is None else [panel.controls, plot, panel.view]
    return VBox(parts, layout=Layout(width="100%"))


class Output:
    """The place in a cell's output where the live view stands, and at the end the picture: widgets do not outlive their
    kernel, a PNG does."""

    def __init__(self) -> None:
        self.name = uuid4().hex

    def live(self, view: Any, text: str) -> None:
        from IPython.display import display

        shown = {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": view.model_id}, "text/plain": text}
        display(shown, raw=True, display_id=self.name)

    def picture(self, png: bytes) -> None:
        from IPython.display import Image, display

        display(Image(png, retina=True), display_id=self.name, update=True)


def line_of(record: Record) -> str:
    """An epoch, or an evaluation between steps, in one line, for terminals and logs."""
    values = record.values
    shown = "  ".join(f"{name} {v:.4f}" for name, v in values.items() if name.startswith(("train_", "val_")))
    if record.kind == "evaluation":
        return f"step {record.step}: {shown}"
    return f"epoch {record.epoch + 1}: {shown}  lr {values['lr']:.2e}  {values['epoch_time']:.1f} s"
