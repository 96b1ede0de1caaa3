"""What is shown of a run: buttons, live picture and form in a notebook, a bar in a terminal, messages in both."""

from __future__ import annotations

import dataclasses
import math
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.data import bar, in_notebook, say
from nbtools.live import facts, output, png, samples, svg
from nbtools.live.columns import Columns
from nbtools.live.facts import TRAINING, About, fitting, line_of
from nbtools.live.output import Output
from nbtools.live.panel import Panel
from nbtools.live.plot import picture
from nbtools.live.png import Still
from nbtools.live.samples import Preview
from nbtools.train import History, Plan, Record

PLOT_FILE = "plot.png"
FRAME_EVERY, FRAME_COST = 0.25, 0.006
"""Seconds between frames: quicker ones hang a Colab tab (lightning#2517); share of the time that drawing may take, of
the 0.01 that the whole surface may."""
STILL_EVERY, STILL_COST = 60.0, 0.004  # the same of PNGs of a run in progress
SHOWN = 4  # samples in a terminal


class View:
    """A run's history, drawn as it grows: what is new at most 4 times a second, and more rarely where that would take
    above FRAME_COST of the time; `due = 0.0` has the next `draw` draw in any case. events: every message so far.

    count: samples per epoch. best: the metric that counts, as in `Task.BEST`. given: the panel to show, or the Advice
    or Plan that one is made of where it can be shown. show: False draws and prints nothing.
    """

    def __init__(self, folder: Path, history: History, plan: Plan, count: int, best: str, given: Any, show: bool):
        self.folder, self.history, self.count, self.progress = folder, history, count, show
        self.about = About(folder.name, self.epochs(plan), count, best, plan.warmup_epochs)
        self.columns, self.cards, self.events = Columns(), list[Preview](), list[str]()
        self.drawn: Any = None
        self.due, self.next_still = 0.0, time.monotonic() + STILL_EVERY
        self.notebook = in_notebook()
        drawn = show and self.notebook
        self.panel: Panel | None = given if isinstance(given, Panel) else Panel(given) if drawn else None
        self.output = Output(self.redraw) if drawn else None
        self.fresh: Still | None = None  # a PNG, until it is shown
        self.drawing, self.ended = threading.Lock(), False  # the last picture replaces one that is still being drawn
        done, hidden = history.rows[-1]["samples"] if history.rows else 0, not show or self.notebook
        options: Any = {"unit": " samples", "disable": hidden, "mininterval": 0.5, "dynamic_ncols": True}
        self.bar = bar(total=count * self.epochs(plan), initial=done, **options)

    def epochs(self, plan: Plan) -> int:
        """Return how many epochs to show: those of the plan, or those that have begun where these are more."""
        rows = self.history.rows
        ended = next((row for row in reversed(rows) if row["kind"] == "epoch"), {"epoch": -1, "samples": 0})
        begun = rows[-1]["epoch"] + (rows[-1]["samples"] > ended["samples"]) if rows else 0
        return max(plan.epochs, ended["epoch"] + 1, begun)

    @property
    def visible(self) -> bool:
        """Whether samples and lines can be displayed."""
        return self.output is not None or not self.bar.disable

    # -- while it lasts

    def start(self, status: str = TRAINING) -> None:
        """Put the live view into the output of the running cell."""
        self.draw(status)
        if self.output is not None and self.panel is not None:
            text = f"{self.folder}: {PLOT_FILE} in it shows how the run went"
            self.output.live(self.panel.form.controls, text)

    def draw(self, status: str = TRAINING) -> None:
        """Draw a new frame when it is due; else it costs only a clock read. If one fails, a message says so, and the
        run continues without. status: the run's state."""
        if self.output is None or time.monotonic() < self.due:
            return
        try:
            self.columns.follow(self.history)  # paid once a row, and not for the frame: a resumed run brings thousands
            start = time.thread_time()  # work of other processes on these cores is not a cost of drawing
            news = (id(self.columns.seen), self.about, status, self.output.look)
            if not self.due or news != self.drawn:
                made = picture(self.columns, self.about.best, self.output.look)
                self.output.facts.value = facts.html(self.columns, self.about, status)
                self.output.frame.value, self.drawn = svg.frame(made), news
            self.due = time.monotonic() + max(FRAME_EVERY, (time.thread_time() - start) / FRAME_COST)
        except Exception as error:
            self.due = math.inf
            self.tell(f"the picture is no longer drawn ({type(error).__name__}: {error}); the run continues")

    def redraw(self) -> None:
        """Have the next `draw` draw."""
        self.due = 0.0

    def advance(self, record: Record) -> None:
        """Show what a record says, and move the terminal's bar."""
        if record.kind in ("event", "change"):
            self.tell(record.values["what"])
        if record.kind in ("epoch", "evaluation") and self.visible:
            self.log([line_of(record, self.columns.follow(self.history), self.about)])
        if self.bar.disable:
            return
        if record.kind == "step":
            self.bar.update(max(record.samples - self.bar.n, 0))
        if record.values:
            named = {n: v for n, v in record.values.items() if n == "loss" or n.startswith("val_")}
            named.pop("val_loss", None)
            self.bar.set_postfix({name: f"{value:.3f}" for name, value in named.items()}, refresh=False)

    def log(self, lines: Sequence[list[str]]) -> None:
        """Add lines that stay, each of fields: to the cell, or to the terminal."""
        if self.output is not None:
            self.output.write(lines)
        elif not self.bar.disable:
            room = shutil.get_terminal_size((output.WIDTH + 1, 24)).columns - 1
            say("\n".join(fitting(fields, room) for fields in lines))

    def show_samples(self, previews: Sequence[Preview]) -> None:
        """Show the newest samples with their answers: in the live picture, or below the terminal's bar."""
        self.cards = [*previews]
        if self.output is not None:
            self.output.samples.value = samples.html(previews)
        elif not self.bar.disable:
            room = shutil.get_terminal_size((120, 24)).columns - 1
            for line in [line for each in previews[:SHOWN] for line in samples.text(each, room)]:
                say(line)

    def changed(self, plan: Plan) -> None:
        """The run continues with another plan."""
        epochs = self.epochs(plan)
        self.about = dataclasses.replace(self.about, epochs=epochs, warmup=plan.warmup_epochs)
        self.bar.total = self.count * epochs
        if self.panel is not None:
            self.panel.refresh()

    def tell(self, message: str) -> None:
        """Show a message under the buttons and in the log of the live picture where there is one."""
        self.events.append(message)
        if self.output is not None and self.output.lives and self.panel is not None:
            self.output.write([[message]])
            self.panel.form.tell(message)
        elif self.progress:
            say(textwrap.fill(message, 90, break_long_words=False) if self.notebook else message)

    # -- what stays

    def still(self, status: str) -> Callable[[], Still]:
        """Return what draws the picture of now, which takes half a second."""
        made = picture(self.columns.follow(self.history), self.about.best)
        said = [f"{fact.label} {fact.value}".strip() for fact in facts.facts(self.columns, self.about, status)]
        cards, alt = self.cards, "; ".join(filter(None, (self.about.title, made.alt)))
        return lambda: Still(png.draw(made, said, cards), alt)

    def keep_still(self) -> Callable[[], None]:
        """Return what draws the picture of now, if it is due, and writes it to the run folder, in another thread; one
        that fails is left out, since the last one will say why."""
        if time.monotonic() < self.next_still:
            return lambda: None
        self.next_still = math.inf
        try:
            draw = self.still(TRAINING)
        except Exception:
            return lambda: None

        def keep() -> None:
            start = time.thread_time()
            with self.drawing, suppress(Exception):
                if not self.ended:
                    self.fresh = draw()
                    disk.write_atomic(self.folder / PLOT_FILE, self.fresh.image)
            self.next_still = time.monotonic() + max(STILL_EVERY, (time.thread_time() - start) / STILL_COST)

        return keep

    def show_still(self) -> None:
        """Put the last drawn PNG into the output, for readers of the notebook when this kernel is gone."""
        fresh, self.fresh = self.fresh, None
        if fresh is not None and self.output is not None and self.output.lives:
            self.output.still(fresh)

    def finish(self, previews: list[Preview], status: str, path: Path | None = None) -> None:
        """Replace the live view by the final picture, and write it to `path`. status: how the run ended. Raises
        DiskError; if the picture cannot be drawn, a message says so, since the run is complete without it."""
        self.bar.close()
        with self.drawing:
            self.ended = True
        still, page, self.cards = None, "", previews
        lives = self.output is not None and self.output.lives
        try:
            still, page = self.still(status)(), self.page(status) if lives else ""
        except Exception as error:
            self.tell(f"no picture: {type(error).__name__}: {error}")
        if self.output is not None and lives:
            self.output.stay(still, page)
        if path is not None and still is not None:
            with disk.explained("writing the plot", self.folder):
                disk.write_atomic(path, still.image)

    def page(self, status: str) -> str:
        """Return facts, frame and samples as HTML, as in the live view."""
        look = self.output.look if self.output is not None else None
        made = picture(self.columns, self.about.best, *([look] if look else []))
        parts = (facts.html(self.columns, self.about, status), svg.frame(made), samples.html(self.cards))
        return svg.head(facts.STYLE, samples.STYLE, output.STYLE) + "".join(parts)
