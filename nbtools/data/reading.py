"""The items of `run.predict`, read as a pack keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.data.frames import tables
from nbtools.data.images import open_image
from nbtools.data.items import Form, inputs_of, is_image
from nbtools.data.pack import Card, Sample
from nbtools.errors import PackError


def items_of(given: Any, card: Card) -> Sequence[Any]:
    """Return what `run.predict` got, item by item: a file, an item (a dict, a tuple, an image, a number, a sample's
    array), or several: a list, a Dataset, an array of them, or the rows of a DataFrame. Raises PackError."""
    if hasattr(given, "iloc"):
        if not card.options.get("encoding"):
            raise PackError("this run was not trained on a DataFrame; pass items as its Dataset returns them")
        frame = given.to_frame().T.infer_objects() if given.ndim == 1 else given
        table = next(tables([frame], (), None, card.options["encoding"]))
        for row, (value, rule, fix) in table.odd.items():
            raise PackError(f"row {row}: {rule}, got {value}; {fix}")
        return [*table]
    first = card.columns[card.options["inputs"][0]]
    rank = len(first.shape) + (first.kind == "ragged")
    if isinstance(given, (str, Path, dict, tuple)) or is_image(given) or getattr(given, "ndim", None) in (0, rank):
        return [given]
    return given if hasattr(given, "__getitem__") else list(given) if isinstance(given, Iterable) else [given]


def sample_of(item: Any, card: Card) -> Sample:
    """Return an item, or an image file, as packing would have stored its inputs. Raises PackError(value, rule, fix)."""
    item = open_image(item) if isinstance(item, (str, Path)) else item
    inputs, roles = card.options["inputs"], card.options["roles"]
    values = inputs_of(item, inputs, roles["target"], roles["inputs"])
    return {name: np.asarray(Form.of(card.options["forms"][name]).fit(name, values[name])) for name in inputs}
