"""The widgets of a Panel: buttons that act on a run, a strip of the settings that users change most while it trains,
and a form with name, input, slider and note of each setting.

Core ipywidgets that 7.7.1 and 8 both have. A number's text holds the value; its slider is one way to set it. What is
shown above the curves has the same height whatever it says: a click under which a button moves is lost.
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

from ipywidgets import (
    HTML,
    Accordion,
    Button,
    Checkbox,
    Dropdown,
    FloatLogSlider,
    HBox,
    IntSlider,
    Label,
    Layout,
    Text,
    ToggleButton,
    VBox,
)

from nbtools import show
from nbtools.live.controls import entitle
from nbtools.live.svg import SCRIPT

IN_VIEW = ("network", "epochs", "batch_size", "lr", "amp", "clip_norm", "eval_every", "early_stop")
"""The settings that users change most, in this order; all other settings are under More."""
STRIP = ("lr", "batch_size", "amp", "epochs")
"""Those next to the curves of a run in progress."""

SPANS = {"lr": (10.0, 2, 0.05), "batch_size": (2.0, 4, 1.0), "epochs": (0.0, 3, 1)}
"""setting → base of its logarithmic slider, reach to either side and step (exponents); base 0: a linear one from 1 to
so many times the value."""

HELP = "font-size:12px;line-height:1.35"
MUTED = f"{HELP};opacity:.7"
WRONG = f"{HELP};color:#D55E00;font-weight:600"  # Okabe & Ito's vermillion: contrast above 3.8 on white and on black

NAME, INPUT, NUMBER, SLIDER, NOTE = "166px", "280px", "84px", "120px", "260px"
LINE, LINES, WORD = "20px", "36px", "88px"  # room for a message, for a question in two lines, and for Resume
OPEN = "364px"  # height at most of the form above the curves, which stay in view: it scrolls, and shows half of "More"
INSET = "6px"  # from a slider's edge to its track, in ipywidgets 7 and 8
STYLE = """
.nbtools-form { container-type: inline-size }
.nbtools-row { border-top: 1px solid rgba(128, 128, 128, .18) }
.nbtools-line .widget-html-content > div, .nbtools-lines .widget-html-content > div {
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 1; overflow: hidden; overflow-wrap: anywhere }
.nbtools-lines .widget-html-content > div { -webkit-line-clamp: 2 }
.nbtools-knob { line-height: 18px }
.nbtools-wrong input { outline: 2px solid #D55E00 }
@container (max-width: 760px) {
  .nbtools-row > .widget-html { flex-basis: 100% !important; margin: 0 0 4px 184px !important }
}
@container (max-width: 480px) {
  .nbtools-row > .widget-html { margin-left: 2px !important }
}
"""
"""Lines between rows; where the form is narrow, a note is below its input (184 px: NAME, gap and margins), which is
below its name where it is narrower still. A host that drops it shows the same form, less neatly."""

BUTTONS = {
    "pause": ("Pause", "pause", "Pause after this step; the run stays in memory until Resume"),
    "stop": ("Stop", "stop", "Finish the step, save a checkpoint and return the run; run the cell again to continue"),
    "evaluate": ("Evaluate now", "check", "Evaluate the validation split after this step, then continue"),
    "save": ("Save now", "save", "Write a checkpoint after this step, then continue"),
    "profile": ("What limits it?", "search", "Measure for a few seconds what a step consists of, then continue"),
    "best": ("Back to best", "history", "Go back to the best checkpoint and continue from there with these settings"),
    "undo": ("Undo", "undo", "Go back to before the last change of settings"),
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
UNABLE = {"best": "no evaluation has chosen one yet", "undo": "there is no recent change"}
DIVERGED = "Training diverged"  # how the message begins
SLOW = 1.0  # seconds per step; from here on the panel announces that clicks are read when a step ends

OFFERS = {
    "none": ("keep", "keep the lr"),
    "sqrt": ("√ rule", "times √k for a batch k times as large: rule of thumb for Adam (arXiv 2205.10287)"),
    "linear": ("linear", "times k for a batch k times as large: rule of thumb for SGD with warmup (arXiv 1706.02677)"),
}
"""lr_rule → label of the button that takes its lr, and its tooltip."""


class Form:
    """The widgets of one Panel, which call its methods.

    controls: of a run in progress, all above its curves, the form folded. whole: of the panel's own cell, the buttons
    only while a run is in progress. values: what the fields show, or would show where they keep the user's text. told:
    the newest message of the run; alarm: that training diverged, until something newer is shown.
    """

    def __init__(self, panel: Any):
        self.panel, plan = panel, panel.plan
        self.filling: int | None = None  # the thread that fills the fields: what it sets was not set by the user
        self.told = self.proposal = self.proposes = self.alarm = ""
        self.asked: list[str] = []  # what has to be confirmed, or was refused
        self.brought: list[str] = []  # what a change brought with it
        self.changed = ""
        self.unapplied = False  # whether a field holds what breaks a rule or has to be confirmed
        self.actions = {action: button("", partial(panel.click, action)) for action in BUTTONS}
        self.actions["pause"].layout.min_width = WORD
        self.pending = markup("line", LINE)
        self.buttons = column([bar([*self.actions.values()]), self.pending])
        self.asking = self.questions()

        self.fields = {n: field(getattr(plan, n), rule, n in {*SPANS, *STRIP}) for n, rule in panel.rules.items()}
        self.sliders = {name: slider(getattr(plan, name), *span) for name, span in SPANS.items()}
        for name, widget in [*self.fields.items(), *self.sliders.items()]:
            entitle(widget, name)
        self.ranges = {name: (made.min, made.max) for name, made in self.sliders.items()}
        self.ticks = {name: HTML(layout=Layout(height="6px", margin="-6px 0 0", overflow="hidden")) for name in SPANS}
        self.captions = {name: HTML(layout=Layout(height="18px", margin="0 2px")) for name in STRIP}
        self.notes = {name: markup() for name in self.fields}
        self.values: dict[str, Any] = {}
        for made, changed in ((self.fields, panel.read), (self.sliders, self.slid)):
            for name, widget in made.items():
                widget.observe(partial(self.by_user, changed, name), names="value")
        self.presets = {
            label: button(worded(label), partial(panel.choose, label), why) for label, (_, why) in panel.presets.items()
        }
        self.view = self.arranged()
        self.fold = column([self.view], display="none", max_height=OPEN, overflow="auto")
        self.controls = column([self.buttons, self.strip(), self.asking, self.fold])
        self.own = column([self.buttons])  # of a run in progress, whose output may be gone
        self.whole = column([self.own, self.asking, self.view])
        self.propose("", "")

    def questions(self) -> HBox:
        """What is asked, refused, changed or proposed, and the buttons that answer."""
        self.notice = markup("lines", LINES)
        self.notice.layout.flex = "0 1 auto"  # the buttons stand next to what they answer
        self.make = button("", self.panel.accept, "Takes effect at the next step", "arrow-right")
        self.confirm = button("", self.panel.insist, "Apply it anyway", "exclamation-triangle")
        self.decline = button("", self.panel.decline, "Keep what is in effect", "times")
        self.offers = {rule: button("", partial(self.panel.follow, rule), why) for rule, (_, why) in OFFERS.items()}
        answers = [self.confirm, self.decline, *self.offers.values(), self.make]
        for made in answers:
            made.layout.flex, made.layout.max_width = "0 0 auto", "60%"  # the notice has two lines, a label only one
        return HBox([self.notice, *answers], layout=Layout(height=LINES, grid_gap="8px", align_items="flex-start"))

    def strip(self) -> HBox:
        layout = Layout(width="auto", margin="18px 2px 2px")
        self.all = ToggleButton(
            description="All settings",
            icon="sliders",
            tooltip="Every setting of the plan, to change here",
            layout=layout,
        )
        self.all.observe(self.unfold, names="value")
        return bar([*map(self.knob, STRIP), self.all], grid_gap="4px 20px", align_items="flex-start")

    def arranged(self) -> VBox:
        rows = {name: self.row(name, rule) for name, rule in self.panel.rules.items()}
        parts = [rows.pop(name) for name in IN_VIEW if name in rows]
        more = Accordion(children=[VBox([*rows.values()])], selected_index=None, layout=Layout(margin="8px 0 0"))
        more.set_title(0, f"More: {len(rows)} settings")
        style, top = (
            HTML(f'<style onload="{escape(SCRIPT)}">{STYLE}</style>', layout=Layout(display="none")),
            bar([*self.presets.values()], margin="0 0 6px"),
        )
        form = VBox([style, top, *parts, more], layout=Layout(width="100%", max_width="1100px", flex="0 0 auto"))
        form.add_class("nbtools-form")
        return form

    def row(self, name: str, rule: Field[Any]) -> HBox:
        unit, help = rule.metadata.get("unit", ""), rule.metadata.get("help", "")
        title = f"{name} ({unit})" if unit and unit not in f"{name} {help}" else name
        label = Label(title, layout=Layout(width=NAME, flex="0 0 auto"))
        middle = HBox(self.inputs(name), layout=Layout(width=INPUT, flex="0 0 auto"))
        row = bar([label, middle, self.notes[name]], grid_gap="0 14px", padding="2px 0")
        row.add_class("nbtools-row")
        return row

    def inputs(self, name: str) -> list[Any]:
        """The field of a setting, and its slider above the tick of the advised value."""
        slide = [self.sliders[name], self.ticks[name]] if name in SPANS else []
        look = Layout(flex="0 0 auto", margin="2px 0 0 8px", overflow="visible")  # a handle at the end juts out
        column = [VBox(slide, layout=look)] if slide else []
        return [self.fields[name], *column]

    def knob(self, name: str) -> VBox:
        """A setting of the strip: its inputs below its name and the advised value."""
        made = VBox([self.captions[name], HBox(self.inputs(name))], layout=Layout(flex="0 0 auto"))
        made.add_class("nbtools-knob")
        return made

    def unfold(self, change: Any) -> None:
        self.fold.layout.display = "flex" if change.new else "none"

    def by_user(self, changed: Callable[[str, Any], None], name: str, change: Any) -> None:
        if self.filling != threading.get_ident():
            changed(name, change.new)

    def slid(self, name: str, value: float) -> None:
        """The user released a slider: its field gets the value, a whole number or two digits."""
        self.panel.slide(name, f"{value:.2g}" if name == "lr" else str(round(value)))

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
        if self.values not in ({}, plan.to_dict()):  # a change is newer than what was measured or went wrong before it
            self.told = "" if self.told == self.proposal else self.told
            self.proposal = self.alarm = ""
        self.values = plan.to_dict()
        with self.silently():
            for name, value in self.values.items():
                self.fields[name].disabled = name in panel.fixed
                if name not in wrong and name not in waiting:
                    self.fields[name].value = self.holds(name, value)
                help, reason = panel.rules[name].metadata.get("help", ""), panel.reason(name)
                good = styled(HELP, help) + styled(MUTED, reason)
                self.notes[name].value = styled(WRONG, bad[name]) if name in bad else good
                (self.fields[name].add_class if name in bad else self.fields[name].remove_class)("nbtools-wrong")
            self.show_advised()
        for label, (preset, _) in panel.presets.items():
            self.presets[label].button_style = "primary" if preset == plan else ""
            self.presets[label].disabled = preset is None
        shown(self.confirm, applying("Apply", waiting, panel.question))
        shown(self.decline, applying("Keep", {**waiting, **wrong}, plan))
        self.unapplied = bool(waiting or wrong)
        sentence, offers = panel.offers()
        for rule, made in self.offers.items():
            shown(made, f"{OFFERS[rule][0]}: {show.shown(offers[rule])}" if rule in offers else "")
        changed = list(plan.changes_from(panel.advised))
        self.asked = [f"Not applied: {'; '.join(bad.values())}"] if bad else []
        self.brought = [*filter(None, [sentence, note])]
        self.changed = f"Changed: {', '.join(changed)}" if changed else "No setting is changed"
        self.show_notice()
        self.show_run()

    def show_advised(self) -> None:
        """Show where the advised values lie, and move the sliders to the wanted ones."""
        plan, advised = self.panel.plan, self.panel.advised
        for name, made in self.sliders.items():
            share = move(made, self.ranges[name], SPANS[name][0], getattr(plan, name), getattr(advised, name))
            self.ticks[name].value = TICK.format(f"{share:.4f}")
        for name, caption in self.captions.items():
            value = escape(show.shown(getattr(advised, name)))
            caption.value = f'<div style="{HELP}"><b>{name}</b> <span style="opacity:.65">advised {value}</span></div>'

    def show_notice(self) -> None:
        """Show what is asked or refused, else that training diverged, else what a change brought with it, else what is
        proposed, else what was changed, in two lines at most."""
        news = [self.alarm] if self.alarm else self.brought
        text = " · ".join(self.asked or news or [self.proposal or self.changed])
        self.notice.value = styled(WRONG if self.asked or self.alarm else HELP, text, tip=True)
        shown(self.make, "" if self.panel.question is not None else self.proposes)

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
                messages.append(f"the last step took {requests.pace:.0f} s; requests are read between steps")
        told = "" if self.told in (self.proposal, self.alarm) else self.told
        self.pending.value = styled(HELP, " · ".join(messages), tip=True) or styled(MUTED, told, tip=True)
        self.own.layout.display = "flex" if requests else "none"
        for action, made in self.actions.items():
            resume = action == "pause" and paused
            made.description, made.icon, what = RESUME if resume else BUTTONS[action]
            made.button_style = "primary" if resume else ""
            able = requests is not None and (requests.able(action) or (action == "undo" and self.unapplied))
            made.tooltip = what if able else f"{what} ({UNABLE.get(action, '') if requests else NO_RUN})"
            made.disabled = not able or "stop" in pending or action in pending

    def tell(self, message: str) -> None:
        """Show a message where nothing is pending; that training diverged, in place of what was measured."""
        self.told = message
        if message.startswith(DIVERGED):
            self.alarm, self.proposal = message, ""
            self.show_notice()
        self.show_run()

    def propose(self, sentence: str, change: str) -> None:
        """Show what limits the plan; change: what the button would do; no button without."""
        self.proposal, self.proposes, self.alarm = sentence, change, ""
        self.show_notice()


def applying(verb: str, waiting: Mapping[str, str], plan: Any) -> str:
    """The label of the button that confirms a change, or declines it: `verb` what the plan has."""
    if len(waiting) > 1:
        return f"{verb} {len(waiting)} changes: {', '.join(waiting)}" if verb == "Apply" else f"{verb} what is applied"
    return "".join(f"{verb} {name} = {show.shown(getattr(plan, name))}" for name in waiting)


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
    return "none" if value is None else show.shown(value)


TICK = (
    f'<div style="position:relative;height:6px;margin:0 {INSET}"><div class="nbtools-tick" style="position:absolute;'
    'left:calc(100% * {});width:2px;height:6px;margin-left:-1px;background:currentColor;opacity:.6"></div></div>'
)


def slider(value: float, base: float, reach: int, step: float) -> FloatLogSlider | IntSlider:
    """A slider around a value; it reports where it is released, not the values in between."""
    look: Any = {"continuous_update": False, "readout": False}
    look["layout"] = Layout(width=SLIDER, flex="0 0 auto", margin="0")
    if not base:
        return IntSlider(value=value, min=1, max=max(reach * int(value), 10), step=step, **look)
    middle = math.log(value, base) if base == 2 else round(math.log(value, base))  # halves and doubles of a batch
    least = middle - (min(reach, math.floor(middle)) if base == 2 else reach)  # no batch below one
    return FloatLogSlider(value=value, base=base, min=least, max=middle + reach, step=step, **look)


def move(
    slider: FloatLogSlider | IntSlider, ends: tuple[float, float], base: float, value: float, advised: float
) -> float:
    """Move to a value; the slider's range, else `ends`, is larger while that is needed. The advised value's place on
    it, from 0 to 1."""
    places = [math.log(each, base) if base else each for each in (value, advised)]
    low, high = min(ends[0], *map(math.floor, places)), max(ends[1], *map(math.ceil, places))
    slider.min, slider.max = min(slider.min, low), max(slider.max, high)  # both values are within them
    slider.value = value
    slider.min, slider.max = low, high
    return (places[1] - low) / (high - low)


def shown(button: Button, label: str) -> None:
    """Show a button with this label; hide it without."""
    button.description = label
    button.layout.display = "inline-block" if label else "none"


def styled(style: str, text: str, tip: bool = False) -> str:
    """Escaped text in a style; tip: a state, read aloud when it changes, in full as a tooltip where room is short."""
    title = f' role="status" title="{escape(text)}"' if tip else ""
    return f'<div style="{style}"{title}>{escape(text)}</div>' if text else ""


def markup(kind: str = "", height: str = "auto") -> HTML:
    """Text that takes the room that is left. kind: `line` or `lines` of a fixed height."""
    made = HTML(layout=Layout(flex=f"1 1 {NOTE}", width="auto", min_width="0", margin="2px 0", height=height))
    if kind:
        made.add_class(f"nbtools-{kind}")
        made.layout.margin, made.layout.overflow, made.layout.flex = "0", "hidden", f"1 1 {height}"
    return made


def button(label: str, action: Callable[[], None], tooltip: str = "", icon: str = "") -> Button:
    made = Button(description=label, tooltip=tooltip, icon=icon, layout=Layout(width="auto", margin="2px 0"))
    made.on_click(lambda _: action())
    return made


def bar(children: Sequence[Any], grid_gap: str = "4px 8px", **layout: str) -> HBox:
    """Widgets in a line that breaks where the window ends."""
    look = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": grid_gap}
    return HBox(children, layout=Layout(**{**look, **layout}))


def column(children: Sequence[Any], **layout: str) -> VBox:
    return VBox(children, layout=Layout(width="100%", **layout))
