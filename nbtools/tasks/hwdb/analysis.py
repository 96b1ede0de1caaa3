"""Tables of what a pack of lines contains, before training, and of what a network reads wrong.

`wrong` adds up to the same number in each table: the Levenshtein distance over all lines, the numerator of `cer`. As
there, a character of the truth that is unknown counts as read wrong, whatever was read. N lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools.data import SPLITS, Pack
from nbtools.tasks.common.metrics import levenshtein, paired, text_metrics
from nbtools.tasks.hwdb.formats import UNKNOWN

if TYPE_CHECKING:
    import pandas as pd

STRIDES = (4, 32)  # columns a time step of the networks
NEVER = "\U0010ffff"  # no character: nothing reads it
BINS = 8


# What a pack holds


def report(pack: Pack) -> pd.DataFrame:
    """A row for each split and one for all: lines; characters; classes, how many different ones; unknown, characters of
    the class UNKNOWN; never trained, of classes that no training line has; narrow, lines that CTC cannot spell at a
    stride; and their widths in pixels. Narrow lines stay in the pack, since another network may have a smaller stride.
    """
    import pandas as pd

    labels, widths, lengths = pack.arrays["label"], np.diff(pack.offsets["image"]), np.diff(pack.offsets["label"])
    line = np.repeat(np.arange(len(pack)), lengths)
    repeated = (labels[1:] == labels[:-1]) & (line[1:] == line[:-1])  # CTC needs a blank between them
    needed = lengths + np.bincount(line[1:][repeated], minlength=len(pack))
    trained, rows = counts_of(pack, pack.split == 0), {}
    for name in (*SPLITS, "all"):
        chosen = np.isin(pack.split, [k for k, split in enumerate(SPLITS) if name in (split, "all")])
        if chosen.any():
            counts = counts_of(pack, chosen)
            rows[name] = {
                "lines": chosen.sum(),
                "characters": counts.sum(),
                "classes": (counts[:-1] > 0).sum(),
                "unknown": counts[-1],
                "never trained": counts[trained == 0].sum(),
                **{f"narrow /{s}": (-(-widths // s) < needed)[chosen].sum() for s in STRIDES},
                "narrowest": widths[chosen].min(),
                "widest": widths[chosen].max(),
            }
    return pd.DataFrame.from_dict(rows, orient="index")


def counts_of(pack: Pack, chosen: np.ndarray) -> np.ndarray:
    """(classes,) how often each occurs in the chosen lines, (n,) bool."""
    inside = np.repeat(chosen, np.diff(pack.offsets["label"]))
    return np.bincount(pack.arrays["label"][inside], minlength=len(pack.classes))


def frequencies(pack: Pack, split: str = "train") -> dict[str, int]:
    """How often each of the pack's characters occurs in a split."""
    counts = counts_of(pack, pack.split == SPLITS.index(split))
    return dict(zip(pack.classes, counts.tolist(), strict=True))


# What is read wrong


def aligned(truth: str, predicted: str) -> list[tuple[str, str]]:
    """(true character, what was read for it) from left to right: "" if one is missing, or was inserted.

    No alignment has fewer wrong pairs; of those with as few, the one that `cr` counts. Raises MissingExtra without
    rapidfuzz.
    """
    found = []
    for step in levenshtein().opcodes(truth.replace(UNKNOWN, NEVER), predicted):
        true, read = truth[step.src_start : step.src_end], predicted[step.dest_start : step.dest_end]
        found += zip_longest(true, read, fillvalue="")
    return found


def is_wrong(true: str, read: str) -> bool:
    """Whether an aligned pair counts as an error."""
    return true != read or true == UNKNOWN


def pairs_of(truth: Sequence[str], predicted: Sequence[str]) -> pd.DataFrame:
    """A row for each aligned pair: line (from 0), truth, read, wrong. Raises PackError unless there is one answer for
    each line."""
    import pandas as pd

    texts = paired(truth, predicted, "text", "line")
    rows = [(line, *pair, is_wrong(*pair)) for line, both in enumerate(texts) for pair in aligned(*both)]
    return pd.DataFrame(rows, columns=["line", "truth", "read", "wrong"]).astype({"wrong": bool})


def tallied(pairs: pd.DataFrame, by: Any) -> pd.DataFrame:
    """characters, wrong and cer of each group of pairs: infinite where there are no characters to be wrong, 0 where
    nothing is."""
    flags: Any = pairs[["wrong"]].assign(characters=pairs.truth != "")
    found = flags[["characters", "wrong"]].astype(int).groupby(by).sum()
    return found.assign(cer=(found.wrong / found.characters).where(found.wrong > 0, 0.0))


def confusions(truth: Sequence[str], predicted: Sequence[str]) -> pd.DataFrame:
    """What was read for what, the most frequent first: truth, read, wrong (how often).

    read is "" if a character is missing, truth if one was inserted.
    """
    pairs = pairs_of(truth, predicted)
    groups: Any = pairs[pairs.wrong].groupby(["truth", "read"])
    found = groups.wrong.sum().reset_index()
    return found.sort_values("wrong", ascending=False, kind="stable", ignore_index=True)


def worst(truth: Sequence[str], predicted: Sequence[str], ids: Sequence[Any] | np.ndarray) -> pd.DataFrame:
    """One row per line, highest CER first, the longest first among equals: id, characters, wrong, cer, truth, read. cer
    is infinite where the truth is empty and something was read."""
    pairs = pairs_of(truth, predicted)
    found = tallied(pairs, pairs.line).reindex(range(len(truth)), fill_value=0)
    found.insert(0, "id", list(ids))
    found = found.assign(truth=list(truth), read=list(predicted))
    return found.sort_values(["cer", "wrong"], ascending=False, kind="stable", ignore_index=True)


def by_width(truth: Sequence[str], predicted: Sequence[str], widths: Sequence[int] | np.ndarray) -> pd.DataFrame:
    """CER of lines of similar width (N,), about as many in each row: width (narrowest–widest), lines, characters,
    wrong, cer."""
    pairs, widths = pairs_of(truth, predicted), np.asarray(widths)
    edges = np.quantile(widths, np.arange(1, BINS) / BINS) if len(widths) else []
    bin_of = np.digitize(widths, edges)
    found: Any = tallied(pairs, bin_of[pairs.line.to_numpy(int)]).reindex(np.unique(bin_of), fill_value=0)
    lines = [widths[bin_of == each] for each in found.index]
    found.insert(0, "width", [f"{few.min()}–{few.max()}" for few in lines])
    found.insert(1, "lines", list(map(len, lines)))
    return found.reset_index(drop=True)


def by_frequency(truth: Sequence[str], predicted: Sequence[str], seen: Mapping[str, int]) -> pd.DataFrame:
    """CER by how often training shows a character: seen, characters, wrong, cer. The last row counts what was inserted,
    which has no true character.

    seen: character → count, as from `frequencies`; one that it does not name was never seen.
    """
    pairs = pairs_of(truth, predicted)
    last = 99  # more digits than a count has
    found = tallied(pairs, pairs.truth.map(lambda true: len(str(seen.get(true) or "")) if true else last).astype(int))
    names = {0: "never", last: "inserted"}
    found.insert(0, "seen", [names.get(n) or f"{10 ** (n - 1):,}–{10**n - 1:,}" for n in found.index])
    return found.assign(cer=found.cer.where(found.characters > 0)).reset_index(drop=True)


def scores(truth: Sequence[str], predicted: Sequence[str]) -> dict[str, float]:
    """cer, ar, cr and whole_accuracy of answers that are not from `evaluate`, by the same definitions."""
    pairs = paired([text.replace(UNKNOWN, NEVER) for text in truth], predicted, "text", "line")
    sums = text_metrics([read for _, read in pairs], [true for true, _ in pairs])
    return {name: float(wrong) / max(float(count), 1) for name, (wrong, count) in sums.items()}
