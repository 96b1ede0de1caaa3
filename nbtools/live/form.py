"""The widgets of a Panel: buttons that act on a run, a strip of the settings that users change most while it trains,
and a form with name, input, slider and note of each setting.

Core ipywidgets that 7.7.1 and 8 both have. What is shown above the curves has the same
height whatever it says: a click under which a button moves is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets import HTML, Button, FloatLogSlider, HBox, Layout, Text, VBox

from nbtools import show
from nbtools.live.draw import HEAD
from nbtools.train import Plan

STRIP = ("lr", "batch_size", "amp", "epochs", "clip_norm", "early_stop")
"""The settings that users change most, next to the curves of a run in progress."""
IN_VIEW = ("network", *STRIP, "eval_every")  # of the form; all other settings are under More
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
        self.actions = {action: button(partial(panel.click, action)) for action in BUTTONS}
        self.apply, self.keep = button(panel.accept, "check"), button(panel.drop, "times")
        self.pending, self.notice = classed(HTML(), "line"), classed(HTML(), "lines")
        self.fields = {name: field(getattr(self.plan, name), rule) for name, rule in panel.rules.items()}
        span: Any = {"base": 10, "min": -6, "max": 0, "step": 0.05, "continuous_update": False}
        self.slider = classed(FloatLogSlider(value=self.plan.lr, readout_format=".2g", **span), "slider")
        self.inputs = {n: HBox([made, *[self.slider] * (n == "lr")]) for n, made in self.fields.items()}
        self.captions, self.notes = {name: HTML() for name in STRIP}, {name: HTML() for name in self.fields}
        self.menu = classed(widgets.Dropdown(options=[OTHER, *panel.presets]), "menu")
        for name, made in (*self.fields.items(), ("lr", self.slider), ("Other settings", self.menu)):
            tooltip = "tooltip" if made.has_trait("tooltip") else "description_tooltip"  # ipywidgets 8, or 7
            made.set_trait(tooltip, name)
            acts = self.moved if made is self.slider else self.chosen if made is self.menu else panel.read
            made.observe(partial(self.by_user, acts, name), names="value")
        self.arrange()

    def arrange(self) -> None:
        """Put the widgets together, each in a class of live.css."""
        asking, rows = classed(HBox([self.notice, self.apply, self.keep]), "asking"), dict[str, HBox]()
        for name, rule in self.panel.rules.items():
            unit = f" ({rule.metadata['unit']})" if rule.metadata.get("unit") else ""
            parts = [HTML(escape(name + unit)), self.inputs[name], self.notes[name]]
            rows[name] = classed(HBox(parts), "row", *["narrow"] * (name in STRIP))
        parts = [rows.pop(name) for name in IN_VIEW if name in rows]
        more = folded(f"More: {len(rows)} settings", VBox([*rows.values()]))
        form = classed(VBox([self.menu, *parts, more]), "form")
        knobs = [classed(VBox([self.captions[name], self.inputs[name]]), "knob", "narrow") for name in STRIP]
        actions, strip = classed(HBox([*self.actions.values()]), "bar"), classed(HBox(knobs), "bar")
        every = folded("All settings", classed(VBox([form]), "fold"))
        head = HTML(HEAD, layout=Layout(display="none"))
        self.controls = classed(VBox([head, actions, self.pending, strip, asking, every]), "panel")
        self.own = VBox([actions, self.pending, HTML(said(ELSEWHERE, "nbtools-muted"))])
        self.before = VBox([asking, form])
        self.whole = classed(VBox([head, self.own, self.before]), "panel")

    # -- what the user does

    def by_user(self, acts: Callable[[str, Any], None], name: str, change: Any) -> None:
        with self.panel.lock:
            if not self.filling:
                acts(name, change.new)

    def moved(self, name: str, value: float) -> None:
        """The user released the slider: its field gets the value in two digits."""
        self.fields[name].value = f"{value:.2g}"

    def chosen(self, _: str, label: str) -> None:
        if label in self.panel.presets:
            self.panel.put(self.panel.presets[label])

    def holds(self, name: str, plan: Plan) -> Any:
        """Return the value of a setting as its input holds it."""
        value = getattr(plan, name)
        return written(value) if isinstance(self.fields[name], Text) else value

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
        self.slider.value = self.plan.lr
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
        text = f"Not applied: {bad}" if bad else panel.note or panel.changed()
        self.notice.value = said(text, "nbtools-bad" * bool(bad), True)
        asked = (
            {name: getattr(panel.asked, name) for name in panel.asked.changes_from(self.plan)} if panel.asked else {}
        )
        wanted = asked or ({} if bad else panel.proposed)
        values = ", ".join(f"{name} = {show.shown(value)}" for name, value in wanted.items())
        apply = f"Apply {values if len(wanted) < 3 else f'{len(wanted)} changes'}" if wanted else ""
        kept = next(iter(asked if len(asked) == 1 else {} if asked else panel.bad), "")
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


def field(value: Any, rule: Field[Any]) -> Any:
    """Return the input for one setting: a box to tick, a list to choose from, or text that is read when it is
    complete."""
    if isinstance(rule.default, bool):
        return widgets.Checkbox(value=value, indent=False)
    if rule.metadata.get("choices"):
        return widgets.Dropdown(options=list(rule.metadata["choices"]), value=value)
    return Text(value=written(value), continuous_update=False)


def written(value: Any) -> str:
    """Return a value as text that Plan.parse reads."""
    if isinstance(value, tuple):
        return ", ".join(map(written, value))
    return "none" if value is None else show.shown(value)


def said(text: str, look: str = "", status: bool = False) -> str:
    """Return escaped text; status: read aloud when it changes, in full as a tooltip."""
    title = f' role="status" title="{escape(text)}"' if status else ""
    return f'<div class="nbtools-said {look}"{title}>{escape(text)}</div>' if text else ""


def button(action: Callable[[], None], icon: str = "") -> Button:
    made = Button(icon=icon)
    made.on_click(lambda _: action())
    return made


def folded(title: str, child: Any) -> widgets.Accordion:
    made = widgets.Accordion([child], selected_index=None)
    made.set_title(0, title)
    return made


def classed(widget: Any, *names: str) -> Any:
    """Return the widget, in classes of live.css."""
    for name in names:
        widget.add_class(f"nbtools-{name}")
    return widget
