"""watch: the live view of a run that another process trains. What is shown comes from its history, and requests go to
it through `control.json`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

from nbtools import live
from nbtools.errors import NbtoolsError
from nbtools.run import HISTORY, PLAN, Run, busy, what_next
from nbtools.train import CONTROL, KEYS, History, Record, TaskLike, checkpoint, require_batch

MOMENT = 0.05  # seconds between two checks for requests
READ_EVERY = 0.5  # seconds between two reads of the history


def watch(run: str | Path, task: TaskLike | None = None, wait: float = 60.0) -> Run:
    """Draw a run that another process on this machine trains until it ends, with buttons and fields that act on it;
    returns the Run. An interrupt ends the watching, not the run; one that is over, or kept here, is drawn once.

    wait: seconds to wait for the run to start. task: only for one that cannot be imported by name. Raises
    CheckpointError if there is no run.
    """
    folder, left, end = Path(run), Event(), monotonic() + wait
    while not checkpoint.read_index(folder) and monotonic() < end:
        sleep(MOMENT)
    remote = Remote(Run.open(folder, task))
    with live.FirstSignal(signal.SIGINT, left.set):
        remote.follow(lambda: busy(folder) and not left.is_set())
    if busy(folder):
        stop = f"python -m nbtools control {folder} stop"
        remote.view.tell(f"{folder} continues; nb.watch it again, or ask it to stop: {stop}")
    return Run.open(folder, remote.run.task)


class Remote:
    """A run in another process. given: the panel to show, or the Advice that one is made of; None: the run's plan.
    show: False draws and prints nothing. sent: actions that it has not taken yet; asked: the plan that it was asked
    for; shown: rows of the history."""

    def __init__(self, run: Run, given: Any = None, show: bool = True):
        self.run, count, history = run, run.card.splits["train"], History(run.folder / HISTORY)
        self.view = live.View(run.folder, history, run.plan, count, run.task.BEST, given or run.plan, show)
        self.plans, fits = live.Plans(run.plan, run.plan), partial(require_batch, count=count)
        self.requests = live.Requests(self.plans, live.advised(run.folder, run.plan), fits)
        self.sent: set[str] = set()
        self.asked, self.paused, self.shown, self.status = run.plan, False, len(history), live.STARTING

    def follow(self, lasts: Callable[[], bool], look: Callable[[], object] = lambda: None) -> None:
        """Draw while the run lasts, and send what is requested. look: called between two looks at the folder."""
        view, messages, due = self.view, live.Messages(), 0.0
        with ExitStack() as stack:
            stack.callback(self.finish)
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
                except NbtoolsError as error:  # it is tried again
                    if str(error) not in view.events:
                        view.tell(str(error))
                if monotonic() >= due:
                    due = monotonic() + READ_EVERY
                    self.read()
                if view.panel is not None:
                    view.panel.refresh()
                view.draw(self.status)
                sleep(MOMENT)
            self.read()

    def finish(self) -> None:
        """Show how the run ended, and what to do with it unless it goes on or did not begin."""
        run = Run(self.run.folder, self.run.task, self.run.card, self.plans.plan)
        state, note = run.state, ""
        if state in live.OVER and checkpoint.read_index(run.folder):
            note = live.AGAIN.get(state, "").format(it="it") + what_next(run, state == live.DONE)
        self.view.finish([], state, note=note)

    def send(self) -> None:
        """Send what was requested since the last call, once the run has its folder. An action stays pending until the
        run takes the file."""
        requests, folder, plan = self.requests, self.run.folder, self.plans.plan
        requests.unread = (folder / CONTROL).exists()
        if not requests.unread:
            requests.pending -= self.sent
            self.sent.clear()
        settings = {name: getattr(plan, name) for name in plan.changes_from(self.asked)}
        actions = [action for action in live.ACTIONS if action in requests.pending - self.sent]
        turned = ["pause" if requests.paused else "resume"] * (requests.paused != self.paused)
        if folder.is_dir() and (actions or settings or turned):
            live.send(folder, [*actions, *turned], settings, force=bool(settings))  # the panel has asked already
            self.sent, self.asked, self.paused = self.sent | {*actions}, plan, requests.paused

    def read(self) -> None:
        """Show what the other process wrote."""
        history = self.view.history
        before = history.rows
        history.refresh()
        if history.rows is not before:  # the run went back to a checkpoint, and wrote other rows from there
            pairs = zip(map(repr, before[: self.shown]), map(repr, history.rows), strict=False)  # a NaN equals its text
            self.shown = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for row in history.rows[self.shown :]:
            values = {name: value for name, value in row.items() if name not in KEYS}
            if values.get("asked") == live.OPENING:
                self.view.log(values["what"].split("\t"), opening=True)
            else:
                self.take(Record(row["kind"], row["epoch"], row["step"], row["samples"], values))
        self.shown = len(history)

    def take(self, record: Record) -> None:
        """Show a row of the history, with what it says of the plan and of what limits the run."""
        said, path, panel, self.status = (
            record.values.get("what", ""),
            self.run.folder / PLAN,
            self.view.panel,
            live.TRAINING,
        )
        if record.kind in ("change", "event") and path.exists():  # it may go at any moment
            plan = type(self.run.plan).from_json(path.read_text())
            if said.startswith(live.REFUSED) or record.kind == "change" or plan != self.plans.applied:
                self.plans.plan = self.plans.applied = self.asked = plan
                self.view.changed(plan)
        if panel is not None and record.values.get("asked") == "profile":
            verdict = self.run.verdict
            if verdict is not None and verdict.sentence == said:  # not an older one's, where it failed
                panel.propose(said, verdict.change)
        self.view.advance(record)
