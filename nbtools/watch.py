"""watch: the live view of a run that another process trains."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

from nbtools.data import is_kept
from nbtools.errors import NbtoolsError
from nbtools.live import (
    ACTIONS,
    AGAIN,
    DONE,
    OPENING,
    OVER,
    REFUSED,
    STARTING,
    TRAINING,
    FirstSignal,
    Messages,
    Plans,
    Requests,
    View,
    advised,
    send,
)
from nbtools.run import HISTORY, PLAN, Run, busy, doing, what_next
from nbtools.train import CONTROL, KEYS, History, Record, TaskLike, checkpoint, require_batch

MOMENT = 0.05  # seconds between two checks for requests
READ_EVERY = 0.5  # seconds between two reads of the history


def watch(run: str | Path, task: TaskLike | None = None, wait: float = 60.0) -> Run:
    """Draw a run that another process on this machine is training until it ends; returns the Run.

    Buttons and fields send requests to that process through `control.json`, and its answers come back through the
    history: where it saved, what limits it. An interrupt stops watching, not the run. wait: seconds to wait for the
    run to start. A run that is no longer training, or that is kept in this folder, is drawn once. task: only for one
    that cannot be imported by name. Raises CheckpointError if there is no run.
    """
    folder, left, end = Path(run), Event(), monotonic() + wait
    while not (checkpoint.read_index(folder) or is_kept(folder)) and monotonic() < end:
        sleep(MOMENT)
    remote = Remote(Run.open(folder, task))
    with FirstSignal(signal.SIGINT, left.set):
        remote.follow(lambda: busy(folder) and not left.is_set())
    if busy(folder):
        remote.view.tell(
            f"{folder} continues; nb.watch it again, or ask it to stop: python -m nbtools control {folder} stop"
        )
    return Run.open(folder, remote.run.task)


class Remote:
    """A run in another process: what it writes is shown, and requests are sent to it once, and stay pending until its
    history answers them.

    given: the panel to show, or the Advice that one is made of; None: the run's plan. show: False draws and prints
    nothing. sent: the actions, and the settings with their values, that it has not answered. shown: rows of the
    history.
    """

    def __init__(self, run: Run, given: Any = None, show: bool = True):
        self.run, given = run, given or run.plan
        self.plans = Plans(run.plan, run.plan)
        history, count = History(run.folder / HISTORY), run.card.splits["train"]
        self.view = View(run.folder, history, run.plan, count, run.task.BEST, given, show)
        self.requests = Requests(
            self.plans, advised(run.folder, run.plan), partial(require_batch, count=count), self.able
        )
        self.sent: dict[str, object] = {}
        self.paused = self.grows = False
        self.shown = len(history)

    def follow(self, lasts: Callable[[], bool], look: Callable[[], object] = lambda: None) -> None:
        """Draw while the run lasts, and send what is requested. look: called between two looks at the folder."""
        view, folder, messages, due = self.view, self.run.folder, Messages(), 0.0
        with ExitStack() as stack:
            stack.callback(lambda: view.finish([], self.state, note=self.note))
            if view.panel is not None and view.notebook:
                stack.enter_context(messages)
                view.panel.begin(self.requests)
                stack.callback(view.panel.end)
            view.start()
            while lasts():
                messages.handle()
                look()
                try:
                    self.send()
                except NbtoolsError as error:
                    if str(error) not in view.events:  # it is tried again
                        view.tell(str(error))
                if monotonic() >= due:
                    due = monotonic() + READ_EVERY
                    self.read()
                if view.panel is not None:
                    self.requests.unread = (folder / CONTROL).exists()
                    view.panel.refresh()
                view.draw(self.status)
                sleep(MOMENT)
            self.read()

    @property
    def status(self) -> str:
        """What its process does now."""
        return doing(self.run.folder) or (TRAINING if self.grows else STARTING)

    @property
    def state(self) -> str:
        return self.newest.state

    @property
    def newest(self) -> Run:
        """As its folder says now; there may be none, where its process could not begin."""
        return Run(self.run.folder, self.run.task, self.run.card, self.plans.plan)

    @property
    def note(self) -> str:
        """What to do when it has ended; "" while it goes on, or where it did not begin."""
        state, begun = self.state, checkpoint.read_index(self.run.folder)
        again = AGAIN.get(state, "").format(it="it")
        return again + what_next(self.newest, state == DONE) if begun and state in OVER else ""

    def able(self, action: str) -> bool:
        """Whether there is anything to do for an action, as far as the folder says."""
        if action == "undo":
            return bool(self.view.history.of("change"))
        return action != "best" or checkpoint.best_of(self.run.folder) is not None

    def send(self) -> None:
        """Send what was requested since the last call; before the run has its folder, requests stay pending."""
        if not self.run.folder.is_dir():
            return
        wanted, applied = self.plans.plan.to_dict(), self.plans.applied.to_dict()
        settings = {n: value for n, value in wanted.items() if value != self.sent.get(n, applied[n])}
        actions = [action for action in ACTIONS if action in self.requests.pending and action not in self.sent]
        paused = self.requests.paused
        turned = [] if paused == self.paused else ["pause" if paused else "resume"]
        if actions or settings or turned:
            send(self.run.folder, [*actions, *turned], settings, force=bool(settings))  # the panel has already asked
            self.sent |= {**dict.fromkeys(actions), **settings}
            self.paused = paused

    def read(self) -> None:
        """Show what the other process wrote."""
        before, history = self.view.history.rows, self.view.history
        history.refresh()
        if history.rows is not before:  # the run went back to a checkpoint, and wrote other rows from there
            pairs = zip(map(repr, before[: self.shown]), map(repr, history.rows), strict=False)  # a NaN equals its text
            differing = (i for i, (old, new) in enumerate(pairs) if old != new)
            self.shown = next(differing, min(self.shown, len(history)))
        for row in history.rows[self.shown :]:
            values = {name: value for name, value in row.items() if name not in KEYS}
            record = Record(row["kind"], row["epoch"], row["step"], row["samples"], values)
            if values.get("asked") == OPENING:
                self.view.log(values["what"].split("\t"), opening=True)
                continue
            self.answered(record)
            self.view.advance(record)
            self.grows = True
        self.shown = len(history)

    def answered(self, record: Record) -> None:
        """Clear the requests that a row of the history answers; a refusal answers all that were sent."""
        refused = str(record.values.get("what", "")).startswith(REFUSED)
        evaluated = record.kind in ("epoch", "evaluation") and any(name.startswith("val_") for name in record.values)
        for action in {*self.sent} & {*ACTIONS}:
            if refused or record.values.get("asked") == action or (evaluated and action == "evaluate"):
                del self.sent[action]
                self.requests.take(action)
        if record.kind in ("change", "event") and (path := self.run.folder / PLAN).exists():  # it may go at any moment
            plan = type(self.run.plan).from_json(path.read_text())
            if refused or record.kind == "change" or plan != self.plans.applied:  # as after going back to a checkpoint
                self.plans.plan = self.plans.applied = plan
                self.sent = {name: value for name, value in self.sent.items() if name in ACTIONS}
                self.view.changed(plan)
        if record.values.get("asked") == "profile" and self.view.panel is not None:
            verdict = self.run.verdict
            if verdict is not None and verdict.sentence == record.values["what"]:  # not an older one's, where it failed
                self.view.panel.propose(verdict.sentence, verdict.change)
