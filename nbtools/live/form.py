"""The widgets of a Panel: buttons that act on a run, a strip of the settings that users change most while it trains,
and a form with name, input, slider and note of each setting.

Core ipywidgets that 7.7.1 and 8 both have. A number's text holds the value; its slider is one way to set it. What is
shown above the curves has the same height whatever it says: a click under which a button moves is lost.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets import HTML, Button, FloatLogSlider, HBox, IntSlider, Layout, Text, VBox

from nbtools import show
from nbtools.live.svg import SCRIPT

STRIP = ("lr", "batch_size", "amp", "epochs", "clip_norm", "early_stop")
"""The settings that users change most, next to the curves of a run in progress."""
IN_VIEW = ("network", *STRIP, "eval_every")  # of the form; all other settings are under More
SPANS = {"lr": (10, 2, 0.05, ".2g"), "batch_size": (2, 4, 1.0, "d"), "epochs": (0, 3, 1, "d")}
"""setting → base of its logarithmic slider, reach to either side and step (exponents), format of its value; base 0: a
linear one from 1 to so many times the value."""
HELP = "font-size:12px;line-height:16px"
MUTED = f"{HELP};opacity:.75"
WRONG = f"{HELP};color:#C65300;font-weight:600"  # contrast 4.5 on white and 4.6 on black
NAME, INPUT, NUMBER, SLIDER, NOTE = "166px", "280px", "84px", "96px", "260px"
LINE, LINES, OPEN = "20px", "48px", "364px"  # a message; a question; the form above the curves, which scrolls
STYLE = """
.nbtools-form { container-type: inline-size }
.nbtools-row { border-top: 1px solid rgba(128, 128, 128, .18) }
.nbtools-line .widget-html-content > div, .nbtools-lines .widget-html-content > div {
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 1; overflow: hidden; overflow-wrap: anywhere }
.nbtools-lines .widget-html-content > div { -webkit-line-clamp: 3 }
.nbtools-knob { line-height: 18px }
.nbtools-wrong :is(input, select) { outline: 2px solid #D55E00 }
.nbtools-slider { position: relative; overflow: visible }
.nbtools-slider .widget-readout { position: absolute; right: 0; top: -16px; margin: 0; padding: 0 4px; height: 16px;
  line-height: 16px; min-width: 0; visibility: hidden; background: rgba(128, 128, 128, .25); z-index: 2 }
.nbtools-slider:is(:active, :focus-within) .widget-readout { visibility: visible }
.nbtools-form :focus-visible, .nbtools-knob :focus-visible { outline: 2px solid #0072B2 }
@container (max-width: 760px) { .nbtools-row > .widget-html:last-child { flex-basis: 100% !important } }
"""
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
PAUSED = "paused between two steps: change what you like, then Resume"
ELSEWHERE = "It trains: these settings are in the cell below, next to its curves."
OTHER = "Other settings …"


class Form:
    """The widgets of one Panel, which call its methods.

    controls: of a run in progress, above its curves, the form folded. whole: of the panel's own cell: the form, and
    while a run is in progress the buttons, since its output may be gone. values: what the fields show. told: the newest
    message of the run.
    """

    def __init__(self, panel: Any):
        self.panel, plan = panel, panel.plan
        self.filling: int | None = None  # the thread that fills the fields: what it sets was not set by the user
        self.told, self.values = "", dict[str, Any]()
        self.actions = {action: button("", partial(panel.click, action)) for action in BUTTONS}
        self.actions["pause"].layout.min_width = "88px"  # room for Resume
        self.pending, self.notice = markup("line", LINE), markup("lines", LINES)
        self.notice.layout.flex = "0 1 auto"  # the buttons stand next to what they answer
        self.fields = {n: field(getattr(plan, n), rule, n in {*SPANS, *STRIP}) for n, rule in panel.rules.items()}
        self.sliders = {name: slider(getattr(plan, name), *span) for name, span in SPANS.items()}
        self.captions, self.notes = {n: HTML() for n in STRIP}, {n: markup() for n in self.fields}
        for made, changed in ((self.fields, panel.read), (self.sliders, self.slid)):
            for name, widget in made.items():
                entitle(widget, name)
                widget.observe(partial(self.by_user, changed, name), names="value")
        self.menu = widgets.Dropdown(options=[OTHER, *panel.presets], layout=Layout(width="280px", margin="2px 0 6px"))
        entitle(self.menu, "Other settings: whole plans to take over")
        self.menu.observe(partial(self.by_user, lambda _, label: panel.choose(label), ""), names="value")
        self.make = button("", panel.accept, "Takes effect at the next step", "arrow-right")
        self.confirm = button("", panel.insist, "Apply it anyway", "exclamation-triangle")
        self.decline = button("", panel.drop, "Keep what is in effect", "times")
        self.arrange()

    def arrange(self) -> None:
        """Put the widgets together."""
        answers = [self.confirm, self.decline, self.make]
        asking = HBox([self.notice, *answers], layout=Layout(height=LINES, grid_gap="8px", align_items="flex-start"))
        rows = {name: self.row(name, rule) for name, rule in self.panel.rules.items()}
        parts = [rows.pop(name) for name in IN_VIEW if name in rows]
        more = widgets.Accordion(
            children=[VBox([*rows.values()])], selected_index=None, layout=Layout(margin="8px 0 0")
        )
        more.set_title(0, f"More: {len(rows)} settings")
        style = HTML(f'<style onload="{escape(SCRIPT)}">{STYLE}</style>', layout=Layout(display="none"))
        form = VBox([style, self.menu, *parts, more], layout=Layout(width="100%", max_width="1100px", flex="0 0 auto"))
        form.add_class("nbtools-form")
        fold = column([form], display="none", max_height=OPEN, overflow="auto")
        every = widgets.ToggleButton(
            description="All settings", icon="sliders", layout=Layout(width="auto", margin="2px 0")
        )
        every.observe(lambda change: setattr(fold.layout, "display", "flex" if change.new else "none"), names="value")
        knobs = [VBox([self.captions[name], HBox(self.inputs(name))]) for name in STRIP]
        for knob in knobs:
            knob.layout.flex = "0 0 auto"
            knob.add_class("nbtools-knob")
        actions = [*self.actions.values()]
        self.controls = column([bar([*actions, every]), self.pending, bar(knobs, "2px 18px"), asking, fold])
        self.own = column([bar(actions), self.pending, HTML(styled(MUTED, ELSEWHERE))])
        self.before = column([asking, form])
        self.whole = column([self.own, self.before])

    def row(self, name: str, rule: Field[Any]) -> HBox:
        unit = rule.metadata.get("unit", "")
        label = HTML(
            styled("", f"{name} ({unit})" if unit else name), layout=Layout(width=NAME, flex="0 0 auto", margin="2px")
        )
        row = bar([label, HBox(self.inputs(name), layout=Layout(width=INPUT, flex="0 0 auto")), self.notes[name]])
        row.layout.padding = "2px 0"
        row.add_class("nbtools-row")
        return row

    def inputs(self, name: str) -> list[Any]:
        return [self.fields[name], *([self.sliders[name]] if name in SPANS else [])]

    def by_user(self, changed: Callable[[str, Any], None], name: str, change: Any) -> None:
        if self.filling != threading.get_ident():
            changed(name, change.new)

    def slid(self, name: str, value: float) -> None:
        """The user released a slider: its field gets the value, a whole number or two digits."""
        self.panel.slide(name, f"{value:.2g}" if name == "lr" else str(round(value)))

    def hold(self, name: str, text: Any) -> None:
        """Keep what the user typed into a field, verbatim; for nothing the plan's value."""
        with self.silently():
            self.fields[name].value = self.holds(name, getattr(self.panel.plan, name)) if text == "" else text

    @contextmanager
    def silently(self) -> Iterator[None]:
        self.filling = threading.get_ident()
        try:
            yield
        finally:
            self.filling = None

    def holds(self, name: str, value: Any) -> Any:
        """Return a value as the input of a setting holds it."""
        return written(value) if isinstance(self.fields[name], Text) else value

    def changed(self) -> str:
        changes = self.panel.plan.changes_from(self.panel.advised)
        return f"Changed: {', '.join(changes)}" if changes else "No setting is changed"

    # -- what is shown

    def show(self) -> None:
        """Show the wanted plan; what is refused or has to be confirmed stays in its field."""
        panel, plan = self.panel, self.panel.plan
        self.values, bad = plan.to_dict(), {**panel.asks, **panel.refused}
        with self.silently():
            for name, value in self.values.items():
                made = self.fields[name]
                made.disabled = name in panel.fixed
                if name not in panel.refused and name not in panel.asked:
                    made.value = self.holds(name, value)
                help, reason = panel.rules[name].metadata.get("help", ""), panel.reason(name)
                good = styled(HELP, help) + styled(MUTED, reason)
                self.notes[name].value = styled(WRONG, bad[name]) if name in bad else good
                (made.add_class if name in bad else made.remove_class)("nbtools-wrong")
            for name, (base, *_) in SPANS.items():
                move(self.sliders[name], base, getattr(plan, name))
            self.menu.value = next((label for label, preset in panel.presets.items() if preset == plan), OTHER)
        for name, caption in self.captions.items():
            value = escape(show.shown(getattr(panel.advised, name)))
            caption.value = f'<div style="{HELP}"><b>{name}</b> <span style="opacity:.75">advised {value}</span></div>'
        self.show_notice()
        self.show_run()

    def show_notice(self) -> None:
        """Show what is asked or refused, else what a change brought with it, else what limits the plan, else what was
        changed, and the buttons that answer."""
        panel, asked = self.panel, self.panel.asked
        bad = [*panel.asks.values(), *panel.refused.values()]
        text = f"Not applied: {'; '.join(bad)}" if bad else panel.note or panel.sentence or self.changed()
        self.notice.value = styled(WRONG if bad else HELP, text, tip=True)
        one = next(iter(asked), "") if len(asked) == 1 else ""
        kept = one or (next(iter(panel.refused)) if len(panel.refused) == 1 and not asked else "")
        apply = f"Apply {one} = {show.shown(asked[one])}" if one else f"Apply {len(asked)} changes" if asked else ""
        keep = f"Keep {kept} = {show.shown(getattr(panel.plan, kept))}" if kept else "Keep what is applied"
        proposed = ", ".join(f"{name} = {show.shown(value)}" for name, value in panel.proposed.items())
        label(self.confirm, apply)
        label(self.decline, keep if bad else "")
        label(self.make, f"Apply: {proposed}" if proposed and not bad else "")

    def show_run(self) -> None:
        """Show what is pending in the run, if one is in progress. An unchanged value sends nothing."""
        requests = self.panel.requests if self.panel.running else None
        paused, pending = (requests.paused, requests.pending) if requests else (False, ())
        messages = [f"{BUTTONS[action][0]}: after this step …" for action in BUTTONS if action in pending]
        if requests is not None:
            if paused and not requests.stop:
                messages.insert(0, PAUSED)
            if requests.change:
                messages.append(f"after this step: {requests.change}")
        self.pending.value = styled(HELP, " · ".join(messages), tip=True) or styled(MUTED, self.told, tip=True)
        self.own.layout.display, self.before.layout.display = ("flex", "none") if requests else ("none", "flex")
        for action, made in self.actions.items():
            resume = action == "pause" and paused
            made.description, made.icon, made.tooltip = RESUME if resume else BUTTONS[action]
            made.button_style = "primary" if resume else ""
            unapplied = action == "undo" and (self.panel.refused or self.panel.asked)
            able = requests is not None and (requests.able(action) or unapplied)
            made.disabled = not able or "stop" in pending or action in pending

    def tell(self, message: str) -> None:
        """Show a message where nothing is pending."""
        self.told = message
        self.show_run()


def field(value: Any, rule: Field[Any], narrow: bool) -> Any:
    """Return the input for one setting: a box to tick, a list to choose from, or text that is read when it is
    complete."""
    layout = Layout(width=NUMBER if narrow else INPUT, flex="0 0 auto", margin="2px 0")
    if isinstance(rule.default, bool):
        return widgets.Checkbox(value=value, indent=False, layout=layout)
    if rule.metadata.get("choices"):
        return widgets.Dropdown(options=list(rule.metadata["choices"]), value=value, layout=layout)
    return Text(value=written(value), continuous_update=False, layout=layout)


def written(value: Any) -> str:
    """Return a value as text that Plan.parse reads."""
    if isinstance(value, tuple):
        return ", ".join(map(written, value))
    return "none" if value is None else show.shown(value)


def slider(value: float, base: float, reach: int, step: float, form: str) -> FloatLogSlider | IntSlider:
    """Return a slider around a value; it shows its value while it is dragged, and reports where it is released."""
    look: Any = {"continuous_update": False, "readout_format": form, "layout": Layout(width=SLIDER, flex="0 0 auto")}
    if not base:
        made = IntSlider(value=value, min=1, max=max(reach * int(value), 10), step=step, **look)
    else:
        middle = math.log(value, base) if base == 2 else round(math.log(value, base))  # halves and doubles of a batch
        least = middle - (min(reach, math.floor(middle)) if base == 2 else reach)  # no batch below one
        made = FloatLogSlider(value=value, base=base, min=least, max=middle + reach, step=step, **look)
    made.add_class("nbtools-slider")
    return made


def move(slider: FloatLogSlider | IntSlider, base: float, value: float) -> None:
    """Move to a value; the range grows to it."""
    place = round(math.log(value, base), 9) if base else value
    slider.min, slider.max = min(slider.min, math.floor(place)), max(slider.max, math.ceil(place))
    slider.value = value


def label(button: Button, text: str) -> None:
    """Show a button with this label; hide it without."""
    button.description = text
    button.layout.display = "inline-block" if text else "none"


def styled(style: str, text: str, tip: bool = False) -> str:
    """Return escaped text in a style; tip: a state, read aloud when it changes, in full as a tooltip."""
    title = f' role="status" title="{escape(text)}"' if tip else ""
    return f'<div style="{style}"{title}>{escape(text)}</div>' if text else ""


def entitle(widget: Any, text: str) -> None:
    """Give an input its name, for a screen reader and on hover."""
    widget.set_trait("tooltip" if widget.has_trait("tooltip") else "description_tooltip", text)  # ipywidgets 8, or 7


def markup(kind: str = "", height: str = "auto") -> HTML:
    """Return text that takes the room that is left. kind: `line` or `lines` of a fixed height."""
    made = HTML(layout=Layout(flex=f"1 1 {NOTE}", width="auto", min_width="0", margin="2px 0", height=height))
    if kind:
        made.add_class(f"nbtools-{kind}")
        made.layout.margin, made.layout.overflow, made.layout.flex = "0", "hidden", f"1 1 {height}"
    return made


def button(text: str, action: Callable[[], None], tooltip: str = "", icon: str = "") -> Button:
    layout = Layout(width="auto", margin="2px 0", flex="0 0 auto")
    made = Button(description=text, tooltip=tooltip, icon=icon, layout=layout)
    made.on_click(lambda _: action())
    return made


def bar(children: list[Any], grid_gap: str = "4px 8px") -> HBox:
    """Return widgets in a line that breaks where the window ends."""
    return HBox(children, layout=Layout(flex_flow="row wrap", align_items="center", grid_gap=grid_gap))


def column(children: list[Any], **layout: str) -> VBox:
    return VBox(children, layout=Layout(width="100%", **layout))
