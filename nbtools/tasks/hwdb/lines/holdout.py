"""Which lines train, validate and test: whole writers, so that no hand is in two splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nbtools.data import SPLITS, is_count, position, split_of
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.hwdb.lines.sources import Found

FEW = 3  # writers: one for each split


def drawn(lines: Sequence[Found], val: float, test: float) -> list[str]:
    """The split of each line: what its source says, and the rest by writers, or by pages where there are fewer than
    three hands.

    Where only train lines are named all three are drawn from them; beside a test set, val comes from train.
    """
    named = {one.split for one in lines} - {None}
    if named <= {"train"}:
        splits = ["train"] * len(lines)
    else:
        splits, test = [one.split or "train" for one in lines], 0
    if "val" in named or "train" not in splits:
        return splits
    free = [one for one, split in zip(lines, splits, strict=True) if split == "train"]
    by_writer = len({one.group for one in free}) >= FEW
    groups = [one.group if by_writer else one.name.partition("#")[0] for one in lines]
    sizes = Counter(group for group, split in zip(groups, splits, strict=True) if split == "train")
    chosen = held_out(sizes, val, test)
    return [chosen[group] if split == "train" else split for group, split in zip(groups, splits, strict=True)]


def held_out(sizes: Mapping[str, int], val: float, test: float) -> dict[str, str]:
    """Group → split, of groups with so many lines each.

    Shares: by each group's own hash, so that it stays where it is when others come; a split that was asked for and got
    none takes one. Whole numbers: by hashes in order, until there are at least so many lines; PackError where that
    leaves nothing to train on.
    """
    order = sorted(sizes, key=position)
    shares = {"test": test, "val": val}
    if any(map(is_count, shares.values())):
        result = counted(order, sizes, shares)
    else:
        result = {group: split_of(group, val, test) for group in order} | {order[-1]: "train"}
    for split, share in shares.items():
        training = [group for group in order if result[group] == "train"]
        if share and split not in result.values() and len(training) > 1:
            result[training[0]] = split
    if "train" not in result.values():
        raise PackError(
            f"val={val} and test={test} leave none of {plural(sum(sizes.values()), 'line')} to train on; lower them"
        )
    return result


def counted(order: Sequence[str], sizes: Mapping[str, int], shares: Mapping[str, float]) -> dict[str, str]:
    total, rest, result = sum(sizes.values()), iter(order), dict.fromkeys(order, SPLITS[0])
    for split, share in shares.items():
        wanted = share if is_count(share) else round(share * total)
        while wanted > 0 and (group := next(rest, None)) is not None:
            result[group] = split
            wanted -= sizes[group]
    return result
