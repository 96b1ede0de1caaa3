"""Panel: the fields of a Plan as a form, built from the dataclass itself; during a run, changes and clicks become
requests to it. Callbacks set values and nothing else: they may run on another thread."""

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any
from uuid import uuid4

from nbtools.errors import NbtoolsError, PlanError
from nbtools.live.requests import Plans, Requests
from nbtools.show import shown
from nbtools.train import Plan, list_changes

VIEW = "application/vnd.jupyter.widget-view+json"
TWICE = 0.1  # seconds between two clicks that mean one: in a long step the first shows nothing yet


class Panel:
    """The plan of an Advice, or a Plan, as a form to read and change, before and during the run.

    `plan` is always valid: if a value breaks a rule, the rule is shown next to its field and nothing changes. A change
    of batch size adjusts lr by the plan's lr_rule. Works without a front end: `panel.fields["lr"].value = "3e-4"`.

    bad: setting → why its field's value is not applied, "" for several at once. note: what the last change brought
    with it, or what limits the plan; proposed: the values that *Apply* sets, to be confirmed or worth making. advised:
    the plan to compare with. changes: settings that differ from it from the start, as in a demo. Raises PlanError.
    """

    def __init__(self, advice: Any, **changes: Any):
        self.advised = advised = getattr(advice, "plan", advice)
        if not isinstance(advised, Plan):
            rule = f"Panel takes an Advice or a Plan, got {type(advice).__qualname__}"
            raise PlanError(f"{rule}; try Panel(nb.advise(…))")
        from nbtools.live.form import Form  # here, since ipywidgets are slow to import

        self.id = uuid4().hex  # in the index of the run that it drives
        given = {name: value for name, value in changes.items() if value != getattr(advised, name, ...)}
        self.start = plan = advised.turn(**given)
        self.requests, self.running = Requests(Plans(plan, plan), advised), False
        self.clicked = dict[str, float]()  # action → when
        self.lock = threading.RLock()  # the run and the user may both be changing it
        self.rules = {field.name: field for field in dataclasses.fields(plan)}
        self.reasons, self.lr_trial = getattr(advice, "reasons", {}), getattr(advice, "lr_trial", None)
        self.presets, self.fixed = presets(advice, advised), dict[str, str]()
        self.bad, self.note, self.proposed = dict[str, str](), "", dict[str, Any]()
        self.form = Form(self)
        self.fields = self.form.fields
        verdict = getattr(advice, "verdict", None)
        self.propose(f"Faster: {verdict.best}" if verdict and verdict.change else "", verdict and verdict.change)

    @property
    def plan(self) -> Plan:
        """Return the wanted plan: of the run in progress, else of the next one."""
        return self.requests.state.plan

    @property
    def changed(self) -> str:
        """Return what was changed from the start, and what the user changed."""
        pairs = ("Set instead of the advice", self.start, self.advised), ("Changed", self.plan, self.start)
        said = [f"{what}: {text}" for what, a, b in pairs if (text := list_changes(a.changes_from(b)))]
        return "; ".join(said) or "No settings changed"

    def begin(self, requests: Requests) -> None:
        """A run starts: changes and clicks are posted to its requests. A resumed run keeps its applied settings."""
        with self.lock:
            changes = list_changes(requests.state.plan.changes_from(self.plan))
            self.requests, self.running, self.fixed = requests, True, requests.state.plan.fixed_settings()
            self.advised = self.presets["as advised"] = requests.advised
            self.start = requests.state.plan if changes else self.start
            note = f"This run continues with its applied settings: {changes}" if changes else self.note
            self.propose(note, {} if changes else self.proposed)

    def end(self) -> None:
        """The run is over: everything may be changed again, and there is nothing to pause."""
        with self.lock:
            self.requests = Requests(Plans(self.plan, self.plan), self.advised)
            self.running, self.fixed, self.form.told, self.form.every.selected_index = False, {}, "", None
            self.propose()

    def refresh(self) -> None:
        """Show what was applied, or requested elsewhere; nothing is sent where nothing changed."""
        with self.lock:
            self.propose() if self.form.plan != self.plan else self.form.show_run()

    def propose(self, sentence: str = "", change: Mapping[str, Any] | None = None) -> None:
        """Show what limits the plan, and a button for the change worth making; by default only the values in effect."""
        with self.lock:
            self.bad, self.note, self.proposed = {}, sentence, dict(change or {})
            self.form.show()

    def click(self, action: str) -> None:
        """Request an action; Undo first takes back what is not applied yet."""
        if action == "undo" and self.bad:
            self.propose()
        elif self.running and monotonic() - self.clicked.get(action, 0.0) > TWICE:
            self.requests.post("resume" if action == "pause" and self.requests.paused else action)
            self.form.show_run()
            self.clicked[action] = monotonic()

    def read(self, name: str, text: Any) -> None:
        """Adopt what the user put into a field, else keep it with the reason; emptied it gets the plan's value back."""
        kept = name in self.fixed or text in ("", self.form.holds(name))  # of which it shows three digits
        read = (lambda: self.plan.parse(name, text.strip())) if isinstance(text, str) else (lambda: text)
        self.make(lambda: self.plan if kept else self.plan.turn(**{name: read()}), name)

    def accept(self) -> None:
        """Make the change that had to be confirmed, or that is proposed."""
        turned = self.plan.replace if self.bad else self.plan.turn
        self.make(lambda change=self.proposed: turned(**change), sure=bool(self.bad))

    def put(self, plan: Plan) -> None:
        """Request a whole plan, or none of it if it breaks a rule; a started run keeps its fixed settings."""
        kept = [name for name in plan.changes_from(self.plan) if name in self.fixed]
        self.make(lambda: plan.replace(**{name: getattr(self.plan, name) for name in kept}))
        if kept:
            self.note = f"kept: {', '.join(kept)} (fixed in a started run)"
            self.form.show()

    def make(self, plan: Callable[[], Plan], name: str = "", sure: bool = False) -> None:
        """Want this plan, or ask, unless the user is sure; or keep the reason for refusing it. name: of its field."""
        with self.lock:
            try:
                new, old, doubted = plan(), self.plan, self.bad
                self.bad = self.requests.want(new, sure or not self.running)
                if doubted or self.bad or self.plan != old:  # else what is proposed is not older than this change
                    self.note, self.proposed = "", {n: getattr(new, n) for n in new.changes_from(self.plan)}
            except NbtoolsError as error:  # `lr must be greater than 0, got -1`, below the field that it names
                self.bad, self.note, self.proposed = {name: re.sub(r"^\w+\.(?=\w+ )", "", str(error))}, "", {}
            self.form.show()

    def reason(self, name: str) -> str:
        value, advised, reason = getattr(self.plan, name), getattr(self.advised, name), self.reasons.get(name, "")
        if name in self.fixed:
            return self.fixed[name]
        return reason if value == advised else f"advised {shown(advised)}{f': {reason}' if reason else ''}"

    def __repr__(self) -> str:
        return f"Panel. {self.changed}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the form, and for a page without a kernel what was changed."""
        return bundle_of(self.form.whole, repr(self))


def tree(widget: Any) -> Iterator[Any]:
    """Yield a widget after those inside it and its layout and style, which are widgets too."""
    parts = getattr(widget, "layout", None), getattr(widget, "style", None)
    for part in (*getattr(widget, "children", ()), *filter(None, parts)):
        yield from tree(part)
    yield widget


def bundle_of(widget: Any, text: str) -> dict[str, Any]:
    """Return a widget as a notebook shows it: data by type. text: for a page without a kernel."""
    for each in tree(widget):
        each.tooltip = getattr(each, "tooltip", "") or ""  # of None ipywidgets 8 shows "null"
    return {"text/plain": text, VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def presets(advice: Any, plan: Plan) -> dict[str, Plan]:
    """Return plain name → plan of those that an advice brings: of `guide-large` *the guide's large*."""
    before = "the guide's before" if getattr(advice, "presets", {}) else "the baseline"
    named = {"as advised": plan, before: getattr(advice, "baseline", None)}
    for name, (preset, _) in getattr(advice, "presets", {}).items():
        which = name.partition("-")[2].replace("gpus", "on several GPUs") or "optimised"
        named[f"the guide's {which.replace('-', ' ')}"] = preset
    return {name: preset for name, preset in named.items() if preset is not None}
