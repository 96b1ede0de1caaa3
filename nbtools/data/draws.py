"""What is random: the order of samples, which follows from (seed, epoch, position), and draws: random numbers per
sample, independent of the batch, device or order in which it comes.

The n-th number of a sample is a hash of (seed, epoch, sample id, n) in whole-number tensor operations, with the same
bits on CPU and GPU: PCG's output permutation RXS-M-XS 32 (O'Neill 2014), chained (Jarzynski & Olano 2020). B samples.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray
Segments = Sequence[Sequence[int]]  # [(batch size, batches done with it)] since the start of the epoch

MEGABATCH = 32  # batches sorted by length together: about 2.5 % padding in simulated text lines, order still mixed
STAYING = 2**14  # small tensors of a kind that stay on a device: more than a run has shapes, as CUDA graphs read them


def batches_left(ids: Ids, lengths: Ids | None, seed: int, epoch: int, segments: Segments) -> list[Ids]:
    """Return what remains of an epoch: batches of ids in order, after the given position. A change of batch size is a
    new segment: it regroups what the earlier ones left, so every id still comes exactly once. lengths (same order as
    ids) groups samples of like length, within megabatches whose batches are then shuffled; None if all are equal."""
    left = np.random.default_rng([seed, epoch]).permutation(len(ids))
    batches: list[np.ndarray] = []
    for k, (batch_size, done) in enumerate(segments):
        batches = split(left, batch_size if lengths is None else batch_size * MEGABATCH)
        if lengths is not None:
            megabatches = (mega[np.argsort(lengths[mega], kind="stable")] for mega in batches)
            batches = [batch for mega in megabatches for batch in split(mega, batch_size)]
            rng = np.random.default_rng([seed, epoch, k + 1])  # NumPy takes [seed, epoch, 0] for [seed, epoch]
            batches = [batches[i] for i in rng.permutation(len(batches))]
        left = left[~np.isin(left, np.concatenate([left[:0], *batches[:done]]))]
        batches = batches[done:]
    return [ids[batch] for batch in batches]


def split(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut into batches; a last one of a single sample, which BatchNorm refuses, gets another from the one before."""
    cuts = list(range(size, len(order), size))
    if size > 1 and cuts and len(order) - cuts[-1] == 1:
        cuts[-1:] = [cuts[-1] - 1] if size > 2 else []
    return np.split(order, cuts) if len(order) else []


def batches_in(count: int, batch_size: int) -> int:
    """Return how many batches an epoch over so many samples has, grouped by length or not: as `split` makes them."""
    return -(-count // batch_size) - (batch_size == 2 and count > 1 and count % 2)


def in_order(ids: np.ndarray, lengths: np.ndarray | None, batch_size: int) -> list[np.ndarray]:
    """Return every id once, for evaluation: ascending, or by length so that little is padded."""
    return split(ids if lengths is None else ids[np.argsort(lengths, kind="stable")], batch_size)


def mix(x: Any) -> Any:
    """Return a 32-bit hash of whole numbers in [0, 2³³): plain ones, or int64, as torch has few unsigned operations."""
    state = (x * 747796405 + 2891336453) & 0xFFFFFFFF
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & 0xFFFFFFFF
    return (word >> 22) ^ word


@lru_cache(STAYING)  # a copy in every step would make the host wait, and a CUDA graph reads it where it lies
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of these values, float32 whatever torch's default is. Not to be modified."""
    return torch.tensor(values, dtype=dtype, device=device)


@lru_cache(STAYING)
def places(count: int, device: torch.device) -> Tensor:
    """Return (count,) int64, from 0 on. Not to be modified: those up to a power of two share memory."""
    if count & (count - 1):
        return places(1 << count.bit_length(), device)[:count]
    return torch.arange(count, device=device)


class Keys:
    """The keys of all samples in an epoch, in one tensor that a CUDA graph reads where it lies; ids are below count."""

    def __init__(self, count: int, device: torch.device):
        self.ids, self.epoch = torch.arange(count, device=device), (-1, -1)
        self.table = torch.empty_like(self.ids)

    def of(self, seed: int, epoch: int) -> Tensor:
        """Return (count,) int64, until those of another epoch replace them."""
        if self.epoch != (seed, epoch):
            self.table.copy_(Draws(seed, epoch, self.ids).keys)
            self.epoch = seed, epoch
        return self.table


class Draws:
    """The random numbers of a batch; each call takes the next ones. ids (B,) int64, on its device; keys: of all ids."""

    def __init__(self, seed: int, epoch: int, ids: Tensor, keys: Keys | None = None):
        self.seed, self.epoch, self.ids, self.all, self.count = seed, epoch, ids, keys, 0

    @cached_property
    def keys(self) -> Tensor:  # at the first draw: a task without augmentation pays nothing
        if self.all is not None:
            return self.all.of(self.seed, self.epoch)[self.ids]
        return mix(self.ids + mix(mix(self.seed) + self.epoch))

    def bits(self, shape: tuple[int, ...] = ()) -> Tensor:
        """Return (B, *shape) int64 in [0, 2³²)."""
        first, self.count = self.count, self.count + math.prod(shape)
        numbers = mix(places(self.count, self.ids.device)[first:])
        return mix(self.keys[:, None] + numbers).view(len(self.ids), *shape)

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> Tensor:
        """Return (B, *shape) float32 in [low, high), 24 bits; low ≠ 0 may round up to high."""
        return (self.bits(shape) >> 8) * constant(((high - low) / 2**24,), self.ids.device) + low

    def uniforms(self, *ranges: tuple[float, float]) -> Tensor:
        """Return (B, N) float32, the n-th in the n-th range [low, high): those of N calls of `uniform`."""
        spans = constant(tuple((high - low) / 2**24 for low, high in ranges), self.ids.device)
        lows = constant(tuple(low for low, _ in ranges), self.ids.device)
        return (self.bits((len(ranges),)) >> 8) * spans + lows

    def normal(self, shape: tuple[int, ...] = ()) -> Tensor:
        """Return (B, *shape) float32, mean 0, variance 1 (Box–Muller); equal across devices but for log and cos."""
        radius = (-2 * torch.log1p(-self.uniform(shape=shape))).sqrt()
        return radius * torch.cos(self.uniform(0, 2 * math.pi, shape))

    def chance(self, p: float, shape: tuple[int, ...] = ()) -> Tensor:
        """Return (B, *shape) bool, True with probability p."""
        return self.uniform(shape=shape) < p
