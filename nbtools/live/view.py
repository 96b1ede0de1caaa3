"""What is shown of a run: live in a notebook, a bar in a terminal. Widgets do not outlive their kernel, and GitHub
shows no SVG: so what stays is a PNG, and the last frame again, which takes its place where scripts run."""

import dataclasses
import math
import textwrap
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from nbtools import disk
from nbtools.data import Card, bar, in_notebook, say
from nbtools.live import draw, facts, samples
from nbtools.live.panel import Panel, bundle_of, tree
from nbtools.live.plot import SCALES, XS, Columns, picture
from nbtools.show import UNIT, number
from nbtools.train import History, Plan, Record

PLOT_FILE = "plot.png"
FRAME_EVERY = 0.25  # seconds between frames: quicker ones hang a Colab tab (lightning#2517)
FRAME_COST = 0.0025  # share of the time that drawing may take, of the 0.01 that the whole surface may
STILL_EVERY = 180.0  # the same between PNGs of a run in progress, each of which takes half a second to draw
LINES = 5  # of the log in view
SMOOTHING = {"medium": 1.0, "strong": 4.0, "light": 0.4, "none": 0.0}
STILL = f"""<style>{draw.STYLE}</style><div class="nbtools-still">
Saved during training: if it still runs, reload the page; otherwise run this cell again.</div>"""
"""Has the PNG after it shown where the live view is not, see live.css."""
KEPT = escape(Path(__file__).with_name("kept.js").read_text("utf-8"))


class View:
    """A run's history, drawn as it grows: at most 4 times a second, and less often where that would take more than
    FRAME_COST of the time; `due = 0.0` makes the next `draw` draw in any case. events: every message so far.

    card: of the pack. best: the metric that counts, as in `Task.BEST`. given: the panel to show, or the Advice of this
    plan, whose reasons stand next to the fields of one that is made. show: False draws and prints nothing.
    """

    def __init__(self, folder: Path, history: History, plan: Plan, card: Card, best: str, given: Any, show: bool):
        self.folder, self.history, self.progress = folder, history, show
        best, since = best if card.splits["val"] else "", history.rows[-1]["step"] if history.rows else 0
        self.about = facts.About(folder.name, self.epochs(plan), card.splits["train"], best, since)
        self.columns, self.events = Columns(), list[str]()
        self.cards: Sequence[samples.Preview] = ()
        self.due, self.next_still = 0.0, time.monotonic() + STILL_EVERY
        self.notebook = in_notebook()
        drawn = show and self.notebook
        advice = given if getattr(given, "plan", None) == plan else plan
        self.panel = given if isinstance(given, Panel) else Panel(advice) if drawn else None
        self.output = Output(self.panel, self.panel is not given) if drawn and self.panel else None
        done, hidden = history.rows[-1]["samples"] if history.rows else 0, not show or self.notebook
        self.bar = bar(total=self.about.samples, initial=done, unit=" samples", disable=hidden, dynamic_ncols=True)

    def epochs(self, plan: Plan) -> int:
        """Return how many epochs to show: those of the plan, or those that have begun where these are more."""
        begun = (row["epoch"] + 1 for row in reversed(self.history.rows) if row["kind"] in ("step", "epoch"))
        return max(plan.epochs, next(begun, 0))

    def start(self, status: str = facts.TRAINING) -> None:
        """Put the live view into the output of the running cell."""
        self.draw(status)
        if self.output is not None:
            self.output.begin(f"{PLOT_FILE} in {self.folder} shows how the run went")

    def draw(self, status: str = facts.TRAINING) -> None:
        """Draw a new frame when it is due; if one fails, the run continues without charts. status: the run's state."""
        if self.output is None or (time.monotonic() < self.due and not self.output.stale):
            return
        try:
            self.output.stale = False
            self.columns.follow(self.history)  # paid once a row, and not for the frame: a resumed run brings thousands
            start = time.thread_time()  # work of other processes on these cores is not a cost of drawing
            self.output.lines.value = log_html(self.output.log)
            self.output.facts.value = facts.html(self.columns, self.about, status)
            look: list[Any] = [choice.value for choice in self.output.choices]
            self.output.frame.value = draw.page(picture(self.columns, self.about.best, *look), head="")
            self.due = time.monotonic() + max(FRAME_EVERY, (time.thread_time() - start) / FRAME_COST)
        except Exception as error:
            self.due = math.inf
            self.tell(f"the charts are no longer drawn ({type(error).__name__}: {error}); the run continues")

    def advance(self, record: Record) -> None:
        """Show what a record says, and move the terminal's bar."""
        if record.kind in ("event", "change"):
            self.tell(record.values["what"])
        if record.kind in ("epoch", "evaluation"):
            self.log(facts.line_of(record, self.about))
        if record.kind == "step":
            self.bar.update(max(record.samples - self.bar.n, 0))
            if "loss" in record.values:
                self.bar.set_postfix(loss=number(record.values["loss"]), refresh=False)

    def log(self, fields: list[str]) -> None:
        """Add a line that stays: to the cell, or to the terminal."""
        if self.output is not None:
            self.output.log.append(fields)  # shown with the next frame: quick epochs would send all of it each time
        elif not self.bar.disable:
            say("  ".join(fields))

    def show_samples(self, previews: Sequence[samples.Preview]) -> None:
        self.cards = previews
        if self.output is not None:
            self.output.samples.value = samples.html(previews)

    def changed(self, plan: Plan) -> None:
        self.about = dataclasses.replace(self.about, epochs=self.epochs(plan))
        self.bar.total = self.about.samples

    def tell(self, message: str) -> None:
        """Show a message under the buttons and in the log of the live picture where there is one."""
        self.events.append(message)
        if self.output is not None and self.output.lives:
            self.output.log.append([message])
            self.output.lines.value = log_html(self.output.log)
            self.output.form.told = message
            self.output.form.show_run()
        elif self.progress:
            if self.output is not None:  # of a page that was closed, which has the view still
                self.output.lines.value += log_html([[message]])
            say(textwrap.fill(UNIT.sub("\xa0", message), 90, break_long_words=False) if self.notebook else message)

    def keep_still(self) -> None:
        """Draw the picture that stays when this kernel is gone, if it is due."""
        if time.monotonic() >= self.next_still:
            self.next_still = time.monotonic() + STILL_EVERY
            self.still(facts.TRAINING)

    def finish(self, previews: list[samples.Preview], status: str, write: bool = False) -> None:
        """Replace the live view by the final picture. status: how the run ended; write: also into the run folder."""
        self.bar.close()
        self.due = 0.0
        self.draw(status)
        self.show_samples(previews)
        self.still(status, last=True, write=write)

    def still(self, status: str, last: bool = False, write: bool = True) -> None:
        """Put a PNG below the live view or in its place, and into the run folder. If that fails, say so."""
        try:
            made = picture(self.columns.follow(self.history), self.about.best)
            lines = [f"{fact.label} {fact.value}".strip() for fact in facts.facts(self.columns, self.about, status)]
            image, words = draw.png(made, lines, self.cards), [self.about.title, *map(draw.describe, made.charts)]
            if self.output is not None and self.output.lives:
                data, metadata = draw.as_data(image, "; ".join(words))
                self.output.stay(data, metadata) if last else show(data, self.output.stills[1], metadata, update=True)
            if write:
                disk.write_atomic(self.folder / PLOT_FILE, image)
        except Exception as error:
            self.next_still = math.inf
            self.tell(f"no picture: {type(error).__name__}: {error}")


class Output:
    """A cell's output: controls, facts, charts, samples and log below one another: what grows is below what is clicked.
    stale: whether the curves should look different by now. log: lines as fields. lives: whether the view is displayed.
    Its widgets outlive the run: nothing of that may be held here."""

    def __init__(self, panel: Panel, own: bool) -> None:
        from ipywidgets import HTML, Dropdown, HBox, Layout, VBox

        self.form, self.name, self.log = panel.form, uuid4().hex, list[list[str]]()
        self.lives = self.stale = False
        self.stills = f"{self.name}-style", f"{self.name}-still"  # ids of what replaces the view without its kernel
        made = [HTML(layout=Layout(width="100%", margin="0")) for _ in range(4)]  # apart: frames send no images again
        self.facts, self.frame, self.samples, self.lines = made
        style, layout = {"description_width": "initial"}, Layout(width="auto", margin="0 16px 0 0")
        names: dict[str, Any] = {"x axis": XS, "y axis": SCALES, "smoothing": (*SMOOTHING.items(),)}
        self.choices = [Dropdown(options=names[n], description=n, style=style, layout=layout) for n in names]
        for choice in self.choices:
            choice.observe(lambda _: setattr(self, "stale", True), names="value")
        parts = [self.facts, self.frame, HBox(self.choices), self.samples]
        self.view = VBox([self.form.controls, *parts, self.lines], layout=Layout(width="100%"))
        self.view.add_class("nbtools-live")
        self.passing = [*parts, *[self.form.controls, self.form.whole] * own]  # at the end; own: in no other cell

    def begin(self, text: str) -> None:
        """Display the view, and in outputs of their own, as updating its own draws it anew, what shows without it."""
        self.lives = True
        show(bundle_of(self.view, text), self.name)
        show({"text/html": STILL, "text/plain": ""}, self.stills[0])
        show({"text/plain": ""}, self.stills[1])

    def stay(self, image: Any, metadata: Any) -> None:
        """Put a PNG in the place of the view, with the last frame, which replaces it where scripts run, and the log
        under it. The view itself lives on with that frame, for a page closed before the end and opened again."""
        self.lives = False
        for name in self.stills:
            show({"text/plain": ""}, name, update=True)
        page = draw.HEAD + self.facts.value + self.frame.value + self.samples.value
        keep(page, image, metadata, self.name)
        if self.log:
            text = "\n".join(map("  ".join, self.log))
            show({"text/html": f"<style>{draw.STYLE}</style>{self.lines.value}", "text/plain": text})
        self.lines.value = page + self.lines.value
        self.view.children = [self.lines]
        for each in [each for widget in self.passing for each in tree(widget)]:
            each.close()


def show(data: Any, name: str | None = None, metadata: Any = None, update: bool = False) -> None:
    """Display data by type; with a name, in a place that can be updated."""
    from IPython.display import display

    display(data, metadata=metadata, raw=True, display_id=name, update=update)


def keep(page: str, image: Any, metadata: Any, name: str | None = None) -> None:
    """Display a page, or a PNG where scripts do not run, as on GitHub. name: of what these replace."""
    show(image, name, metadata, update=bool(name))
    size = " ".join(f'data-{side}="{2 * metadata["image/png"][side]}"' for side in ("width", "height"))
    show({"text/html": f'<style onload="{KEPT}" {size} data-page="{escape(page)}"></style>', "text/plain": ""})


def log_html(lines: Sequence[list[str]]) -> str:
    """Return the last lines of the log, and all of them folded; live.css hides the fields that do not fit a line."""
    rows = []
    for fields in lines:
        texts = " ".join(f"<span>{escape(field)}</span>" for field in fields)
        rows.append(f'<div class="nbt-line">{texts}</div>' if len(fields) > 1 else f"<div>{texts}</div>")
    every = f"<details><summary>The whole log</summary>{''.join(rows)}</details>" if len(rows) > LINES else ""
    return f'<div class="nbt nbt-log">{every}{"".join(rows[-LINES:])}</div>' if rows else ""
