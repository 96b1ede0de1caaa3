"""The live surface of a run in this process: what a person sees of it, and what they ask of it, heard between steps."""

from __future__ import annotations

import dataclasses
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, TracebackType
from typing import Any, Self

from nbtools.data import Pack
from nbtools.errors import NbtoolsError
from nbtools.live import control
from nbtools.live.control import Wishes
from nbtools.live.kernel import Messages, closing, flush, running_kernel
from nbtools.live.panel.panel import Panel
from nbtools.live.plot.chart import Preview
from nbtools.live.preview import Previews
from nbtools.live.view import PLOT_FILE, View
from nbtools.measure import Sampler, nvml_index
from nbtools.train import History, Plan, Record, TrainState, best_of, checkpoint, fixed, require_change

LOOK_EVERY = 0.5  # seconds between looks for control.json
SHOW_EVERY = 0.25  # seconds between refreshments of the panel
MOMENT = 0.05  # seconds of a pause between two looks at what is asked


def advised(folder: Path, plan: Plan) -> Plan:
    """The plan that was advised for the run in a folder, else the one it was started with; `plan` where neither is
    known."""
    values = checkpoint.read_index(folder).get("advised", {})
    return plan.replace(**{name: value for name, value in values.items() if name in plan.to_dict()})


class Surface(View):
    """A View whose buttons and fields act on the run; GPU readings; `control.json`; Ctrl-C.

    Enter it while the run lasts. `listen` hears what is asked, `wishes` is what waits to be granted, `heeded` the plan
    of the last wish that was looked at, `undoable` the plans before each change, `advised` the plan that values are
    compared with.
    """

    def __init__(self, folder: Path, state: TrainState, pack: Pack, history: History, given: Any, show: bool):
        if not isinstance(given, Panel) and getattr(given, "plan", None) is not state.plan:
            given = state.plan  # an Advice has reasons, which stand beside the fields
        super().__init__(folder, history, state.plan, pack.splits["train"], state.task.BEST, given, show)
        self.state = state
        self.previews = Previews(state, pack)
        self.wishes = Wishes()
        self.heeded: Plan | None = None
        self.undoable: list[Plan] = []
        self.advised = advised(folder, state.plan)
        self.messages = Messages()
        self.sampler: Sampler | None = None
        self.energy = next((row["gpu_energy"] for row in reversed(history.rows) if "gpu_energy" in row), 0.0)
        self.looked = self.shown = 0.0
        self.seconds = 0.0  # of the epoch's steps so far
        self.looking = False  # at an evaluation that was asked for: a pause lets it end
        self.status = "compiling" if state.plan.compile or state.plan.graph else ""
        self.entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(Interrupt(self.wishes))
            if self.panel is not None and self.notebook:
                stack.enter_context(self.messages)
                with self.panel.lock:
                    late = self.panel.plan  # what another thread turned while the run was made ready is a wish
                    self.panel.begin(self.wishes, fixed(self.state.plan), self.check, self.advised, self.able)
                    self.panel.take(self.state.plan)
                    self.panel.put(late)
                stack.callback(self.panel.end)
            if self.state.device.type == "cuda" and (index := nvml_index(self.state.device.index or 0)) is not None:
                self.sampler = stack.enter_context(Sampler(index))
            self.start(self.status)
            self.entered = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.entered:  # until the picture is there Ctrl-C is a wish
            if error is None:
                self.finish(self.samples(), self.folder / PLOT_FILE)
            else:
                self.finish([])

    def samples(self) -> list[Preview]:
        """What the network reads now; nothing where nobody looks, or the task fails to show it, which is told."""
        if not self.progress:
            return []
        try:
            return self.previews.now()
        except Exception as error:
            self.previews.ids = []
            self.tell(f"no samples are shown: {type(error).__name__}: {error}")
            return []

    def check(self, plan: Plan) -> None:
        """Raise NbtoolsError for a plan that the run cannot take over."""
        require_change(self.state, plan, self.count)

    def able(self, action: str) -> bool:
        """Whether there is anything to do for an action."""
        return bool(self.undoable) if action == "undo" else action != "best" or best_of(self.folder) is not None

    def request(self, plan: Plan) -> None:
        """Request a plan, and show it in the panel as if it had been requested there."""
        self.wishes.plan = plan
        if self.panel is not None:
            self.panel.hear(plan)

    def returned(self, plan: Plan) -> None:
        """The run continues with the plan of an earlier checkpoint: requests since then are void."""
        self.undoable.clear()
        self.request(plan)
        self.heeded = self.wishes.plan
        self.turned(plan)

    def measured(self, record: Record) -> Record:
        """The record with the GPU's newest reading, where it is a row and there is one. Energy goes on from the rows of
        an earlier session."""
        reading = self.sampler.latest if self.sampler is not None else None
        if reading is None or record.kind not in ("step", "epoch") or not record.values:
            return record
        values = reading.values()
        if isinstance(used := values.get("gpu_energy"), float):
            values["gpu_energy"] = self.energy + used
        return dataclasses.replace(record, values={**record.values, **values})

    def update(self, record: Record) -> None:
        """Show what a record brings, where it is time to."""
        self.advance(record)
        self.looking = self.looking and (self.state.evaluate_next or record.kind == "evaluating")
        if record.kind == "step" and self.panel is not None:
            self.panel.buttons.pace = self.state.seconds - self.seconds
        self.seconds = self.state.seconds
        if record.kind in ("step", "evaluating"):
            self.status = "evaluating" if record.kind == "evaluating" else ""
        if record.kind == "change":
            plan = self.state.plan
            self.turned(plan)
            if plan.compile or plan.graph:  # another batch size or precision is another program
                self.status, self.plot.due = "compiling", 0.0
        if record.kind in ("epoch", "evaluation") and self.sees and self.previews.due():
            self.see(self.samples())
        self.draw(self.status)

    def listen(self) -> bool:
        """Read clicks, control.json and the kernel's shutdown; whether there is something to apply."""
        self.messages.handle()
        if closing(running_kernel()):
            self.wishes.stop, self.wishes.stopper = True, "the shutdown of the kernel"
        if (trouble := self.messages.trouble) is not None and trouble not in self.told:
            self.tell(trouble)
        now, wishes = monotonic(), self.wishes
        if self.panel is not None and now >= self.shown:
            self.panel.refresh()
            self.shown = now + SHOW_EVERY
        if now >= self.looked and wishes.plan is self.heeded:
            self.looked = now + LOOK_EVERY
            try:
                control.receive(self.folder, wishes, self.state.plan, self.check, self.advised)
            except NbtoolsError as error:
                self.answer(f"{control.REFUSED}{error}")
            if self.panel is not None and wishes.plan is not None and wishes.plan is not self.heeded:
                self.panel.hear(wishes.plan)
        asked = wishes.stop or wishes.save or wishes.evaluate or wishes.profile or wishes.best or wishes.undo
        return wishes.paused or asked or wishes.plan is not self.heeded

    def answer(self, sentence: str, asked: str = "") -> None:
        """Show a message here and, through the history, wherever else the run is watched. asked: which of
        `control.ACTIONS` it answers."""
        state, values = self.state, {"what": sentence, **({"asked": asked} if asked else {})}
        self.tell(sentence)
        self.history.append(Record("event", state.epoch, state.step, state.samples, values))

    def hold(self) -> None:
        """A moment of a pause."""
        self.draw("paused")
        sleep(MOMENT)


class Interrupt:
    """Turns the first SIGINT into a wish that is read between steps, since one inside a step would tear the state; a
    second one interrupts at once. Off the main thread signals cannot be caught: there it does nothing."""

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.asked = False
        self.before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = self.wishes.stop = True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


class Termination:
    """Turns the first SIGTERM into a request to stop, and delivers it when the block has ended; a second one is
    delivered at once. Off the main thread it does nothing.

    Schedulers send it, and jupyter_client to a kernel that has not shut down after half of `shutdown_wait_time`
    (2.5 of 5 s), when SIGKILL follows.
    """

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.came = False
        self.before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self.ask) or signal.SIG_DFL
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self.deliver()
        self.came = self.wishes.stop = True
        self.wishes.stopper = "SIGTERM"

    def deliver(self) -> None:
        signal.signal(signal.SIGTERM, self.before)
        signal.raise_signal(signal.SIGTERM)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.before is None:
            return
        signal.signal(signal.SIGTERM, self.before)
        if self.came and error is None:  # an error has to be shown, which ends a process in a terminal as well
            flush()
            signal.raise_signal(signal.SIGTERM)
