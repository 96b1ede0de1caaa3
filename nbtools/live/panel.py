"""Panel: the fields of a Plan as a form, built from the dataclass itself, so that a new setting appears here
automatically; while a run is in progress, changes and clicks here become requests to it.

Callbacks set values and nothing else: they may run on another thread.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any
from uuid import uuid4

from nbtools import show
from nbtools.errors import NbtoolsError, PlanError
from nbtools.live.requests import Plans, Requests
from nbtools.measure import explained
from nbtools.train import Plan, fixed, listed

VIEW = "application/vnd.jupyter.widget-view+json"
RESTS = 0.4  # seconds until a slider that was moved rests: several presses of a key are one change of a run


class Panel(show.Table):
    """The plan of an Advice, or a Plan, as a form to read and change, before and during the run.

    `plan` is always valid: if a value breaks a rule, the rule is shown next to its field and nothing changes. A change
    of batch size adjusts lr by the plan's lr_rule. Works without a front end: `panel.fields["lr"].value = "3e-4"`.
    """

    def __init__(self, advice: Any):
        plan = getattr(advice, "plan", advice)
        if not isinstance(plan, Plan):
            rule = f"Panel takes an Advice or a Plan, got {type(advice).__qualname__}"
            raise PlanError(f"{rule}; try Panel(nb.advise(…))")
        from nbtools.live.form import Form  # here, since ipywidgets are slow to import

        self.id = uuid4().hex  # in the index of the run that it drives
        self.requests, self.running = Requests(Plans(plan, plan), plan), False
        self.lock = threading.RLock()  # the run and the user may both be changing it
        self.rules = {field.name: field for field in dataclasses.fields(plan)}
        why, measured = getattr(advice, "reasons", {}), getattr(advice, "evidence", {})
        self.reasons = {n: explained(why.get(n, ""), measured.get(n, "")) for n in {**why, **measured}}
        self.presets = presets(advice, plan)
        self.fixed: dict[str, str] = {}
        self.refused: dict[str, str] = {}  # setting → why what its field holds is not applied
        self.asked: dict[str, Any] = {}  # what has to be confirmed before it is wanted; asks: setting → why
        self.asks: dict[str, str] = {}
        self.note = ""  # what the last change brought with it
        self.sentence, self.proposed = "", dict[str, Any]()  # what limits the plan, and the change worth making
        self.sliding: dict[str, str] = {}  # setting → where its slider is, until it rests
        self.moved = 0.0
        self.form = Form(self)
        self.fields = self.form.fields
        verdict = getattr(advice, "verdict", None)
        if verdict is not None and verdict.change:
            self.sentence, self.proposed = verdict.sentence, dict(verdict.change)
        self.form.show()

    @property
    def plan(self) -> Plan:
        """The wanted plan: of the run in progress, else of the next one."""
        return self.requests.state.plan

    @property
    def advised(self) -> Plan:
        """The plan that values are compared with."""
        return self.requests.advised

    # -- of the run

    def adopt(self, plan: Plan) -> None:
        """Show the plan with which a run begins: a resumed one keeps what it has applied."""
        with self.lock:
            if changes := plan.changes_from(self.plan):
                self.requests.want(plan, sure=True)
                self.show(f"This run goes on with what it had applied: {listed(changes)}")

    def begin(self, requests: Requests) -> None:
        """A run starts: changes and clicks are posted to its requests, also those that were made here meanwhile."""
        with self.lock:
            late, note, self.requests, self.running = self.plan, self.note, requests, True
            self.fixed = fixed(self.plan)
            self.put(late)
            self.show(note)

    def end(self) -> None:
        """The run is over: everything may be changed again, and there is nothing to pause."""
        with self.lock:
            self.settle()
            self.requests = Requests(Plans(self.plan, self.plan), self.advised)
            self.running, self.fixed, self.form.told = False, {}, ""
            self.propose("", None)  # what limits a run, as measured while it lasted
            self.drop()

    def refresh(self) -> None:
        """Show what was applied, or requested elsewhere; nothing is sent where nothing changed."""
        with self.lock:
            if time.monotonic() - self.moved >= RESTS:
                self.settle()
            if self.form.values != self.plan.to_dict():
                self.sentence, self.proposed = "", {}  # older than this change
                self.drop()
            self.form.show_run()

    def propose(self, sentence: str, change: Mapping[str, Any] | None) -> None:
        """Show what limits the plan, and a button for the one change worth making."""
        with self.lock:
            self.sentence, self.proposed = sentence, dict(change or {})
            self.form.show_notice()

    # -- what the widgets call

    def click(self, action: str) -> None:
        """Request an action; Undo first takes back what is not applied yet."""
        if action == "undo" and (self.refused or self.asked):
            self.drop()
        elif self.running:
            self.settle()
            self.requests.post("resume" if action == "pause" and self.requests.paused else action)
            self.form.show_run()

    def read(self, name: str, text: Any) -> None:
        """Adopt what the user put into a field, else keep it there with the reason; empty, as after Escape, the field
        gets the plan's value back."""
        with self.lock:
            self.sliding.pop(name, None)
            self.form.hold(name, text)  # the run may have overwritten it since
            if name in self.asked:
                self.asked, self.asks = {}, {}
            others = [other for other in self.refused if other != name]
            for each in [name, *others]:  # which may be valid now
                self.refused.pop(each, None)
                self.attempt(each)
            self.show(self.note)

    def attempt(self, name: str) -> None:
        """Request what a field holds, or keep why not."""
        text, current, kind = self.fields[name].value, getattr(self.plan, name), type(self.plan)
        if text in ("", self.form.holds(name, current)):
            return  # every bit of the plan's value: the text shows three digits
        try:
            value = kind.check(name, kind.parse(name, text.strip()) if isinstance(text, str) else text)
            if value != current and name in self.fixed:
                raise PlanError(f"{name} cannot change now: {self.fixed[name]}")
            if value != current:
                self.want(self.plan.turn(**{name: value}))
        except NbtoolsError as error:
            self.refused[name] = plainly(error)

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

    def insist(self) -> None:
        """Apply what had to be confirmed."""
        self.make(lambda: self.plan.replace(**self.asked), sure=True)

    def accept(self) -> None:
        """Make the proposed change."""
        self.make(lambda: self.plan.turn(**self.proposed))

    def drop(self) -> None:
        """Keep the values in effect instead of what breaks a rule or had to be confirmed."""
        with self.lock:
            self.refused, self.asked, self.asks = {}, {}, {}
            self.show("")

    def choose(self, label: str) -> None:
        """Take a preset."""
        if label in self.presets:
            self.put(self.presets[label])

    # -- what they come to

    def reset(self) -> None:
        """Go back to the advised plan."""
        self.put(self.advised)

    def put(self, plan: Plan) -> None:
        """Request a whole plan, or none of it if it breaks a rule; a started run keeps its fixed settings."""
        with self.lock:
            self.sliding, self.refused = {}, {}
            kept = [name for name in self.fixed if getattr(plan, name) != getattr(self.plan, name)]
            self.make(lambda: plan.replace(**{name: getattr(self.plan, name) for name in kept}))
            if kept:
                self.show(f"kept: {', '.join(kept)} (fixed in a started run)")

    def make(self, plan: Callable[[], Plan], sure: bool = False) -> None:
        """Request a plan, or keep why it is refused, and show what comes of it."""
        with self.lock:
            new = self.plan
            try:
                self.want(new := plan(), sure)
            except NbtoolsError as error:
                self.refused[blamed(error, [*new.changes_from(self.plan)] or [*self.proposed])] = plainly(error)
            self.show(self.note)

    def want(self, new: Plan, sure: bool = False) -> None:
        """Make this plan wanted, or, during a run, the one to confirm, unless the user is sure. Raises NbtoolsError."""
        changes = new.changes_from(self.plan)
        self.note, self.asked, self.asks = "", {}, {}
        self.asks = self.requests.want(new, sure or not self.running)
        if self.asks:
            self.asked = {name: getattr(new, name) for name in changes}
        elif changes:
            self.sentence, self.proposed = "", {}  # older than this change

    def show(self, note: str) -> None:
        self.note = note
        self.form.show()

    # -- what is shown

    def reason(self, name: str) -> str:
        """Return the reason for a setting's value, if there is one."""
        value, advised, reason = getattr(self.plan, name), getattr(self.advised, name), self.reasons.get(name, "")
        if name in self.fixed:
            return self.fixed[name]
        return reason if value == advised else f"advised {show.shown(advised)}{f': {reason}' if reason else ''}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the form if there is a kernel; the plan, folded, in a page without one."""
        page = f"<details><summary>The plan. {escape(self.form.changed())}</summary>{self._repr_html_()}</details>"
        view = {"version_major": 2, "version_minor": 0, "model_id": self.form.whole.model_id}
        return {"text/plain": str(self), "text/html": page, VIEW: view}

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, Any, str]]]:
        rows = [(name, value, self.reasons.get(name, "")) for name, value in self.plan.to_dict().items()]
        return ("setting", "value", "reason"), rows

    def __repr__(self) -> str:
        return str(self)


def presets(advice: Any, plan: Plan) -> dict[str, Plan]:
    """Return plain name → plan of those that an advice brings."""
    named = {"as advised": plan, "the guide's before": getattr(advice, "baseline", None)}
    for name, (preset, _) in getattr(advice, "presets", {}).items():
        _, *rest = name.split("-")
        named[f"the guide's {' '.join(rest) or 'optimised'}"] = preset
    named["the largest batch"] = getattr(advice, "largest", None)
    return {name: preset for name, preset in named.items() if preset is not None}


def blamed(error: Exception, changed: Iterable[str]) -> str:
    """Return the changed field that an error names (`Plan.min_lr must be at most lr (0.1)`), else the last changed."""
    names = list(changed)
    return next((word for word in re.findall(r"\w+", str(error)) if word in names), names[-1] if names else "")


def plainly(error: Exception) -> str:
    """Return what an error says, below the field that it names: `lr must be greater than 0, got -1`."""
    return re.sub(r"^\w+\.(?=\w+ )", "", str(error))
