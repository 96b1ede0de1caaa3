"""A few samples of the validation split with what the network reads in them now: the live picture's last row."""

from __future__ import annotations

from time import monotonic

import numpy as np

from nbtools.data import Pack, collate
from nbtools.live.plot.chart import Preview
from nbtools.train import TrainState, scoring

COUNT = 8
COST = 0.002  # share of the time that looking may take


class Previews:
    """The same few samples each time, evenly spaced over the split; none where the task shows no samples.

    `Task.preview` draws them, from the answers of `Task.decode`.
    """

    def __init__(self, state: TrainState, pack: Pack):
        task = state.task
        self.state, self.pack = state, pack
        ids = pack.ids("val") if len(pack.ids("val")) else pack.ids("train")
        places = np.unique(np.linspace(0, len(ids) - 1, COUNT).round().astype(int))
        self.ids = [int(i) for i in ids[places]] if task.preview is not None else []
        self.next = 0.0

    def due(self) -> bool:
        """Whether another look costs less than its share of the time."""
        return bool(self.ids) and monotonic() >= self.next

    def now(self) -> list[Preview]:
        """The samples, and the answers of the weights that evaluation uses."""
        if not self.ids:
            return []
        start, state = monotonic(), self.state
        raw = collate([self.pack.sample(i) for i in self.ids], self.pack.columns)
        raw = {name: tensor.to(state.device) for name, tensor in raw.items()}
        _, outputs = scoring.forward(state.task, state.evaluated, raw, state.plan.while_training(), state.device)
        answers = state.task.decode(outputs, state.card)
        found = [Preview(*state.task.preview(self.pack, i, a)) for i, a in zip(self.ids, answers, strict=True)]
        end = monotonic()
        self.next = end + (end - start) / COST
        return found
