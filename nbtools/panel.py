"""Panel: a form over the fields of a Plan, built from the dataclass itself, so that a new knob appears here by itself.

Core ipywidgets only (7.7.1 to 8). Callbacks set values and nothing else: they may run on another thread.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from html import escape
from typing import Any

from nbtools import plan as plans
from nbtools import table
from nbtools.errors import PlanError
from nbtools.plan import Plan

SHOWN = ("network", "epochs", "batch_size", "lr", "schedule", "amp", "feed", "eval_every", "augment", "early_stop")
"""What people touch: the first eight of these that a plan has, in this order. The rest stands under More."""

HELP = "font-size:12px;line-height:1.35"
MUTED = f"{HELP};opacity:.65"
WRONG = f"{HELP};color:#D55E00;font-weight:600"  # Okabe & Ito's vermillion: contrast above 3.8 on white and on black


class Panel:
    """The plan of an Advice, or a Plan, to look at and to change before the run.

    `plan` is always valid: a value that breaks a rule shows the rule beside its field and changes nothing. A change of
    batch size moves lr by the plan's lr_rule. Works without a front end: `panel.fields["lr"].value = "3e-4"`.
    """

    def __init__(self, advice: Any):
        self.advised: Plan = getattr(advice, "plan", advice)
        if not isinstance(self.advised, Plan):
            raise PlanError(
                f"Panel takes an Advice or a Plan, got {type(advice).__qualname__}; try Panel(nb.advise(…))"
            )
        self.plan = self.advised
        self.reasons: dict[str, str] = getattr(advice, "reasons", {})
        self.baseline: Plan | None = getattr(advice, "baseline", None)
        self.rules = {field.name: field for field in dataclasses.fields(self.advised)}
        self.hints = typing.get_type_hints(type(self.advised))
        self.fields = {name: widget(getattr(self.plan, name), rule) for name, rule in self.rules.items()}
        self.notes = {name: markup() for name in self.fields}
        self.said = markup()
        self.writing = False  # the fields are being filled: not a person's doing
        self.view = form(self)
        for field in self.fields.values():
            field.observe(self.read, names="value")
        self.tell({})

    def reset(self) -> None:
        """Back to what was advised."""
        self.put(self.advised)

    def put(self, plan: Plan) -> None:
        """Take a plan, and show it in the fields."""
        self.plan = plan
        self.write({})
        self.tell({})

    def read(self, _change: Any = None) -> None:
        """Take what the fields say; what breaks a rule stays as it was, and the rule is shown beside it."""
        if self.writing:
            return
        changed, wrong = self.changes()
        while changed:
            try:
                size = changed.get("batch_size", self.plan.batch_size)
                self.plan = self.plan.with_batch_size(size).replace(**changed)
                break
            except PlanError as error:  # a rule between fields
                name = blamed(str(error), changed)
                wrong[name] = str(error)
                del changed[name]
        self.write(wrong)
        self.tell(wrong)

    def changes(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(field → value that differs from the plan's, field → why its value is refused)."""
        changed, wrong = {}, {}
        for name in self.fields:
            try:
                value = self.value(name)
                if value != getattr(self.plan, name):
                    changed[name] = value
            except PlanError as error:
                wrong[name] = str(error)
        return changed, wrong

    def value(self, name: str) -> Any:
        """What a field says, checked by the field's own rule. Raises PlanError."""
        said, current = self.fields[name].value, getattr(self.plan, name)
        if said == written(current, said):
            return current  # every bit of it, where the text shows six digits
        kind, label = type(self.advised), f"{type(self.advised).__qualname__}.{name}"
        value = kind.parse(name, said.strip()) if isinstance(said, str) else said
        return plans.checked(label, value, self.hints[name], self.rules[name].metadata)

    def write(self, wrong: dict[str, str]) -> None:
        """Make the fields say what the plan has, but for the wrong ones: what was typed there stays, to be mended."""
        self.writing = True
        try:
            for name, field in self.fields.items():
                if name not in wrong and not self.says(name):
                    field.value = written(getattr(self.plan, name), field.value)
        finally:
            self.writing = False

    def says(self, name: str) -> bool:
        try:
            return self.value(name) == getattr(self.plan, name)
        except PlanError:
            return False

    def tell(self, wrong: dict[str, str]) -> None:
        """The reasons, or what is wrong, beside the fields; above them, how the plan differs from the advice."""
        for name, note in self.notes.items():
            note.value = f'<span style="{WRONG}">{escape(wrong[name])}</span>' if name in wrong else self.help(name)
        if wrong:
            said = escape(f"Not taken: {', '.join(wrong)}; the plan keeps its last valid value.")
            self.said.value = f'<span style="{WRONG}">{said}</span>'
        else:
            changed = [n for n, v in self.plan.to_dict().items() if v != getattr(self.advised, n)]
            said = f"Changed: {', '.join(changed)}" if changed else "As advised"
            self.said.value = f'<span style="{MUTED}">{said}</span>'

    def help(self, name: str) -> str:
        """What a knob does; and why it was advised so, once it is not the task's own."""
        rule = self.rules[name].metadata
        text = f'<span style="{HELP}">{escape(rule.get("help", ""))}</span>'
        reason = self.reasons.get(name, "")
        if getattr(self.plan, name) != getattr(self.advised, name):
            reason = f"advised {table.shown(getattr(self.advised, name))}" + (f": {reason}" if reason else "")
        return f'{text}<br><span style="{MUTED}">{escape(reason)}</span>' if reason else text

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)

    def __repr__(self) -> str:
        values = self.plan.to_dict()
        return table.text(("knob", "value", "reason"), [(n, v, self.reasons.get(n, "")) for n, v in values.items()])


def widget(value: Any, rule: dataclasses.Field[Any]) -> Any:
    """The input for one field: a box to tick, a list to choose from, or text that is read when it is complete."""
    from ipywidgets import Checkbox, Dropdown, Layout, Text

    layout = Layout(width="170px", min_width="170px", margin="2px 0")
    if isinstance(rule.default, bool):
        return Checkbox(value=value, indent=False, layout=layout)
    if rule.metadata.get("choices"):
        return Dropdown(options=list(rule.metadata["choices"]), value=value, layout=layout)
    return Text(value=written(value, ""), continuous_update=False, layout=layout)


def written(value: Any, like: Any) -> Any:
    """A value as its input holds it: text for text fields, in a form that Plan.parse reads."""
    if not isinstance(like, str) or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(written(part, "") for part in value)
    return "none" if value is None else table.shown(value)


def blamed(message: str, changed: dict[str, Any]) -> str:
    """The changed field that an error speaks of (`Plan.warmup_epochs must be ≤ epochs (3)`), else the last changed."""
    return next((word for word in re.findall(r"\w+", message) if word in changed), list(changed)[-1])


def markup() -> Any:
    from ipywidgets import HTML, Layout

    return HTML(layout=Layout(flex="1 1 auto", width="auto", min_width="0"))


def form(panel: Panel) -> Any:
    """The widgets in their places."""
    from ipywidgets import Accordion, Button, HBox, Layout, VBox

    def button(label: str, plan: Plan) -> Any:
        made = Button(description=label, layout=Layout(width="auto"))
        made.on_click(lambda _: panel.put(plan))
        return made

    presets = [button("As advised", panel.advised)]
    if panel.baseline is not None:
        presets.append(button("The guide's baseline", panel.baseline))
    shown = [name for name in SHOWN if name in panel.fields][:8]
    more = Accordion(children=[VBox([row(panel, n) for n in panel.fields if n not in shown])], selected_index=None)
    more.set_title(0, "More")
    top = HBox([*presets, panel.said], layout=Layout(align_items="center", grid_gap="10px", margin="0 0 6px"))
    return VBox([top, *[row(panel, name) for name in shown], more], layout=Layout(max_width="1040px"))


def row(panel: Panel, name: str) -> Any:
    from ipywidgets import HBox, Label, Layout

    unit = panel.rules[name].metadata.get("unit", "")
    help = panel.rules[name].metadata.get("help", "")
    title = f"{name} ({unit})" if unit and unit not in f"{name} {help}" else name
    label = Label(title, layout=Layout(width="170px", min_width="170px"))
    return HBox([label, panel.fields[name], panel.notes[name]], layout=Layout(align_items="center", grid_gap="12px"))
