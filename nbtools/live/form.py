"""The widgets of a Panel: buttons that act on a run, a strip of settings, a form. Core ipywidgets of 7.7.1 and 8. What
is above the curves keeps its height: a click under which a button moves is lost."""

from collections.abc import Callable
from dataclasses import Field
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets import HTML, Button, FloatLogSlider, HBox, Layout, Text, VBox

from nbtools.live.draw import HEAD
from nbtools.show import shown

STRIP = ("lr", "batch_size", "amp", "epochs", "clip_norm", "early_stop")  # settings next to the curves of a run
IN_VIEW = ("network", *STRIP, "eval_every")  # of the form; all other settings are under More
BUTTONS = {
    "pause": ("Pause", "pause", "Pause after this step; the run stays in memory until Resume"),
    "stop": ("Stop", "stop", "Finish the step, save a checkpoint and return the run; run the cell again to continue"),
    "evaluate": ("Evaluate now", "check", "Evaluate the validation split after this step, then continue"),
    "save": ("Save now", "save", "Write a checkpoint after this step, then continue"),
    "profile": ("What limits it?", "search", "Measure for a few seconds where a step's time goes, then continue"),
    "best": ("Back to best", "history", "Go back to the best checkpoint and continue from there with these settings"),
    "undo": ("Undo", "undo", "Go back to the state before the last change of settings"),
}  # action → label, icon (a name that Font Awesome 4 to 6 know), tooltip
RESUME = ("Resume", "play", "Continue with the next step")
PAUSED = "paused between two steps: change what you like, then Resume"
ELSEWHERE = "Training is running: its settings are in the cell below, next to the curves."
OTHER = "Other settings …"


class Form:
    """The widgets of a Panel; they call its methods. controls: of a run in progress, above its curves, the form folded.
    whole: of the panel's own cell: the form, folded after a run, and amid one the buttons, since its output may be
    gone. plan: what the fields show. told: the newest message of the run."""

    def __init__(self, panel: Any):
        self.panel, self.plan, self.told, self.filling = panel, panel.plan, "", False
        self.actions = {action: button(partial(panel.click, action)) for action in BUTTONS}
        self.apply, self.keep = button(panel.accept, "check"), button(panel.propose, "times")
        self.pending, self.notice = make(HTML, look="line"), make(HTML, look="lines")
        self.fields = {name: field(getattr(self.plan, name), rule) for name, rule in panel.rules.items()}
        span: Any = {"base": 10, "min": -6, "max": 0, "step": 0.05, "continuous_update": False}
        self.slider = make(FloatLogSlider, value=self.plan.lr, readout_format=".2g", **span, look="slider")
        self.menu = make(widgets.Dropdown, options=[OTHER, *panel.presets], look="menu")
        self.notes = {name: HTML() for name in self.fields}
        for name, each in (*self.fields.items(), ("lr", self.slider), ("Other settings", self.menu)):
            each.description = name  # read aloud; what is seen of it stands elsewhere
            each.observe(partial(self.by_user, name), names="value")
        self.arrange()

    def arrange(self) -> None:
        asking, knobs, rows = make(HBox, [self.notice, self.apply, self.keep], look="asking"), {}, {}
        for name, rule in self.panel.rules.items():
            unit = f" ({rule.metadata['unit']})" if rule.metadata.get("unit") else ""
            inputs = HBox([self.fields[name], *[self.slider] * (name == "lr")])
            parts = [HTML(escape(name + unit)), inputs, self.notes[name]]
            rows[name] = make(HBox, parts, look="row narrow" if name in STRIP else "row")
            if name in STRIP:
                knobs[name] = make(VBox, [HTML(f"<b>{name}</b>"), inputs], look="knob narrow")
        first = [rows.pop(name) for name in IN_VIEW if name in rows]
        form = make(VBox, [self.menu, *first, fold(f"More: {len(rows)} settings", [*rows.values()])], look="form")
        head, actions = HTML(HEAD, layout=Layout(display="none")), make(HBox, [*self.actions.values()], look="bar")
        strip = make(HBox, [knobs[name] for name in STRIP], look="bar")
        self.every = fold("All settings", [make(VBox, [form], look="fold")])
        self.controls = make(VBox, [head, actions, self.pending, strip, asking, self.every], look="panel")
        self.own = VBox([actions, self.pending, HTML(message(ELSEWHERE, "nbtools-muted"))])
        self.before = VBox([asking, form])
        self.whole = make(VBox, [head, self.own, self.before], look="panel")

    def by_user(self, name: str, change: Any) -> None:
        """Read a field; the slider, released, sets the field of lr in two digits."""
        with self.panel.lock:
            if self.filling:
                return
            if change.owner is self.slider:
                self.fields[name].value = f"{change.new:.2g}"
            elif change.owner is not self.menu:
                self.panel.read(name, change.new)
            elif change.new in self.panel.presets:
                self.panel.put(self.panel.presets[change.new])

    def holds(self, name: str) -> Any:
        """Return the wanted value of a setting as its input holds it."""
        value = getattr(self.panel.plan, name)
        return to_text(value) if isinstance(self.fields[name], Text) else value

    def show(self) -> None:
        """Show the wanted plan; what is refused stays in its field, and reasons for advised values are tooltips."""
        panel, self.plan, self.filling = self.panel, self.panel.plan, True
        held = {*panel.bad, *panel.proposed} if panel.bad else set()
        for name, each in self.fields.items():
            each.disabled, wrong = name in panel.fixed, panel.bad.get(name, "")
            if name not in held:
                each.value = self.holds(name)
            why, same = panel.reason(name), getattr(self.plan, name) == getattr(panel.advised, name)
            text = panel.rules[name].metadata.get("help", "") or why
            good = message(text, more=why) + message("" if same and name not in panel.fixed else why, "nbtools-muted")
            self.notes[name].value = message(wrong, "nbtools-bad") or good
            (each.add_class if wrong else each.remove_class)("nbtools-wrong")
        self.slider.value = self.plan.lr
        self.menu.value = next((label for label, plan in panel.presets.items() if plan == self.plan), OTHER)
        self.filling = False
        self.show_notice()
        self.show_run()

    def show_notice(self) -> None:
        """Show the question or refusal, else the note, else what was changed; and the buttons to answer with."""
        panel, names = self.panel, [*self.panel.bad]
        text = panel.note or panel.changed
        bad = f"Not applied: {'; '.join(panel.bad.values())}" if names else ""
        self.notice.value = message(bad or text, "nbtools-bad" * bool(bad), True)
        few, count = ", ".join(f"{n} = {to_text(value)}" for n, value in panel.proposed.items()), len(panel.proposed)
        apply = f"Apply {few if count < 3 else f'{count} changes'}" if count else ""
        single = len(names) == 1 and names[0] and count < 2
        keep = f"Keep {names[0]} = {to_text(getattr(self.plan, names[0]))}" if single else "Keep the applied values"
        for each, text in ((self.apply, apply), (self.keep, keep if bad else "")):
            each.description, each.layout.display = text, "inline-block" if text else "none"

    def show_run(self) -> None:
        """Show what is pending in a run in progress, else its newest message; what is unchanged is not sent."""
        requests = self.panel.requests if self.panel.running else None
        paused, pending = (requests.paused, requests.pending) if requests else (False, ())
        messages = [PAUSED] if paused and "stop" not in pending else []
        messages += [f"{BUTTONS[action][0]} – after this step …" for action in BUTTONS if action in pending]
        messages += [f"after this step: {requests.change}"] if requests and requests.change else []
        self.pending.value = message(" · ".join(messages) or self.told, "" if messages else "nbtools-muted", True)
        self.own.layout.display, self.before.layout.display = ("flex", "none") if requests else ("none", "flex")
        if requests:  # at its end the form comes back folded, so that what is below stays where it is
            self.before.children = (self.before.children[0], self.every)
        for action, each in self.actions.items():
            resume = action == "pause" and paused
            each.description, each.icon, each.tooltip = RESUME if resume else BUTTONS[action]
            each.button_style = "primary" if resume else ""
            able = requests is not None and (requests.able(action) or (action == "undo" and bool(self.panel.bad)))
            each.disabled = not able or "stop" in pending or action in pending


def field(value: Any, rule: Field[Any]) -> Any:
    """Return the input for one setting: a box to tick, a list to choose from, or a text, read when complete."""
    if isinstance(rule.default, bool):
        return widgets.Checkbox(value=value, indent=False)
    if rule.metadata.get("choices"):
        return widgets.Dropdown(options=list(rule.metadata["choices"]), value=value)
    return Text(value=to_text(value), continuous_update=False)


def to_text(value: Any) -> str:
    """Return a value as text that Plan.parse reads."""
    return ", ".join(map(to_text, value)) if isinstance(value, tuple) else shown(value)


def message(text: str, look: str = "", status: bool = False, more: str = "") -> str:
    """Return escaped text. status: read aloud when it changes. more: its tooltip, by default the text in full."""
    role = ' role="status"' * status
    return f'<div class="nbtools-said {look}"{role} title="{escape(more or text)}">{escape(text)}</div>' if text else ""


def button(action: Callable[[], None], icon: str = "") -> Button:
    each = Button(icon=icon)
    each.on_click(lambda _: action())
    return each


def fold(title: str, children: list[Any]) -> widgets.Accordion:
    each = widgets.Accordion([VBox(children)], selected_index=None)
    each.set_title(0, title)
    return each


def make(kind: Any, *values: Any, look: str, **options: Any) -> Any:
    widget = kind(*values, **options)
    for name in look.split():
        widget.add_class(f"nbtools-{name}")
    return widget
