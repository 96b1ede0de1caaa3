"""A source anywhere → local disk → Pack → batches on the device."""

from nbtools.data.build import Entry, Survey, build_pack, cores
from nbtools.data.draws import Draws
from nbtools.data.feed import (
    Feed,
    Raw,
    Resident,
    Workers,
    batches_left,
    choose,
    gather,
    in_order,
    lengths_of,
    on,
    open_feed,
    require_shared_memory,
)
from nbtools.data.pack import MANIFEST, Card, Pack, Sample, collate
from nbtools.data.packing import Writer, build
from nbtools.data.progress import bar, in_notebook
from nbtools.data.report import ERROR, WARNING, Refused, Row, ordered
from nbtools.data.splits import SPLITS, is_count, position, require_shares, split_of
from nbtools.data.stage import cache, drive_path, existing, kept, on_colab, place_to_keep, release_runtime, stage

__all__ = [
    "ERROR",
    "MANIFEST",
    "SPLITS",
    "WARNING",
    "Card",
    "Draws",
    "Entry",
    "Feed",
    "Pack",
    "Raw",
    "Refused",
    "Resident",
    "Row",
    "Sample",
    "Survey",
    "Workers",
    "Writer",
    "bar",
    "batches_left",
    "build",
    "build_pack",
    "cache",
    "choose",
    "collate",
    "cores",
    "drive_path",
    "existing",
    "gather",
    "in_notebook",
    "in_order",
    "is_count",
    "kept",
    "lengths_of",
    "on",
    "on_colab",
    "open_feed",
    "ordered",
    "place_to_keep",
    "position",
    "release_runtime",
    "require_shared_memory",
    "require_shares",
    "split_of",
    "stage",
]
