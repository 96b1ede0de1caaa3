"""What is read wrong, and where: tables of the errors in lines of text.

`wrong` adds up to the same number in each table: the Levenshtein distance over all lines, the numerator of `cer`. As
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
from nbtools.tasks.hwdb.formats import UNKNOWN

if TYPE_CHECKING:
    import pandas as pd

NEVER = "\U0010ffff"  # no character: nothing reads it
KINDS = ("substituted", "missing", "inserted")
COUNTS = ("characters", *KINDS, "wrong")
BINS, EXAMPLES = 8, 3


def aligned(truth: str, predicted: str) -> list[tuple[str, str]]:
    """(true character, what was read for it) from left to right: "" where one is missing, or was inserted.

    No alignment has fewer wrong pairs; of those with as few, the one that `cr` counts. Raises MissingExtra without
    rapidfuzz.
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra(
            "comparing texts needs the package rapidfuzz: pip install rapidfuzz, or nbtools[text]"
        ) from None
    found = []
    for step in Levenshtein.opcodes(truth.replace(UNKNOWN, NEVER), predicted):
        true, read = truth[step.src_start : step.src_end], predicted[step.dest_start : step.dest_end]
        found += zip_longest(true, read, fillvalue="")
    return found


def right(true: str, read: str) -> bool:
    return true == read != UNKNOWN


def kind(true: str, read: str) -> str:
    """One of KINDS, for a wrong pair."""
    if not read:
        return "missing"
    return "substituted" if true else "inserted"


def compared(
    truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None = None
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
        errors = [pair for pair in pairs if not right(*pair)]
        wrong.update(errors)
        for pair in set(errors):
            where.setdefault(pair, []).append(name)
    ranked = sorted(wrong, key=lambda pair: (-wrong[pair], pair))
    rows = [(*pair, kind(*pair), wrong[pair], where[pair][:examples]) for pair in ranked]
    return pd.DataFrame(rows, columns=["truth", "read", "kind", "wrong", "lines"])


def worst(
    truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None = None, count: int | None = None
) -> pd.DataFrame:
    """A row a line, highest CER first, of equal ones the longest; the first `count`: id, characters, substituted,
    missing, inserted, wrong, cer, truth, read. cer is infinite where the truth is empty and something was read."""
    table = errors_of(truth, predicted, ids).sort_values(["cer", "wrong"], ascending=False, kind="stable")
    return table.head(len(table) if count is None else count).reset_index(drop=True)


def errors_of(truth: Sequence[str], predicted: Sequence[str], ids: Iterable[Any] | None = None) -> pd.DataFrame:
    """The rows of `worst`, in the order of the lines."""
    import pandas as pd

    rows = []
    for (name, pairs), true, read in zip(compared(truth, predicted, ids), truth, predicted, strict=True):
        counts = Counter(kind(*pair) for pair in pairs if not right(*pair))
        rows.append((name, len(true), *(counts[k] for k in KINDS), counts.total(), true, read))
    table = pd.DataFrame(rows, columns=["id", *COUNTS, "truth", "read"])
    table.insert(6, "cer", cer_of(table))
    return table


def by_width(
    truth: Sequence[str], predicted: Sequence[str], widths: Sequence[int] | np.ndarray, bins: int | Sequence[int] = BINS
) -> pd.DataFrame:
    """CER of lines of similar width (N,): width (narrowest–widest), lines, characters, wrong, cer.

    bins: how many, of about as many lines each, or the widths at which a new one begins; empty ones are left out.
    """
    table, widths = errors_of(truth, predicted), np.asarray(widths)
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
    return found.assign(cer=cer_of(found)).reset_index(drop=True)


def by_frequency(truth: Sequence[str], predicted: Sequence[str], seen: Mapping[str, int]) -> pd.DataFrame:
    """CER by how often training shows a character: seen, kinds (different characters), characters, substituted,
    missing, inserted, wrong, cer. The last row counts what was inserted, which stands for no character.

    seen: character → count, as from `frequencies`; one that it does not name was never seen.
    """
    import pandas as pd

    def group(true: str) -> int:
        """Digits of the count, 0 for none; what was inserted comes last."""
        return len(str(seen.get(true, 0))) * bool(seen.get(true, 0)) if true else 99

    def named(digits: int) -> str:
        return {0: "never", 99: "inserted"}.get(digits, f"{10 ** max(digits - 1, 0):,}–{10**digits - 1:,}")

    pairs = Counter(pair for _, found in compared(truth, predicted) for pair in found)
    groups: dict[int, Counter[str]] = {99: Counter()}
    for (true, read), count in pairs.items():
        counts = groups.setdefault(group(true), Counter())
        counts["characters"] += count if true else 0
        if not right(true, read):
            counts[kind(true, read)] += count
            counts["wrong"] += count
    kinds = Counter(map(group, {true for true, _ in pairs if true}))
    rows = [(named(digits), kinds[digits], *(groups[digits][c] for c in COUNTS)) for digits in sorted(groups)]
    table = pd.DataFrame(rows, columns=["seen", "kinds", *COUNTS])
    return table.assign(cer=cer_of(table).where(table.characters > 0))


def scores(truth: Sequence[str], predicted: Sequence[str]) -> dict[str, float]:
    """cer, ar, cr and whole_accuracy of answers that did not come from `evaluate`, by the same definitions."""
    compared(truth, predicted)
    sums = text_metrics(predicted, [text.replace(UNKNOWN, NEVER) for text in truth])
    return {name: float(wrong) / max(float(count), 1) for name, (wrong, count) in sums.items()}


def frequencies(pack: Pack, split: str = "train") -> dict[str, int]:
    """How often each of the pack's characters occurs in a split."""
    chosen = np.isin(np.arange(len(pack)), pack.ids(split))
    inside = np.repeat(chosen, np.diff(pack.offsets["label"]))
    counts = np.bincount(pack.arrays["label"][inside], minlength=len(pack.classes))
    return dict(zip(pack.classes, counts.tolist(), strict=True))


def cer_of(table: pd.DataFrame) -> pd.Series:
    """wrong / characters: infinite where there are none to be wrong, 0 where nothing is."""
    return (table.wrong / table.characters).where(table.wrong > 0, 0.0)
