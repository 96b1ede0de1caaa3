"""Panel: the fields of a Plan as a form, built from the dataclass itself, so that a new setting appears here
automatically; while a run is in progress, changes and clicks here become requests to it.

Callbacks set values and nothing else: they may run on another thread.
"""

from __future__ import annotations

import dataclasses
import math
import re
import threading
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbtools import table
from nbtools.errors import MissingExtra, NbtoolsError, PlanError
from nbtools.live.requests import Plans, Requests
from nbtools.train import Plan, fixed, lr_factor
from nbtools.train import plan as plans

VIEW = "application/vnd.jupyter.widget-view+json"
SHOWN = 5  # names of changed settings on a button

SPEED = {"batch_size", "micro_batch_size", "amp", "compile", "graph", "channels_last", "feed", "workers", "prefetch"}
"""Settings on which depends what a step is bound by."""

RULES = {
    "none": ("keep", "lr as it was"),
    "sqrt": ("√ rule", "times √k for a batch k times as large: rule of thumb for Adam (arXiv 2205.10287)"),
    "linear": ("linear", "times k for a batch k times as large: rule of thumb for SGD with warmup (arXiv 1706.02677)"),
}
"""lr_rule → what its button says, what taking it does."""
SAME = 5e-3  # relative: three digits show no difference


@dataclass(frozen=True)
class Before:
    """The batch size and lr that offers of another lr count from: those before the batch was changed, until lr is."""

    batch_size: int
    lr: float

    def offers(self, batch_size: int) -> dict[str, float]:
        """lr_rule → lr at another batch size, in the three digits that its button shows; lr itself under `none`."""
        k = batch_size / self.batch_size
        found = {rule: float(f"{self.lr * lr_factor(rule, k):.3g}") for rule in RULES}
        return {**found, "none": self.lr}

    def words(self, plan: Plan) -> tuple[str, dict[str, str]]:
        """(what happened on the way to this plan, lr_rule → what the button of another lr says); empty at the same
        batch size."""
        if self.batch_size == plan.batch_size:
            return "", {}
        did = f"lr stays {table.shown(plan.lr)}"
        if plan.lr != self.lr:
            did = f"lr {table.shown(self.lr)} → {table.shown(plan.lr)} by its rule ({plan.lr_rule})"
        others = {
            n: lr for n, lr in self.offers(plan.batch_size).items() if not math.isclose(lr, plan.lr, rel_tol=SAME)
        }
        labels = {rule: f"{RULES[rule][0]}: {table.shown(lr)}" for rule, lr in others.items()}
        return f"batch {self.batch_size} → {plan.batch_size}: {did}", labels


@dataclass(frozen=True)
class Question:
    """Changes that have to be confirmed. names: the settings. row: the setting in whose row it is shown, "" for the
    presets. apply: makes them."""

    names: tuple[str, ...]
    row: str
    label: str
    apply: Callable[[], None]


class Panel:
    """The plan of an Advice, or a Plan, as a form to read and change, before and during the run.

    `plan` is always valid: for a value that breaks a rule, the rule is shown next to its field and nothing changes. A
    change of batch size adjusts lr by the plan's lr_rule, and offers the lr of the other rules. Works without a front
    end: `panel.fields["lr"].value = "3e-4"`. Raises MissingExtra if ipywidgets cannot be imported.
    """

    def __init__(self, advice: Any):
        plan = getattr(advice, "plan", advice)
        if not isinstance(plan, Plan):
            raise PlanError(
                f"Panel takes an Advice or a Plan, got {type(advice).__qualname__}; try Panel(nb.advise(…))"
            )
        self.requests = Requests(Plans(plan, plan), plan)
        self.running = False
        why, measured = getattr(advice, "reasons", {}), getattr(advice, "evidence", {})
        self.reasons = {
            name: "; ".join(filter(None, [why.get(name), measured.get(name)])) for name in {**why, **measured}
        }
        self.rules = {field.name: field for field in dataclasses.fields(plan)}
        self.hints = typing.get_type_hints(type(plan))
        self.fixed: dict[str, str] = {}
        self.before: Before | None = None
        self.lock = threading.RLock()  # the run and the user may both be changing it
        self.proposed: dict[str, Any] = {}
        self.question: Question | None = None
        self.draw(advice)
        self.show()
        if (verdict := getattr(advice, "verdict", None)) is not None:
            self.propose(verdict.sentence, verdict.change)

    @property
    def plan(self) -> Plan:
        """The wanted plan: of the run in progress, else of the next one."""
        return self.requests.state.plan

    @property
    def advised(self) -> Plan:
        """The plan that values are compared with."""
        return self.requests.advised

    def draw(self, advice: Any) -> None:
        """Make the widgets."""
        form = drawing()
        self.presets = {
            "Guide's baseline": getattr(advice, "baseline", None),
            "As advised": self.plan,
            "Largest batch": getattr(advice, "largest", None),
        }
        why = {
            "Guide's baseline": "The guide's settings, the receipt's “before”",
            "As advised": "Every setting as it was advised",
            "Largest batch": getattr(advice, "largest_reason", ""),
        }
        made = {}
        for label, plan in self.presets.items():
            if plan is not None or (label == "Largest batch" and why[label]):
                made[label] = form.button(label, lambda label=label: self.put(self.preset(label)), why[label])
                made[label].disabled = plan is None
        offers = {rule: form.button("", partial(self.follow, rule), why) for rule, (_, why) in RULES.items()}
        confirm = form.button("", self.insist, "Apply it anyway", "exclamation-triangle")
        self.form = form.Form(self.plan.to_dict(), self.rules, made, self.read, offers, confirm)
        self.fields, self.sliders, self.notes = self.form.fields, self.form.sliders, self.form.notes
        self.buttons, self.proposal = form.Buttons(self.click), form.Proposal(lambda: self.make(self.proposed))
        self.view = self.form.view
        self.controls = form.column([self.buttons.view, self.proposal.view])
        self.acts = form.column([self.buttons.view])
        self.whole = form.column([self.acts, self.view])  # for the panel's own cell, which outlives the output of fit's
        self.acts.layout.display = "none"

    def preset(self, label: str) -> Plan:
        return self.advised if label == "As advised" else self.presets[label]

    def begin(self, requests: Requests) -> None:
        """A run starts: changes and clicks are posted to its requests, and so is what another thread changed here while
        the run was made ready."""
        with self.lock:
            late, self.requests, self.running = self.plan, requests, True
            self.fixed = {name: why for name, why in fixed(self.plan).items() if name in self.fields}
            self.acts.layout.display = "flex"
            self.put(late)

    def end(self) -> None:
        """The run is over: everything may be changed again, and there is nothing to pause."""
        with self.lock:
            self.requests = Requests(Plans(self.plan, self.plan), self.advised)
            self.running, self.fixed, self.question = False, {}, None
            self.acts.layout.display = "none"
            self.show()

    def refresh(self) -> None:
        """Show what was applied, or requested elsewhere; nothing is sent where nothing changed."""
        with self.lock:
            if self.form.values != self.plan.to_dict():
                self.before = self.question = None
                self.show(self.changes()[1])
            self.buttons.show(self.requests if self.running else None)

    def click(self, action: str) -> None:
        if self.running:
            self.requests.post("resume" if action == "pause" and self.requests.paused else action)
            self.buttons.show(self.requests)

    def propose(self, sentence: str, change: Mapping[str, Any] | None) -> None:
        """Show what the plan is bound by, and a button for the one change worth making."""
        with self.lock:
            self.proposed = dict(change or {})
            done = ", ".join(f"{name} = {table.shown(value)}" for name, value in self.proposed.items())
            self.proposal.show(sentence, f"Make it so: {done}" if done else "")

    def make(self, changes: Mapping[str, Any], sure: bool = False) -> None:
        """Want these changes, and show what came of it."""
        with self.lock:
            self.show(self.accept(changes, sure))

    def insist(self) -> None:
        """Apply the changes that had to be confirmed."""
        with self.lock:
            if (question := self.question) is not None:
                self.question = None
                question.apply()

    def reset(self) -> None:
        """Back to what was advised."""
        self.put(self.advised)

    def put(self, plan: Plan, sure: bool = False) -> None:
        """Request a whole plan, or nothing of it if it breaks a rule; a started run keeps what is fixed in it, and asks
        for confirmation unless the user is sure."""
        with self.lock:
            self.question = None
            kept = [name for name in self.fixed if getattr(plan, name) != getattr(self.plan, name)]
            note = f"kept: {', '.join(kept)} (fixed in a started run)" if kept else ""
            wanted = plan.replace(**{name: getattr(self.plan, name) for name in kept})
            try:
                asks = self.want(wanted, sure)
            except NbtoolsError as error:
                self.form.ask("", "")
                self.form.say(f"Not taken: {error}", wrong=True)
                return
            if asks:
                names = tuple(wanted.changes_from(self.plan))
                self.question = Question(names, "", applying(names), partial(self.put, plan, sure=True))
                note = "; ".join(asks.values())
            else:
                self.before = None
            self.show(note=note)

    def follow(self, rule: str) -> None:
        """Take an offered lr."""
        with self.lock:
            if self.before is not None:
                self.make({"lr": self.before.offers(self.plan.batch_size)[rule]})

    def read(self, name: str = "", text: Any = None) -> None:
        """Take what the fields hold; what breaks a rule stays as it was, and the rule is shown next to it.

        name, text: what the user just changed, which the run may have overwritten since.
        """
        with self.lock:
            self.question = None
            if name:
                self.form.hold(name, text)
            changed, wrong = self.changes()
            self.show({**wrong, **self.accept(changed)})

    def changes(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(field → value that differs from the plan's, field → why its value is refused)."""
        changed, wrong = {}, {}
        for name in self.fields:
            try:
                value = self.value(name)
            except PlanError as error:
                wrong[name] = str(error)
                continue
            if value == getattr(self.plan, name):
                continue
            if name in self.fixed:
                wrong[name] = f"{name} cannot change now: {self.fixed[name]}"
            else:
                changed[name] = value
        return changed, wrong

    def value(self, name: str) -> Any:
        """What a field holds, checked by the field's own rule. Raises PlanError."""
        text, current = self.fields[name].value, getattr(self.plan, name)
        if text == self.form.holds(name, current):
            return current  # every bit of it: the text shows three digits
        kind = type(self.plan)
        value = kind.parse(name, text.strip()) if isinstance(text, str) else text
        return plans.checked(f"{kind.__qualname__}.{name}", value, self.hints[name], self.rules[name].metadata)

    def accept(self, changed: Mapping[str, Any], sure: bool = False) -> dict[str, str]:
        """Want the changes; those that break a rule between fields, or the run's, are returned with the rule, and those
        to ask about once more with the question, unless the user is sure."""
        changed, wrong, asked = dict(changed), {}, {}
        while changed:
            batch_size, lr = self.plan.batch_size, self.plan.lr
            try:
                asks = self.want(self.plan.turn(**changed), sure)
            except NbtoolsError as error:
                name = blamed(str(error), changed)
                wrong[name] = str(error)
                del changed[name]
                continue
            if asks:
                for name in [name for name in asks if name in changed] or list(changed):
                    asked[name], wrong[name] = changed.pop(name), "; ".join(asks.values())
                continue
            if "lr" in changed:
                self.before = None
            elif "batch_size" in changed:
                self.before = self.before or Before(batch_size, lr)
            break
        if asked:
            [row, *more] = asked
            label = applying(asked) if more else f"Apply {row} = {table.shown(asked[row])}"
            self.question = Question(tuple(asked), "" if more else row, label, partial(self.make, asked, sure=True))
        return wrong

    def want(self, plan: Plan, sure: bool) -> dict[str, str]:
        """Make this the wanted plan, unless something has to be confirmed, which is returned: nothing while no run is
        in progress. Raises NbtoolsError if the run cannot continue with it."""
        self.requests.check(plan)
        asks = self.requests.doubts(plan) if self.running and not sure else {}
        if not asks and plan != self.plan:
            if SPEED & set(plan.changes_from(self.plan)):
                self.proposal.show("", "")  # it was measured otherwise
            self.requests.state.plan = plan
        return asks

    def show(self, wrong: Mapping[str, str] = types.MappingProxyType({}), note: str = "") -> None:
        """Make everything show the wanted plan, but for wrong fields, which keep the user's text, to be corrected."""
        self.form.fill(self.plan.to_dict(), wrong)
        self.form.fix(self.fixed)
        for name in self.fields:
            self.form.note(name, *self.help(name), wrong.get(name, ""))
        changed = list(self.plan.changes_from(self.advised))
        summary = f"Changed: {', '.join(changed)}" if changed else ""
        asked = self.question.names if self.question is not None else ()
        if refused := [name for name in wrong if name not in asked]:
            summary = f"Not taken: {', '.join(refused)}; the plan keeps its last valid value."
        elif wrong:
            summary = f"Not applied yet: {', '.join(asked)}"
        self.form.mark([label for label in self.presets if self.preset(label) == self.plan])
        self.form.say(" · ".join(filter(None, (summary, note))), bool(wrong) or self.question is not None)
        self.form.ask(*((self.question.row, self.question.label) if self.question is not None else ("", "")))
        self.form.offer(*(self.before.words(self.plan) if self.before else ("", {})))
        self.buttons.show(self.requests if self.running else None)

    def help(self, name: str) -> tuple[str, str]:
        """What a setting does; and why it is as it is, where there is a reason."""
        value, advised = getattr(self.plan, name), getattr(self.advised, name)
        reason = self.reasons.get(name, "")
        if value != advised:
            reason = f"advised {table.shown(advised)}" + (f": {reason}" if reason else "")
        if name == "micro_batch_size":
            reason = passes(self.plan)
        if name in self.fixed:
            reason = self.fixed[name]
        return self.rules[name].metadata.get("help", ""), reason

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The form if there is a kernel, below the buttons while a run is in progress; the table of the plan in a page
        without a kernel."""
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if (model := self.whole.model_id) is not None:
            bundle[VIEW] = {"version_major": 2, "version_minor": 0, "model_id": model}
        return bundle

    def rows(self) -> list[tuple[str, Any, str]]:
        return [(name, value, self.reasons.get(name, "")) for name, value in self.plan.to_dict().items()]

    def _repr_html_(self) -> str:
        return table.html(("setting", "value", "reason"), self.rows())

    def __repr__(self) -> str:
        return table.text(("setting", "value", "reason"), self.rows())


def drawing() -> Any:
    """The module that needs ipywidgets, imported when a panel is made."""
    try:
        from nbtools.live import form
    except ImportError as error:
        raise MissingExtra(
            f"Panel is drawn with ipywidgets, which does not import here ({error}); %pip install ipywidgets, or change "
            "the plan in code: advice.plan.replace(lr=3e-4)"
        ) from error
    return form


def applying(names: typing.Collection[str]) -> str:
    """What a button that makes several changes says."""
    listed = ", ".join(list(names)[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"Apply {table.plural(len(names), 'change')}: {listed}"


def passes(plan: Plan) -> str:
    """How a batch goes through the model."""
    if plan.micro_batch_size is None:
        return f"batch {plan.batch_size} in one forward pass; in halves where memory runs out"
    count = math.ceil(plan.batch_size / plan.micro_batch_size)
    return f"batch {plan.batch_size} in {count} forward passes of {plan.micro_batch_size}: less memory, the same step"


def blamed(message: str, changed: dict[str, Any]) -> str:
    """The changed field that an error names (`Plan.warmup_epochs must be ≤ epochs (3)`), else the last changed."""
    return next((word for word in re.findall(r"\w+", message) if word in changed), list(changed)[-1])
