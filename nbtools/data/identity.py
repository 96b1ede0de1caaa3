"""What identifies data: equal data open the pack that was made of them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from nbtools.data.build import fingerprint
from nbtools.data.folders import Images
from nbtools.data.frames import Table, features_of
from nbtools.data.items import flattened, numeric
from nbtools.errors import PackError

MOST = 2**28  # bytes of a Dataset's state, above which it is not read


def mark(values: Iterable[tuple[str, Any]]) -> bytes:
    """A hash of what an item holds."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values:
        if isinstance(value, Image.Image):
            name, value = f"{name} {value.mode}", np.asarray(value)
        try:
            array = numeric(name, value)
            digest.update(repr((name, array.dtype, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).data)
        except PackError:
            digest.update(repr((name, value if isinstance(value, str | bytes) else type(value).__name__)).encode())
    return digest.digest()


def whole(part: Any) -> bytes:
    """What identifies the whole of a part, as far as that is known without reading each item; b"" if it is not."""
    if isinstance(part, Images):
        return fingerprint("images", part.root, {}).encode()
    if isinstance(part, Table):
        return mark([("x", part.x)]) + repr((features_of(part.encoding), part.y)).encode()
    if isinstance(part, list | np.ndarray | torch.Tensor):
        return b"".join(mark(flattened(item, "item")) for item in part)
    if isinstance(part, TensorDataset):
        return mark(flattened(part.tensors, "tensor"))
    if isinstance(part, Subset):
        return np.asarray(part.indices).tobytes() + whole(part.dataset)
    if isinstance(part, ConcatDataset):
        return b"".join(map(whole, part.datasets))
    return str(getattr(part, "_fingerprint", "")).encode() or state(part)  # of a Hugging Face Dataset


def state(data: Any) -> bytes:
    """A hash of what a Dataset holds, such as paths and labels; b"" where that is not known, or reading an item changes
    it."""
    found = pickled(data)
    if found:
        with suppress(Exception):  # an item that raises becomes a row of the table of bad samples
            data[0]
    return found if found == pickled(data) else b""


def pickled(data: Any) -> bytes:
    """A hash of what it is pickled as; b"" where it cannot be, or is larger than MOST."""
    found = Hash()
    try:
        Pickler(found, pickle.HIGHEST_PROTOCOL).dump(data)
    except Exception:  # whatever a Dataset's own pickling may raise
        return b""
    return found.digest.digest()


class Hash:
    """A file that keeps a hash alone. Raises OSError beyond MOST bytes."""

    def __init__(self) -> None:
        self.digest, self.left = hashlib.blake2b(digest_size=16), MOST

    def write(self, data: Any) -> None:
        self.left -= memoryview(data).nbytes
        if self.left < 0:
            raise OSError("too large")
        self.digest.update(data)


class Pickler(pickle.Pickler):
    """Takes a hash of a tensor for the tensor, which would be copied twice."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.nbytes > MOST:
            raise OSError("too large")
        return bytes, (mark([("tensor", value)]),)
