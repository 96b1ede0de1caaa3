"""What is read wrong: tables over what clips were, and what a network took them for.

Truth and predicted are lists of names, of glosses or of categories; `grouped` makes the latter of the former.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from nbtools.data import Card, Pack
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd


def by_class(
    truth: Sequence[str], predicted: Sequence[str], categories: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """A row for each gloss that clips have, the worst first: gloss, category, clips, right, accuracy, confused (what it
    was taken for most often, "" where never) and times. clips and right add up to those of all.

    categories: gloss → category; without it, as for lists of categories, the first column is `class` alone.
    """
    import pandas as pd

    pairs = paired(truth, predicted)
    rows = []
    for name in sorted({stood for stood, _ in pairs}):
        read = Counter(taken for stood, taken in pairs if stood == name)
        clips, right = read.total(), read.pop(name, 0)
        other, times = min(read.items(), key=lambda item: (-item[1], item[0]), default=("", 0))
        about = (name,) if categories is None else (name, categories[name])
        rows.append((*about, clips, right, right / clips, other, times))
    first = ("class",) if categories is None else ("gloss", "category")
    table = pd.DataFrame(rows, columns=[*first, "clips", "right", "accuracy", "confused", "times"])
    return table.sort_values(["accuracy", "clips", first[0]], ascending=[True, False, True], ignore_index=True)


def confusion(truth: Sequence[str], predicted: Sequence[str], classes: Iterable[str] | None = None) -> pd.DataFrame:
    """How many clips of each class (rows) were taken for each (columns), in the order of `classes`, by default the
    alphabet's. Raises PackError for names that are not among them."""
    import pandas as pd

    pairs = Counter(paired(truth, predicted))
    there = {name for pair in pairs for name in pair}
    names = sorted(there) if classes is None else list(classes)
    if strange := sorted(there - set(names)):
        raise PackError(f"classes must hold all that was there or read, {strange[0]!r} is missing")
    counts = [[pairs[stood, read] for read in names] for stood in names]
    return pd.DataFrame(counts, pd.Index(names, name="truth"), pd.Index(names, name="read"))


def categories_of(card: Card | Pack) -> dict[str, str]:
    """gloss → category, glosses in the order of their categories, so that its keys are an order for `confusion`."""
    names, of = card.options["categories"], card.options["category_of"]
    ranked = sorted(range(len(of)), key=lambda gloss: of[gloss])
    return {card.classes[gloss]: names[of[gloss]] if of[gloss] >= 0 else "" for gloss in ranked}


def grouped(glosses: Iterable[str], categories: Mapping[str, str]) -> list[str]:
    """The categories of glosses."""
    return [categories[gloss] for gloss in glosses]


def paired(truth: Sequence[str], predicted: Sequence[str]) -> list[tuple[str, str]]:
    if len(truth) != len(predicted):
        raise PackError(
            f"truth and predicted belong together clip by clip, got {len(truth)} and {len(predicted)}; take both from "
            "the same ids"
        )
    return list(zip(truth, predicted, strict=True))
