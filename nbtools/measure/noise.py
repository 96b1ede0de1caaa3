"""The gradient noise scale: the batch size beyond which a step learns little more, estimated from two batch sizes.

B = tr(Σ) / |G|², the "simple" noise scale of McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1): Σ is the
covariance of one sample's gradient, G the mean gradient. A gradient of b samples has the expected square norm
|G|² + tr(Σ) / b, so two sizes give both. It belongs to the weights it was measured at, and grows as training goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.measure.trial import Trial
from nbtools.measure.untouched import untouched
from nbtools.train import Plan, Task, TrainState, backward, clear_gradients, load_module
from nbtools.train import device as devices

SMALL, PARTS = 16, 8  # samples of the small batch; small batches whose mean is the large one
PAIRS = (8, 200)  # fewest and most
ENOUGH = 0.1  # of the value: an interval so narrow needs no more pairs
RESAMPLES, CONFIDENCE = 1000, 0.9


@dataclass(frozen=True)
class Noise:
    """B_simple in samples. low, high: the 90 % bootstrap interval over n pairs of batches of `small` and `large`
    samples. None: beyond what n pairs can tell, since the mean gradient is lost in the noise. step: of the weights."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    small: int
    large: int
    step: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def words(self) -> str:
        if self.value is None:
            return f"too large to tell from {self.n} pairs of batches of {self.small} and {self.large}"
        most = "∞" if self.high is None else f"{self.high:,.0f}"
        low = "–" if self.low is None else f"{self.low:,.0f}"
        where = "at the first weights" if self.step == 0 else f"after step {self.step}"
        return f"{self.value:,.0f} (90 % within {low}–{most}, n={self.n}) {where}"

    def __str__(self) -> str:
        return f"gradient noise scale: {self.words()}"


def noise_scale(
    task: Task,
    pack: Pack,
    plan: Plan,
    device: torch.device | str | None = None,
    seconds: float = 10.0,
    state: TrainState | None = None,
    seed: int = 0,
) -> Noise:
    """B_simple of the training loss at the weights of `state` (copied), else at those a run begins with.

    As the plan trains: with augmentation, dropout and mixed precision, but for fp16, whose scaled gradients would be
    cut off; never clipped. Ends after `seconds`, or when the interval is narrow. Raises TrainError where memory ends.
    """
    began = perf_counter()
    device = torch.device(device) if device is not None else state.device if state is not None else devices.pick()
    plan = plan.replace(amp="off") if plan.amp == "fp16" else plan
    with untouched(device):
        found, reason = devices.within_memory(lambda: Gradients(task, pack, plan, device, state, seed))
        pairs: list[tuple[float, float]] = []
        while found is not None and not enough(pairs, perf_counter() - began, seconds):
            pair, reason = devices.within_memory(found.pair)
            if pair is None:
                break
            pairs.append(pair)
        small = found.small if found is not None else 0
        del found
    if len(pairs) < 2:
        raise TrainError(f"out of memory measuring the gradient noise scale ({reason}); take a smaller network")
    scales = scales_of(pairs, small, PARTS)
    step = 0 if state is None else state.step
    return Noise(*scales, n=len(pairs), small=small, large=small * PARTS, step=step, seconds=perf_counter() - began)


class Gradients:
    """Square norms of gradients of small batches and of their means, at weights that stay as they are."""

    def __init__(self, task: Task, pack: Pack, plan: Plan, device: torch.device, state: TrainState | None, seed: int):
        self.trial = Trial(task, pack, plan, device)
        if state is not None:
            load_module(self.trial.state.model, dict(state.model.state_dict()), "")
        self.small = min(SMALL, max(2, len(self.trial.ids) // 2))
        self.rng = np.random.default_rng(seed)
        self.trial.state.model.train()

    def pair(self) -> tuple[float, float]:
        """(mean |gradient|² of PARTS small batches, |gradient|² of them all together). Samples are drawn with
        replacement: then the expectation is exact for a finite data set too."""
        state, trial = self.trial.state, self.trial
        groups = [trial.ids[self.rng.integers(len(trial.ids), size=self.small)] for _ in range(PARTS)]
        total: list[Tensor] = []
        squares = []
        for raw in trial.feed(groups):
            clear_gradients(state.parameters)
            backward(trial.task, state, raw)
            gradients = [p.grad for p in state.parameters if p.grad is not None]
            squares.append(square_norm(gradients))
            total = [a + g for a, g in zip(total, gradients, strict=True)] if total else gradients
        clear_gradients(state.parameters)
        small, large = torch.stack([torch.stack(squares).mean(), square_norm(total) / PARTS**2]).tolist()
        return small, large


def square_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares over all of them, in float64 where the device has it."""
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32).to(dtype) ** 2 for t in tensors]).sum()


def enough(pairs: list[tuple[float, float]], elapsed: float, seconds: float) -> bool:
    """Whether to stop: the time is up, or the interval is as narrow as is useful. Looks at it on powers of two."""
    n = len(pairs)
    if n < 2 or (n < PAIRS[0] and elapsed < 2 * seconds):
        return False
    if elapsed >= seconds or n >= PAIRS[1]:
        return True
    if n & (n - 1):
        return False
    value, low, high = scales_of(pairs, SMALL, PARTS)
    return value is not None and low is not None and high is not None and high - low < 2 * ENOUGH * value


def scales_of(
    pairs: list[tuple[float, float]], small: int, parts: int
) -> tuple[float | None, float | None, float | None]:
    """Pure: (B, low, high) from (|g_small|², |g_large|²) pairs; None for what is infinite.

    Numerator and denominator are averaged apart, as the paper asks: their ratio over one pair is badly biased.
    """
    found = np.array(pairs, np.float64)
    draws = np.random.default_rng(0).integers(len(found), size=(RESAMPLES, len(found)))
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratio(found[draws].mean(axis=1), small, parts), (edge, 1 - edge), method="nearest")
    value = ratio(found.mean(axis=0)[None], small, parts)[0]
    return finite(value), finite(low), finite(high)


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def ratio(means: np.ndarray, small: int, parts: int) -> np.ndarray:
    """(n, 2) mean square norms → (n,) B; infinite where |G|² comes out at nothing or below."""
    large = small * parts
    gradient = (large * means[:, 1] - small * means[:, 0]) / (large - small)  # |G|²
    noise = (means[:, 0] - means[:, 1]) / (1 / small - 1 / large)  # tr(Σ)
    return np.where(gradient > 0, np.maximum(noise, 0) / np.where(gradient > 0, gradient, 1), np.inf)
