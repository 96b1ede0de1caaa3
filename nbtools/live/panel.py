"""Panel: the fields of a Plan as a form, built from the dataclass itself, so that a new setting appears here
automatically; while a run is in progress, changes and clicks here become requests to it.

Callbacks set values and nothing else: they may run on another thread.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from nbtools import show
from nbtools.errors import NbtoolsError, PlanError
from nbtools.live.requests import Plans, Requests
from nbtools.train import Plan, fixed, listed

VIEW = "application/vnd.jupyter.widget-view+json"


class Panel:
    """The plan of an Advice, or a Plan, as a form to read and change, before and during the run.

    `plan` is always valid: if a value breaks a rule, the rule is shown next to its field and nothing changes. A change
    of batch size adjusts lr by the plan's lr_rule. Works without a front end: `panel.fields["lr"].value = "3e-4"`.

    bad: setting → why what its field holds is not applied, "" for several at once; asked: the plan that has to be
    confirmed first. note: what the last change brought with it, or what limits the plan; proposed: the change worth
    making.
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
        self.reasons: Mapping[str, str] = getattr(advice, "reasons", {})
        self.presets, self.fixed = presets(advice, plan), dict[str, str]()
        self.bad, self.asked = dict[str, str](), None
        self.note, self.proposed = "", dict[str, Any]()
        self.form = Form(self)
        self.fields = self.form.fields
        verdict = getattr(advice, "verdict", None)
        if verdict is not None and verdict.change:
            self.note, self.proposed = verdict.sentence, dict(verdict.change)
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

    def begin(self, requests: Requests) -> None:
        """A run starts: changes and clicks are posted to its requests. A resumed one keeps what it had applied."""
        with self.lock:
            changes = listed(requests.state.plan.changes_from(self.plan))
            self.requests, self.running, self.fixed = requests, True, fixed(requests.state.plan)
            resumed = f"This run goes on with what it had applied: {changes}", {}
            note, proposed = resumed if changes else (self.note, self.proposed)
            self.drop()
            self.propose(note, proposed)

    def end(self) -> None:
        """The run is over: everything may be changed again, and there is nothing to pause."""
        with self.lock:
            self.requests = Requests(Plans(self.plan, self.plan), self.advised)
            self.running, self.fixed, self.form.told = False, {}, ""
            self.drop()

    def refresh(self) -> None:
        """Show what was applied, or requested elsewhere; nothing is sent where nothing changed."""
        with self.lock:
            if self.form.plan != self.plan:
                self.drop()
            self.form.show_run()

    def propose(self, sentence: str, change: Mapping[str, Any] | None = None) -> None:
        """Show what limits the plan, and a button for the one change worth making."""
        with self.lock:
            self.note, self.proposed = sentence, dict(change or {})
            self.form.show()

    # -- what the widgets call

    def click(self, action: str) -> None:
        """Request an action; Undo first takes back what is not applied yet."""
        if action == "undo" and self.bad:
            self.drop()
        elif self.running:
            self.requests.post("resume" if action == "pause" and self.requests.paused else action)
            self.form.show_run()

    def read(self, name: str, text: Any) -> None:
        """Adopt what the user put into a field, else keep it there with the reason; empty, as after Escape, the field
        gets the plan's value back."""
        kept = name in self.fixed or text in ("", self.form.holds(name, self.plan))  # of which it shows three digits
        read = (lambda: text) if isinstance(text, bool) else (lambda: self.plan.parse(name, text.strip()))
        self.make(lambda: self.plan if kept else self.plan.turn(**{name: read()}), name)

    def accept(self) -> None:
        """Make the change that had to be confirmed, or that is proposed."""
        asked, proposed = self.asked, self.proposed
        self.make(lambda: asked or self.plan.turn(**proposed), sure=asked is not None)

    def drop(self) -> None:
        """Keep the values in effect instead of what breaks a rule or had to be confirmed."""
        with self.lock:
            self.bad, self.asked, self.note, self.proposed = {}, None, "", {}
            self.form.show()

    def put(self, plan: Plan) -> None:
        """Request a whole plan, or none of it if it breaks a rule; a started run keeps its fixed settings."""
        kept = {
            name: getattr(self.plan, name) for name in self.fixed if getattr(plan, name) != getattr(self.plan, name)
        }
        self.make(lambda: plan.replace(**kept))
        if kept:
            self.note = f"kept: {', '.join(kept)} (fixed in a started run)"
            self.form.show()

    def make(self, plan: Callable[[], Plan], name: str = "", sure: bool = False) -> None:
        """Make this plan wanted, or, during a run, the one to confirm, unless the user is sure; or keep why it is
        refused. name: of the field that it comes from."""
        with self.lock:
            try:
                new, old = plan(), self.plan
                self.bad = self.requests.want(new, sure or not self.running)
                self.asked = new if self.bad else None
                if self.plan != old:
                    self.note, self.proposed = "", {}  # older than this change
            except NbtoolsError as error:  # `lr must be greater than 0, got -1`, below the field that it names
                self.bad, self.asked = {name: re.sub(r"^\w+\.(?=\w+ )", "", str(error))}, None
            self.form.show()

    # -- what is shown

    def reason(self, name: str) -> str:
        """Return the reason for a setting's value, if there is one."""
        value, advised, reason = getattr(self.plan, name), getattr(self.advised, name), self.reasons.get(name, "")
        if name in self.fixed:
            return self.fixed[name]
        return reason if value == advised else f"advised {show.shown(advised)}{f': {reason}' if reason else ''}"

    def changed(self) -> str:
        changes = self.plan.changes_from(self.advised)
        return f"Changed: {', '.join(changes)}" if changes else "No setting is changed"

    def __repr__(self) -> str:
        return f"Panel: {listed(self.plan.changes_from(self.advised)) or 'no setting is changed'}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the form, and for a page without a kernel what was changed of the advice."""
        return {"text/plain": repr(self), VIEW: viewed(self.form.whole)}


def viewed(widget: Any) -> dict[str, Any]:
    """Return a widget as the data of VIEW."""
    return {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}


def presets(advice: Any, plan: Plan) -> dict[str, Plan]:
    """Return plain name → plan of those that an advice brings."""
    named = {"as advised": plan, "the guide's before": getattr(advice, "baseline", None)}
    for name, (preset, _) in getattr(advice, "presets", {}).items():
        _, *rest = name.split("-")
        named[f"the guide's {' '.join(rest) or 'optimised'}"] = preset
    return {name: preset for name, preset in named.items() if preset is not None}
