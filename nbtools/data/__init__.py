"""A source anywhere → local disk → Pack → batches on the device."""

from nbtools.data.build import Entry, Survey, build_pack, read_entry
from nbtools.data.dataset import items_of, options_like, pack, sample_of, split_word
from nbtools.data.draws import Draws, Keys, batches_in, batches_left, constant, in_order, places
from nbtools.data.feed import Feed, Padding, Raw, Resident, choose, collate, gather, lengths_of, on, open_feed
from nbtools.data.fetch import cache, drive_path, kept, local, place_to_keep, release_runtime, remount, retry
from nbtools.data.forms import IMAGES, TARGET, compose, open_image
from nbtools.data.pack import SPLITS, Card, Column, Pack, Sample
from nbtools.data.progress import SLOW, bar, cores, in_notebook, meanwhile, phase, say, side_by_side, tick, work
from nbtools.data.splits import is_all, lacking, some
from nbtools.data.stage import cached, digest, stage
