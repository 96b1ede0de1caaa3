"""Which samples train, validate and test: the source's own choice, else a hash of the sample's name, so that a sample
stays where it is when others come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from nbtools.errors import PackError
from nbtools.table import plural

SPLITS = ("train", "val", "test")


def split_of(name: str, val: float = 0.1, test: float = 0.1) -> str:
    """The split of a sample by a hash of its name: the same on every machine, whatever other samples there are."""
    place = position(name)
    return "test" if place < test else "val" if place < test + val else "train"


def position(name: str) -> float:
    """A name's place in [0, 1)."""
    data = name.encode(errors="surrogateescape")  # file names need not be UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big") / 2**56


def assigned(names: Sequence[str], splits: Sequence[str | None], val: float, test: float) -> list[str]:
    """The split of every sample: its own, else by the hash of its name; whole numbers take exactly so many, the
    smallest hashes first. A source with a test folder but no val folder gives its val share from train."""
    given = set(splits) - {None}
    if given:
        short = "val" not in given and {"train"} & given
        drawn = [s == "train" if short else s is None for s in splits]
        test = 0
    else:
        drawn = [True] * len(names)
    order = sorted((position(n), i) for i, n in enumerate(names) if drawn[i])
    result = [s or "train" for s in splits]
    if is_count(val) or is_count(test):
        ends = [int(x) if is_count(x) else round(x * len(order)) for x in (test, val)]
        if sum(ends) >= len(order):
            raise PackError(
                f"val={val} and test={test} leave none of {plural(len(order), 'sample')} to train on; lower them"
            )
        for rank, (_, i) in enumerate(order):
            result[i] = "test" if rank < ends[0] else "val" if rank < sum(ends) else "train"
    else:
        for _, i in order:
            result[i] = split_of(names[i], val, test)
    return result


def require_shares(val: float, test: float) -> None:
    shares = [x for x in (val, test) if not is_count(x)]
    numbers = all(isinstance(x, (int, float)) for x in (val, test))
    if not numbers or not min(val, test) >= 0 or not sum(shares) < 1:
        raise PackError(f"val and test must be whole numbers of samples, or shares ≥ 0 and below 1, got {val}, {test}")


def is_count(share: float) -> bool:
    return isinstance(share, int) and share >= 1
