"""Panel: a form over the fields of a Plan, built from the dataclass itself, so that a new knob appears here by itself;
while a run is under way, what a person says to it.

Callbacks set values and nothing else: they may run on another thread.
"""

from __future__ import annotations

import dataclasses
import math
import re
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nbtools import table
from nbtools.errors import MissingExtra, NbtoolsError, PlanError
from nbtools.live.control import Wishes
from nbtools.live.panel.offers import RULES, Before
from nbtools.train import Plan
from nbtools.train import plan as plans

VIEW = "application/vnd.jupyter.widget-view+json"
MANY = 3  # changed knobs beyond which a line names them alone
SHOWN = 5  # names of changed knobs on a button

SPEED = {"batch_size", "micro_batch_size", "amp", "compile", "graph", "channels_last", "feed", "workers", "prefetch"}
"""Knobs on which depends what a step is bound by."""


def always(action: str) -> bool:
    """Whether an action is possible, for a run that does not say."""
    return True


@dataclass(frozen=True)
class Question:
    """What is asked about once more. knob: the row that it is shown in, "" for the presets'; label: of the button that
    applies it."""

    knob: str
    label: str
    apply: Callable[[], None]


class Panel:
    """The plan of an Advice, or a Plan, to look at and to change, before the run and while it lasts.

    `plan` is always valid: a value that breaks a rule shows the rule beside its field and changes nothing. A change of
    batch size moves lr by the plan's lr_rule, and offers what the other rules would do. Works without a front end:
    `panel.fields["lr"].value = "3e-4"`. Raises MissingExtra where ipywidgets does not import.
    """

    def __init__(self, advice: Any):
        self.advised: Plan = getattr(advice, "plan", advice)
        if not isinstance(self.advised, Plan):
            raise PlanError(
                f"Panel takes an Advice or a Plan, got {type(advice).__qualname__}; try Panel(nb.advise(…))"
            )
        self.plan = self.acting = self.advised  # acting: what the run goes on with until it takes a wish
        why, measured = getattr(advice, "reasons", {}), getattr(advice, "evidence", {})
        self.reasons = {
            name: "; ".join(filter(None, [why.get(name), measured.get(name)])) for name in {**why, **measured}
        }
        self.presets: dict[str, Plan] = {}
        self.rules = {field.name: field for field in dataclasses.fields(self.advised)}
        self.hints = typing.get_type_hints(type(self.advised))
        self.fixed: dict[str, str] = {}
        self.check: Callable[[Plan], None] = anything
        self.before: Before | None = None
        self.lock = threading.RLock()  # the run and a person may both be changing it
        self.proposed: dict[str, Any] = {}
        self.question: Question | None = None
        self.draw(advice)
        self.show({})
        if (verdict := getattr(advice, "verdict", None)) is not None:
            self.propose(verdict.sentence, verdict.change)

    def draw(self, advice: Any) -> None:
        """Make the widgets."""
        Form, Buttons, Proposal, button, column = drawing()
        presets = {
            "Guide's baseline": (getattr(advice, "baseline", None), "The guide's settings, the receipt's “before”"),
            "As advised": (self.advised, "Every knob as it was advised"),
            "Largest batch": (getattr(advice, "largest", None), getattr(advice, "largest_reason", "")),
        }
        made = {}
        for label, (plan, why) in presets.items():
            if plan is not None or (label == "Largest batch" and why):
                made[label] = button(label, partial(self.preset, label), why)
                made[label].disabled = plan is None
            if plan is not None:
                self.presets[label] = plan
        offers = {rule: button("", partial(self.follow, rule), why) for rule, (_, why) in RULES.items()}
        confirm = button("", self.insist, "Apply it anyway", "exclamation-triangle")
        self.form = Form(self.advised.to_dict(), self.rules, made, self.read, offers, confirm)
        self.fields, self.sliders, self.notes = self.form.fields, self.form.sliders, self.form.notes
        self.said, self.view = self.form.said, self.form.view
        self.buttons, self.proposal = Buttons(), Proposal(self.make)
        self.controls = column([self.buttons.view, self.proposal.view])
        self.acts = column([self.buttons.view])
        self.whole = column([self.acts, self.view])  # for the panel's own cell, which outlives the output of fit's
        self.acts.layout.display = "none"

    def begin(
        self,
        wishes: Wishes,
        fixed: Mapping[str, str],
        check: Callable[[Plan], None],
        advised: Plan | None = None,
        able: Callable[[str], bool] = always,
    ) -> None:
        """A run starts: changes become its wishes. fixed: knob → why it cannot change now; check: raises NbtoolsError
        for a plan that this run cannot go on with; advised: for this run, where that is not this panel's; able: whether
        there is anything to do for one of `control.ACTIONS`."""
        with self.lock:
            self.fixed = {name: why for name, why in fixed.items() if name in self.fields}
            self.check, self.acting, self.question = check, self.plan, None
            if advised is not None:
                self.advised = self.presets["As advised"] = advised
            self.buttons.wishes, self.buttons.asked, self.buttons.able = wishes, "", able
            self.acts.layout.display = "flex"
            self.show({})

    def refresh(self) -> None:
        """Show what was granted, or was wished elsewhere; nothing is sent where nothing changed."""
        with self.lock:
            self.buttons.show()

    def take(self, plan: Plan) -> None:
        """The run goes on with this plan, whoever wished it: show it, unless a newer wish waits."""
        with self.lock:
            wishes = self.buttons.wishes
            waits = wishes is not None and wishes.plan is self.plan and self.plan != self.acting
            self.acting = plan
            if plan != self.plan and not waits:
                self.plan, self.before, self.question = plan, None, None
                _, wrong = self.changes()
                self.show(wrong)
            self.buttons.asked = turned(plan, self.plan)
            self.buttons.show()

    def hear(self, plan: Plan) -> None:
        """Somebody else wished this plan: show it as if it was wished here, or a click would take it back."""
        with self.lock:
            if plan != self.plan:
                self.before = self.question = None
                _, wrong = self.changes()
                self.adopt(plan)
                self.show(wrong)

    def end(self) -> None:
        """The run is over: everything may be changed again, and there is nothing to pause."""
        with self.lock:
            self.fixed, self.check, self.acting, self.question = {}, anything, self.plan, None
            self.buttons.wishes, self.buttons.able = None, always
            self.acts.layout.display = "none"
            self.show({})

    def propose(self, sentence: str, change: Mapping[str, Any] | None) -> None:
        """Show what the plan is bound by, and a button for the one change worth making."""
        with self.lock:
            self.proposed = dict(change or {})
            done = ", ".join(f"{name} = {table.shown(value)}" for name, value in self.proposed.items())
            self.proposal.show(sentence, f"Make it so: {done}" if done else "")

    def make(self) -> None:
        """The change that was proposed."""
        with self.lock:
            self.show(self.accept(self.proposed))

    def reset(self) -> None:
        """Back to what was advised."""
        self.put(self.advised)

    def preset(self, label: str) -> None:
        self.put(self.presets[label])

    def put(self, plan: Plan, sure: bool = False) -> None:
        """Take a plan, and show it in the fields; a started run keeps what is fixed in it, and asks once more unless
        the user is sure."""
        with self.lock:
            self.question = None
            kept = [name for name in self.fixed if getattr(plan, name) != getattr(self.plan, name)]
            try:
                wanted = plan.replace(**{name: getattr(self.plan, name) for name in kept})
                self.check(wanted)
            except NbtoolsError as error:
                self.form.ask("", "")
                self.form.say(f"Not taken: {error}", wrong=True)
                return
            if not sure and (asks := self.doubts(wanted)):
                self.question = Question("", changing(self.plan, wanted), partial(self.put, plan, sure=True))
                self.show({}, "; ".join(asks.values()))
                return
            self.before = None
            self.adopt(wanted)
            self.show({}, f"kept: {', '.join(kept)} (fixed in a started run)" if kept else "")

    def follow(self, rule: str) -> None:
        """Take an offered lr."""
        with self.lock:
            if self.before is not None:
                wrong = self.accept({"lr": self.before.offers(self.plan.batch_size)[rule]})
                self.show(wrong)

    def read(self, name: str = "", said: Any = None) -> None:
        """Take what the fields say; what breaks a rule stays as it was, and the rule is shown beside it.

        name, said: what a person just changed, which the run may have written over since.
        """
        with self.lock:
            self.question = None
            self.form.fill({}, {name: said} if name else {})
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
        """What a field says, checked by the field's own rule. Raises PlanError."""
        said, current = self.fields[name].value, getattr(self.plan, name)
        if said == self.form.holds(name, current):
            return current  # every bit of it, where the text shows six digits
        kind, label = type(self.advised), f"{type(self.advised).__qualname__}.{name}"
        value = kind.parse(name, said.strip()) if isinstance(said, str) else said
        return plans.checked(label, value, self.hints[name], self.rules[name].metadata)

    def doubts(self, plan: Plan) -> dict[str, str]:
        """What to ask once more: nothing while no run is under way."""
        return {} if self.buttons.wishes is None else plans.doubts(self.plan, plan, self.advised)

    def insist(self) -> None:
        """Apply what was asked about once more."""
        with self.lock:
            if (question := self.question) is not None:
                self.question = None
                question.apply()

    def force(self, name: str, value: Any) -> None:
        """Take a change without asking once more."""
        self.show(self.accept({name: value}, sure=True))

    def accept(self, changed: dict[str, Any], sure: bool = False) -> dict[str, str]:
        """Take the changes; those that break a rule between fields, or the run's, are returned with the rule, and those
        to ask about once more with the question, unless the user is sure."""
        changed, wrong = dict(changed), {}
        while changed:
            try:
                plan = self.plan.turn(**changed)
                self.check(plan)
            except NbtoolsError as error:
                name = blamed(str(error), changed)
                wrong[name] = str(error)
                del changed[name]
                continue
            if not sure and (asks := self.doubts(plan)):
                name = blamed(" ".join(asks), changed)
                value = changed.pop(name)
                wrong[name] = "; ".join(asks.values())
                self.question = Question(name, f"Apply {name} = {table.shown(value)}", partial(self.force, name, value))
                continue
            if "lr" in changed:
                self.before = None
            elif "batch_size" in changed:
                self.before = self.before or Before(self.plan.batch_size, self.plan.lr)
            self.adopt(plan)
            break
        return wrong

    def adopt(self, plan: Plan) -> None:
        """This is the plan now; a run under way shall go on with it."""
        wishes = self.buttons.wishes
        if SPEED & set(plan.changes_from(self.plan)):
            self.proposal.show("", "")  # it was measured otherwise
        if plan != self.plan and wishes is not None:
            wishes.plan = plan
            self.buttons.asked = turned(self.acting, plan)
        self.plan = plan

    def show(self, wrong: Mapping[str, str], said: str = "") -> None:
        """Make everything say what the plan has, but for wrong fields: what was typed there stays, to be mended."""
        self.form.fill({name: value for name, value in self.plan.to_dict().items() if name not in wrong})
        self.form.fix(self.fixed)
        for name in self.fields:
            self.form.note(name, *self.help(name), wrong.get(name, ""))
        changed = list(self.plan.changes_from(self.advised))
        summary = f"Changed: {', '.join(changed)}" if changed else ""
        asked = self.question.knob if self.question is not None else ""
        if refused := [name for name in wrong if name != asked]:
            summary = f"Not taken: {', '.join(refused)}; the plan keeps its last valid value."
        elif asked:
            summary = f"Not applied yet: {asked}"
        self.form.mark([label for label, plan in self.presets.items() if plan == self.plan])
        self.form.say(" · ".join(filter(None, (summary, said))), bool(wrong) or self.question is not None)
        self.form.ask(asked, self.question.label if self.question is not None else "")
        self.form.offer(*(self.before.words(self.plan) if self.before else ("", {})))
        self.buttons.show()

    def help(self, name: str) -> tuple[str, str]:
        """What a knob does; and why it is as it is, where there is something to say."""
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
        """The form where there is a kernel, below the buttons while a run is under way; the table of the plan in a page
        that has none."""
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if (model := self.whole.model_id) is not None:
            bundle[VIEW] = {"version_major": 2, "version_minor": 0, "model_id": model}
        return bundle

    def rows(self) -> list[tuple[str, Any, str]]:
        return [(name, value, self.reasons.get(name, "")) for name, value in self.plan.to_dict().items()]

    def _repr_html_(self) -> str:
        return table.html(("knob", "value", "reason"), self.rows())

    def __repr__(self) -> str:
        return table.text(("knob", "value", "reason"), self.rows())


def drawing() -> tuple[Any, ...]:
    """What needs ipywidgets, imported when a panel is made."""
    try:
        from nbtools.live.panel.buttons import Buttons, Proposal
        from nbtools.live.panel.form import Form, button, column
    except ImportError as error:
        raise MissingExtra(
            f"Panel is drawn with ipywidgets, which does not import here ({error}); %pip install ipywidgets, or change "
            "the plan in code: advice.plan.replace(lr=3e-4)"
        ) from error
    return Form, Buttons, Proposal, button, column


def anything(plan: Plan) -> None:
    """What a panel checks beyond the plan's own rules while there is no run: nothing."""


def turned(old: Plan, new: Plan) -> str:
    """What differs between two plans, in a line: with the values as long as they are few."""
    names = list(new.changes_from(old)) if new is not old else []
    if len(names) > MANY:
        return ", ".join(names)
    return ", ".join(f"{n} {table.shown(getattr(old, n))} → {table.shown(getattr(new, n))}" for n in names)


def changing(old: Plan, new: Plan) -> str:
    """What a button that makes all changes of a preset says."""
    names = list(new.changes_from(old))
    listed = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return f"Apply {table.plural(len(names), 'change')}: {listed}"


def passes(plan: Plan) -> str:
    """How a batch goes through the model."""
    if plan.micro_batch_size is None:
        return f"batch {plan.batch_size} in one forward pass; in halves where memory ends"
    count = math.ceil(plan.batch_size / plan.micro_batch_size)
    return f"batch {plan.batch_size} in {count} forward passes of {plan.micro_batch_size}: less memory, the same step"


def blamed(message: str, changed: dict[str, Any]) -> str:
    """The changed field that an error speaks of (`Plan.warmup_epochs must be ≤ epochs (3)`), else the last changed."""
    return next((word for word in re.findall(r"\w+", message) if word in changed), list(changed)[-1])
