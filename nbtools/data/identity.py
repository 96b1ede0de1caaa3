"""What identifies data: equal data open the pack that was made of them."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from nbtools.data.build import fingerprint
from nbtools.data.folders import Images
from nbtools.data.frames import Table, features_of
from nbtools.data.items import bare, flattened, is_image, mode_of, numeric, parts_of, pixels
from nbtools.errors import PackError

MOST = 2**28  # bytes of a Dataset's state, above which it is not read


def mark(values: Iterable[tuple[str, Any]]) -> bytes:
    """A hash of what an item holds."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values:
        if is_image(value):
            name, value = f"{name} {value.mode}", pixels(value, mode_of(value))
        try:
            array = numeric(name, value)
            digest.update(repr((name, array.dtype, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).data)
        except PackError:
            shown = value if isinstance(value := bare(value), str | bytes | int) else type(value).__name__
            digest.update(repr((name, shown)).encode())
    return digest.digest()


def whole(part: Any) -> bytes:
    """What identifies the whole of a part, as far as that is known without reading each item; b"" if it is not."""
    if isinstance(part, Images):
        return fingerprint("images", part.root, {}).encode()
    if isinstance(part, Table):
        y = part.y.tolist() if isinstance(part.y, np.ndarray) else part.y
        return mark([("x", part.x)]) + repr((features_of(part.encoding), y)).encode()
    if isinstance(part, list | np.ndarray | torch.Tensor):
        return b"".join(mark(flattened(None if item is None else parts_of(item)[0], "item")) for item in part)
    if isinstance(part, TensorDataset):
        return mark(flattened(part.tensors, "tensor"))
    if isinstance(part, Subset):
        return np.asarray(part.indices).tobytes() + whole(part.dataset)
    if isinstance(part, ConcatDataset):
        return b"".join(map(whole, part.datasets))
    return str(getattr(part, "_fingerprint", "")).encode() or state(part)  # of a Hugging Face Dataset


def state(data: Any) -> bytes:
    """A hash of a Dataset's code and of what it holds, such as paths and labels; b"" where that is not known, or where
    reading an item changes it."""
    found = pickled(data)
    if found:
        with suppress(Exception):  # an item that raises becomes a row of the table of bad samples
            data[0]
    return found if found == pickled(data) else b""


def pickled(data: Any) -> bytes:
    """A hash of what it is pickled as; b"" where it cannot be, or is larger than MOST."""
    found = Hash()
    try:
        Pickler(found).dump(data)
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
    """Takes a hash of a tensor for the tensor, which would be copied twice, and the code of functions and classes for
    their names, but of those of installed packages."""

    def __init__(self, file: Hash):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.seen: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and not is_installed(value):
            return tuple, ((value.__qualname__, *self.code(value)),)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.nbytes > MOST:
            raise OSError("too large")
        return bytes, (mark([("tensor", value)]),)

    def code(self, value: Any) -> Iterable[Any]:
        if id(value) in self.seen:  # a method that calls super() refers to its class
            return ()
        self.seen.add(id(value))
        if isinstance(value, type):
            inner = [getattr(one, "__func__", getattr(one, "fget", one)) for one in vars(value).values()]
            return value.__bases__, [one for one in inner if isinstance(one, FunctionType)]
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        return instructions(value.__code__), value.__defaults__, value.__kwdefaults__, captured


def is_installed(value: Any) -> bool:
    """Whether a function or class is of Python or of an installed package."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return value.__module__.partition(".")[0] in sys.stdlib_module_names or "-packages" in file


def instructions(code: CodeType) -> tuple[Any, ...]:
    """What a function does, wherever it is written."""
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(instructions(value))
        else:  # the order of a set differs from process to process
            constants.append(sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value))
    return code.co_code, code.co_names, constants
