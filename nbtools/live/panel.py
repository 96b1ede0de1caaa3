"""Panel: the fields of a Plan as a form, built from the dataclass itself, so that a new setting appears here
automatically; while a run is in progress, changes and clicks here become requests to it.

Callbacks set values and nothing else: they may run on another thread.
"""

from __future__ import annotations

import dataclasses
import math
import re
import threading
import time
import types
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from nbtools import show
from nbtools.errors import NbtoolsError, PlanError
from nbtools.live.requests import Plans, Requests
from nbtools.measure import explained
from nbtools.train import Plan, fixed, lr_factor

VIEW = "application/vnd.jupyter.widget-view+json"
SPEED = {"batch_size", "micro_batch_size", "amp", "compile", "graph", "channels_last"}
SPEED |= {"feed", "workers", "prefetch", "threads"}
"""Settings that affect what a step is bound by."""
RESTS = 0.4  # seconds until a slider that was moved rests: several presses of a key are one change of a run
NOTHING: Mapping[str, str] = types.MappingProxyType({})


class Panel(show.Table):
    """The plan of an Advice, or a Plan, as a form to read and change, before and during the run.

    `plan` is always valid: if a value breaks a rule, the rule is shown next to its field and nothing changes. A
    change of batch size adjusts lr by the plan's lr_rule, and offers the lr of the other rules. Works without a front
    end: `panel.fields["lr"].value = "3e-4"`.
    """

    def __init__(self, advice: Any):
        plan = getattr(advice, "plan", advice)
        if not isinstance(plan, Plan):
            raise PlanError(
                f"Panel takes an Advice or a Plan, got {type(advice).__qualname__}; try Panel(nb.advise(…))"
            )
        from nbtools.live.form import Form  # here, since ipywidgets are slow to import

        self.id = uuid4().hex  # in the index of the run that it drives
        self.requests, self.running = Requests(Plans(plan, plan), plan), False
        self.lock = threading.RLock()  # the run and the user may both be changing it
        self.rules = {field.name: field for field in dataclasses.fields(plan)}
        why, measured = getattr(advice, "reasons", {}), getattr(advice, "evidence", {})
        self.reasons = {n: explained(why.get(n, ""), measured.get(n, "")) for n in {**why, **measured}}
        baseline = getattr(advice, "baseline", None)
        self.baseline = (baseline, "The original settings, with which the receipt compares" if baseline else "")
        self.largest = (getattr(advice, "largest", None), getattr(advice, "largest_reason", ""))
        self.own_presets: Mapping[str, tuple[Plan | None, str]] = getattr(advice, "presets", {})
        self.fixed: dict[str, str] = {}
        self.before: tuple[int, float] | None = None  # batch size and lr before the batch was changed, until lr is
        self.proposed: Mapping[str, Any] = {}
        self.question: Plan | None = None  # what has to be confirmed before it is wanted; asks: why
        self.asks: Mapping[str, str] = NOTHING
        self.sliding: dict[str, str] = {}  # setting → where its slider is, until it rests
        self.moved = 0.0
        self.form = Form(self)
        self.fields = self.form.fields
        self.form.show(NOTHING)
        if (verdict := getattr(advice, "verdict", None)) is not None:
            self.propose(f"Training takes {advice.times(plan)}. {verdict.sentence}", verdict.change)

    @property
    def plan(self) -> Plan:
        """The wanted plan: of the run in progress, else of the next one."""
        return self.requests.state.plan

    @property
    def advised(self) -> Plan:
        """The plan that values are compared with."""
        return self.requests.advised

    @property
    def presets(self) -> dict[str, tuple[Plan | None, str]]:
        """label → (plan, description); None: there is none, and why."""
        found: dict[str, tuple[Plan | None, str]] = {"Baseline": self.baseline}
        for name, (plan, why) in self.own_presets.items():
            found[name] = plan, "; here ".join(filter(None, [f'PRESETS["{name}"]', why])) if plan else why
        found |= {"As advised": (self.advised, "Every setting as advised"), "Largest batch": self.largest}
        return {label: (plan, why) for label, (plan, why) in found.items() if plan is not None or why}

    def adopt(self, plan: Plan) -> None:
        """Show the plan with which a run begins: a resumed one keeps what it has applied."""
        with self.lock:
            if plan != self.plan:
                self.requests.want(plan, sure=True)
                self.before = None
                self.form.show(NOTHING)

    def begin(self, requests: Requests) -> None:
        """A run starts: changes and clicks are posted to its requests, including changes that another thread made here
        meanwhile."""
        with self.lock:
            late, self.requests, self.running = self.plan, requests, True
            self.fixed = fixed(self.plan)
            self.put(late)

    def end(self) -> None:
        """The run is over: everything may be changed again, and there is nothing to pause."""
        with self.lock:
            self.settle()
            self.requests = Requests(Plans(self.plan, self.plan), self.advised)
            self.running, self.fixed, self.question, self.asks = False, {}, None, NOTHING
            self.form.told = ""
            self.form.propose("", "")  # what limits a run, as measured while it lasted
            self.form.show(NOTHING)

    def refresh(self) -> None:
        """Show what was applied, or requested elsewhere; nothing is sent where nothing changed."""
        with self.lock:
            if time.monotonic() - self.moved >= RESTS:
                self.settle()
            if self.form.values != self.plan.to_dict():
                self.before, self.question, self.asks = None, None, NOTHING
                self.form.show(self.changes()[1])
            self.form.show_run()

    # -- what the widgets call

    def click(self, action: str) -> None:
        """Request an action; Undo first takes back what is not applied yet."""
        if action == "undo" and self.form.unapplied:
            self.decline()
        elif self.running:
            self.settle()
            self.requests.post("resume" if action == "pause" and self.requests.paused else action)
            self.form.show_run()

    def read(self, name: str, text: Any) -> None:
        """The user changed a field. Adopt the fields' values; one that breaks a rule stays in its field, and the plan
        is unchanged. An empty field, as after Escape, gets the plan's value back."""
        with self.lock:
            self.sliding.pop(name, None)
            text = self.form.holds(name, getattr(self.plan, name)) if text == "" else text
            self.form.hold(name, text)  # the run may have overwritten it since
            changed, wrong = self.changes()
            if not changed:  # what was asked about is typed no more
                self.question, self.asks = None, NOTHING
            wrong |= self.attempt(changed)
            if doubtful := self.asks.keys() & changed.keys():  # they hold no other up
                wrong |= self.attempt({name: value for name, value in changed.items() if name not in doubtful})
                wrong |= self.attempt({name: value for name, value in changed.items() if name not in wrong})
            self.form.show(wrong)

    def slide(self, name: str, text: str) -> None:
        """The user moved a slider. During a run it counts once it rests, or its step of more than a second ends."""
        with self.lock:
            self.form.hold(name, text)
            self.sliding[name], self.moved = text, time.monotonic()
            if not self.running or self.requests.pace >= 1:
                self.settle()

    def settle(self) -> None:
        """Adopt where sliders are."""
        with self.lock:
            sliding, self.sliding = self.sliding, {}
            for name, text in sliding.items():
                self.read(name, text)

    def choose(self, label: str) -> None:
        """Take a preset."""
        if (plan := self.presets[label][0]) is not None:
            self.put(plan)

    def follow(self, rule: str) -> None:
        """Take an offered lr."""
        with self.lock:
            if (lr := self.offers()[1].get(rule)) is not None:
                self.form.show(self.make({"lr": lr}))

    def accept(self) -> None:
        """Make the proposed change."""
        with self.lock:
            self.form.show(self.make(self.proposed))

    def insist(self) -> None:
        """Apply what had to be confirmed."""
        with self.lock:
            if self.question is not None:
                self.form.show(self.want(self.question, sure=True))

    def decline(self) -> None:
        """Keep the values in effect instead of what breaks a rule or had to be confirmed."""
        with self.lock:
            self.question, self.asks = None, NOTHING
            self.form.show(NOTHING)

    # -- what they come to

    def reset(self) -> None:
        """Back to the advised plan."""
        self.put(self.advised)

    def put(self, plan: Plan) -> None:
        """Request a whole plan, or none of it if it breaks a rule; a started run keeps its fixed settings."""
        with self.lock:
            self.sliding.clear()
            kept = [name for name in self.fixed if getattr(plan, name) != getattr(self.plan, name)]
            wrong = self.want(plan.replace(**{name: getattr(self.plan, name) for name in kept}))
            self.before = self.before if wrong or self.question else None
            self.form.show(wrong, f"kept: {', '.join(kept)} (fixed in a started run)" if kept else "")

    def propose(self, sentence: str, change: Mapping[str, Any] | None) -> None:
        """Show what limits the plan, and a button for the one change worth making."""
        with self.lock:
            self.proposed = dict(change or {})
            done = ", ".join(f"{name} = {show.shown(value)}" for name, value in self.proposed.items())
            self.form.propose(sentence, f"Apply: {done}" if done else "")

    def changes(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(field → value that differs from the plan's, field → why its value is refused)."""
        changed, wrong = {}, {}
        for name in self.fields:
            try:
                value = self.value(name)
            except PlanError as error:
                wrong[name] = plainly(error)
                continue
            if value != getattr(self.plan, name) and name in self.fixed:
                wrong[name] = f"{name} cannot change now: {self.fixed[name]}"
            elif value != getattr(self.plan, name):
                changed[name] = value
        return changed, wrong

    def value(self, name: str) -> Any:
        """What a field holds, checked by the field's own rule. Raises PlanError."""
        text, current = self.fields[name].value, getattr(self.plan, name)
        if text == self.form.holds(name, current):
            return current  # every bit of it: the text shows three digits
        kind = type(self.plan)
        return kind.check(name, kind.parse(name, text.strip()) if isinstance(text, str) else text)

    def attempt(self, changes: Mapping[str, Any]) -> dict[str, str]:
        """Request those of these changes that no rule refuses; setting → its rule, of the others."""
        wrong: dict[str, str] = {}
        while changes and (refused := self.make(changes)):
            wrong |= refused
            changes = {name: value for name, value in changes.items() if name not in refused}
        return wrong

    def make(self, changes: Mapping[str, Any]) -> dict[str, str]:
        """Request these changes of the plan; setting → the rule that refuses all of them."""
        size, lr = self.plan.batch_size, self.plan.lr
        try:
            wrong = self.want(self.plan.turn(**changes))
        except PlanError as error:
            return {blamed(error, changes): plainly(error)}
        if "lr" in changes:
            self.before = None
        elif "batch_size" in changes:
            self.before = self.before or (size, lr)
        return wrong

    def want(self, plan: Plan, sure: bool = False) -> dict[str, str]:
        """Make this the wanted plan, or, during a run, the one to confirm, unless the user is sure. Setting → the rule
        by which the run cannot continue with it."""
        changed = plan.changes_from(self.plan)
        self.question, self.asks = None, NOTHING
        try:
            asks = self.requests.want(plan, sure or not self.running)
        except NbtoolsError as error:
            return {blamed(error, changed): plainly(error)}
        if asks:
            self.question, self.asks = plan, asks
        elif SPEED & changed.keys():
            self.form.propose("", "")  # it was measured otherwise
        return {}

    # -- what is shown

    def offers(self) -> tuple[str, dict[str, float]]:
        """(what a change of batch size did to lr, lr_rule → the lr of another rule in the three digits of its button);
        empty at the same batch size."""
        plan = self.plan
        size, lr = self.before or (plan.batch_size, plan.lr)
        if size == plan.batch_size:
            return "", {}
        found = {rule: float(f"{lr * lr_factor(rule, plan.batch_size / size):.3g}") for rule in ("sqrt", "linear")}
        others = {
            n: value for n, value in {"none": lr, **found}.items() if not math.isclose(value, plan.lr, rel_tol=5e-3)
        }
        did = f"lr {show.shown(lr)} → {show.shown(plan.lr)} by its rule ({plan.lr_rule})"
        did = did if plan.lr != lr else f"lr stays {show.shown(lr)}"
        return f"batch {size} → {plan.batch_size}: {did}", others

    def reason(self, name: str) -> str:
        """The reason for a setting's value, if there is one."""
        value, advised, reason = getattr(self.plan, name), getattr(self.advised, name), self.reasons.get(name, "")
        if name in self.fixed:
            return self.fixed[name]
        return reason if value == advised else f"advised {show.shown(advised)}{f': {reason}' if reason else ''}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The form if there is a kernel, below the buttons while a run is in progress; the table of the plan in a page
        without a kernel."""
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if (model := self.form.whole.model_id) is not None:
            bundle[VIEW] = {"version_major": 2, "version_minor": 0, "model_id": model}
        return bundle

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, Any, str]]]:
        rows = [(name, value, self.reasons.get(name, "")) for name, value in self.plan.to_dict().items()]
        return ("setting", "value", "reason"), rows

    def __repr__(self) -> str:
        return str(self)


def blamed(error: Exception, changed: Iterable[str]) -> str:
    """The changed field that an error names (`Plan.min_lr must be at most lr (0.1)`), else the last changed."""
    names = list(changed)
    return next((word for word in re.findall(r"\w+", str(error)) if word in names), names[-1] if names else "")


def plainly(error: Exception) -> str:
    """What an error says, below the field that it names: `lr must be greater than 0, got -1`."""
    return re.sub(r"^\w+\.(?=\w+ must)", "", str(error))
