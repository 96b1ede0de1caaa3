"""Which samples train, validate and test: decided by a hash of each, so that it has the same split on every machine.
What stays in one split is a unit: a sample, or a group of them. If drawn by name, each unit's own hash decides, so that
none moves when others are added; if drawn by class or content, shares are exact."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from statistics import mode
from typing import Any

from nbtools.errors import PackError
from nbtools.show import plural

SPLITS = ("train", "val", "test")
Places = Sequence[float]
USES = {"train": "can be learned", "val": "chooses the best checkpoint or stops early", "test": "tests it at the end"}


def position(data: str | bytes, seed: int = 0) -> float:
    """Return the place in [0, 1) of a name, or of what a sample holds."""
    data = data.encode(errors="surrogateescape") if isinstance(data, str) else data  # file names need not be UTF-8
    key = str(seed).encode() if seed else b""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7, key=key).digest(), "big") / 2**56


def assign(
    given: Sequence[Any], places: Places, groups: Sequence[Any], labels: Any, shares: Places, exact: bool
) -> list[str]:
    """Return the split of every sample: the given one, else by its place in [0, 1) and the shares of val and test.

    A source with a train split but no val split gives its val share from train, and one with any split of its own has
    no other test split. test=1.0: all are test. A share above 0 gets one unit at least, and the last one always trains.
    labels: classes, which are divided alike. Raises PackError where whole numbers leave nothing to train on.
    """
    val, test = shares
    if is_all(test):
        return ["test"] * len(given)
    own = {*given} - {None}
    divided, test = "train" if "train" in own and "val" not in own else None, 0 if own else test
    units = units_of((i for i, split in enumerate(given) if split == divided), places, groups, labels)
    total = sum(map(len, units))
    units.sort(key=lambda unit: 2 * len(unit) > total)  # one that holds more than half comes last: it trains
    splits, exact = ["train"] * len(units), exact or is_count(val) or is_count(test)
    for k, x in enumerate(places[unit[0]] for unit in units[:-1]):
        if not exact and x < test + val:
            splits[k] = "test" if x < test else "val"
    for split, share in (("test", test), ("val", val)):
        wanted = share if is_count(share) else max(1, exact * round(share * total)) if share else 0
        missing = wanted - sum(len(unit) for unit, one in zip(units, splits, strict=True) if one == split)
        for k, unit in enumerate(units[:-1]):
            if missing > 0 and splits[k] == "train":
                splits[k], missing = split, missing - len(unit)
        if missing > 0 and is_count(share) and units:
            raise PackError(f"val={val} and test={test} leave none of {total:,} samples to train on; lower them")
    drawn = {i: split for unit, split in zip(units, splits, strict=True) for i in unit}
    return [drawn.get(i) or split or "train" for i, split in enumerate(given)]


def units_of(ids: Iterable[int], places: Places, groups: Sequence[Any], labels: Any = None) -> list[list[int]]:
    """Return the samples that stay together, by place; with labels any first part has each class in its share."""
    together: dict[Any, list[int]] = {}
    for i in ids:
        together.setdefault(groups[i] or i, []).append(i)
    units = sorted(together.values(), key=lambda unit: places[unit[0]])
    classes = [mode(labels[i] for i in unit) if unit[1:] else labels[unit[0]] for unit in units if labels is not None]
    sizes, before, middles = Counter(classes), Counter[str](), []
    for label in classes:
        middles.append((before[label] + 0.5) / sizes[label])
        before[label] += 1
    return [units[k] for k in sorted(range(len(middles)), key=middles.__getitem__)] if labels is not None else units


def remarks(splits: Sequence[str], labels: Sequence[str] | None, drawn: Iterable[str]) -> list[str]:
    """Return warnings for whoever trains on these samples. labels: their classes; drawn: splits that must have some."""
    lines = [f"the {split} split is empty, so nothing {USES[split]}" for split in drawn if split not in splits]
    classes = {*(labels or ())}
    if len(classes) > max(0.7 * len(splits), 10):
        return [*lines, f"{len(classes):,} classes for {len(splits):,} samples: is the target a class at all?"]
    if len(classes) == 1:
        lines.append(f"all samples are of one class ({min(classes)}): there is nothing to tell apart")
    for split, so in (("train", "not learnable"), ("val", "not evaluated")):
        seen = {label for label, one in zip(labels or (), splits, strict=False) if one == split}
        lines += lacking(sorted(classes), seen, f"{split} sample", so)
    return lines


def lacking(classes: Iterable[str], seen: Collection[str], what: str, so: str = "not learnable") -> list[str]:
    """Return a warning about classes that are not among those seen, none where nothing is seen."""
    names = [name for name in classes if seen and name not in seen]
    return [f"{plural(len(names), 'class')} without a {what} ({some(names)}): {so}"] if names else []


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + " …" * (len(names) > 5)


def require_shares(val: float, test: float) -> None:
    """Raise PackError unless these can be the validation's and the test's part of a source."""
    numbers = all(isinstance(share, (int, float)) and share >= 0 for share in (val, test))
    if not numbers or not (is_all(test) or sum(share for share in (val, test) if not is_count(share)) < 1):
        rule = "val and test must be whole numbers of samples, or shares ≥ 0 and below 1"
        raise PackError(f"{rule}, got {val}, {test}; leave samples to train on, or make all of them test: test=1.0")


def is_count(share: float) -> bool:
    return isinstance(share, int) and share >= 1


def is_all(share: float) -> bool:  # the whole number 1 is one sample
    return isinstance(share, float) and share == 1
