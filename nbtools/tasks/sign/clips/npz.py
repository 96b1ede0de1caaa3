"""Arrays of a `.npz` file, read so that no file can do harm: nothing is unpickled, and nothing is unpacked before the
array's own header and the archive's directory agree on a size that is allowed."""

from __future__ import annotations

import contextlib
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from nbtools import disk
from nbtools.data import Refused, Row

SUFFIX = ".npy"
LARGEST = 160_000_000  # bytes of an array: ten minutes of features at 30 frames/s; memory is taken once a thread
DAMAGED = "copy the file again from its origin, or delete it"
PLAIN = "save it as plain numbers, or text, with np.savez_compressed"
STRAY = (  # what zipfile, its decompressors and NumPy's header parser let escape on damaged input; found by mutation
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError),
    *(LookupError, TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError),
)


class Npz:
    """An open file. `keys` are the names of its arrays."""

    def __init__(self, file: IO[bytes]):
        self.zip = zipfile.ZipFile(file)
        self.entries = {info.filename.removesuffix(SUFFIX): info for info in self.zip.infolist()}
        count = Counter(info.filename.removesuffix(SUFFIX) for info in self.zip.infolist())
        self.twice = {key for key, times in count.items() if times > 1}

    @property
    def keys(self) -> list[str]:
        return list(self.entries)

    def header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """(shape, dtype) of an array, which is not unpacked. Raises Refused as `array` does."""
        with damage_refused(key), self.zip.open(self.entries[key]) as member:
            return self.allowed(key, member, LARGEST)[:2]

    def array(self, key: str, largest: int = LARGEST) -> np.ndarray:
        """One array. Raises Refused where it is damaged, pickled, larger than so many bytes or not what it says."""
        with damage_refused(key), self.zip.open(self.entries[key]) as member:
            shape, dtype, fortran = self.allowed(key, member, largest)
            size = math.prod(shape) * dtype.itemsize
            data = member.read(size)  # not read(): that inflates whatever there is, and a directory can lie
            if len(data) != size:
                refuse(key, f"{shape} {dtype} takes {size:,} bytes", f"{len(data):,}", DAMAGED)
            return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")

    def allowed(self, key: str, member: IO[bytes], largest: int) -> tuple[tuple[int, ...], np.dtype, bool]:
        """What the array's header says, once it is known to be harmless and true."""
        if key in self.twice:
            refuse(key, "a key is in the file once", "twice", "save the file again")
        shape, dtype, fortran = read_header(member)
        if dtype.hasobject:
            refuse(key, "arrays are never pickled objects", f"dtype {dtype}", PLAIN)
        size, rest = math.prod(shape) * dtype.itemsize, self.entries[key].file_size - member.tell()
        if max(size, rest) > largest:
            fix = "cut the clip into shorter ones, or delete it"
            refuse(key, f"an array has at most {disk.human(largest)}", disk.human(max(size, rest)), fix)
        if size != rest:
            refuse(key, f"{shape} {dtype} takes {size:,} bytes", f"{rest:,}", DAMAGED)
        return shape, dtype, fortran


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Npz]:
    """The arrays of a file. Raises Refused for one that is no archive, OSError for one that is not there."""
    with open(path, "rb") as file:
        with damage_refused(""):
            head = disk.read(file, 6)
            if not head.startswith(b"PK"):
                fix = "save it with np.savez_compressed" if head == np.lib.format.MAGIC_PREFIX else DAMAGED
                refuse(
                    "",
                    "a clip is a .npz archive",
                    f"a file that begins with {head!r}" if head else "an empty file",
                    fix,
                )
            npz = Npz(file)
            if not npz.entries:
                refuse("", "a clip holds arrays", "an empty archive", DAMAGED)
        with npz.zip:
            yield npz


@contextlib.contextmanager
def damage_refused(key: str) -> Iterator[None]:
    try:
        yield
    except STRAY as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        refuse(key, "the array can be read" if key else "the archive can be read", said, DAMAGED)


def refuse(key: str, rule: str, value: str, fix: str) -> NoReturn:
    raise Refused(Row(key, rule, value, fix))


def read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, bool]:
    """(shape, dtype, whether it is stored by columns) of the array that begins here."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(member)
    if version not in readers:
        raise ValueError(f"version {version} of the .npy format")
    shape, fortran, dtype = readers[version](member)
    return shape, dtype, fortran
