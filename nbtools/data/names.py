"""The names that Datasets have for classes given as whole numbers."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from nbtools.data.items import TARGETS
from nbtools.errors import PackError


def class_names(data: Any, target: Any) -> Sequence[str]:
    """The names that a Dataset has for classes given as numbers: ClassLabel, or `.classes` as in torchvision."""
    features = getattr(data, "features", None)
    key = target or next((key for key in TARGETS if key in features), None) if isinstance(features, Mapping) else None
    found = getattr(features.get(key), "names", None) if key else getattr(data, "classes", None)  # type: ignore[union-attr]
    return found if isinstance(found, list | tuple) and found and isinstance(found[0], str) else ()


def leaves(data: Any, target: Any) -> list[Any]:
    """The Datasets with names for classes that one consists of, or those without that hold no others. Only a Subset and
    a ConcatDataset are known to return labels as they are."""
    inner = data.datasets if isinstance(data, ConcatDataset) else [data.dataset] if isinstance(data, Subset) else []
    if class_names(data, target) or not inner:
        return [data]
    return [leaf for one in inner for leaf in leaves(one, target)]


def leaf_of(data: Any, i: int, target: Any) -> Any:
    """The one of them that item i comes from."""
    if class_names(data, target):
        return data
    if isinstance(data, ConcatDataset):
        k = bisect.bisect_right(data.cumulative_sizes, i)
        return leaf_of(data.datasets[k], i - (data.cumulative_sizes[k - 1] if k else 0), target)
    if isinstance(data, Subset):
        return leaf_of(data.dataset, int(data.indices[i]), target)
    return data


def named_class(data: Any, i: int, target: Any, value: Any) -> Any:
    """The name that the Dataset of item i has for its class; the value itself where it has none, or is no number.
    Raises PackError(value, rule, fix) for a number beyond the names."""
    names = class_names(leaf_of(data, i, target), target)
    if not names or not isinstance(value, int):
        return value
    if not 0 <= value < len(names):
        some = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
        raise PackError(
            value, f"the class must be one of {len(names):,}, from 0: {some}", "correct it, or leave it out"
        )
    return names[value]
