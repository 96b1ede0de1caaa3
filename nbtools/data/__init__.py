"""A source anywhere → local disk → Pack → batches on the device."""

from nbtools.data.archive import archive_index, read_member
from nbtools.data.build import Entry, Survey, build_pack, cores, steady
from nbtools.data.dataset import RawItems, pack
from nbtools.data.draws import Draws
from nbtools.data.drive import drive_path, kept, on_colab, place_to_keep, release_runtime
from nbtools.data.feed import (
    Feed,
    Raw,
    Resident,
    Workers,
    auto_feed,
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
from nbtools.data.frames import encoded
from nbtools.data.items import TARGET, Form, inputs_of
from nbtools.data.pack import (
    SPLITS,
    Card,
    Column,
    Pack,
    Sample,
    collate,
    is_all,
    is_count,
    is_pack,
    position,
    require_shares,
    split_of,
)
from nbtools.data.progress import bar, in_notebook, say
from nbtools.data.sources import Source, cache
from nbtools.data.stage import stage

__all__ = [
    "SPLITS",
    "TARGET",
    "Card",
    "Column",
    "Draws",
    "Entry",
    "Feed",
    "Form",
    "Pack",
    "Raw",
    "RawItems",
    "Resident",
    "Sample",
    "Source",
    "Survey",
    "Workers",
    "archive_index",
    "auto_feed",
    "bar",
    "batches_in",
    "batches_left",
    "build_pack",
    "cache",
    "choose",
    "collate",
    "cores",
    "drive_path",
    "encoded",
    "gather",
    "in_notebook",
    "in_order",
    "inputs_of",
    "is_all",
    "is_count",
    "is_pack",
    "kept",
    "lengths_of",
    "on",
    "on_colab",
    "open_feed",
    "pack",
    "place_to_keep",
    "position",
    "read_member",
    "release_runtime",
    "require_shared_memory",
    "require_shares",
    "say",
    "split_of",
    "stage",
    "steady",
]
