"""Draws: random numbers per sample, independent of the batch, device or order in which the sample comes.

The n-th number of a sample is a hash of (seed, epoch, sample id, n) in whole-number tensor operations: CPU and GPU give
the same bits, and augmentation resumes exactly and survives a change of batch size. The hash is PCG's output
permutation RXS-M-XS 32 (O'Neill 2014) in chained form (Jarzynski & Olano 2020). B samples.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

STAYING = 512  # small tensors of a kind that stay on a device; a step reads a few dozen, other shapes bring others


def mix(x: Any) -> Any:
    """Return a 32-bit hash of whole numbers in [0, 2³³): plain ones, or int64, as torch has few unsigned operations."""
    state = (x * 747796405 + 2891336453) & 0xFFFFFFFF
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & 0xFFFFFFFF
    return (word >> 22) ^ word


@lru_cache(STAYING)  # a copy in every step would make the host wait, and a CUDA graph reads it where it lies
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of these values. Not to be modified."""
    return torch.tensor(values, dtype=dtype, device=device)


@lru_cache(STAYING)
def places(count: int, device: torch.device) -> Tensor:
    """Return (count,) int64, from 0 on. Not to be modified."""
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
    """The random numbers of one batch; every call takes the next ones. ids (B,) int64 on the device of the batch;
    keys: where those of all samples are looked up; None: hash them."""

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
        span = constant(((high - low) / 2**24,), self.ids.device)  # float32, whatever torch's default is
        return (self.bits(shape) >> 8) * span + low

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
