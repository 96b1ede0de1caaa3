"""A source anywhere → local disk → Pack → batches on the device."""

from nbtools.data.archive import archive_index, read_member
from nbtools.data.build import Entry, Survey, build_pack
from nbtools.data.cached import cached
from nbtools.data.dataset import RawItems, pack
from nbtools.data.draws import STAYING, Draws, Keys, constant, places
from nbtools.data.drive import drive_path, kept, on_colab, place_to_keep, release_runtime, remount
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
from nbtools.data.frames import tables
from nbtools.data.images import IMAGES, open_image
from nbtools.data.items import TARGET, Form, inputs_of, is_image
from nbtools.data.keeping import EARLIER, LATER, LATEST, is_kept, latest, opened_copy, present, restore_kept
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
from nbtools.data.parallel import cores, in_processes, side_by_side, threaded
from nbtools.data.progress import SLOW, bar, in_notebook, meanwhile, phase, say, tick, work
from nbtools.data.reading import items_of, sample_of
from nbtools.data.sources import Source, cache
from nbtools.data.stage import stage
from nbtools.data.transfer import patient
