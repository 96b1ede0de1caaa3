"""A source anywhere → local disk → Pack → batches on the device."""

from nbtools.data.archive import archive_index, read_member
from nbtools.data.build import Entry, Survey, build_pack, cores, steady
from nbtools.data.draws import Draws
from nbtools.data.drive import drive_path, kept, on_colab, place_to_keep, release_runtime
from nbtools.data.feed import (
    Feed,
    Raw,
    Resident,
    Workers,
    batches_in,
    batches_left,
    choose,
    gather,
    in_order,
    lengths_of,
    on,
    open_feed,
    require_shared_memory,
)
from nbtools.data.pack import (
    SPLITS,
    Card,
    Pack,
    Sample,
    collate,
    is_all,
    is_count,
    position,
    require_shares,
    split_of,
)
from nbtools.data.sources import Source, cache
from nbtools.data.stage import bar, in_notebook, stage

__all__ = [
    "SPLITS",
    "Card",
    "Draws",
    "Entry",
    "Feed",
    "Pack",
    "Raw",
    "Resident",
    "Sample",
    "Source",
    "Survey",
    "Workers",
    "archive_index",
    "bar",
    "batches_in",
    "batches_left",
    "build_pack",
    "cache",
    "choose",
    "collate",
    "cores",
    "drive_path",
    "gather",
    "in_notebook",
    "in_order",
    "is_all",
    "is_count",
    "kept",
    "lengths_of",
    "on",
    "on_colab",
    "open_feed",
    "place_to_keep",
    "position",
    "read_member",
    "release_runtime",
    "require_shared_memory",
    "require_shares",
    "split_of",
    "stage",
    "steady",
]
