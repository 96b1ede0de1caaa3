"""A job whose parts take known times, on a clock that it moves itself: what is to be measured is known exactly."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from nbtools.data import Pack


@dataclass
class Job:
    """The toy task, with seconds for its parts. reading: of a sample's source file; preparing: of a sample in `batch`;
    fixed, a_sample: of a forward and backward pass; scoring: of a validation batch; amp: precision → the factor of its
    passes; losses: of its losses, or their function; most: samples a pass, beyond which memory ends; cost: of a pass
    of so many samples, instead of fixed and a_sample. passes: [(precision, samples)] of all that were made."""

    reading: float = 0.0
    preparing: float = 0.0
    fixed: float = 0.05
    a_sample: float = 0.0
    scoring: float = 0.0
    amp: dict[str, float] = field(default_factory=dict)
    most: float = float("inf")
    cost: Callable[[int], float] | None = None
    losses: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    passes: list[tuple[str, int]] = field(default_factory=list)

    PLAN, BASELINE, BEST, model = toy.PLAN, toy.BASELINE, toy.BEST, staticmethod(toy.model)

    def clock(self) -> float:
        return self.now

    @contextmanager
    def times(self) -> Iterator[None]:
        """Measurements of the block read the job's own clock, on an idle machine."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("timing.perf_counter", "advisor.process_time"):
                patch.setattr(f"nbtools.measure.{name}", self.clock)
            patch.setattr("os.getloadavg", lambda: 3 * (0.0,))
            yield

    def pack(self, pack: Pack) -> Pack:
        assert pack.raw is not None
        return dataclasses.replace(pack, raw=dataclasses.replace(pack.raw, read=self.read))

    def read(self, path: Path, options: Any) -> Any:
        self.now += self.reading
        return toy.read(path, options)

    def batch(self, raw: Any, plan: Any, draws: Any) -> Any:
        self.now += len(raw["id"]) * self.preparing
        return toy.batch(raw, plan, draws)

    def loss(self, model: Any, batch: Any, plan: Any) -> Any:
        size = len(batch["x"])
        if size > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {size} samples.")
        if torch.is_grad_enabled():
            self.passes.append((plan.amp, size))
            seconds = self.cost(size) if self.cost else self.fixed + self.a_sample * size
            self.now += seconds * self.amp.get(plan.amp, 1.0)
        total, number = toy.loss(model, batch, plan)
        if (factor := self.losses.get(plan.amp, 1.0)) is None:
            raise RuntimeError('"fft" not implemented for BFloat16')
        return factor(total) if callable(factor) else total * factor, number

    def metrics(self, outputs: Any, batch: Any) -> Any:
        self.now += self.scoring
        return toy.metrics(outputs, batch)
