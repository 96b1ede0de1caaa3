"""Feeds: every sample once an epoch whatever happens to the batch size, and the same batches from everywhere."""

import dataclasses
import multiprocessing
import os
import signal
from collections import namedtuple

import numpy as np
import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from packs import pack_of

from nbtools.data import batches_left, choose, lengths_of, open_feed
from nbtools.errors import TrainError
from nbtools.train import Plan

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["fixed", "ragged"])
def pack(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTOOLS_CACHE", str(folder / "cache"))
        return toy.make_pack(folder, 90, ragged=request.param == "ragged")


def widths(count: int, seed: int = 0) -> np.ndarray:
    """Widths of text lines: most are long, last lines of a paragraph are any length."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.8, rng.normal(1200, 150, count), rng.uniform(80, 1200, count)).astype(int)


def padding(batches: list[np.ndarray], lengths: np.ndarray) -> float:
    """The share of padded columns that are padding."""
    used = sum(lengths[batch].sum() for batch in batches)
    return 1 - used / sum(len(batch) * lengths[batch].max() for batch in batches)


SIZES = st.integers(1, 40)


@given(st.integers(1, 300), st.booleans(), st.integers(0, 2**20), st.lists(st.tuples(SIZES, st.floats(0, 1))), SIZES)
def test_every_id_comes_once_for_any_changes_of_batch_size_and_from_any_position(count, ragged, epoch, changes, last):
    """A change regroups only what is left; what is left after k batches is the tail of what was left before them."""
    ids = np.sort(np.random.default_rng(epoch).choice(1000, count, replace=False))
    lengths = widths(count, epoch) if ragged else None
    segments, seen = [], []
    for size, share in [*changes, (last, 1.0)]:
        left = batches_left(ids, lengths, 7, epoch, [*segments, [size, 0]])
        assert all(len(batch) <= max(size, 3) for batch in left)
        done = round(share * len(left))
        tail = batches_left(ids, lengths, 7, epoch, [*segments, [size, done]])
        assert [batch.tolist() for batch in tail] == [batch.tolist() for batch in left[done:]]
        segments, seen = [*segments, [size, done]], [*seen, *left[:done]]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), ids)


@pytest.mark.parametrize("lengths", [None, widths(300)])
def test_order_differs_by_epoch_and_by_seed_and_not_otherwise(lengths):
    ids = np.arange(300)

    def order(seed, epoch):
        return np.concatenate(batches_left(ids, lengths, seed, epoch, [[16, 0]])).tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert [order(0, 0), order(0, 1), order(1, 0), order(1, 1)] == orders
    assert order(0, 0) != ids.tolist()


@given(st.integers(2, 100), st.integers(2, 40))
def test_batches_have_the_size_asked_for_and_no_sample_is_alone_when_it_can_be_helped(count, size):
    sizes = [len(batch) for batch in batches_left(np.arange(count), None, 0, 0, [[size, 0]])]
    assert 1 not in sizes  # BatchNorm refuses it
    assert max(sizes) <= max(size, 3)
    assert sizes[:-2] == [size] * (len(sizes) - 2)
    assert [len(b) for b in batches_left(np.arange(3), None, 0, 0, [[1, 0]])] == [1, 1, 1]


def test_padding_of_simulated_text_lines_is_a_few_percent_where_random_batches_waste_a_third():
    lengths, ids = widths(20_000), np.arange(20_000)
    for size in (8, 64):
        random, grouped = (padding(batches_left(ids, by, 0, 0, [[size, 0]]), lengths) for by in (None, lengths))
        assert grouped < min(0.03, random / 10)


def slowly(pack, batch: np.ndarray) -> dict[str, torch.Tensor]:
    """The raw batch of these ids, sample by sample."""
    raw = {"id": torch.from_numpy(batch)}
    for name, column in pack.columns.items():
        rows = [torch.from_numpy(pack.sample(i)[name].copy()) for i in batch]
        if column.kind == "ragged":
            raw[f"{name}_length"] = torch.tensor([len(row) for row in rows])
        raw[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return raw


def assert_equal(raw: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert raw.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw[name].dtype == tensor.dtype, name
        assert torch.equal(raw[name], tensor), name


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("chosen", [Plan(), Plan(feed="streamed"), *(Plan(feed="workers", workers=n) for n in (0, 2))])
def test_every_feed_gives_the_samples_bit_for_bit_padded_with_zeros(pack, chosen):
    """And takes nothing from the random stream of training. The second epoch reuses ring, thread or workers."""
    ids, made, before = pack.ids("train"), open_feed(pack, chosen, CPU), torch.get_rng_state()
    assert list(made([])) == []
    for epoch in (0, 1):
        batches = batches_left(ids, lengths_of(pack, ids), 3, epoch, [[7, 0]])
        for raw, batch in zip(made(batches), batches, strict=True):
            assert_equal(raw, slowly(pack, batch))
            raw["x"].zero_()  # writing to a batch does not touch the pack
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_an_interrupt_that_reaches_the_workers_too_ends_none_of_them(pack):
    """As a notebook's does, and a terminal's: it goes to the whole process group."""
    batches = batches_left(pack.ids("train"), None, 0, 0, [[3, 0]])
    found = iter(open_feed(pack, Plan(feed="workers", workers=1), CPU)(batches))
    ids = next(found)["id"].tolist()
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    assert [*ids, *(i for raw in found for i in raw["id"].tolist())] == np.concatenate(batches).tolist()


def test_samples_without_any_length_are_fed_as_padding(tmp_path):
    samples = [{"text": np.full(n, i + 1), "other": np.zeros(0)} for i, n in enumerate([0, 2, 0])]
    made = pack_of(samples, tmp_path, ragged={"text", "other"})
    for batch in (np.arange(3), np.array([0, 2])):
        for plan in (Plan(), Plan(feed="streamed")):
            [raw] = open_feed(made, plan, CPU)([batch])
            assert_equal(raw, slowly(made, batch))


def test_an_error_of_the_streams_thread_reaches_the_consumer(pack):
    stream = iter(open_feed(pack, Plan(feed="streamed"), CPU)([np.array([0, 1]), np.array([10**6])]))
    next(stream)
    with pytest.raises(IndexError):
        next(stream)


def test_workers_that_cannot_work_are_refused_before_they_start(pack, monkeypatch):
    alone = dataclasses.replace(pack, raw=None)
    with pytest.raises(TrainError, match=r'Plan.feed = "workers" reads the source files, .*choose feed="auto"'):
        open_feed(alone, Plan(feed="workers"), CPU)
    small = namedtuple("Stat", "f_bavail f_frsize")(4, 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    with pytest.raises(TrainError, match=r"Plan.workers = 4 with prefetch 2 and batch 512 .* has 16.4 kB free; lower"):
        open_feed(pack, Plan(feed="workers", workers=4, batch_size=512), CPU)
    open_feed(pack, Plan(feed="workers", workers=0, batch_size=512), CPU)  # in this process: no shared memory


@pytest.mark.parametrize(("free", "name"), [(1e6, "resident"), (1e4, "streamed")])
def test_auto_is_resident_where_the_pack_takes_at_most_its_share_of_free_gpu_memory(pack, monkeypatch, free, name):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2e6))
    found, reason = choose(pack, Plan(), torch.device("cuda"))
    assert found == name
    assert "30 % of free GPU memory" in reason
    assert choose(pack, Plan(), CPU)[0] == "resident"
    assert choose(pack, Plan(feed="streamed"), CPU) == ("streamed", "set in the plan")
