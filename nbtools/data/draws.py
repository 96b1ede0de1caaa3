"""Draws: random numbers per sample, independent of the batch, device or order in which the sample comes.

A counter-based generator: the n-th number of a sample is a hash of (seed, epoch, sample id, n), in whole-number tensor
operations, so that CPU and GPU give the same bits. Augmentation built on it resumes exactly and survives a change of
batch size. The mixer is PCG's output permutation RXS-M-XS 32 (O'Neill 2014) in chained form (Jarzynski & Olano 2020).

B samples.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A 32-bit hash of whole numbers in [0, 2³²), held in int64 because torch has few unsigned operations."""
    state = (x * 747796405 + 2891336453) & MASK
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & MASK
    return (word >> 22) ^ word


def mixed(*parts: int) -> int:
    """The same hash of several plain numbers: one seed that depends on all of them."""
    state = 0
    for part in parts:
        x = ((state + part) * 747796405 + 2891336453) & MASK
        word = (((x >> ((x >> 28) + 4)) ^ x) * 277803737) & MASK
        state = (word >> 22) ^ word
    return state


class Draws:
    """The random numbers of one batch; every call takes the next ones. ids (B,) int64 on the device of the batch."""

    def __init__(self, seed: int, epoch: int, ids: Tensor):
        self.seed, self.epoch, self.ids = seed, epoch, ids
        self.count = 0

    @cached_property
    def keys(self) -> Tensor:
        """(B,) int64; made at the first draw, so that a task without augmentation pays nothing."""
        return mix((self.ids + mixed(self.seed, self.epoch)) & MASK)

    def bits(self, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) int64 in [0, 2³²)."""
        n = math.prod(shape)
        counter = torch.arange(self.count, self.count + n, device=self.keys.device)
        self.count += n
        return mix((self.keys[:, None] + mix(counter)) & MASK).view(-1, *shape)

    def uniform(self, low: float = 0.0, high: float = 1.0, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) float32 in [low, high), 24 bits, all that a float32 holds; low ≠ 0 may round up to high."""
        return (self.bits(shape) >> 8).to(torch.float32) * ((high - low) / 2**24) + low

    def normal(self, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) float32, mean 0, variance 1 (Box–Muller); equal across devices but for their log and cos."""
        radius = (-2 * torch.log1p(-self.uniform(shape=shape))).sqrt()
        return radius * torch.cos(self.uniform(0, 2 * math.pi, shape))

    def chance(self, p: float, shape: tuple[int, ...] = ()) -> Tensor:
        """(B, *shape) bool, True with probability p."""
        return self.uniform(shape=shape) < p
