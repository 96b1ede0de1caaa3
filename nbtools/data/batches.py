"""Which samples make a batch, in an order that is a pure function of (seed, epoch, position), and what it holds.

A raw batch is a dict of tensors: a fixed column (B, *shape); a ragged one zero-padded (B, L, *shape) with
`<column>_length` (B,); and `id` (B,) int64, the sample ids. B samples, L at least the longest of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbtools.data.pack import Column, Pack, Sample

Raw = dict[str, Tensor]
Segments = Sequence[Sequence[int]]  # [(batch size, batches done with it)] since the start of the epoch

MEGABATCH = 32  # batches sorted by length together: about 2.5 % padding in simulated text lines, order still mixed


def batches_left(
    ids: np.ndarray, lengths: np.ndarray | None, seed: int, epoch: int, segments: Segments
) -> list[np.ndarray]:
    """Return what remains of an epoch: batches of ids in order, after the given position.

    A change of batch size is a new segment: it regroups what the earlier ones left, so every id still comes exactly
    once. lengths (same order as ids) groups samples of like length; None if all are equal.
    """
    left = np.random.default_rng([seed, epoch]).permutation(len(ids))
    batches: list[np.ndarray] = []
    for k, (batch_size, done) in enumerate(segments):
        rng = np.random.default_rng([seed, epoch, k + 1])  # NumPy takes [seed, epoch, 0] for [seed, epoch]
        batches = grouped(left, lengths, batch_size, rng)
        left = left[~np.isin(left, np.concatenate([left[:0], *batches[:done]]))]
        batches = batches[done:]
    return [ids[batch] for batch in batches]


def grouped(
    order: np.ndarray, lengths: np.ndarray | None, batch_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return positions cut into batches: by length within megabatches, whose batches are then shuffled."""
    if lengths is None:
        return split(order, batch_size)
    batches = []
    for mega in split(order, batch_size * MEGABATCH):
        batches += split(mega[np.argsort(lengths[mega], kind="stable")], batch_size)
    return [batches[i] for i in rng.permutation(len(batches))]


def split(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut into batches; a last one of a single sample, which BatchNorm refuses, gets another from the one before."""
    cuts = list(range(size, len(order), size))
    if size > 1 and cuts and len(order) - cuts[-1] == 1:
        cuts[-1:] = [cuts[-1] - 1] if size > 2 else []
    return [order[start:end] for start, end in pairwise([0, *cuts, len(order)])] if len(order) else []


def batches_in(count: int, batch_size: int) -> int:
    """Return how many batches an epoch over so many samples has, grouped by length or not: as `split` makes them."""
    return -(-count // batch_size) - (batch_size == 2 and count > 1 and count % 2)


def in_order(ids: np.ndarray, lengths: np.ndarray | None, batch_size: int) -> list[np.ndarray]:
    """Return every id once, for evaluation: ascending, or by length so that little is padded."""
    return split(ids if lengths is None else ids[np.argsort(lengths, kind="stable")], batch_size)


def lengths_of(pack: Pack, ids: np.ndarray) -> np.ndarray | None:
    """Return the lengths that batches are grouped by; None where every sample has the same, or nobody has read them."""
    by = pack.card.bucket_by
    return pack.lengths(by, ids) if by and by in offsets_of(pack) else None


# -- how long a batch is


class Padding:
    """To what length samples are padded: a multiple of `Plan.bucket`, if it has one, but not beyond the longest of the
    pack. cuDNN, oneDNN, CUDA graphs and compiled code plan anew for each shape, and then see few."""

    def __init__(self, pack: Pack, plan: Any):
        self.bucket = getattr(plan, "bucket", 1)
        self.longest = {name: int(np.diff(ends).max(initial=0)) for name, ends in offsets_of(pack).items()}

    def __call__(self, column: str, length: Any) -> Any:
        """Return the padded length, or (N,) lengths, of batches whose longest samples have these."""
        whole = -(-length // self.bucket) * self.bucket
        return np.minimum(whole, np.maximum(length, self.longest[column])) if column in self.longest else whole

    def of(self, pack: Pack, batches: Sequence[np.ndarray]) -> dict[str, list[int]]:
        """Return the length of each ragged column in each of these batches of ids, computed by the host alone."""
        order, starts = np.concatenate(batches), np.cumsum([0, *map(len, batches[:-1])])
        longest = {name: np.maximum.reduceat(pack.lengths(name, order), starts) for name in offsets_of(pack)}
        return {name: self(name, lengths).tolist() for name, lengths in longest.items()}


def offsets_of(pack: Pack) -> Mapping[str, np.ndarray]:
    return pack.offsets if is_stored(pack) else {}


def is_stored(pack: Pack) -> bool:
    """Return whether the pack has the arrays of its samples: not after `nb.pack(store=False)`."""
    return pack.options.get("stored", True)


def collate(
    samples: Sequence[Sample],
    columns: Mapping[str, Column],
    unread: Collection[str] = (),
    padding: Padding | None = None,
) -> Raw:
    """Return the raw batch of samples: fixed (B, *shape); ragged zero-padded (B, L, *shape) and `<column>_length` (B,);
    without the unread columns."""
    batch = {}
    for name in (name for name in samples[0] if name not in unread):
        arrays = [sample[name] for sample in samples]
        if name in columns and columns[name].kind == "ragged":
            lengths = np.array([len(a) for a in arrays])
            longest = lengths.max(initial=0) if padding is None else padding(name, lengths.max(initial=0))
            padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
            for row, array in zip(padded, arrays, strict=True):
                row[: len(array)] = array
            batch[name], batch[f"{name}_length"] = torch.from_numpy(padded), torch.from_numpy(lengths)
        else:
            batch[name] = torch.from_numpy(np.stack(arrays))
    return batch


def gather(pack: Pack, ids: np.ndarray, padding: Padding | None = None) -> Raw:
    """Return a raw batch in host memory, copied from the memory map, or read anew where the pack stores no arrays."""
    raw, ragged = {}, offsets_of(pack)
    if not is_stored(pack):
        raw = collate([pack.raw[int(i)] for i in ids], pack.columns, pack.unread, padding)
    elif ragged:
        samples = [{n: pack.arrays[n][slice(*ends[i : i + 2])] for n, ends in ragged.items()} for i in ids]
        raw = collate(samples, pack.columns, padding=padding)
    for name in pack.columns:
        if name not in raw:
            raw[name] = torch.from_numpy(np.take(pack.arrays[name], ids, axis=0))
    return {**raw, "id": torch.from_numpy(np.asarray(ids, np.int64))}


def on(device: torch.device, raw: Raw) -> Raw:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in raw.items()}
