"""watch: the view of a run that another process trains: its history, and `control.json` for requests to it."""

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
from nbtools.run import HISTORY, PLAN, Run, busy, what_next
from nbtools.train import CONTROL, KEYS, History, Record, checkpoint, require_batch

MOMENT = 0.05  # seconds between two checks for requests
READ_EVERY = 0.5  # seconds between two reads of the history


def watch(run: str | Path, wait: float = 60.0) -> Run:
    """Draw a run that another process on this machine trains until it ends, with buttons and fields that act on it;
    return the Run. An interrupt ends the watching, not the run; one that is over, or kept here, is drawn once.

    wait: seconds to wait for the run to start. Raises CheckpointError if there is no run.
    """
    folder, left, end = Path(run), Event(), monotonic() + wait
    while not checkpoint.read_index(folder) and monotonic() < end:
        sleep(MOMENT)
    remote = Remote(Run.open(folder))
    with live.FirstSignal(signal.SIGINT, left.set):
        remote.follow(lambda: busy(folder) and not left.is_set())
    if busy(folder):
        stop = f"python -m nbtools control {folder} stop"
        remote.view.tell(f"{folder} continues; nb.watch it again, or ask it to stop: {stop}")
    return Run.open(folder)


class Remote:
    """A run in another process. given: the panel or the Advice to show; None: the run's plan. sent: actions that it has
    not taken yet; asked: the plan and the pause that it was asked for; shown: rows of the history."""

    def __init__(self, run: Run, given: Any = None, show: bool = True):
        (metric, sign), plan, count = run.metric, run.plan, run.card.splits["train"]
        given = given if isinstance(given, live.Panel) or getattr(given, "plan", None) == plan else plan
        self.run, self.history, self.plans = run, History(run.folder / HISTORY), live.Plans(plan, plan)
        best = f"-{metric}" if sign < 0 else metric
        self.view = live.View(run.folder, self.history, plan, count, best, given, show)
        fits = partial(require_batch, count=count)
        self.requests = live.Requests(self.plans, live.advised_plan(run.folder, plan), fits)
        self.sent: set[str] = set()
        self.asked, self.shown, self.status = (plan, False), len(self.history), live.STARTING

    def follow(self, lasts: Callable[[], bool]) -> None:
        """Draw while the run lasts, and send what is requested; then draw how it ended, and say what to do next."""
        due, view, panel = 0.0, self.view, self.view.panel if self.view.notebook else None
        with ExitStack() as stack:
            stack.callback(self.finish)
            messages = stack.enter_context(live.Messages())
            if panel is not None:
                stack.callback(panel.end)
                panel.begin(self.requests)
            view.start()
            while lasts():
                messages.handle()
                self.send()
                if monotonic() >= due:
                    due = monotonic() + READ_EVERY
                    self.read()
                if panel is not None:
                    panel.refresh()
                view.draw(self.status)
                sleep(MOMENT)
            self.read()

    def finish(self) -> None:
        run = Run(self.run.folder, self.run.known, self.run.card, self.plans.plan)
        self.view.finish([], run.state)
        if run.state in live.OVER and run.index:  # else it goes on, or did not begin
            self.view.tell(what_next(run, run.over))

    def send(self) -> None:
        """Send what was requested since the last call, once the run has taken that; until then an action is pending."""
        requests, (plan, paused), folder = self.requests, self.asked, self.run.folder
        if (folder / CONTROL).exists() or not folder.is_dir():
            return
        requests.pending -= self.sent
        self.sent = set(requests.pending)
        turned = ["pause" if requests.paused else "resume"] * (requests.paused != paused)
        settings = {name: getattr(self.plans.plan, name) for name in self.plans.plan.changes_from(plan)}
        if self.sent or turned or settings:  # which the panel has asked to confirm already
            live.send(folder, [*self.sent, *turned], settings, force=bool(settings))
        self.asked = self.plans.plan, requests.paused

    def read(self) -> None:
        """Show the rows that are new, or other ones where it went back, and follow what they say of the plan."""
        before, view = self.history.rows[: self.shown], self.view
        self.history.refresh()
        pairs = zip(before, self.history.rows, strict=False)
        equal = takewhile(lambda rows: str(rows[0]) == str(rows[1]), pairs)  # as text: NaN is not NaN
        for row in self.history.rows[len([*equal]) :]:
            values = {name: value for name, value in row.items() if name not in KEYS}
            self.status = live.TRAINING
            if row["kind"] == "change" or values.get("what", "").startswith(live.REFUSED):
                plan = type(self.run.plan).from_json((self.run.folder / PLAN).read_text())
                self.plans.plan = self.plans.applied = plan
                self.asked = plan, self.asked[1]
                view.changed(plan)
            view.advance(Record(row["kind"], row["epoch"], row["step"], row["samples"], values))
        self.shown = len(self.history)
