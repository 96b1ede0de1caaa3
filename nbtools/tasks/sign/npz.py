"""`.npz` files, read so that none can do harm: nothing is unpickled, and nothing is decompressed before the array's own
header and the archive's directory agree on an allowed size."""

from __future__ import annotations

import contextlib
import io
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from nbtools import disk
from nbtools.data import Refused, Row

LARGEST = 160_000_000  # bytes of an array: ten minutes of features at 30 frames/s; each reading thread may take as much
DAMAGED = "copy the file again from its origin, or delete it"
STRAY = (  # what zipfile, its decompressors and NumPy's header parser raise on damaged input; found by mutation
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError),
    *(LookupError, TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError),
)


class Npz:
    """An open file. entries: the archive's entry of each array, by key."""

    def __init__(self, file: IO[bytes]):
        self.zip = zipfile.ZipFile(file)
        keys = [info.filename.removesuffix(".npy") for info in self.zip.infolist()]
        self.entries = dict(zip(keys, self.zip.infolist(), strict=True))
        self.repeated = {key for key, count in Counter(keys).items() if count > 1}

    def header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """(shape, dtype) of an array, which is not decompressed. Raises Refused as `array` does."""
        with damage_refused(key), self.zip.open(self.entries[key]) as member:
            return self.checked_header(key, member, LARGEST)[:2]

    def array(self, key: str, largest: int = LARGEST) -> np.ndarray:
        """One array. Raises Refused where it is damaged, pickled, not of the size it says, or larger than `largest`
        bytes."""
        with damage_refused(key), self.zip.open(self.entries[key]) as member:
            shape, dtype, fortran = self.checked_header(key, member, largest)
            size = math.prod(shape) * dtype.itemsize
            data = member.read(size)  # read() would decompress all there is, and the directory can lie about that
            if len(data) != size:
                refuse(key, f"{shape} {dtype} takes {size:,} bytes", f"{len(data):,}", DAMAGED)
            return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")

    def checked_header(self, key: str, member: IO[bytes], largest: int) -> tuple[tuple[int, ...], np.dtype, bool]:
        """(shape, dtype, whether it is stored by columns), once these are known to be harmless and true."""
        if key in self.repeated:
            refuse(key, "a key is in the file once", "twice", "save the file again")
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        version = np.lib.format.read_magic(member)
        if version not in readers:
            raise ValueError(f"version {version} of the .npy format")
        shape, fortran, dtype = readers[version](member)
        if dtype.hasobject:
            fix = "save it as plain numbers, or text, with np.savez_compressed"
            refuse(key, "arrays are never pickled objects", f"dtype {dtype}", fix)
        size, rest = math.prod(shape) * dtype.itemsize, self.entries[key].file_size - member.tell()
        if max(size, rest) > largest:
            fix = "cut the clip into shorter ones, or delete it"
            refuse(key, f"an array has at most {disk.human(largest)}", disk.human(max(size, rest)), fix)
        if size != rest:
            refuse(key, f"{shape} {dtype} takes {size:,} bytes", f"{rest:,}", DAMAGED)
        return shape, dtype, fortran


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Npz]:
    """The arrays of a file. Raises Refused where it is no archive of arrays, OSError where it cannot be opened."""
    with open(path, "rb") as file:
        with damage_refused(""):
            head = disk.read(file, 6)
            if not head.startswith(b"PK"):
                came = f"a file that begins with {head!r}" if head else "an empty file"
                fix = "save it with np.savez_compressed" if head == np.lib.format.MAGIC_PREFIX else DAMAGED
                refuse("", "a clip is a .npz archive", came, fix)
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
        value = getattr(error, "strerror", None) or str(error) or type(error).__name__
        refuse(key, "the array can be read" if key else "the archive can be read", value, DAMAGED)


def refuse(key: str, rule: str, value: str, fix: str) -> NoReturn:
    raise Refused(Row(key, rule, value, fix))


def npz_bytes(arrays: Mapping[str, np.ndarray], level: int) -> bytes:
    """The file of these arrays, at a level of compression: 0 for none. np.savez_compressed has level 6, which takes
    three times as long as 1 for a tenth fewer bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(
        content, "w", zipfile.ZIP_DEFLATED if level else zipfile.ZIP_STORED, compresslevel=level
    ) as file:
        for key, array in arrays.items():
            with file.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    return content.getvalue()
