"""What a person sees of a run while it lasts, and the interrupt with which they stop it."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from nbtools.history import History, Record
from nbtools.pack import Pack
from nbtools.plot import LivePlot, in_notebook
from nbtools.state import TrainState


class Surface:
    """The live plot in a notebook, a bar in a terminal, and sentences in both. told: every sentence so far."""

    def __init__(self, title: str, task: Any, state: TrainState, pack: Pack, progress: bool):
        count = len(pack.ids("train"))
        self.total = count * state.plan.epochs
        self.plot = LivePlot(title, state.plan.epochs, count, getattr(task, "BEST", "-loss"))
        self.told: list[str] = []
        self.notebook = in_notebook()
        quiet = not progress or self.notebook
        self.bar = tqdm(
            total=self.total, initial=state.samples, unit=" samples", disable=quiet, mininterval=0.5, dynamic_ncols=True
        )
        self.progress = progress

    def update(self, record: Record, history: History) -> None:
        if self.progress:
            self.plot.update(history, "evaluating" if record.kind == "evaluating" else "")
        if record.kind == "step":
            self.bar.update(record.samples - self.bar.n)
        if record.kind in ("event", "change"):
            self.tell(record.values["what"])
        if record.values and not self.bar.disable:
            shown = {
                k: v for k, v in record.values.items() if k == "loss" or (k.startswith("val_") and k != "val_loss")
            }
            if record.kind == "epoch":
                self.bar.write(epoch_line(record))
            self.bar.set_postfix({k: f"{v:.3f}" for k, v in shown.items()}, refresh=False)

    def tell(self, sentence: str) -> None:
        self.told.append(sentence)
        if self.progress:
            tqdm.write(sentence, file=sys.stdout if self.notebook else sys.stderr)

    def tell_all(self, sentences: list[str]) -> None:
        """Tell and forget them."""
        while sentences:
            self.tell(sentences.pop(0))

    def close(self) -> None:
        self.bar.close()


def epoch_line(record: Record) -> str:
    """One epoch in one line, for terminals and logs."""
    values = record.values
    shown = [f"{name} {value:.4f}" for name, value in values.items() if name.startswith(("train_", "val_"))]
    return f"epoch {record.epoch + 1}: {'  '.join(shown)}  lr {values['lr']:.2e}  {values['epoch_time']:.1f} s"


class Interrupt:
    """Turns the first SIGINT into a wish that is read between steps, since one inside a step would tear the state; a
    second one interrupts at once. Off the main thread signals cannot be caught: there it does nothing."""

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
