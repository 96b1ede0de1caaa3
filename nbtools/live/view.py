"""What is shown of a run: buttons, live picture and form in a notebook, a bar in a terminal, messages in both.

Widgets do not outlive their kernel, and GitHub shows no SVG: so what stays is a PNG, which every reader of notebooks
shows, and the last frame again, which takes its place where scripts run.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import bar, in_notebook, say
from nbtools.live import draw, facts, samples
from nbtools.live.facts import TRAINING, About, fitting, line_of
from nbtools.live.panel import VIEW, Panel, viewed
from nbtools.live.plot import SCALES, XS, Columns, picture
from nbtools.live.samples import Preview
from nbtools.train import History, Plan, Record

PLOT_FILE = "plot.png"
FRAME_EVERY, FRAME_COST = 0.25, 0.006
"""Seconds between frames: quicker ones hang a Colab tab (lightning#2517); share of the time that drawing may take, of
the 0.01 that the whole surface may."""
STILL_EVERY, STILL_COST = 60.0, 0.003  # the same of PNGs of a run in progress
LINES, WIDTH = 5, 104  # lines of the log in view; letters of one in plain text
SMOOTHING = {"medium": 1.0, "strong": 4.0, "light": 0.4, "none": 0.0}
STILL = f"""<style>{draw.STYLE}</style>
<div class="nbtools-still">Saved while it trained; run this cell again to continue.</div>"""
"""Has the PNG after it shown where the live view is not, see live.css."""
KEPT = escape(Path(__file__).with_name("kept.js").read_text("utf-8"))


class View:
    """A run's history, drawn as it grows: at most 4 times a second, and more rarely where that would take above
    FRAME_COST of the time; `due = 0.0` has the next `draw` draw in any case. events: every message so far.

    count: samples per epoch. best: the metric that counts, as in `Task.BEST`. given: the panel to show, or the Advice
    or Plan that one is made of where it can be shown. show: False draws and prints nothing.
    """

    def __init__(self, folder: Path, history: History, plan: Plan, count: int, best: str, given: Any, show: bool):
        self.folder, self.history, self.count, self.progress = folder, history, count, show
        self.about = About(folder.name, self.epochs(plan), count, best)
        self.columns, self.cards, self.events = Columns(), list[Preview](), list[str]()
        self.due, self.next_still = 0.0, time.monotonic() + STILL_EVERY
        self.notebook = in_notebook()
        drawn = show and self.notebook
        self.panel: Panel | None = given if isinstance(given, Panel) else Panel(given) if drawn else None
        self.output = Output(partial(setattr, self, "due", 0.0)) if drawn else None
        done, hidden = history.rows[-1]["samples"] if history.rows else 0, not show or self.notebook
        options: Any = {"unit": " samples", "disable": hidden, "mininterval": 0.5, "dynamic_ncols": True}
        self.bar = bar(total=self.about.samples, initial=done, **options)

    def epochs(self, plan: Plan) -> int:
        """Return how many epochs to show: those of the plan, or those that have begun where these are more."""
        begun = (row["epoch"] + 1 for row in reversed(self.history.rows) if row["kind"] in ("step", "epoch"))
        return max(plan.epochs, next(begun, 0))

    # -- while it lasts

    def start(self, status: str = TRAINING) -> None:
        """Put the live view into the output of the running cell."""
        self.draw(status)
        if self.output is not None and self.panel is not None:
            self.output.live(self.panel.form.controls, f"{self.folder}: {PLOT_FILE} in it shows how the run went")

    def draw(self, status: str = TRAINING) -> None:
        """Draw a new frame when it is due; else it costs only a clock read. If one fails, a message says so, and the
        run continues without. status: the run's state."""
        if self.output is None or time.monotonic() < self.due:
            return
        try:
            self.columns.follow(self.history)  # paid once a row, and not for the frame: a resumed run brings thousands
            start = time.thread_time()  # work of other processes on these cores is not a cost of drawing
            self.output.facts.value = facts.html(self.columns, self.about, status)
            self.output.frame.value = draw.frame(picture(self.columns, self.about.best, *self.output.look))
            self.due = time.monotonic() + max(FRAME_EVERY, (time.thread_time() - start) / FRAME_COST)
        except Exception as error:
            self.due = math.inf
            self.tell(f"the picture is no longer drawn ({type(error).__name__}: {error}); the run continues")

    def advance(self, record: Record) -> None:
        """Show what a record says, and move the terminal's bar."""
        if record.kind in ("event", "change"):
            self.tell(record.values["what"])
        if record.kind in ("epoch", "evaluation"):
            self.log([line_of(record, self.columns.follow(self.history), self.about)])
        if record.kind == "step":
            self.bar.update(max(record.samples - self.bar.n, 0))
        if record.values and not self.bar.disable:
            named = {n: v for n, v in record.values.items() if n == "loss" or n.startswith("val_")}
            self.bar.set_postfix({n: f"{v:.3f}" for n, v in named.items() if n != "val_loss"}, refresh=False)

    def log(self, lines: Sequence[list[str]]) -> None:
        """Add lines that stay, each of fields: to the cell, or to the terminal."""
        if self.output is not None:
            self.output.write(lines)
        elif not self.bar.disable:
            room = shutil.get_terminal_size().columns - 1 if sys.stderr.isatty() else sys.maxsize
            say("\n".join(fitting(fields, room) for fields in lines))

    def show_samples(self, previews: Sequence[Preview]) -> None:
        """Show the newest samples with their answers."""
        self.cards = [*previews]
        if self.output is not None:
            self.output.samples.value = samples.html(previews)

    def changed(self, plan: Plan) -> None:
        """The run continues with another plan."""
        self.about = dataclasses.replace(self.about, epochs=self.epochs(plan))
        self.bar.total = self.about.samples
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

    def still(self, status: str) -> tuple[bytes, str]:
        """Return the picture of now, a PNG and what it shows in words, which takes half a second to draw."""
        made = picture(self.columns.follow(self.history), self.about.best)
        said = [f"{fact.label} {fact.value}".strip() for fact in facts.facts(self.columns, self.about, status)]
        alt = "; ".join(filter(None, (self.about.title, made.alt)))
        return draw.png(made, said, self.cards), alt

    def keep_still(self) -> None:
        """Write the picture of now to the run folder and put it below the live view, when that is due, for readers when
        this kernel is gone. One that fails is left out, since the last one will say why."""
        if time.monotonic() < self.next_still:
            return
        start = time.thread_time()
        with suppress(Exception):
            image, alt = self.still(TRAINING)
            disk.write_atomic(self.folder / PLOT_FILE, image)
            if self.output is not None and self.output.lives:
                self.output.still(image, alt)
        self.next_still = time.monotonic() + max(STILL_EVERY, (time.thread_time() - start) / STILL_COST)

    def finish(self, previews: list[Preview], status: str, path: Path | None = None) -> None:
        """Replace the live view by the final picture, and write it to `path`. status: how the run ended. Raises
        DiskError; if the picture cannot be drawn, a message says so, since the run is complete without it."""
        self.bar.close()
        self.cards = previews
        try:
            image, alt = self.still(status)
            if self.output is not None and self.output.lives:
                charts = draw.frame(picture(self.columns, self.about.best, *self.output.look))
                top = facts.html(self.columns, self.about, status)
                self.output.stay(image, alt, f"{draw.HEAD}{top}{charts}{samples.html(self.cards)}")
        except Exception as error:
            self.tell(f"no picture: {type(error).__name__}: {error}")
            return
        if path is not None:
            with disk.explained("writing the plot", self.folder):
                disk.write_atomic(path, image)


class Output:
    """A cell's output: controls, facts, charts, samples and log below one another: what grows is below what is clicked.

    changed: called when the curves are to look otherwise. log: lines as fields, of which a page shows as many as it has
    room for.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        from ipywidgets import HTML, Accordion, HBox, Layout

        self.name, self.lives, self.log = uuid4().hex, False, list[list[str]]()
        self.stills: list[str] = []  # display ids of what replaces the view when the kernel is gone
        made = [HTML(layout=Layout(width="100%", margin="0")) for _ in range(5)]  # apart: frames send no images again
        self.facts, self.frame, self.samples, self.recent, self.every = made
        self.whole = Accordion([self.every], selected_index=None)
        self.whole.set_title(0, "The whole log")
        names = {"x axis": XS, "y axis": SCALES, "smoothing": (*SMOOTHING,)}
        self.choices = HBox([choice(name, options) for name, options in names.items()])
        for control in self.choices.children:
            control.observe(lambda _: changed(), names="value")

    @property
    def look(self) -> tuple[str, str, float]:
        """Return how curves are drawn, see `picture`."""
        x, scale, smoothing = (str(control.value) for control in self.choices.children)
        return x, scale, SMOOTHING[smoothing]

    def live(self, controls: Any, text: str) -> None:
        """Display the view. text: for readers without widgets."""
        from IPython.display import display
        from ipywidgets import Layout, VBox

        curves = [self.facts, self.frame, self.choices, self.samples, self.recent, self.whole]
        self.view, self.lives = VBox([controls, *curves], layout=Layout(width="100%")), True
        self.view.add_class("nbtools-live")
        display({VIEW: viewed(self.view), "text/plain": text}, raw=True, display_id=self.name)

    def write(self, lines: Sequence[list[str]]) -> None:
        """Add lines to the log: the newest are in view, all of them folded."""
        self.log.extend(lines)
        self.recent.value, self.every.value = log_html(self.log[-LINES:]), log_html(self.log)

    def still(self, image: bytes, alt: str) -> None:
        """Put a PNG below the view, visible only where the view is not. In a separate output: updating the view's would
        make Jupyter draw all its widgets again."""
        from IPython.display import HTML, display

        known, self.stills = bool(self.stills), [f"{self.name}-style", f"{self.name}-still"]
        (data, metadata), (style, place) = draw.shown_as(image, alt), self.stills
        display(HTML(STILL), display_id=style, update=known)
        display(data, metadata=metadata, raw=True, display_id=place, update=known)

    def stay(self, image: bytes, alt: str, page: str) -> None:
        """Put the picture in the place of the view, and the log under it; page: the frame that replaces it where
        scripts run. The view itself lives on with the last frame, for a page that was closed before the end and is
        opened again."""
        from IPython.display import HTML, display
        from ipywidgets import HTML as Markup

        self.lives, log = False, log_html(self.log[-LINES:])
        if len(self.log) > LINES:
            log = f'<details class="nbt"><summary>The whole log</summary>{log_html(self.log)}</details>{log}'
        data, metadata = draw.shown_as(image, alt)
        display(data, metadata=metadata, raw=True, display_id=self.name, update=True)
        for name in self.stills:
            display(HTML(""), display_id=name, update=True)
        size = " ".join(f'data-{side}="{2 * metadata["image/png"][side]}"' for side in ("width", "height"))
        display(HTML(f'<style onload="{KEPT}" {size} data-page="{escape(page)}"></style>'))
        self.view.children = [Markup(page + log)]
        if self.log:
            text = "\n".join(fitting(fields, WIDTH) for fields in self.log)
            display({"text/html": f"<style>{draw.STYLE}</style>{log}", "text/plain": text}, raw=True)


def choice(name: str, options: Sequence[str]) -> Any:
    """Return a list to choose from, next to its name."""
    from ipywidgets import Dropdown, Layout

    style, layout = {"description_width": "initial"}, Layout(width="auto", margin="0 16px 0 0")
    return Dropdown(options=options, description=name, style=style, layout=layout)


def log_html(lines: Sequence[list[str]]) -> str:
    """Return lines of the log; of one with fields those that do not fit their cell are left out, from the right."""
    rows = []
    for fields in lines:
        texts = "".join(f"<span>{escape(field)}</span>" for field in fields)
        rows.append(f'<div class="nbt-line">{texts}</div>' if len(fields) > 1 else f"<div>{texts}</div>")
    return f'<div class="nbt nbt-log">{"".join(rows)}</div>' if rows else ""
