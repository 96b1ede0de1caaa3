"""What is read wrong, and where: tables over lines of text and what was read in them.

`wrong` adds up to the same number in each table: Levenshtein's distance over all lines, the numerator of `cer`. As
there, a character of the truth that is unknown counts as read wrong, whatever was read. N lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools.data import Pack
from nbtools.errors import MissingExtra, PackError
from nbtools.table import plural
from nbtools.tasks.common.metrics import text_metrics
from nbtools.tasks.hwdb.formats.dgrl import UNKNOWN

if TYPE_CHECKING:
    import pandas as pd

NEVER = "\U0010ffff"  # no character: nothing reads it
EXAMPLES = 3
BINS = 8
KINDS = ("substituted", "missing", "inserted")
COUNTS = ("characters", *KINDS, "wrong")
INSERTED = 99  # a magnitude behind all


def aligned(truth: str, predicted: str) -> list[tuple[str, str]]:
    """(character, what was read for it) from left to right: "" where nothing was read, or where nothing stood.

    No alignment has fewer wrong pairs; of those with as few, the one that `metrics.edits` counts.
    Raises MissingExtra without rapidfuzz.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra(
            "comparing texts needs the package rapidfuzz: pip install rapidfuzz, or nbtools[text]"
        ) from None
    found = []
    for step in Levenshtein.opcodes(truth.replace(UNKNOWN, NEVER), predicted):
        stood, read = truth[step.src_start : step.src_end], predicted[step.dest_start : step.dest_end]
        found += zip_longest(stood, read, fillvalue="")
    return found


def right(stood: str, read: str) -> bool:
    return stood == read != UNKNOWN


def kind(stood: str, read: str) -> str:
    """One of KINDS, for a wrong pair."""
    if not read:
        return "missing"
    return "substituted" if stood else "inserted"


def compared(
    truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None
) -> list[tuple[Any, list[tuple[str, str]]]]:
    """(id, pairs) of each line; without ids, its place. Raises PackError where the lists are not equally long."""
    names = list(range(len(truth)) if ids is None else ids)
    if not len(truth) == len(predicted) == len(names):
        given = "" if ids is None else f" and {plural(len(names), 'id')}"
        raise PackError(
            f"truth, predicted and ids belong together line by line, got {plural(len(truth), 'truth')}, "
            f"{plural(len(predicted), 'prediction')}{given}; take all three from the same ids"
        )
    return [(name, aligned(*texts)) for name, *texts in zip(names, truth, predicted, strict=True)]


def confusions(
    truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None = None, examples: int = EXAMPLES
) -> pd.DataFrame:
    """What was read for what, the most frequent first: truth, read, kind, wrong (how often), lines (ids of the first).

    read is "" where a character is missing, truth where one was inserted.
    """
    import pandas as pd

    wrong: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], list[Any]] = {}
    for name, pairs in compared(truth, predicted, ids):
        for pair in pairs:
            if not right(*pair):
                wrong[pair] += 1
                seen = where.setdefault(pair, [])
                if len(seen) < examples and name not in seen:
                    seen.append(name)
    ranked = sorted(wrong, key=lambda pair: (-wrong[pair], pair))
    rows = [(*pair, kind(*pair), wrong[pair], where[pair]) for pair in ranked]
    return pd.DataFrame(rows, columns=["truth", "read", "kind", "wrong", "lines"])


def lines(truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None = None) -> pd.DataFrame:
    """A row a line: id, characters, substituted, missing, inserted, wrong, cer, truth, read.

    cer is infinite where something was read and nothing stood.
    """
    import pandas as pd

    rows = []
    for (name, pairs), stood, read in zip(compared(truth, predicted, ids), truth, predicted, strict=True):
        counts = Counter(kind(*pair) for pair in pairs if not right(*pair))
        rows.append((name, len(stood), *(counts[k] for k in KINDS), counts.total(), stood, read))
    table = pd.DataFrame(rows, columns=["id", "characters", *KINDS, "wrong", "truth", "read"])
    table.insert(6, "cer", share(table))
    return table


def worst(
    truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None = None, count: int | None = None
) -> pd.DataFrame:
    """The table of `lines`, highest CER first, of equal ones the longest; its first `count` rows."""
    table = lines(truth, predicted, ids).sort_values(["cer", "wrong"], ascending=False, kind="stable")
    return table.head(len(table) if count is None else count).reset_index(drop=True)


def by_width(
    truth: Sequence[str], predicted: Sequence[str], widths: Sequence[int] | np.ndarray, bins: int | Sequence[int] = BINS
) -> pd.DataFrame:
    """CER of lines of about the same width (N,): width (narrowest–widest), lines, characters, wrong, cer.

    bins: how many, of about as many lines each, or the widths at which a new one begins; empty ones are left out.
    """
    table, widths = lines(truth, predicted), np.asarray(widths)
    if len(widths) != len(table):
        raise PackError(f"widths must be one number a line, got {len(widths)} for {plural(len(table), 'line')}")
    if isinstance(bins, int):
        edges = np.quantile(widths, np.arange(1, bins) / bins) if len(widths) else np.empty(0)
    else:
        edges = np.asarray(bins, float)
    groups = table.assign(least=widths, most=widths, lines=1).groupby(np.digitize(widths, edges))
    found = groups.agg({"least": "min", "most": "max", "lines": "sum", "characters": "sum", "wrong": "sum"})
    names = [f"{a}–{b}" if a != b else str(a) for a, b in zip(found.pop("least"), found.pop("most"), strict=True)]
    found.insert(0, "width", names)
    return found.assign(cer=share(found)).reset_index(drop=True)


def by_frequency(truth: Sequence[str], predicted: Sequence[str], seen: Mapping[str, int]) -> pd.DataFrame:
    """CER of characters as frequent in training: seen (how often), kinds (different ones), characters, substituted,
    missing, inserted, wrong, cer. The last row is what was inserted, which stands for no character.

    seen: how often training shows a character, as of `frequencies`; one that it does not name was never seen.
    """
    import pandas as pd

    pairs = Counter(pair for _, found in compared(truth, predicted, None) for pair in found)
    groups: dict[int, Counter[str]] = {}
    for (stood, read), count in pairs.items():
        group = groups.setdefault(magnitude(seen.get(stood, 0)) if stood else INSERTED, Counter())
        group["characters"] += count if stood else 0
        if not right(stood, read):
            group[kind(stood, read)] += count
            group["wrong"] += count
    kinds = Counter(magnitude(seen.get(stood, 0)) for stood in {stood for stood, _ in pairs if stood})
    groups.setdefault(INSERTED, Counter())
    rows = [(range_of(size), kinds[size], *(groups[size][c] for c in COUNTS)) for size in sorted(groups)]
    table = pd.DataFrame(rows, columns=["seen", "kinds", *COUNTS])
    return table.assign(cer=share(table).where(table.characters > 0))


def magnitude(count: int) -> int:
    """How many digits a count has, none for 0."""
    return len(str(count)) if count else 0


def range_of(size: int) -> str:
    """The counts of a magnitude."""
    if size == INSERTED:
        return "inserted"
    return f"{10 ** (size - 1):,}–{10**size - 1:,}" if size else "never"


def scores(truth: Sequence[str], predicted: Sequence[str]) -> dict[str, float]:
    """cer, ar, cr and whole_accuracy of answers that did not come from `evaluate`, by the same definitions."""
    compared(truth, predicted, None)
    sums = text_metrics(predicted, [text.replace(UNKNOWN, NEVER) for text in truth])
    return {name: float(wrong) / max(float(count), 1) for name, (wrong, count) in sums.items()}


def frequencies(pack: Pack, split: str = "train") -> dict[str, int]:
    """How often each of the pack's characters stands in a split; 0 for those that do not."""
    chosen = np.isin(np.arange(len(pack)), pack.ids(split))
    inside = np.repeat(chosen, np.diff(pack.offsets["label"]))
    counts = np.bincount(pack.arrays["label"][inside], minlength=len(pack.classes))
    return dict(zip(pack.classes, counts.tolist(), strict=True))


def share(table: pd.DataFrame) -> pd.Series:
    """wrong / characters: infinite where there are none to be wrong, 0 where nothing is."""
    return (table.wrong / table.characters).where(table.wrong > 0, 0.0)
