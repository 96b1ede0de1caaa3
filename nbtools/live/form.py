"""How a Panel looks: name, input, slider and note of each setting in columns, the notes below where it is narrow; and
the buttons that act on a run.

Core ipywidgets that 7.7.1 and 8 both have. A number's text is the truth; its slider is one way to reach it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field
from functools import partial
from html import escape
from typing import Any

from ipywidgets import HTML, Accordion, Button, Checkbox, Dropdown, FloatLogSlider, HBox, Label, Layout, Text, VBox

from nbtools import table
from nbtools.live.requests import Requests

ORDER = (
    *("network", "epochs", "batch_size", "lr", "amp", "clip_norm", "eval_every", "early_stop"),
    *("weight_decay", "micro_batch_size"),
)
"""What users change most, in this order: the first IN_VIEW that a plan has are in view, the rest under More."""
IN_VIEW = 8

SPANS = {"lr": (10.0, 2, 0.05, ".1e"), "batch_size": (2.0, 4, 1.0, "d")}
"""setting → base of its logarithmic slider, reach to either side and step (exponents), format of a value (d3)."""

HELP = "font-size:12px;line-height:1.35"
MUTED = f"{HELP};opacity:.7"
WRONG = f"{HELP};color:#D55E00;font-weight:600"  # Okabe & Ito's vermillion: contrast above 3.8 on white and on black

NAME, INPUT, NUMBER, SLIDER, NOTE = "166px", "280px", "96px", "176px", "260px"  # INPUT: one number and its slider
STYLE = """<style>
.nbtools-form { container-type: inline-size }
.nbtools-row { border-top: 1px solid rgba(128, 128, 128, .18) }
.nbtools-row .widget-readout { min-width: 52px; text-align: right; font-size: 12px; opacity: .7 }
@container (max-width: 760px) {
  .nbtools-row > .widget-html { flex-basis: 100% !important; margin: 0 0 4px 184px !important }
}
</style>"""
"""Lines between rows; where the form is narrow a note stands below its input (184 px: NAME, gap and margins). A host
that drops it shows the same form, less neatly."""

PENDING = {
    "stop": "stopping after this step: saving, then the run is returned …",
    "evaluate": "evaluating after this step …",
    "save": "saving after this step …",
    "profile": "measuring what a step consists of, for a few seconds …",
    "best": "going back to the best checkpoint after this step …",
    "undo": "undoing the last change after this step …",
}
BUTTONS = {
    "pause": ("Pause", "pause", "Pause after this step; the run stays in memory until Resume"),
    "stop": ("Stop", "stop", "Finish the step, save a checkpoint and return the run; run the cell again to continue"),
    "evaluate": ("Evaluate now", "check", "Evaluate the validation split after this step, then continue"),
    "save": ("Save now", "save", "Write a checkpoint after this step, then continue"),
    "profile": ("What limits it?", "search", "Measure for a few seconds what a step consists of, then continue"),
    "best": ("Back to best", "history", "Go back to the best checkpoint and continue from there with these settings"),
    "undo": ("Undo", "undo", "Take back the last change of settings"),
}
"""action → label, icon (a name that Font Awesome 4 to 6 know), tooltip."""
RESUME = ("Resume", "play", "Continue with the next step")
NO_RUN = "no run is in progress: nb.fit starts one"
PAUSED, PAUSING = "paused between two steps: change what you like, then Resume", "pausing after this step …"
SLOW = 1.0  # seconds a step; from here on the panel says beforehand that clicks are read when it ends


class Form:
    """The widgets of one panel: fields and sliders to change, notes to read.

    read: called with setting and value when the user changes a field. presets: label → button. offers: lr_rule →
    button. confirm: the button that applies what has to be confirmed. values: what the fields show, or would
    show where the user's text is kept.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        rules: Mapping[str, Field[Any]],
        presets: Mapping[str, Button],
        read: Callable[..., None],
        offers: Mapping[str, Button],
        confirm: Button,
    ):
        self.presets, self.offers, self.confirm = presets, offers, confirm
        self.fields = {name: field(values[name], rule, name in SPANS) for name, rule in rules.items()}
        self.sliders = {name: slider(values[name], *SPANS[name]) for name in SPANS}
        self.notes = {name: markup() for name in rules}
        self.summary, self.offered = markup(), markup()
        self.offered.layout.flex = "0 1 auto"
        self.offer_row = bar([self.offered, *offers.values()], margin="0 0 6px 184px")
        self.values = dict(values)
        self.filling: int | None = None  # the thread that fills the fields: what it sets was not set by the user
        for name, made in self.fields.items():
            made.observe(lambda change, n=name: read(n, change.new) if self.by_user() else None, names="value")
        for name, made in self.sliders.items():
            made.observe(lambda change, n=name: self.slid(n, change.new) if self.by_user() else None, names="value")
        self.rows = {name: self.row(name, rule) for name, rule in rules.items()}
        self.view = self.arrange(self.rows)
        self.ask("", "")

    def slid(self, name: str, value: float) -> None:
        """The user let a slider go: its field says where, a power of two or two digits."""
        self.fields[name].value = str(round(value)) if SPANS[name][0] == 2 else f"{value:.2g}"

    def fill(self, values: Mapping[str, Any], kept: Collection[str] = ()) -> None:
        """Make fields and sliders show these values; kept: fields that keep the user's text, to be corrected."""
        self.values |= values
        with self.silently():
            for name, value in values.items():
                if name not in kept:
                    self.fields[name].value = self.holds(name, value)
                    if name in self.sliders:
                        move(self.sliders[name], value)

    def hold(self, name: str, text: Any) -> None:
        """Make a field hold what the user put into it, word for word."""
        with self.silently():
            self.fields[name].value = text

    @contextmanager
    def silently(self) -> Iterator[None]:
        self.filling = threading.get_ident()
        try:
            yield
        finally:
            self.filling = None

    def by_user(self) -> bool:
        return self.filling != threading.get_ident()

    def holds(self, name: str, value: Any) -> Any:
        """A value as the input of a setting holds it."""
        return written(value) if isinstance(self.fields[name], Text) else value

    def fix(self, names: Mapping[str, str]) -> None:
        """Disable these, enable all others."""
        for name, made in (*self.fields.items(), *self.sliders.items()):
            made.disabled = name in names

    def note(self, name: str, help: str, reason: str = "", wrong: str = "") -> None:
        """What stands next to a field: what it does and why it has its value, or what is wrong with it."""
        parts = [styled(WRONG, wrong)] if wrong else [styled(HELP, help), styled(MUTED, reason)]
        self.notes[name].value = "".join(parts)

    def mark(self, labels: Collection[str]) -> None:
        """The presets that the plan is."""
        for label, made in self.presets.items():
            made.button_style = "primary" if label in labels else ""

    def say(self, sentence: str, wrong: bool = False) -> None:
        """What stands above the fields."""
        self.summary.value = styled(WRONG if wrong else MUTED, sentence)

    def offer(self, sentence: str, offers: Mapping[str, str]) -> None:
        """Under the batch size: what happened to lr, and a button for each rule that would do otherwise."""
        self.offered.value = styled(HELP, sentence)
        self.offer_row.layout.display = "flex" if sentence else "none"
        for rule, made in self.offers.items():
            made.description = offers.get(rule, "")
            made.layout.display = "inline-block" if rule in offers else "none"

    def ask(self, place: str, label: str) -> None:
        """Show the confirming button in the row of a setting, or next to the presets where there is no such row; no
        label: remove it."""
        at = self.rows.get(place, self.top) if label else None
        self.confirm.description = label
        for bar in (self.top, *self.rows.values()):
            others = tuple(child for child in bar.children if child is not self.confirm)
            if (here := (*others, self.confirm) if bar is at else others) != bar.children:
                bar.children = here

    def row(self, name: str, rule: Field[Any]) -> HBox:
        unit, help = rule.metadata.get("unit", ""), rule.metadata.get("help", "")
        title = f"{name} ({unit})" if unit and unit not in f"{name} {help}" else name
        label = Label(title, layout=Layout(width=NAME, flex="0 0 auto"))
        inputs = [made[name] for made in (self.fields, self.sliders) if name in made]
        middle = HBox(inputs, layout=Layout(width=INPUT, flex="0 0 auto", align_items="center"))
        made = bar([label, middle, self.notes[name]], grid_gap="0 14px", padding="2px 0")
        made.add_class("nbtools-row")
        return made

    def arrange(self, rows: Mapping[str, HBox]) -> VBox:
        names = sorted(rows, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
        in_view = [rows[name] for name in names[:IN_VIEW]]
        in_view.insert(names.index("batch_size") + 1, self.offer_row)
        hidden = VBox([rows[name] for name in names[IN_VIEW:]])
        more = Accordion(children=[hidden], selected_index=None, layout=Layout(margin="8px 0 0"))
        more.set_title(0, f"More: {len(hidden.children)} settings")
        style = HTML(STYLE, layout=Layout(display="none"))
        self.top = bar([*self.presets.values(), self.summary], margin="0 0 6px")
        form = VBox([style, self.top, *in_view, more], layout=Layout(width="100%", max_width="1100px"))
        form.add_class("nbtools-form")
        return form


class Buttons:
    """The buttons of one panel, which post requests and show them as pending until the run has answered."""

    def __init__(self, click: Callable[[str], None]):
        self.made = {action: button("", partial(click, action)) for action in BUTTONS}
        self.message = markup()
        self.view = bar([*self.made.values(), self.message])

    def show(self, requests: Requests | None) -> None:
        """What is pending; None: no run is in progress. Setting what is set already sends nothing."""
        paused, pending = (requests.paused, requests.pending) if requests else (False, ())
        messages = [sentence for action, sentence in PENDING.items() if action in pending]
        if requests is not None:
            if paused and not requests.stop:
                messages.insert(0, PAUSING if requests.unread else PAUSED)
            if requests.change:
                messages.append(f"after this step: {requests.change}")
            if not messages and requests.pace >= SLOW:
                messages.append(f"a step takes {requests.pace:.0f} s; requests are read when it ends")
        self.message.value = styled(HELP, " · ".join(messages))
        for action, made in self.made.items():
            resume = action == "pause" and paused
            made.description, made.icon, what = RESUME if resume else BUTTONS[action]
            made.button_style = "primary" if resume else ""
            made.tooltip = what if requests else f"{what} ({NO_RUN})"
            made.disabled = requests is None or requests.stop or action in pending or not requests.able(action)


class Proposal:
    """What a plan is bound by, and a button that makes the one change most worth making."""

    def __init__(self, accept: Callable[[], None]):
        self.message, self.button = markup(), button("", accept, "Takes effect at the next step", "arrow-right")
        self.view = bar([self.message, self.button])
        self.show("", "")

    def show(self, sentence: str, change: str) -> None:
        """change: what the button would do; no button without."""
        self.message.value = styled(HELP, sentence)
        self.view.layout.display = "flex" if sentence else "none"
        self.button.description = change
        self.button.layout.display = "inline-block" if change else "none"


def field(value: Any, rule: Field[Any], narrow: bool) -> Any:
    """The input for one setting: a box to tick, a list to choose from, or text that is read when it is complete."""
    layout = Layout(width=NUMBER if narrow else INPUT, flex="0 0 auto", margin="2px 0")
    if isinstance(rule.default, bool):
        return Checkbox(value=value, indent=False, layout=layout)
    if rule.metadata.get("choices"):
        return Dropdown(options=list(rule.metadata["choices"]), value=value, layout=layout)
    return Text(value=written(value), continuous_update=False, layout=layout)


def written(value: Any) -> str:
    """A value as text that Plan.parse reads."""
    if isinstance(value, tuple):
        return ", ".join(map(written, value))
    return "none" if value is None else table.shown(value)


def slider(value: float, base: float, reach: int, step: float, format: str) -> FloatLogSlider:
    """A logarithmic slider around a value; it says where it was let go, not where it passes."""
    middle = round(math.log(value, base))
    return FloatLogSlider(
        value=value,
        base=base,
        min=max(middle - reach, 0) if base == 2 else middle - reach,  # no batch below one
        max=middle + reach,
        step=step,
        readout_format=format,
        continuous_update=False,
        layout=Layout(width=SLIDER, flex="0 0 auto", margin="0 0 0 8px"),
    )


def move(slider: FloatLogSlider, value: float) -> None:
    """To a value; the slider's ends give way."""
    exponent = math.log(value, slider.base)
    slider.min, slider.max = min(slider.min, math.floor(exponent)), max(slider.max, math.ceil(exponent))
    slider.value = value


def markup() -> HTML:
    return HTML(layout=Layout(flex=f"1 1 {NOTE}", width="auto", min_width="0", margin="2px 0"))


def styled(style: str, text: str) -> str:
    """Escaped text in a style."""
    return f'<div style="{style}">{escape(text)}</div>' if text else ""


def button(label: str, action: Callable[[], None], tooltip: str = "", icon: str = "") -> Button:
    made = Button(description=label, tooltip=tooltip, icon=icon, layout=Layout(width="auto", margin="2px 0"))
    made.on_click(lambda _: action())
    return made


def bar(children: Sequence[Any], grid_gap: str = "4px 8px", **layout: str) -> HBox:
    """Widgets in a line that breaks where the window ends."""
    return HBox(children, layout=Layout(flex_flow="row wrap", align_items="center", grid_gap=grid_gap, **layout))


def column(children: Sequence[Any]) -> VBox:
    return VBox(children, layout=Layout(width="100%"))
