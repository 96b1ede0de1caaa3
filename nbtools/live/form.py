"""The widgets of a Panel: buttons that act on a run, and a form with name, input, slider and note of each setting.

Core ipywidgets that 7.7.1 and 8 both have. A number's text holds the value; its slider is one way to set it.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field
from functools import partial
from html import escape
from typing import Any

from ipywidgets import HTML, Accordion, Button, Checkbox, Dropdown, FloatLogSlider, HBox, Label, Layout, Text, VBox

from nbtools import table

IN_VIEW = ("network", "epochs", "batch_size", "lr", "amp", "clip_norm", "eval_every", "early_stop")
"""The settings that users change most, in this order; all other settings are under More."""

SPANS = {"lr": (10.0, 2, 0.05, ".1e"), "batch_size": (2.0, 4, 1.0, "d")}
"""setting → base of its logarithmic slider, reach to either side and step (exponents), format of a value (d3)."""

HELP = "font-size:12px;line-height:1.35"
MUTED = f"{HELP};opacity:.7"
WRONG = f"{HELP};color:#D55E00;font-weight:600"  # Okabe & Ito's vermillion: contrast above 3.8 on white and on black

NAME, INPUT, NUMBER, SLIDER, NOTE = "166px", "280px", "96px", "176px", "260px"  # INPUT: one number and its slider
LINE, WORD = "20px", "88px"  # room for a message and for Resume, which move no button when they come and go
STYLE = """<style>
.nbtools-form { container-type: inline-size }
.nbtools-row { border-top: 1px solid rgba(128, 128, 128, .18) }
.nbtools-row .widget-readout { min-width: 52px; text-align: right; font-size: 12px; opacity: .7 }
@container (max-width: 760px) {
  .nbtools-row > .widget-html { flex-basis: 100% !important; margin: 0 0 4px 184px !important }
}
</style>"""
"""Lines between rows; where the form is narrow, a note is below its input (184 px: NAME, gap and margins). A host
that drops it shows the same form, less neatly."""

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
PENDING = {
    "stop": "stopping after this step: saving, then the run is returned …",
    "evaluate": "evaluating after this step …",
    "save": "saving after this step …",
    "profile": "measuring what a step consists of, for a few seconds …",
    "best": "going back to the best checkpoint after this step …",
    "undo": "undoing the last change after this step …",
}
PAUSED, PAUSING = "paused between two steps: change what you like, then Resume", "pausing after this step …"
NO_RUN = "no run is in progress: nb.fit starts one"
SLOW = 1.0  # seconds per step; from here on the panel announces that clicks are read when a step ends

OFFERS = {
    "none": ("keep", "keep the lr"),
    "sqrt": ("√ rule", "times √k for a batch k times as large: rule of thumb for Adam (arXiv 2205.10287)"),
    "linear": ("linear", "times k for a batch k times as large: rule of thumb for SGD with warmup (arXiv 1706.02677)"),
}
"""lr_rule → label of the button that takes its lr, and its tooltip."""


class Form:
    """The widgets of one Panel, which call its methods.

    view: the form. controls: the buttons and the proposal. whole: the form below the buttons of a run in progress.
    values: what the fields show, or would show where they keep the user's text.
    """

    def __init__(self, panel: Any):
        self.panel, plan = panel, panel.plan
        self.filling: int | None = None  # the thread that fills the fields: what it sets was not set by the user
        self.actions = {action: button("", partial(panel.click, action)) for action in BUTTONS}
        self.actions["pause"].layout.min_width = WORD
        self.pending, self.sentence = markup(), markup()
        self.pending.layout.flex, self.pending.layout.min_height = "1 1 100%", LINE
        self.make = button("", panel.accept, "Takes effect at the next step", "arrow-right")
        self.verdict = bar([self.sentence, self.make])
        buttons = bar([*self.actions.values(), self.pending])
        self.controls, self.own = column([buttons, self.verdict]), column([buttons])

        self.fields = {name: field(getattr(plan, name), rule, name in SPANS) for name, rule in panel.rules.items()}
        self.sliders = {name: slider(getattr(plan, name), *span) for name, span in SPANS.items()}
        self.notes = {name: markup() for name in self.fields}
        self.values: dict[str, Any] = {}
        for made, changed in ((self.fields, panel.read), (self.sliders, self.slid)):
            for name, widget in made.items():
                widget.observe(partial(self.by_user, changed, name), names="value")
        self.presets = {
            label: button(worded(label), partial(panel.choose, label), why) for label, (_, why) in panel.presets.items()
        }
        self.confirm = button("", panel.insist, "Apply it anyway", "exclamation-triangle")
        self.summary, self.offered = markup(), markup()
        self.top = bar([*self.presets.values(), self.confirm, self.summary], margin="0 0 6px")
        self.offered.layout.flex = "0 1 auto"
        self.offers = {rule: button("", partial(panel.follow, rule), why) for rule, (_, why) in OFFERS.items()}
        self.offer_row = bar([self.offered, *self.offers.values()], margin="0 0 6px 184px")
        self.view = self.arranged()
        self.whole = column([self.own, self.view])  # for the panel's own cell, which outlives the output of fit's
        self.propose("", "")

    def arranged(self) -> VBox:
        rows = {name: self.row(name, rule) for name, rule in self.panel.rules.items()}
        shown = [name for name in IN_VIEW if name in rows]
        parts = [rows.pop(name) for name in shown]
        parts.insert(shown.index("batch_size") + 1, self.offer_row)
        more = Accordion(children=[VBox([*rows.values()])], selected_index=None, layout=Layout(margin="8px 0 0"))
        more.set_title(0, f"More: {len(rows)} settings")
        style = HTML(STYLE, layout=Layout(display="none"))
        form = VBox([style, self.top, *parts, more], layout=Layout(width="100%", max_width="1100px"))
        form.add_class("nbtools-form")
        return form

    def row(self, name: str, rule: Field[Any]) -> HBox:
        unit, help = rule.metadata.get("unit", ""), rule.metadata.get("help", "")
        title = f"{name} ({unit})" if unit and unit not in f"{name} {help}" else name
        label = Label(title, layout=Layout(width=NAME, flex="0 0 auto"))
        inputs = [made[name] for made in (self.fields, self.sliders) if name in made]
        middle = HBox(inputs, layout=Layout(width=INPUT, flex="0 0 auto", align_items="center"))
        row = bar([label, middle, self.notes[name]], grid_gap="0 14px", padding="2px 0")
        row.add_class("nbtools-row")
        return row

    def by_user(self, changed: Callable[[str, Any], None], name: str, change: Any) -> None:
        if self.filling != threading.get_ident():
            changed(name, change.new)

    def slid(self, name: str, value: float) -> None:
        """The user released a slider: its field gets the value, a power of two or two digits."""
        self.fields[name].value = str(round(value)) if SPANS[name][0] == 2 else f"{value:.2g}"

    def hold(self, name: str, text: Any) -> None:
        """Keep what the user typed into a field, verbatim."""
        with self.silently():
            self.fields[name].value = text

    @contextmanager
    def silently(self) -> Iterator[None]:
        self.filling = threading.get_ident()
        try:
            yield
        finally:
            self.filling = None

    def holds(self, name: str, value: Any) -> Any:
        """A value as the input of a setting holds it."""
        return written(value) if isinstance(self.fields[name], Text) else value

    def show(self, wrong: Mapping[str, str], note: str = "") -> None:
        """Show the wanted plan. wrong: setting → why the user's value, which stays in its field, is not taken."""
        panel, plan = self.panel, self.panel.plan
        waiting = panel.question.changes_from(plan) if panel.question is not None else {}
        prefix = rf"\b(?:Plan|{re.escape(type(plan).__qualname__)})\."  # the row already says which setting
        bad = {name: re.sub(prefix, "", why) for name, why in {**panel.asks, **wrong}.items()}
        self.values = plan.to_dict()
        with self.silently():
            for name, value in self.values.items():
                self.fields[name].disabled = name in panel.fixed
                if name not in wrong and name not in waiting:
                    self.fields[name].value = self.holds(name, value)
                if name in self.sliders:
                    move(self.sliders[name], value)
                help, reason = panel.rules[name].metadata.get("help", ""), panel.reason(name)
                good = styled(HELP, help) + styled(MUTED, reason)
                self.notes[name].value = styled(WRONG, bad[name]) if name in bad else good
        changed = list(plan.changes_from(panel.advised))
        summary = f"Changed: {', '.join(changed)}" if changed else ""
        if wrong:
            summary = f"Not applied: {', '.join(wrong)}; the plan keeps its last valid value"
        elif waiting:
            summary = f"To be confirmed: {'; '.join(panel.asks.values())}"
        self.summary.value = styled(WRONG if bad else MUTED, " · ".join(filter(None, (summary, note))))
        shown(self.confirm, applying(waiting, panel.question))
        for label, (preset, _) in panel.presets.items():
            self.presets[label].button_style = "primary" if preset == plan else ""
            self.presets[label].disabled = preset is None
        sentence, offers = panel.offers()
        self.offered.value = styled(HELP, sentence)
        self.offer_row.layout.display = "flex" if sentence else "none"
        for rule, made in self.offers.items():
            shown(made, f"{OFFERS[rule][0]}: {table.shown(offers[rule])}" if rule in offers else "")
        self.show_run()

    def show_run(self) -> None:
        """Show what is pending in the run, if one is in progress. An unchanged value sends nothing."""
        requests = self.panel.requests if self.panel.running else None
        paused, pending = (requests.paused, requests.pending) if requests else (False, ())
        messages = [sentence for action, sentence in PENDING.items() if action in pending]
        if requests is not None:
            if paused and not requests.stop:
                messages.insert(0, PAUSING if requests.unread else PAUSED)
            if requests.change:
                messages.append(f"after this step: {requests.change}")
            if not messages and requests.pace >= SLOW:
                messages.append(f"a step takes {requests.pace:.0f} s; requests are read when it ends")
        self.pending.value = styled(HELP, " · ".join(messages))
        self.own.layout.display = "flex" if requests else "none"
        for action, made in self.actions.items():
            resume = action == "pause" and paused
            made.description, made.icon, what = RESUME if resume else BUTTONS[action]
            made.button_style = "primary" if resume else ""
            made.tooltip = what if requests else f"{what} ({NO_RUN})"
            made.disabled = requests is None or requests.stop or action in pending or not requests.able(action)

    def propose(self, sentence: str, change: str) -> None:
        """Show what limits the plan; change: what the button would do; no button without."""
        self.sentence.value = styled(HELP, sentence)
        self.verdict.layout.display = "flex" if sentence else "none"
        shown(self.make, change)


def applying(waiting: Mapping[str, str], plan: Any) -> str:
    """The label of the button that confirms a change."""
    if len(waiting) > 1:
        return f"Apply {len(waiting)} changes: {', '.join(waiting)}"
    return "".join(f"Apply {name} = {table.shown(getattr(plan, name))}" for name in waiting)


def worded(name: str) -> str:
    """The label of a preset's button: `guide-low-memory` → Guide, low memory."""
    first, *rest = name.split("-")
    words = " ".join({"cpu": "CPU", "gpus": "GPUs"}.get(word, word) for word in rest)
    return ", ".join(filter(None, (first[:1].upper() + first[1:], words)))


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
    """A logarithmic slider around a value; it reports where it is released, not the values in between."""
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
    """Move to a value; the slider's range grows if needed."""
    exponent = math.log(value, slider.base)
    slider.min, slider.max = min(slider.min, math.floor(exponent)), max(slider.max, math.ceil(exponent))
    slider.value = value


def shown(button: Button, label: str) -> None:
    """Show a button with this label; hide it without."""
    button.description = label
    button.layout.display = "inline-block" if label else "none"


def styled(style: str, text: str) -> str:
    """Escaped text in a style."""
    return f'<div style="{style}">{escape(text)}</div>' if text else ""


def markup() -> HTML:
    return HTML(layout=Layout(flex=f"1 1 {NOTE}", width="auto", min_width="0", margin="2px 0"))


def button(label: str, action: Callable[[], None], tooltip: str = "", icon: str = "") -> Button:
    made = Button(description=label, tooltip=tooltip, icon=icon, layout=Layout(width="auto", margin="2px 0"))
    made.on_click(lambda _: action())
    return made


def bar(children: Sequence[Any], grid_gap: str = "4px 8px", **layout: str) -> HBox:
    """Widgets in a line that breaks where the window ends."""
    return HBox(children, layout=Layout(flex_flow="row wrap", align_items="center", grid_gap=grid_gap, **layout))


def column(children: Sequence[Any]) -> VBox:
    return VBox(children, layout=Layout(width="100%"))
