"""The live surface of a run in this process: what is shown of it, and the requests to it, read between steps."""

import dataclasses
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

from torch.distributed import is_torchelastic_launched

from nbtools.data import Pack
from nbtools.errors import NbtoolsError
from nbtools.live import facts, requests
from nbtools.live.kernel import PERIOD, Messages, closing, running_kernel
from nbtools.live.requests import REFUSED, FirstSignal, Requests, advised_plan
from nbtools.live.samples import Preview, Previews
from nbtools.live.view import View
from nbtools.measure import Sampler
from nbtools.train import Diverged, History, Record, TrainState, checkpoint, require_change

LOOK_EVERY = 0.25  # seconds between looks for control.json, and between updates of the panel


class Surface(View):
    """A View whose buttons and fields act on the run; GPU readings; `control.json`; Ctrl-C. looking: a requested
    evaluation is running, which a pause lets finish. undoable: whether a change can be undone."""

    def __init__(self, folder: Path, state: TrainState, pack: Pack, history: History, given: Any, show: bool):
        super().__init__(folder, history, state.plan, pack.card, state.task.BEST, given, show)
        self.state, self.pack, self.sampler = state, pack, None
        index = checkpoint.read_index(folder)
        self.previews = Previews(state, pack, index.get("samples"))
        self.requests = Requests(state, advised_plan(folder, state.plan), partial(require_change, state), self.able)
        self.messages, self.interrupts = Messages(), FirstSignal(signal.SIGINT, partial(self.requests.post, "stop"))
        self.looked, self.looking, self.held = 0.0, False, "paused" in index
        self.undoable: Callable[[], bool] = bool
        self.status = facts.DONE if state.over else facts.COMPILING if state.plan.compile else facts.TRAINING
        self.entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.interrupts)
            if self.panel is not None and self.notebook:
                stack.enter_context(self.messages)
                self.panel.begin(self.requests)
                stack.callback(self.panel.end)
            if self.state.device.type == "cuda":
                self.sampler = stack.enter_context(Sampler(self.state.device))
            if not self.state.over:
                watch = f"nb.watch({str(self.folder)!r}) shows it in another notebook here"
                line = f"{facts.opening(self.state, self.pack)}; {watch}"
                self.answer(line) if is_torchelastic_launched() else self.log([line])
            self.start(self.status)
            self.entered = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: Any) -> None:
        stopped = (self.requests.stop and not self.state.over) or isinstance(error, KeyboardInterrupt)
        status = facts.STOPPED if stopped else facts.DONE if error is None else facts.FAILED
        status = facts.DIVERGED if isinstance(error, Diverged) else status
        with self.entered:  # until the picture is there Ctrl-C is a request
            if error is not None:
                with suppress(NbtoolsError):  # as where a disk is full: the error that ended the run is to be raised
                    checkpoint.mark(self.folder, ended=status)
            self.finish([] if error else self.samples(), status, write=True)

    def samples(self) -> list[Preview]:
        """Return displayed samples with the network's current answers; where the task fails to show them, say so."""
        try:
            return self.previews.now() if self.progress else []
        except Exception as error:
            self.previews.ids = []
            self.tell(f"no samples are shown: {type(error).__name__}: {error}")
            return []

    def able(self, action: str) -> bool:
        if action == "undo":
            return self.undoable() or self.state.plan != self.state.applied
        return action != "best" or "best" in checkpoint.read_index(self.folder)

    def measured(self, record: Record) -> Record:
        """Return a row's record with the GPU's newest reading, if there is one; the end of training reads once more."""
        if self.sampler is None or record.kind not in ("step", "epoch") or not record.values:
            return record
        if record.kind == "epoch" and self.state.over:
            self.sampler.renew()
        return dataclasses.replace(record, values={**record.values, **(self.sampler.latest or {})})

    def update(self, record: Record) -> None:
        self.advance(record)
        self.looking = self.looking and (self.state.evaluate_next or record.kind == "evaluating")
        if record.kind in ("step", "evaluating"):
            self.status = facts.EVALUATING if record.kind == "evaluating" else facts.TRAINING
        if record.kind in ("change", "event"):  # as of going back to a checkpoint
            self.changed(self.state.plan)
        if record.kind == "change" and self.state.plan.compile:  # another batch size is another program
            self.status, self.due = facts.COMPILING, 0.0
        if record.kind in ("epoch", "evaluation") and self.output and self.previews.due():
            self.show_samples(self.samples())
        self.draw(self.status)

    def listen(self) -> bool:
        """Read clicks, control.json and the kernel's shutdown; return whether more than changed settings is pending."""
        self.messages.handle()
        if closing(running_kernel()):
            self.requests.post("stop", by="the kernel's shutdown")
        if (trouble := self.messages.trouble) is not None and trouble not in self.events:
            self.tell(trouble)
        if (now := monotonic()) >= self.looked:
            self.looked = now + LOOK_EVERY
            if self.panel is not None:
                self.panel.refresh()
            try:
                requests.receive(self.folder, self.requests)
            except NbtoolsError as error:
                self.answer(f"{REFUSED}{error}")
        if self.held != self.requests.paused:  # as the index says, for who watches it from elsewhere
            self.held, self.due = self.requests.paused, 0.0 if self.due < float("inf") else self.due
            checkpoint.mark(self.folder, paused=self.held or None)
        return self.requests.paused or bool(self.requests.pending)

    def answer(self, message: str, asked: str = "") -> None:
        """Show a message here and, by the history, wherever else the run is watched. asked: the action it answers."""
        self.tell(message)
        state, values = self.state, {"what": message, **({"asked": asked} if asked else {})}
        self.history.append(Record("event", state.epoch, state.step, state.samples, values))

    def report(self, message: str) -> None:
        """Show a message; under torchrun, where another process draws the run, through the history."""
        (self.answer if is_torchelastic_launched() else self.tell)(message)

    def report_all(self, messages: list[str]) -> None:
        while messages:
            self.report(messages.pop(0))

    def hold(self) -> None:
        self.draw(facts.PAUSED)
        sleep(PERIOD)
