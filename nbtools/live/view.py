"""What is shown of a run: buttons, live picture and form in a notebook, a bar in a terminal, messages in both.

SVG in a core HTML widget takes about 1 ms a frame where a matplotlib figure takes 50 or more, but neither widgets nor
SVG survive everywhere; so what stays is a PNG, which GitHub and every reader of notebooks shows, and the last frame
again, which takes its place where scripts run.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import bar, in_notebook, say
from nbtools.live import facts, png, samples, svg
from nbtools.live.chart import Picture
from nbtools.live.columns import Columns
from nbtools.live.controls import Looks, changes
from nbtools.live.facts import TRAINING, About
from nbtools.live.log import INDENT, line_of
from nbtools.live.panel import Panel
from nbtools.live.picture import picture
from nbtools.live.png import Still
from nbtools.live.samples import Preview
from nbtools.show import plural
from nbtools.train import History, Plan, Record

PLOT_FILE = "plot.png"
FRAME_EVERY, FRAME_COST = 0.25, 0.006
"""Seconds between frames: quicker ones hang a Colab tab (lightning#2517); share of the time that drawing may take, of
the 0.01 that the whole surface may."""
STILL_EVERY, STILL_COST = 60.0, 0.004  # the same of PNGs of a run in progress
WIDGET = "application/vnd.jupyter.widget-view+json"
LIVE = "nbtools-live"
STILL = f"""<style>
:is(.jp-OutputArea, .output):has(.{LIVE}) :is(.jp-OutputArea-child, .output_area):has(.nbtools-still)
  + :is(.jp-OutputArea-child, .output_area) {{ display: none }}
:is(.jp-OutputArea, .output):has(.nbtools-still)
  :is(.jp-OutputArea-output.jupyter-widgets, .jupyter-widgets-view):not(:has(*)) {{ display: none }}
:is(.jp-OutputArea, .output):has(.{LIVE}) :is(.jp-OutputArea-child, .output_area):has(.nbtools-still) {{
  display: none }}
</style>"""
"""Makes JupyterLab 4 and the classic notebook show the log and the PNG after it only where the live view is not, and
nothing where they would report that a widget's model was not found."""
SAVED = '<div style="font-size:12px">Saved while it trained; run this cell again to continue.</div>'
KEPT = escape(Path(__file__).with_name("kept.js").read_text("utf-8"))
RECENT = 3  # messages shown with the live picture
EPOCHS, LIVE_EPOCHS = 100, 5  # lines of the newest epochs that a notebook keeps, and that the live view shows
MESSAGE = "font-size:12px;line-height:1.5;opacity:.75"
WIDTH = 90  # letters of a printed line: what a cell of JupyterLab has room for in a window of 900 px
LOG = "font-size:12px;line-height:1.4;margin:4px 0;white-space:pre-wrap;word-break:normal;background:none;color:inherit"


class View:
    """A run's history, drawn as it grows: what is new at most 4 times a second, and more rarely where that would take
    above FRAME_COST of the time; `due = 0.0` has the next `draw` draw in any case. events: every message so far.

    count: samples per epoch. best: the metric that counts, as in `Task.BEST`. given: the panel to show, or the Advice
    or Plan that one is made of where it can be shown. show: False draws and prints nothing.
    """

    def __init__(self, folder: Path, history: History, plan: Plan, count: int, best: str, given: Any, show: bool):
        self.folder, self.history, self.count, self.progress = folder, history, count, show
        self.about = About(folder.name, self.epochs(plan), count, best, plan.warmup_epochs)
        self.columns = Columns()
        self.cards: Sequence[Preview] = ()
        self.drawn: Any = None
        self.due = 0.0
        self.notebook = in_notebook()
        drawn = show and self.notebook
        self.panel: Panel | None = given if isinstance(given, Panel) else Panel(given) if drawn else None
        self.output = Output(self.redraw) if drawn else None
        self.events: list[str] = []
        self.next_still = time.monotonic() + STILL_EVERY
        self.fresh: Still | Exception | None = None  # a PNG, or why there is none, until it is shown
        self.drawing, self.ended = threading.Lock(), False  # the last picture replaces one that is still being drawn
        self.bar = bar(
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
            look = self.output.looks.look
            news = (id(self.columns.seen), self.about, status, look)
            if not self.due or news != self.drawn:
                made = picture(self.columns, self.about, status, look)
                self.output.facts.value, self.output.frame.value = facts.html(made), svg.frame(made)
                self.output.log.value = self.output.logged(LIVE_EPOCHS)
                self.output.changes.value = changes(self.columns)
                self.drawn = news
            self.due = time.monotonic() + max(FRAME_EVERY, (time.thread_time() - start) / FRAME_COST)
        except Exception as error:
            self.due = math.inf
            self.tell(f"the picture is no longer drawn ({type(error).__name__}: {error}); the run continues")

    def redraw(self) -> None:
        """Have the next `draw` draw."""
        self.due = 0.0

    def picture(self, status: str) -> Picture:
        return picture(self.columns.follow(self.history), self.about, status)

    def page(self, made: Picture, note: str) -> str:
        """The frame, a note under its facts, samples and changes of settings as HTML, as in the live view."""
        parts = (svg.frame(made), samples.html(self.cards), changes(self.columns))
        line = f'<div class="nbt">{escape(note)}</div>' if note else ""
        return "".join((svg.head(facts.STYLE, samples.STYLE), facts.html(made), line, *parts))

    def keep_still(self) -> Callable[[], None]:
        """What draws the picture of now as PNG, if it is due, and writes it to the run folder, in another thread: that
        takes half a second. `show_still` then says how it went."""
        if time.monotonic() < self.next_still:
            return lambda: None
        self.next_still, cards = math.inf, self.cards
        try:
            made = self.picture(TRAINING)
        except Exception as error:
            self.fresh = error
            return lambda: None

        def keep() -> None:
            start = time.thread_time()
            with self.drawing:
                if self.ended:
                    return
                try:
                    self.fresh = Still(png.draw(made, cards), made.alt)
                    disk.write_atomic(self.folder / PLOT_FILE, self.fresh.image)
                except Exception as error:
                    self.fresh = error
                    return
            self.next_still = time.monotonic() + max(STILL_EVERY, (time.thread_time() - start) / STILL_COST)

        return keep

    def show_still(self) -> None:
        """Put the last drawn PNG into the output, for readers of the notebook when this kernel is gone. If drawing
        failed, a message says so, and the run continues without."""
        fresh, self.fresh = self.fresh, None
        if isinstance(fresh, Exception):
            self.tell(f"no picture until the end: {type(fresh).__name__}: {fresh}")
        elif fresh is not None and self.output is not None and self.output.lives:
            self.output.still(fresh)

    def advance(self, record: Record) -> None:
        """Print what a record says, and move the terminal's bar. Changes of settings are marked in the picture and not
        repeated under it."""
        if record.kind in ("event", "change"):
            what = record.values["what"]
            self.tell(what, passing=record.kind == "change")
        if record.kind in ("epoch", "evaluation") and self.visible:
            self.log([line_of(record, self.columns.follow(self.history), self.about)])
        if self.bar.disable:
            return
        if record.kind == "step":
            self.bar.update(max(record.samples - self.bar.n, 0))
        if record.values:
            shown = {
                n: v for n, v in record.values.items() if n == "loss" or (n.startswith("val_") and n != "val_loss")
            }
            self.bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()}, refresh=False)

    def log(self, lines: Sequence[str], opening: bool = False) -> None:
        """Add lines that stay: to the terminal, or to the cell, where those of an opening come first."""
        if self.output is not None:
            (self.output.opening if opening else self.output.epochs).extend(lines)
        elif not self.bar.disable:
            say("\n".join(lines))

    @property
    def visible(self) -> bool:
        """Whether samples can be displayed."""
        return self.output is not None or not self.bar.disable

    def show_samples(self, previews: Sequence[Preview]) -> None:
        """The newest samples with their answers: in the live picture, or below the terminal's bar."""
        self.cards = previews
        if self.output is not None:
            self.output.samples.value = samples.html(previews)
        room = shutil.get_terminal_size((120, 24)).columns - 1
        if not self.bar.disable and (lines := samples.text(previews, room)):
            say("\n".join(lines))

    def changed(self, plan: Plan) -> None:
        """The run continues with another plan."""
        epochs = self.epochs(plan)
        self.about = dataclasses.replace(self.about, epochs=epochs, warmup=plan.warmup_epochs)
        self.bar.total = self.count * epochs
        if self.panel is not None:
            self.panel.refresh()

    def tell(self, message: str, passing: bool = False) -> None:
        """Show a message under the buttons and below the live picture where there is one, unless it stands there as a
        proposal, and once more under the final one unless passing."""
        self.events.append(message)
        if self.output is not None and self.output.lives and self.panel is not None:
            self.output.say(message, passing, shown=message != self.panel.form.proposal)
            self.panel.form.tell(message)
        elif self.progress:
            say(wrapped(message) if self.notebook else message)

    def finish(self, previews: list[Preview], status: str, path: Path | None = None, note: str = "") -> None:
        """Replace the live view by the final picture, and write it to `path`. status: how the run ended; note: what to
        do next. Raises DiskError; if the picture cannot be drawn, a message says so, since the run is complete without
        it."""
        self.bar.close()
        with self.drawing:
            self.ended = True
        still, page, self.cards = None, "", previews
        lives = self.output is not None and self.output.lives
        try:
            made = self.picture(status)
            still, page = Still(png.draw(made, self.cards), made.alt), self.page(made, note) if lives else ""
        except Exception as error:
            self.tell(f"no picture: {type(error).__name__}: {error}")
        if self.output is not None and self.output.lives:
            self.output.stay(still, page)
        if path is not None and still is not None:
            with disk.explained("writing the plot", self.folder):
                disk.write_atomic(path, still.image)


class Output:
    """The place in a cell's output of the live view, and at the end of the picture: widgets do not outlive their
    kernel, a PNG does.

    While the view lives it shows the messages: a line printed under a tall output has the classic notebook fold it all
    into a small box that scrolls. They are printed once the picture is there.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        from ipywidgets import HTML, HBox, Layout

        self.name, self.looks = uuid4().hex, Looks(changed)  # changed: called when the curves are to look otherwise
        self.lives = False
        self.opening: list[str] = []
        self.epochs: list[str] = []
        self.lines: list[str] = []  # messages
        self.recent: list[str] = []
        self.stills: list[str] = []  # display ids of what replaces the view when the kernel is gone
        made = [HTML(layout=Layout(width="100%", margin="0")) for _ in range(6)]  # apart: frames send no images again
        self.facts, self.frame, self.samples, self.changes, self.messages, self.log = made
        self.choice = HBox()  # which samples, where that can be chosen

    def live(self, controls: Any, text: str) -> None:
        """Display controls, picture, samples, messages and log below one another: what grows is below what is clicked.
        text: for readers without widgets."""
        from IPython.display import display
        from ipywidgets import HTML, Layout, VBox

        self.style = HTML(svg.head(facts.STYLE, samples.STYLE))
        curves, growing = [self.facts, self.frame, self.looks.box], [self.changes, self.messages, self.log]
        parts = [controls, self.style, *curves, self.choice, self.samples, *growing]
        self.view = VBox(parts, layout=Layout(width="100%"))
        self.view.add_class(LIVE)
        self.lives = True
        shown = {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self.view.model_id}, "text/plain": text}
        display(shown, raw=True, display_id=self.name)

    def say(self, message: str, passing: bool, shown: bool = True) -> None:
        self.recent = [*self.recent, *[message] * shown][-RECENT:]
        self.messages.value = "".join(f'<div style="{MESSAGE}">{escape(line)}</div>' for line in self.recent)
        if not passing:
            self.lines.append(message)

    def text(self, most: int) -> str:
        """The log: the opening, and at most so many lines of epochs, the newest."""
        left = len(self.epochs) - most
        gap = [f"… {plural(left, 'line')} before these; run.summary() has every epoch"] if left > 0 else []
        return "\n".join([*(wrapped(line, INDENT) for line in self.opening), *gap, *self.epochs[-most:]])

    def logged(self, most: int) -> str:
        return f'<pre style="{LOG}">{escape(self.text(most))}</pre>'

    def still(self, image: Still) -> None:
        """The log and a PNG below the view, visible only where the view is not. In separate outputs: updating the
        view's would make Jupyter draw all its widgets again."""
        from IPython.display import HTML, display

        line = f'<div class="nbtools-still">{self.logged(EPOCHS)}{SAVED}</div>'
        known = bool(self.stills)
        self.stills = [f"{self.name}-style", f"{self.name}-still"]
        for part, name in zip((HTML(STILL + line), image), self.stills, strict=True):
            display(part, display_id=name, update=known)

    def stay(self, image: Still | None, page: str) -> None:
        """Put the picture in the place of the view, and log and messages under it; page: the frame that replaces it
        where scripts run. None: the last frame stays while the kernel lives. The view itself lives on with the last
        frame, for a page that was closed before the end and is opened again."""
        from IPython.display import HTML, display
        from ipywidgets import HTML as Markup

        if image is not None:
            display(image, display_id=self.name, update=True)
            for name in self.stills:
                display(HTML(""), display_id=name, update=True)
            width, height = image.pixels
            size = f'data-width="{width}" data-height="{height}"'
            display(HTML(f'<style onload="{KEPT}" {size} data-page="{escape(page)}"></style>'))
        self.lives = False
        texts = [*filter(None, [self.text(EPOCHS), *map(wrapped, self.lines)])]
        for text in texts:
            print(text)
        if image is not None:
            boxes = [widget for box in (self.looks.box, *self.choice.children) for widget in (*box.children, box)]
            _, *parts = self.view.children  # the first are the panel's
            self.view.children = [Markup(f'{page}<pre style="{LOG}">{escape(chr(10).join(texts))}</pre>')]
            for widget in (*boxes, *parts):
                close(widget)


def wrapped(message: str, indent: int = 2) -> str:
    """Lines that break at words: front ends break a printed one anywhere. indent: of all but the first."""
    further = " " * indent
    return textwrap.fill(message, WIDTH, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def close(widget: Any) -> None:
    """Close a widget with its layout and style: ipywidgets keeps each open one, and its comm, as long as the kernel.
    Not for a form: what follows its 900 closings waits for seconds in a classic notebook."""
    widget.close()
    for part in (getattr(widget, "style", None), widget.layout):
        if part is not None:
            part.close()
