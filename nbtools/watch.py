"""watch: the live view of a run that another process trains, in a terminal or on several GPUs."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from nbtools.errors import CheckpointError, NbtoolsError
from nbtools.folder import busy
from nbtools.live import Interrupt, Messages, View, Wishes, advised, control
from nbtools.run import HISTORY, PLAN, Run
from nbtools.train import KEYS, History, Plan, Record, checkpoint, fixed, require_batch

MOMENT = 0.05  # seconds between two looks at the person
READ_EVERY = 0.5  # seconds between two looks at the history
ANSWERED = ("stop", "evaluate", "save", "profile", "best", "undo")  # actions that the run answers in its history


def watch(run: str | Path, task: Any = None, wait: float = 60.0) -> Run:
    """Draw a run of another process of this machine until it ends; returns the Run.

    Buttons and fields send requests to that process through `control.json`, and its answers come back through the
    history: where it saved, what limits it. An interrupt ends the watching, not the run. wait: seconds for it to begin.
    A run that is no longer training is drawn once. task: only for one that cannot be imported by name. Raises
    CheckpointError where there is no run.
    """
    folder = Path(run)
    await_start(folder, wait)
    opened = Run.open(folder, task)
    history = History(folder / HISTORY)
    view = View(folder, history, opened.plan, opened.card.splits["train"], opened.task.BEST, opened.plan, show=True)
    asked, interrupted, messages = Asked(folder, opened.plan), Wishes(), Messages()
    with ExitStack() as stack:
        stack.enter_context(Interrupt(interrupted))
        stack.callback(view.finish, [])
        if view.panel is not None:
            stack.enter_context(messages)
            check, able = partial(require_batch, count=view.count), partial(possible, folder, history)
            view.panel.begin(asked.wishes, fixed(opened.plan), check, advised(folder, opened.plan), able)
            stack.callback(view.panel.end)
        view.start()
        read, told = 0.0, len(history)
        while (trains := busy(folder)) and not interrupted.stop:
            messages.handle()
            try:
                asked.send()
            except NbtoolsError as error:
                view.tell(str(error))
            if monotonic() >= read:
                read = monotonic() + READ_EVERY
                told = follow(view, told, opened, asked)
            if view.panel is not None:
                view.panel.buttons.unread = (folder / control.FILE).exists()
                view.panel.refresh()
            view.draw("paused" if asked.wishes.paused else "")
            sleep(MOMENT)
        follow(view, told, opened, asked)
    if trains:
        view.tell(f"{folder} goes on; nb.watch it again, or ask it to stop: python -m nbtools control {folder} stop")
    return Run.open(folder, opened.task)


def await_start(folder: Path, wait: float) -> None:
    """Wait for a run to appear. Raises CheckpointError where none did."""
    end = monotonic() + wait
    while not checkpoint.read_index(folder):
        if monotonic() > end:
            raise CheckpointError(
                f"{folder}: no run here after {wait:g} s; train with run={str(folder)!r}, or give the folder of one"
            )
        sleep(MOMENT)


def possible(folder: Path, history: History, action: str) -> bool:
    """Whether there is anything to do for an action, as far as the folder says."""
    return (
        bool(history.of("change")) if action == "undo" else action != "best" or checkpoint.best_of(folder) is not None
    )


def follow(view: View, told: int, run: Run, asked: Asked) -> int:
    """Read what the other process wrote, and say it; returns how many rows are told."""
    before = view.history.rows
    view.history.refresh()
    rows = view.history.rows
    if rows is not before:  # the run went back to a checkpoint, and wrote other rows from there
        pairs = zip(map(repr, before[:told]), map(repr, rows), strict=False)  # a NaN is unequal to itself, its text not
        told = next((i for i, (a, b) in enumerate(pairs) if a != b), min(told, len(rows)))
    for row in rows[told:]:
        values = {name: value for name, value in row.items() if name not in KEYS}
        record = Record(row["kind"], row["epoch"], row["step"], row["samples"], values)
        view.advance(record)
        refused = str(values.get("what", "")).startswith(control.REFUSED)
        asked.answered(record, refused)
        if record.kind in ("change", "event") and (path := run.folder / PLAN).exists():  # it may go at any moment
            plan = type(run.plan).from_json(path.read_text())
            if refused or record.kind == "change" or plan != asked.applied:  # as after going back to a checkpoint
                asked.plan = asked.applied = plan
                view.turned(plan)
        if values.get("asked") == "profile" and view.panel is not None:
            verdict = run.verdict
            if verdict is not None and verdict.sentence == values["what"]:  # not an older one's, where it failed
                view.panel.propose(verdict.sentence, verdict.change)
    return len(rows)


class Asked:
    """Requests to another process: sent on once as they come, and pending until the history answers them, so that
    their buttons say so meanwhile."""

    def __init__(self, folder: Path, plan: Plan):
        self.folder, self.plan, self.applied = folder, plan, plan  # as last requested, as the run last reported
        self.wishes, self.paused = Wishes(), False
        self.pending: set[str] = set()

    def send(self) -> None:
        wishes = self.wishes
        actions = [each for each in ANSWERED if getattr(wishes, each) and each not in self.pending]
        self.pending |= {*actions}
        if wishes.paused != self.paused:
            self.paused = wishes.paused
            actions.append("pause" if self.paused else "resume")
        (plan, wishes.plan), knobs = (wishes.plan, None), {}  # the run answers: what it does is shown, and what not
        if plan is not None and plan is not self.plan:
            knobs = {n: value for n, value in plan.to_dict().items() if value != getattr(self.plan, n)}
            self.plan = plan
        if actions or knobs:
            control.send(self.folder, actions, knobs, force=bool(knobs))  # the panel has asked already

    def answered(self, record: Record, refused: bool) -> None:
        """Clear the requests that a row of the history answers; refused: all that were sent with it."""
        evaluated = record.kind in ("epoch", "evaluation") and any(name.startswith("val_") for name in record.values)
        for action in [*self.pending]:
            if refused or record.values.get("asked") == action or (evaluated and action == "evaluate"):
                self.pending.discard(action)
                setattr(self.wishes, action, False)
