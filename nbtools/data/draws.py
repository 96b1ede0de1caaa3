"""Draws: random numbers per sample, independent of the batch, device or order in which the sample comes.

A counter-based generator: the n-th number of a sample is a hash of (seed, epoch, sample id, n), in whole-number tensor
operations, so that CPU and GPU give the same bits. Augmentation built on it resumes exactly and survives a change of
batch size. The mixer is PCG's output permutation RXS-M-XS 32 (O'Neill 2014) in chained form (Jarzynski & Olano 2020).

B samples.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF
FACTOR, TERM = 747796405, 2891336453
BLOCK = 16  # numbers a sample hashed at once: on a GPU one costs as much as many
STAYING = 512  # small tensors of a kind that stay on a device; a step reads a few dozen, other shapes bring others


def mix(x: Tensor, more: int = 0) -> Tensor:
    """A 32-bit hash of x + more, whole numbers in [0, 2³³), held in int64 because torch has few unsigned operations."""
    return permuted(torch.rsub(x, more * FACTOR + TERM, alpha=-FACTOR))  # (x + more) · FACTOR + TERM by one kernel


def permuted(x: Tensor) -> Tensor:
    """The hash's second half, of the low 32 bits."""
    state = x & MASK
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & MASK
    return (word >> 22) ^ word


def mixed(*parts: int) -> int:
    """The same hash of several plain numbers: one seed that depends on all of them."""
    state = 0
    for part in parts:
        x = ((state + part) * FACTOR + TERM) & MASK
        word = (((x >> ((x >> 28) + 4)) ^ x) * 277803737) & MASK
        state = (word >> 22) ^ word
    return state


@lru_cache(STAYING)
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of these values that stays on the device: a copy in every step would make the host wait, and a CUDA
    graph reads it where it lies. Not to be modified."""
    return torch.tensor(values, dtype=dtype, device=device)


@lru_cache(STAYING)
def places(count: int, device: torch.device) -> Tensor:
    """(count,) int64, from 0 on, that stays on the device as well."""
    return torch.arange(count, device=device)


@lru_cache(STAYING)
def counters(first: int, count: int, device: torch.device) -> Tensor:
    """(count,) int64: the hashed numbers from `first` on, multiplied as `mix` does with the sum of one and a key."""
    return mix(torch.arange(first, first + count, device=device)) * FACTOR + TERM


class Keys:
    """The keys of all samples in an epoch, hashed once: a batch looks up its own by one kernel instead of ten, and a
    CUDA graph reads them where they lie. count: of samples, whose ids are 0 to count - 1."""

    def __init__(self, count: int, device: torch.device):
        self.table = torch.empty(count, dtype=torch.int64, device=device)
        self.known: tuple[int, int] | None = None

    def of(self, seed: int, epoch: int) -> Tensor:
        """(count,) int64, until another epoch's are asked for."""
        if self.known != (seed, epoch):
            self.known = None  # an interrupt may come
            self.table.copy_(mix(torch.arange(len(self.table), device=self.table.device), mixed(seed, epoch)))
            self.known = seed, epoch
        return self.table


class Draws:
    """The random numbers of one batch; every call takes the next ones. ids (B,) int64 on the device of the batch.
    known: where the keys of these samples are looked up; None: hash them."""

    def __init__(self, seed: int, epoch: int, ids: Tensor, known: Keys | None = None):
        self.seed, self.epoch, self.ids, self.known = seed, epoch, ids, known
        self.count = 0
        self.first = self.last = 0  # of the numbers that are hashed: (B, last - first) in `hashed`
        self.hashed = self.upper = ids  # upper: their higher 24 bits, all that a float32 holds

    @cached_property
    def keys(self) -> Tensor:
        """(B,) int64; made at the first draw, so that a task without augmentation pays nothing."""
        if self.known is not None:
            return self.known.of(self.seed, self.epoch)[self.ids]
        return mix(self.ids, mixed(self.seed, self.epoch))

    def take(self, count: int) -> slice:
        """Where the next numbers are in what is hashed, a block at a time."""
        start, self.count = self.count, self.count + count
        if start < self.first or self.count > self.last or not self.last:
            self.first, self.last = start, max(self.count, start + BLOCK)
            numbers = counters(start, self.last - start, self.ids.device)
            self.hashed = permuted(torch.add(numbers, self.keys[:, None], alpha=FACTOR))  # mix(key + number)
            self.upper = self.hashed >> 8
        return slice(start - self.first, self.count - self.first)

    def bits(self, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) int64 in [0, 2³²)."""
        place = self.take(math.prod(shape))
        return self.hashed[:, place].view(len(self.ids), *shape)

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) float32 in [low, high), 24 bits; low ≠ 0 may round up to high."""
        place = self.take(math.prod(shape))
        span = constant(((high - low) / 2**24,), self.ids.device)  # float32, whatever torch's default is
        return (self.upper[:, place] * span + low).view(len(self.ids), *shape)

    def uniforms(self, *ranges: tuple[float, float]) -> Tensor:
        """(B, N) float32, the n-th in the n-th range [low, high): those of N calls of `uniform` by two kernels."""
        device, place = self.ids.device, self.take(len(ranges))
        spans = constant(tuple((high - low) / 2**24 for low, high in ranges), device)
        lows = constant(tuple(low for low, _ in ranges), device)
        return self.upper[:, place] * spans + lows

    def normal(self, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) float32, mean 0, variance 1 (Box–Muller); equal across devices but for their log and cos."""
        radius = (-2 * torch.log1p(-self.uniform(shape=shape))).sqrt()
        return radius * torch.cos(self.uniform(0, 2 * math.pi, shape))

    def chance(self, p: float, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) bool, True with probability p: where `uniform` is less than p, by one kernel."""
        return self.bits(shape) < math.ceil(np.float32(p) * 2**24) << 8
