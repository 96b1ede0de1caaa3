"""The widgets of a Panel: buttons that act on a run, a strip of the settings that users change most while it trains,
and a form with name, input, slider and note of each setting.

Core ipywidgets that 7.7.1 and 8 both have. A number's text holds the value; its slider is one way to set it. What is
shown above the curves has the same height whatever it says: a click under which a button moves is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets import HTML, Button, FloatLogSlider, HBox, Layout, Text, VBox

from nbtools import show
from nbtools.live.svg import HEAD
from nbtools.train import Plan

STRIP = ("lr", "batch_size", "amp", "epochs", "clip_norm", "early_stop")
"""The settings that users change most, next to the curves of a run in progress."""
IN_VIEW = ("network", *STRIP, "eval_every")  # of the form; all other settings are under More
SPANS = {"lr": (10, 2, 0.05, ".2g"), "batch_size": (2, 4, 1.0, "d")}
"""setting → base of its slider, reach to either side and step (exponents), format of its value."""
NAME, INPUT, NUMBER, SLIDER, NOTE = "166px", "280px", "84px", "96px", "260px"
LINE, LINES, OPEN = "20px", "48px", "364px"  # a message; a question; the form above the curves, which scrolls
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
    while a run is in progress the buttons, since its output may be gone. plan: what the fields show. told: the newest
    message of the run.
    """

    def __init__(self, panel: Any):
        self.panel, self.plan, self.told, self.filling = panel, panel.plan, "", False
        self.actions = {action: button(partial(panel.click, action), "") for action in BUTTONS}
        self.pending, self.notice = markup("nbtools-line", LINE), markup("nbtools-lines", LINES)
        self.fields = {name: field(getattr(self.plan, name), rule, name) for name, rule in panel.rules.items()}
        self.sliders = {name: slider(getattr(self.plan, name), *span) for name, span in SPANS.items()}
        self.captions, self.notes = {name: HTML() for name in STRIP}, {name: markup() for name in self.fields}
        options = [OTHER, *panel.presets]
        self.menu = widgets.Dropdown(options=options, layout=Layout(width=INPUT, margin="2px 0 6px"))
        for name, made in (*self.fields.items(), *self.sliders.items(), ("Other settings", self.menu)):
            made.set_trait(
                "tooltip" if made.has_trait("tooltip") else "description_tooltip", name
            )  # ipywidgets 8, or 7
            acts = self.moved if isinstance(made, FloatLogSlider) else self.chosen if made is self.menu else panel.read
            made.observe(partial(self.by_user, acts, name), names="value")
        self.apply, self.keep = button(panel.accept, "check"), button(panel.drop, "times")
        self.arrange()

    def arrange(self) -> None:
        """Put the widgets together."""
        asking = HBox([self.notice, self.apply, self.keep], layout=Layout(height=LINES, grid_gap="8px"))
        rows = {name: self.row(name, rule) for name, rule in self.panel.rules.items()}
        parts = [rows.pop(name) for name in IN_VIEW if name in rows]
        form = column([self.menu, *parts, folded(f"More: {len(rows)} settings", VBox([*rows.values()]))])
        form.layout.max_width, form.layout.flex = "1100px", "0 0 auto"
        form.add_class("nbtools-form")
        every = folded("All settings", VBox([form], layout=Layout(max_height=OPEN, overflow="auto")))
        knobs = [VBox([self.captions[name], HBox(self.inputs(name))]) for name in STRIP]
        for knob in knobs:
            knob.layout.flex = "0 0 auto"
            knob.add_class("nbtools-knob")
        head, actions = HTML(HEAD, layout=Layout(display="none")), bar([*self.actions.values()])
        self.controls = column([head, actions, self.pending, bar(knobs, "2px 18px"), asking, every])
        self.own = column([actions, self.pending, HTML(said(ELSEWHERE, "nbtools-muted"))])
        self.before = column([asking, form])
        self.whole = column([head, self.own, self.before])

    def row(self, name: str, rule: Field[Any]) -> HBox:
        unit = f" ({rule.metadata['unit']})" if rule.metadata.get("unit") else ""
        label = HTML(escape(name + unit), layout=Layout(width=NAME, flex="0 0 auto", margin="2px"))
        row = bar([label, HBox(self.inputs(name), layout=Layout(width=INPUT, flex="0 0 auto")), self.notes[name]])
        row.add_class("nbtools-row")
        return row

    def inputs(self, name: str) -> list[Any]:
        return [self.fields[name], *([self.sliders[name]] if name in SPANS else [])]

    # -- what the user does

    def by_user(self, acts: Callable[[str, Any], None], name: str, change: Any) -> None:
        with self.panel.lock:
            if not self.filling:
                acts(name, change.new)

    def moved(self, name: str, value: float) -> None:
        """The user released a slider: its field gets the value, a whole number or two digits."""
        self.fields[name].value = f"{value:.2g}" if name == "lr" else str(round(value))

    def chosen(self, _: str, label: str) -> None:
        if label in self.panel.presets:
            self.panel.put(self.panel.presets[label])

    def holds(self, name: str, plan: Plan) -> Any:
        """Return the value of a setting as its input holds it."""
        value = getattr(plan, name)
        return written(value) if isinstance(self.fields[name], Text) else value

    def changed(self) -> str:
        changes = self.panel.plan.changes_from(self.panel.advised)
        return f"Changed: {', '.join(changes)}" if changes else "No setting is changed"

    # -- what is shown

    def show(self) -> None:
        """Show the wanted plan; what is refused or has to be confirmed stays in its field."""
        panel, self.plan, self.filling = self.panel, self.panel.plan, True
        held = {*panel.bad, *(panel.asked.changes_from(self.plan) if panel.asked else ())}
        for name, made in self.fields.items():
            made.disabled, wrong = name in panel.fixed, panel.bad.get(name, "")
            if name not in held:
                made.value = self.holds(name, self.plan)
            good = said(panel.rules[name].metadata.get("help", "")) + said(panel.reason(name), "nbtools-muted")
            self.notes[name].value = said(wrong, "nbtools-bad") or good
            (made.add_class if wrong else made.remove_class)("nbtools-wrong")
        for name, (base, *_) in SPANS.items():
            move(self.sliders[name], base, getattr(self.plan, name))
        self.menu.value = next((label for label, plan in panel.presets.items() if plan == self.plan), OTHER)
        for name, caption in self.captions.items():
            advised = escape(show.shown(getattr(panel.advised, name)))
            caption.value = f'<div class="nbtools-said"><b>{name}</b> <span>advised {advised}</span></div>'
        self.filling = False
        self.show_notice()
        self.show_run()

    def show_notice(self) -> None:
        """Show what is asked or refused, else what a change brought with it or what limits the plan, else what was
        changed, and the buttons that answer."""
        panel, bad = self.panel, "; ".join(self.panel.bad.values())
        self.notice.value = said(
            f"Not applied: {bad}" if bad else panel.note or self.changed(), "nbtools-bad" * bool(bad), True
        )
        asked = [*panel.asked.changes_from(self.plan)] if panel.asked else []
        one = asked[0] if len(asked) == 1 else ""
        kept = one or next(iter(panel.bad), "")
        apply = f"Apply {len(asked)} changes" if asked else ""
        if one or (panel.proposed and not bad):
            wanted = {one: getattr(panel.asked, one)} if one else panel.proposed
            apply = f"Apply {', '.join(f'{name} = {show.shown(value)}' for name, value in wanted.items())}"
        keep = f"Keep {kept} = {show.shown(getattr(self.plan, kept))}" if kept else "Keep what is applied"
        for made, text in ((self.apply, apply), (self.keep, keep if bad else "")):
            made.description, made.layout.display = text, "inline-block" if text else "none"

    def show_run(self) -> None:
        """Show what is pending in the run, if one is in progress. An unchanged value sends nothing."""
        requests = self.panel.requests if self.panel.running else None
        paused, pending = (requests.paused, requests.pending) if requests else (False, ())
        messages = [PAUSED] if paused and "stop" not in pending else []
        messages += [f"{BUTTONS[action][0]}: after this step …" for action in BUTTONS if action in pending]
        if requests is not None and requests.change:
            messages.append(f"after this step: {requests.change}")
        text = " · ".join(messages) or self.told
        self.pending.value = said(text, "" if messages else "nbtools-muted", True)
        self.own.layout.display, self.before.layout.display = ("flex", "none") if requests else ("none", "flex")
        for action, made in self.actions.items():
            resume = action == "pause" and paused
            made.description, made.icon, made.tooltip = RESUME if resume else BUTTONS[action]
            made.button_style = "primary" if resume else ""
            able = requests is not None and (requests.able(action) or (action == "undo" and bool(self.panel.bad)))
            made.disabled = not able or "stop" in pending or action in pending

    def tell(self, message: str) -> None:
        """Show a message where nothing is pending."""
        self.told = message
        self.show_run()


def field(value: Any, rule: Field[Any], name: str) -> Any:
    """Return the input for one setting: a box to tick, a list to choose from, or text that is read when it is
    complete."""
    layout = Layout(width=NUMBER if name in STRIP else INPUT, flex="0 0 auto", margin="2px 0")
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


def slider(value: float, base: float, reach: int, step: float, form: str) -> FloatLogSlider:
    """Return a slider around a value; it shows its value while it is dragged, and reports where it is released."""
    look: Any = {"continuous_update": False, "readout_format": form, "layout": Layout(width=SLIDER, flex="0 0 auto")}
    middle = math.log(value, base) if base == 2 else round(math.log(value, base))  # halves and doubles of a batch
    least = middle - (min(reach, math.floor(middle)) if base == 2 else reach)  # no batch below one
    made = FloatLogSlider(value=value, base=base, min=least, max=middle + reach, step=step, **look)
    made.add_class("nbtools-slider")
    return made


def move(slider: FloatLogSlider, base: float, value: float) -> None:
    """Move to a value; the range grows to it."""
    place = round(math.log(value, base), 9)
    slider.min, slider.max = min(slider.min, math.floor(place)), max(slider.max, math.ceil(place))
    slider.value = value


def said(text: str, look: str = "", status: bool = False) -> str:
    """Return escaped text; status: read aloud when it changes, in full as a tooltip."""
    title = f' role="status" title="{escape(text)}"' if status else ""
    return f'<div class="nbtools-said {look}"{title}>{escape(text)}</div>' if text else ""


def markup(kind: str = "", height: str = "auto") -> HTML:
    """Return text that takes the room that is left. kind: a class, of text of a fixed height."""
    made = HTML(layout=Layout(flex=f"1 1 {NOTE}", width="auto", min_width="0", margin="2px 0", height=height))
    if kind:
        made.add_class(kind)
        made.layout.margin, made.layout.overflow = "0", "hidden"
        made.layout.flex = "0 1 auto" if height == LINES else f"1 1 {height}"  # buttons stand next to their question
    return made


def button(action: Callable[[], None], icon: str) -> Button:
    made = Button(icon=icon, layout=Layout(width="auto", margin="2px 0", flex="0 0 auto"))
    made.on_click(lambda _: action())
    return made


def folded(title: str, child: Any) -> widgets.Accordion:
    made = widgets.Accordion([child], selected_index=None, layout=Layout(margin="8px 0 0"))
    made.set_title(0, title)
    return made


def bar(children: list[Any], grid_gap: str = "4px 8px") -> HBox:
    """Return widgets in a line that breaks where the window ends."""
    return HBox(children, layout=Layout(flex_flow="row wrap", align_items="center", grid_gap=grid_gap))


def column(children: list[Any]) -> VBox:
    return VBox(children, layout=Layout(width="100%"))
