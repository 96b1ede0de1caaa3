"""The learning-rate sweep with its curve drawn: loss over lr, the suggestion marked."""

from __future__ import annotations

import math

import numpy as np
import torch

from nbtools.data import Pack, in_notebook
from nbtools.live import BLUE, Chart, Line, Mark, Picture, falling, number, png
from nbtools.measure import SECONDS, STEPS, Sweep, sweep
from nbtools.train import Plan, TaskLike, as_task


def lr_sweep(
    task: TaskLike,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = STEPS,
    seconds: float = SECONDS,
) -> LrSweep:
    """Raise lr step by step from low to high on a model of its own, and say which one the curve suggests.

    Costs `steps` steps of training, fewer where they would take longer than `seconds`; model, random state and GPU
    memory of whoever calls are as they were. Raises TrainError for a range that is none.
    """
    return LrSweep.from_dict(sweep.lr_sweep(as_task(task), pack, plan, device, low, high, steps, seconds).to_dict())


class LrSweep(Sweep):
    """A sweep that shows as its curve and a table in a notebook, as the table in a terminal."""

    def picture(self) -> Picture:
        """Loss as measured (faint) and smoothed over lr, on an axis of decades."""
        if len(self.lrs) < 2:
            return Picture((Chart("loss", (), falling(0.0, 1.0), note="lost at once"),), x="learning rate")
        x = np.log10(np.array(self.lrs) / self.lrs[0])
        losses, smoothed = np.array(self.losses), np.array(self.smoothed)
        lines = (
            Line("", x, losses, BLUE, "faint"),
            Line("smoothed loss", x, smoothed, BLUE, value=number(smoothed.min())),
        )
        span = float(np.ptp(smoothed))  # one wild loss at the end would hide all others
        low, top = max(losses.min(), smoothed.min() - span / 2), min(losses.max(), smoothed.max() + span)
        chart = Chart("loss", lines, falling(float(min(low, smoothed.min())), float(top)), "a sample")
        return Picture((chart,), float(x[-1]), self.marks(), x="learning rate", origin=self.lrs[0])

    def marks(self) -> tuple[Mark, ...]:
        if self.suggestion is None:
            return ()
        name = f"suggested {self.suggestion:.2g}"
        return (Mark(math.log10(self.suggestion / self.lrs[0]), name, name, side=-1),)

    def png(self) -> bytes:
        return png.draw(self.picture())

    def _repr_png_(self) -> bytes:
        return self.png()

    def _ipython_display_(self) -> None:
        """Two outputs, since a saved notebook keeps a picture where GitHub shows it only as one of its own."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the text
        from IPython.display import HTML, Image, display

        display(Image(self.png(), retina=True))
        display(HTML(self._repr_html_()))
