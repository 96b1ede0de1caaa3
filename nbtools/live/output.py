"""The place in a cell's output of the live view, and at the end of the picture.

Widgets do not outlive their kernel, and GitHub shows no SVG: so what stays is a PNG, which every reader of notebooks
shows, and the last frame again, which takes its place where scripts run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from nbtools.live import facts, samples, svg
from nbtools.live.columns import XS
from nbtools.live.facts import fitting
from nbtools.live.plot import SCALES, Look
from nbtools.live.png import Still
from nbtools.live.samples import FIRST, WORST
from nbtools.show import plural

WIDGET = "application/vnd.jupyter.widget-view+json"
LIVE = "nbtools-live"
STILL = f"""<style>
:is(.jp-OutputArea, .output):has(.{LIVE}) :is(.jp-OutputArea-child, .output_area):has(.nbtools-still)
  + :is(.jp-OutputArea-child, .output_area) {{ display: none }}
:is(.jp-OutputArea, .output):has(.nbtools-still)
  :is(.jp-OutputArea-output.jupyter-widgets, .jupyter-widgets-view):not(:has(*)) {{ display: none }}
:is(.jp-OutputArea, .output):has(.{LIVE}) :is(.jp-OutputArea-child, .output_area):has(.nbtools-still) {{
  display: none }}
</style>
<div class="nbtools-still" style="font-size:12px">Saved while it trained; run this cell again to continue.</div>"""
"""Makes JupyterLab 4 and the classic notebook show the PNG after it only where the live view is not, and nothing where
they would report that a widget's model was not found."""
KEPT = escape(Path(__file__).with_name("kept.js").read_text("utf-8"))
LINES, WIDTH = 5, 104  # lines of the log in view; letters of one in plain text
SMOOTHING = {"none": 0.0, "light": 0.4, "medium": 1.0, "strong": 4.0}
STYLE = """
.nbt-log div{font:12px/17px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
 white-space:pre-wrap}
.nbt-log .nbt-line{display:flex;flex-wrap:wrap;gap:0 16px;height:17px;overflow:hidden}
.nbt summary{display:list-item;font-size:12px;opacity:.75}
"""


class Output:
    """Controls, facts, charts, samples and log below one another: what grows is below what is clicked.

    changed: called when the curves are to look otherwise. log: lines as fields, of which a page shows as many as it has
    room for.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        from ipywidgets import HTML, Accordion, Dropdown, HBox, Layout

        from nbtools.live.form import entitle  # which imports ipywidgets

        self.name, self.lives, self.log = uuid4().hex, False, list[list[str]]()
        self.stills: list[str] = []  # display ids of what replaces the view when the kernel is gone
        made = [HTML(layout=Layout(width="100%", margin="0")) for _ in range(5)]  # apart: frames send no images again
        self.facts, self.frame, self.samples, self.recent, self.earlier = made
        self.older = Accordion([self.earlier], selected_index=None, layout=Layout(display="none"))
        narrow = {"style": {"description_width": "initial"}, "layout": Layout(width="auto", margin="0 16px 0 0")}
        self.x = Dropdown(options=XS, description="x axis", **narrow)
        self.scale = Dropdown(options=SCALES, description="y axis", **narrow)
        self.smoothing = Dropdown(options=[*SMOOTHING], value="medium", description="smoothing", **narrow)
        self.looks = HBox([self.x, self.scale, self.smoothing], layout=Layout(flex_flow="row wrap"))
        self.choice = HBox()  # which samples, where that can be chosen
        entitle(self.scale, "Of the loss. auto: logarithmic once the loss has fallen to a thirtieth or less")
        entitle(self.smoothing, "Of the train loss; medium averages over 5 % of the curve")
        for control in self.looks.children:
            control.observe(lambda _: changed(), names="value")

    @property
    def look(self) -> Look:
        return Look(str(self.x.value), str(self.scale.value), SMOOTHING[str(self.smoothing.value)])

    def offer(self, which: str | Sequence[int], chosen: Callable[[str], object]) -> None:
        """Offer the first and the worst samples, and those that the user named. chosen: called after a change."""
        from ipywidgets import Dropdown, Layout

        named = [("chosen", "")] if not isinstance(which, str) else []
        options = [("the first", FIRST), ("the worst", WORST), *named]
        value, style = which if isinstance(which, str) else "", {"description_width": "initial"}
        kind = Dropdown(options=options, value=value, description="samples", style=style, layout=Layout(width="auto"))
        kind.observe(lambda change: change.new and chosen(change.new), names="value")
        self.choice.children = [kind]

    def live(self, controls: Any, text: str) -> None:
        """Display the view. text: for readers without widgets."""
        from IPython.display import display
        from ipywidgets import HTML, Layout, VBox

        style = HTML(svg.head(facts.STYLE, samples.STYLE, STYLE), layout=Layout(display="none"))
        curves = [self.facts, self.frame, self.looks, self.choice, self.samples, self.recent, self.older]
        self.view = VBox([controls, style, *curves], layout=Layout(width="100%"))
        self.view.add_class(LIVE)
        self.lives = True
        shown = {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self.view.model_id}, "text/plain": text}
        display(shown, raw=True, display_id=self.name)

    def write(self, lines: Sequence[list[str]]) -> None:
        """Add lines to the log: the newest are in view, those before them folded."""
        self.log.extend(lines)
        self.recent.value = log_html(self.log[-LINES:])
        if older := self.log[:-LINES]:
            self.earlier.value = log_html(older)
            self.older.set_title(0, f"The log: {plural(len(older), 'line')} before these")
            self.older.layout.display = "flex"

    def still(self, image: Still) -> None:
        """Put a PNG below the view, visible only where the view is not. In a separate output: updating the view's would
        make Jupyter draw all its widgets again."""
        from IPython.display import HTML, display

        known, self.stills = bool(self.stills), [f"{self.name}-style", f"{self.name}-still"]
        for part, name in zip((HTML(STILL), image), self.stills, strict=True):
            display(part, display_id=name, update=known)

    def stay(self, image: Still | None, page: str) -> None:
        """Put the picture in the place of the view, and the log under it; page: the frame that replaces it where
        scripts run. None: the last frame stays while the kernel lives. The view itself lives on with the last frame,
        for a page that was closed before the end and is opened again."""
        from IPython.display import HTML, display
        from ipywidgets import HTML as Markup

        self.lives, older, log = False, self.log[:-LINES], log_html(self.log[-LINES:])
        if older:
            title = f"<summary>The log: {plural(len(older), 'line')} before these</summary>"
            log = f'<details class="nbt">{title}{log_html(older)}</details>{log}'
        if image is not None:
            display(image, display_id=self.name, update=True)
            for name in self.stills:
                display(HTML(""), display_id=name, update=True)
            width, height = image.pixels
            size = f'data-width="{width}" data-height="{height}"'
            display(HTML(f'<style onload="{KEPT}" {size} data-page="{escape(page)}"></style>'))
            _, *parts = self.view.children  # the first are the panel's
            self.view.children = [Markup(page + log)]
            for widget in [*self.looks.children, *self.choice.children, self.earlier, *parts]:
                close(widget)
        text = "\n".join(fitting(fields, WIDTH) for fields in self.log)
        if text:
            display({"text/html": f"<style>{STYLE}</style>{log}", "text/plain": text}, raw=True)


def log_html(lines: Sequence[list[str]]) -> str:
    """Return lines of the log; of one with fields those that do not fit their cell are left out, from the right."""
    rows = []
    for fields in lines:
        texts = "".join(f"<span>{escape(field)}</span>" for field in fields)
        rows.append(f'<div class="nbt-line">{texts}</div>' if len(fields) > 1 else f"<div>{texts}</div>")
    return f'<div class="nbt nbt-log">{"".join(rows)}</div>' if rows else ""


def close(widget: Any) -> None:
    """Close a widget with its layout and style: ipywidgets keeps each open one, and its comm, as long as the kernel.
    Not for a form: what follows its 900 closings waits for seconds in a classic notebook."""
    widget.close()
    for part in (getattr(widget, "style", None), widget.layout):
        if part is not None:
            part.close()
