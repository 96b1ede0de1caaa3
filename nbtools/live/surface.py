"""The live surface of a run in this process: what is shown of it, and the requests to it, which are read between
steps."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self

from torch.distributed import is_torchelastic_launched

from nbtools.data import Pack
from nbtools.errors import NbtoolsError
from nbtools.live import facts, requests
from nbtools.live.facts import COMPILING, EVALUATING, TRAINING
from nbtools.live.kernel import Messages, closing, running_kernel
from nbtools.live.panel import Panel
from nbtools.live.requests import REFUSED, FirstSignal, Requests, advised
from nbtools.live.samples import FIRST, Preview, Previews
from nbtools.live.view import PLOT_FILE, View
from nbtools.measure import Sampler, nvml_index
from nbtools.train import History, Record, TrainState, checkpoint, require_change

LOOK_EVERY = 0.1  # seconds between looks for control.json, which cost microseconds
SHOW_EVERY = 0.25  # seconds between updates of the panel
MOMENT = 0.05  # seconds between two reads of the requests during a pause


class Surface(View):
    """A View whose buttons and fields act on the run; GPU readings; `control.json`; Ctrl-C. Enter it while the run
    lasts.

    wanted: the samples to show, of a callback, which may run on another thread and sets a value only. looking: at a
    requested evaluation, which a pause lets end. next_steps: what to do when the run has ended. undoable: whether a
    change of settings is recent enough.
    """

    def __init__(self, folder: Path, state: TrainState, pack: Pack, history: History, given: Any, show: bool):
        if not isinstance(given, Panel) and getattr(given, "plan", None) is not state.plan:
            given = state.plan  # an Advice has reasons, which stand next to the fields
        super().__init__(folder, history, state.plan, pack.splits["train"], state.task.BEST, given, show)
        self.state, self.pack = state, pack
        self.previews = Previews(state, pack, checkpoint.read_index(folder).get("samples", FIRST))
        check = partial(require_change, state, epoch_size=self.count)
        self.requests = Requests(state, advised(folder, state.plan), check, self.able)
        self.messages, self.interrupts = Messages(), FirstSignal(signal.SIGINT, partial(self.requests.post, "stop"))
        self.sampler: Sampler | None = None
        self.energy = next((row["gpu_energy"] for row in reversed(history.rows) if "gpu_energy" in row), 0.0)
        self.looked = self.shown = 0.0
        self.wanted, self.looking = "", False
        self.next_steps: Callable[[], str] = str
        self.undoable: Callable[[], bool] = bool
        self.status = facts.DONE if state.over else COMPILING if state.plan.compile else TRAINING
        self.entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.interrupts)
            if self.panel is not None and self.notebook:
                stack.enter_context(self.messages)
                self.panel.begin(self.requests)
                stack.callback(self.panel.end)
            if self.state.device.type == "cuda" and (index := nvml_index(self.state.device.index or 0)) is not None:
                self.sampler = stack.enter_context(Sampler(index))
            if not self.state.over:
                self.open()
            if self.output is not None and self.previews.ids:
                self.output.offer(self.previews.which, partial(setattr, self, "wanted"))
            self.start(self.status)
            if self.state.step and not self.state.over and self.visible:
                self.show_samples(self.samples())
            self.entered = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.entered:  # until the picture is there Ctrl-C is a request
            stopped = self.requests.stop and not self.state.over
            status, path = facts.ended(error, stopped), self.folder / PLOT_FILE
            if error is None:
                self.finish(self.samples(), status, path)
                return
            try:
                checkpoint.mark(self.folder, ended=status)
                self.finish([], status, path)
            except NbtoolsError as trouble:  # as where a disk is full: the error that ended the run is the one to raise
                self.tell(str(trouble))

    def open(self) -> None:
        """Show what the run starts with; under torchrun, where another process draws the run, through the history."""
        lines = facts.opening(self.state, self.pack)
        if self.visible:
            self.log([[line] for line in lines])
        elif is_torchelastic_launched():
            self.record("\t".join(lines), facts.OPENING)

    # -- samples

    def samples(self) -> list[Preview]:
        """Return the network's current answers; none where they are not displayed. If the task fails to show them, a
        message says so."""
        try:
            return self.previews.now() if self.progress else []
        except Exception as error:
            self.previews.ids = []
            self.tell(f"no samples are shown: {type(error).__name__}: {error}")
            return []

    def show_chosen(self) -> None:
        """Show the samples that were requested, if any, and keep the choice in the run's folder for when it resumes."""
        which, self.wanted = self.wanted, ""
        if which and which != self.previews.which:
            self.previews.which = which
            checkpoint.mark(self.folder, samples=which)
            self.show_samples(self.samples())

    # -- records and requests

    def able(self, action: str) -> bool:
        """Return whether there is anything to do for an action."""
        if action == "undo":
            return self.undoable() or self.state.plan != self.state.applied
        return action != "best" or "best" in checkpoint.read_index(self.folder)

    def measured(self, record: Record) -> Record:
        """Return the record with the GPU's newest reading, if it is a row and there is one; at the end of training it
        is read once more. Energy adds to that of an earlier session."""
        if self.sampler is None or record.kind not in ("step", "epoch") or not record.values:
            return record
        if record.kind == "epoch" and self.state.over:
            self.sampler.renew()
        reading = dict(self.sampler.latest or {})
        if isinstance(used := reading.get("gpu_energy"), float):
            reading["gpu_energy"] = self.energy + used
        return dataclasses.replace(record, values={**record.values, **reading})

    def update(self, record: Record) -> None:
        """Show a record when it is due."""
        self.advance(record)
        self.looking = self.looking and (self.state.evaluate_next or record.kind == "evaluating")
        if record.kind in ("step", "evaluating"):
            self.status = EVALUATING if record.kind == "evaluating" else TRAINING
        if record.kind in ("change", "event"):  # as of going back to a checkpoint
            self.changed(self.state.plan)
            if self.state.plan.compile and record.kind == "change":  # another batch size is another program
                self.status, self.due = COMPILING, 0.0
        if record.kind in ("epoch", "evaluation") and self.visible and self.previews.due():
            self.show_samples(self.samples())
        self.draw(self.status)

    def listen(self) -> bool:
        """Read clicks, control.json and the kernel's shutdown; return whether something is pending, other than a change
        of settings, which the loop applies."""
        self.messages.handle()
        self.show_chosen()
        if closing(running_kernel()):
            self.requests.post("stop", by="the kernel's shutdown")
        if (trouble := self.messages.trouble) is not None and trouble not in self.events:
            self.tell(trouble)
        now = monotonic()
        if self.panel is not None and now >= self.shown:
            self.panel.refresh()
            self.shown = now + SHOW_EVERY
        if now >= self.looked:
            self.looked = now + LOOK_EVERY
            try:
                requests.receive(self.folder, self.requests)
            except NbtoolsError as error:
                self.answer(f"{REFUSED}{error}")
        return self.requests.paused or bool(self.requests.pending)

    def record(self, what: str, asked: str = "") -> None:
        """Write an event to the history, for whoever watches the run from elsewhere."""
        state, values = self.state, {"what": what, **({"asked": asked} if asked else {})}
        self.history.append(Record("event", state.epoch, state.step, state.samples, values))

    def answer(self, message: str, asked: str = "") -> None:
        """Show a message here and, through the history, wherever else the run is watched. asked: which of
        `requests.ACTIONS` it answers."""
        self.tell(message)
        self.record(message, asked)

    def report(self, message: str) -> None:
        """Show a message; under torchrun, where another process draws the run, through the history."""
        (self.answer if is_torchelastic_launched() else self.tell)(message)

    def report_all(self, messages: list[str]) -> None:
        """Report messages, and empty the list."""
        while messages:
            self.report(messages.pop(0))

    def measure(self) -> None:
        """Show that training waits for a measurement, which is about to begin."""
        self.due = 0.0
        self.draw(facts.MEASURING)

    def hold(self) -> None:
        """Wait a moment during a pause."""
        self.draw(facts.PAUSED)
        sleep(MOMENT)
