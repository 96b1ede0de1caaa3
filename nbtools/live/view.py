"""What a person sees of a run: buttons, live picture and form in a notebook, a bar in a terminal, sentences in both."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from nbtools import disk
from nbtools.live.panel.panel import Panel
from nbtools.live.plot import terminal
from nbtools.live.plot.chart import Preview
from nbtools.live.plot.live import LivePlot, in_notebook
from nbtools.train import History, Plan, Record

PLOT_FILE = "plot.png"
WIDGET = "application/vnd.jupyter.widget-view+json"
STILL_EVERY, STILL_COST = 60.0, 0.004  # seconds between PNGs of a run under way; share of the time they may take
LIVE = "nbtools-live"
STILL = f"""<style>
:is(.jp-OutputArea, .output):has(.{LIVE}) :is(.jp-OutputArea-child, .output_area):has(.nbtools-still)
  + :is(.jp-OutputArea-child, .output_area) {{ display: none }}
:is(.jp-OutputArea, .output):has(.nbtools-still)
  :is(.jp-OutputArea-output.jupyter-widgets, .jupyter-widgets-view):not(:has(*)) {{ display: none }}
</style><div class="nbtools-still"></div>"""
"""Makes JupyterLab 4 and the classic notebook show the PNG after it only where the live view is not, and nothing where
they would report that a widget's model was not found."""
RECENT = 3  # sentences that stand beside the live picture
SAID = "font-size:12px;line-height:1.5;opacity:.75"


class View:
    """A run's history, drawn as it grows. told: every sentence so far.

    count: samples an epoch. best: the metric that counts, as in `Task.BEST`. given: the panel to show, or the Advice or
    Plan that one is made of where it can be shown. show: False draws nothing and tells silently.
    """

    def __init__(self, folder: Path, history: History, plan: Plan, count: int, best: str, given: Any, show: bool):
        self.folder, self.history, self.count, self.progress = folder, history, count, show
        self.plot = LivePlot(folder.name, self.epochs(plan), count, best)
        self.notebook = in_notebook()
        drawn = show and self.plot.widget is not None
        self.panel: Panel | None = given if isinstance(given, Panel) else Panel(given) if drawn else None
        self.output = Output() if drawn else None
        self.told: list[str] = []
        self.drawing = True
        self.next_still = 0.0
        self.bar = tqdm(
            total=count * self.epochs(plan),
            initial=history.rows[-1]["samples"] if history.rows else 0,
            unit=" samples",
            disable=not show or self.notebook,
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def epochs(self, plan: Plan) -> int:
        """How many epochs to show: those of the plan, or those that have begun where these are more."""
        rows = self.history.rows
        ended = next((row for row in reversed(rows) if row["kind"] == "epoch"), {"epoch": -1, "samples": 0})
        begun = rows[-1]["epoch"] + (rows[-1]["samples"] > ended["samples"]) if rows else 0
        return max(plan.epochs, ended["epoch"] + 1, begun)

    def start(self, status: str = "") -> None:
        """Put the live view into the output of the running cell."""
        if self.output is not None:
            self.draw(status)
            self.output.live(self.panel, self.plot.widget, f"{self.folder}: {PLOT_FILE} in it shows how the run went")

    def draw(self, status: str = "") -> None:
        """A new frame, where it is time to. One that fails is told, and the run goes on without: it matters more."""
        if not self.progress or not self.drawing:
            return
        try:
            self.plot.update(self.history, status)
        except Exception as error:
            self.drawing = False
            self.tell(f"the picture is no longer drawn ({type(error).__name__}: {error}); the run goes on")

    def keep_still(self) -> None:
        """The picture as PNG, when it is time: in the run folder, and in the output for whoever opens the notebook when
        this kernel is gone. Where drawing fails a message says so, and the run continues without."""
        if time.monotonic() < self.next_still:
            return
        start = time.thread_time()
        try:
            png = self.plot.finish(self.history, self.folder / PLOT_FILE, over=False)
            if self.output is not None and self.output.lives:
                self.output.still(png)
        except Exception as error:
            self.next_still = math.inf
            self.tell(f"no picture until the end: {type(error).__name__}: {error}")
            return
        self.next_still = time.monotonic() + max(STILL_EVERY, (time.thread_time() - start) / STILL_COST)

    def advance(self, record: Record) -> None:
        """What a record brings to say, and the terminal's bar. What was turned stands in the picture: it is not said
        again under it."""
        if record.kind in ("event", "change"):
            self.tell(record.values["what"], passing=record.kind == "change")
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

    @property
    def sees(self) -> bool:
        """Whether samples have a place where somebody looks."""
        return self.output is not None or not self.bar.disable

    def see(self, previews: list[Preview]) -> None:
        """The newest samples with their answers: in the live picture, or below the terminal's bar."""
        self.plot.show(previews)
        if not self.bar.disable:
            for line in terminal.text(previews, shutil.get_terminal_size((120, 24)).columns - 1):
                self.bar.write(line)

    def turned(self, plan: Plan) -> None:
        """The run goes on with another plan."""
        epochs = self.epochs(plan)
        self.plot.about = dataclasses.replace(self.plot.about, epochs=epochs)
        self.bar.total = self.count * epochs
        if self.panel is not None:
            self.panel.take(plan)

    def tell(self, sentence: str, passing: bool = False) -> None:
        """Say it: beside the live picture where there is one, and once more under the one that stays unless passing."""
        self.told.append(sentence)
        if self.output is not None and self.output.lives:
            self.output.say(sentence, passing)
        elif self.progress:
            tqdm.write(sentence, file=sys.stdout if self.notebook else sys.stderr)

    def tell_all(self, sentences: list[str]) -> None:
        """Tell and forget them."""
        while sentences:
            self.tell(sentences.pop(0))

    def finish(self, previews: list[Preview], path: Path | None = None) -> None:
        """The picture that stays, in the place of the live view; written to `path`. Raises DiskError; a picture that
        cannot be drawn is told, since the run is whole without."""
        self.bar.close()
        picture = None
        try:
            self.plot.show(previews)
            picture = self.plot.finish(self.history)
        except Exception as error:
            self.tell(f"no picture: {type(error).__name__}: {error}")
        if self.output is not None and self.output.lives:
            kept = (self.panel.controls, self.panel.view) if self.panel is not None else ()
            self.output.stay(picture, kept)
        if path is not None and picture is not None:
            with disk.explained("writing the plot", self.folder):
                disk.write_atomic(path, picture)


class Output:
    """The place in a cell's output where the live view stands, and at the end the picture: widgets do not outlive their
    kernel, a PNG does.

    While the view lives, sentences stand in it: one printed under a tall output has the classic notebook fold it all
    into a small box that scrolls. They are printed when the picture stands.
    """

    def __init__(self) -> None:
        self.name = uuid4().hex
        self.lives = False
        self.lines: list[str] = []
        self.recent: list[str] = []
        self.said: Any = None
        self.view: Any = None
        self.stills: list[str] = []  # display ids of what stands for the view when the kernel is gone

    def live(self, panel: Panel | None, plot: Any, text: str) -> None:
        """Display buttons, sentences, picture and form below one another; text: for readers without widgets."""
        from IPython.display import display
        from ipywidgets import HTML, Layout, VBox

        self.said = HTML(layout=Layout(width="100%", margin="0"))
        parts = [self.said, plot] if panel is None else [panel.controls, self.said, plot, panel.view]
        self.view, self.lives = VBox(parts, layout=Layout(width="100%")), True
        self.view.add_class(LIVE)
        shown = {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self.view.model_id}, "text/plain": text}
        display(shown, raw=True, display_id=self.name)

    def say(self, sentence: str, passing: bool) -> None:
        self.recent = [*self.recent, sentence][-RECENT:]
        self.said.value = "".join(f'<div style="{SAID}">{escape(line)}</div>' for line in self.recent)
        if not passing:
            self.lines.append(sentence)

    def still(self, png: bytes) -> None:
        """A PNG below the view, visible only where the view is not. In an output of its own: updating the view's would
        make Jupyter draw all its widgets again."""
        from IPython.display import HTML, Image, display

        if not self.stills:
            self.stills = [f"{self.name}-style", f"{self.name}-still"]
            display(HTML(STILL), display_id=self.stills[0])
            display(Image(png, retina=True), display_id=self.stills[1])
        else:
            display(Image(png, retina=True), display_id=self.stills[1], update=True)

    def stay(self, png: bytes | None, kept: Sequence[Any]) -> None:
        """The picture in the place of the view, and what was said under it. None: the last frame stays while the kernel
        lives. kept: widgets that live on."""
        from IPython.display import HTML, Image, display

        if png is not None:
            display(Image(png, retina=True), display_id=self.name, update=True)
            for name in self.stills:
                display(HTML(""), display_id=name, update=True)
        self.lives = False
        for line in self.lines:
            print(line)
        if png is not None:
            close(self.view, kept)


def close(widget: Any, kept: Sequence[Any]) -> None:
    """Close a widget with all that it is made of: ipywidgets keeps each open one, and its comm, as long as the kernel.
    Not for a form: what comes after its 900 closings waits for seconds in a classic notebook."""
    widget.close()
    for part in (getattr(widget, "style", None), widget.layout):
        if part is not None:
            part.close()
    for child in getattr(widget, "children", ()):
        if child not in kept:
            close(child, kept)


def line_of(record: Record) -> str:
    """An epoch, or an evaluation between steps, in one line, for terminals and logs."""
    values = record.values
    shown = "  ".join(f"{name} {v:.4f}" for name, v in values.items() if name.startswith(("train_", "val_")))
    if record.kind == "evaluation":
        return f"step {record.step}: {shown}"
    return f"epoch {record.epoch + 1}: {shown}  lr {values['lr']:.2e}  {values['epoch_time']:.1f} s"
