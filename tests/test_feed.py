"""Feeds: every sample once an epoch whatever happens to the batch size, and the same batches from everywhere."""

import contextlib
import dataclasses
import inspect
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from packs import pack_of
from torch.utils.data import DataLoader, TensorDataset

from nbtools.data import Resident, Workers, batches_left, choose, feed, gather, in_order, lengths_of, open_feed
from nbtools.data.feed import Streamed
from nbtools.data.pack import RawFiles
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


def test_batches_of_like_length_still_mix_the_samples():
    """Neighbours in one epoch are mostly not neighbours in the next, and widths do not rise through an epoch."""
    lengths, ids = widths(4000), np.arange(4000)
    first, second = (batches_left(ids, lengths, 0, epoch, [[8, 0]]) for epoch in (0, 1))
    mates = {i: set(batch) for batch in first for i in batch}
    again = np.mean([len(mates[i] & set(batch)) - 1 for batch in second for i in batch])
    assert again < 0.5  # of 7
    means = np.array([lengths[batch].mean() for batch in first])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_evaluation_sees_every_id_once_in_a_fixed_order():
    ids = np.arange(100, 200)
    lengths = widths(100)
    assert np.concatenate(in_order(ids, None, 7)).tolist() == ids.tolist()
    ordered = np.concatenate(in_order(ids, lengths, 7))
    assert sorted(ordered.tolist()) == ids.tolist()
    assert (np.diff(lengths[ordered - 100]) >= 0).all()


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
    found = Workers(pack, CPU, Plan(feed="workers", workers=1))(batches)
    ids = next(found)["id"].tolist()
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    assert [*ids, *(i for raw in found for i in raw["id"].tolist())] == np.concatenate(batches).tolist()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_an_interrupt_while_workers_start_waits_until_all_that_ends_them_is_in_place():
    """In the middle of it torch's queue would keep its lock, and a process would be nobody's."""

    class Interrupted(list):
        def __iter__(self):
            for at, batch in enumerate(super().__iter__()):
                if at == 1:
                    signal.raise_signal(signal.SIGINT)
                asked.append(at)
                yield batch

    asked, batches, own = [], Interrupted([[k] for k in range(9)]), signal.getsignal(signal.SIGINT)
    loader = feed.Loader(DataLoader(TensorDataset(torch.arange(9)), batch_sampler=batches, num_workers=2), batches)
    with pytest.raises(KeyboardInterrupt):
        loader.begin()
    assert asked == [0, 1, 2, 3], "two for each worker"
    assert len(loader.processes) == 2
    assert signal.getsignal(signal.SIGINT) is own
    loader.end()
    assert not multiprocessing.active_children()


class Stuck(TensorDataset):
    """Samples of which those from the third on are on a disk that does not respond."""

    def __getitem__(self, index):
        if index >= 2:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
def test_an_interrupt_acts_at_once_where_workers_that_are_there_do_not_answer():
    """An epoch was left early, and the next waits for the batches that were on their way."""
    batches = [[k] for k in range(5)]
    options = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": feed.ignore_signals}
    loader = feed.Loader(DataLoader(Stuck(torch.arange(5)), batch_sampler=batches, **options), batches)
    stream: Iterator[Any] = loader.begin()
    assert [int(next(stream)[0]), int(next(stream)[0])] == [0, 1]
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loader.begin()
    assert time.monotonic() - started < 30
    loader.end()


def test_samples_without_any_length_are_fed_as_padding(tmp_path):
    samples = [{"text": np.full(n, i + 1), "other": np.zeros(0)} for i, n in enumerate([0, 2, 0])]
    made = pack_of(samples, tmp_path, ragged={"text", "other"})
    for batch in (np.arange(3), np.array([0, 2])):
        for one in (Resident(made, CPU), Streamed(made, CPU, 2)):
            [raw] = one([batch])
            assert_equal(raw, slowly(made, batch))


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nbtools-feed"]


def copy_late(patch: pytest.MonkeyPatch) -> None:
    """What `torch.cuda` does for the streamed feed, on a CPU: a copy from a pinned buffer reads it only when somebody
    waits for the copy's event, as late as a busy GPU may, so that a buffer filled again too early shows."""
    to, empty, lock, here = torch.Tensor.to, torch.empty, threading.Lock(), threading.local()

    class Event:
        def __init__(self):
            self.copies = []

        def record(self, stream):
            self.copies, here.copies = here.copies, []

        def synchronize(self):
            with lock:
                while self.copies:
                    target, source = self.copies.pop()
                    target.copy_(source)

    def copied_later(tensor, *where, **more):
        if not where or getattr(where[0], "type", None) != "cuda":
            return to(tensor, *where, **more)
        target = torch.full_like(tensor, 99)
        here.copies = [*getattr(here, "copies", []), (target, tensor)]
        time.sleep(0.0005)  # the other call's thread has its turn
        return target

    stream = types.SimpleNamespace(wait_event=Event.synchronize)
    for name in ("Stream", "current_stream"):
        patch.setattr(torch.cuda, name, lambda device: stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    patch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
    patch.setattr(torch.Tensor, "to", copied_later)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def test_two_calls_of_the_streamed_feed_at_once_give_each_its_own_batches(pack, monkeypatch):
    """As an evaluation within an epoch makes them, on an emulated GPU."""
    train, val = ([ids[i : i + 4] for i in range(0, 40, 4)] for ids in (np.arange(40), np.arange(40, 80)))
    copy_late(monkeypatch)
    feed = open_feed(pack, Plan(feed="streamed"), torch.device("cuda"))
    for _ in range(4):
        for batches in zip(zip(train, feed(train), strict=True), zip(val, feed(val), strict=True), strict=True):
            for ids, raw in batches:
                assert_equal(raw, gather(pack, ids))


def test_a_stream_stays_prefetch_batches_ahead_and_its_thread_ends_when_the_consumer_leaves_early(pack, monkeypatch):
    gathered, real = [], feed.gather
    monkeypatch.setattr(feed, "gather", lambda *args: gathered.append(1) or real(*args))
    stream = Streamed(pack, CPU, 2)([pack.ids("train")[:4]] * 1000)
    next(stream)
    deadline = time.monotonic() + 2
    while len(gathered) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(gathered) == 4  # one taken, two ready, one in the thread's hands
    stream.close()
    assert feed_threads() == []
    assert len(gathered) < 100


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_call_of_the_streamed_feed_ends_its_thread(pack):
    """In the frames of the standard library too, where CPython looks for signals: where a function begins and where one
    in C returns. Within a queue or an Event in Python it leaves a lock held, for which the end waits for ever."""

    def look(frame, event, arg):
        nonlocal places
        begins = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR  # whose finally would be left out
        if (begins or event == "c_return") and frame.f_code.co_filename != __file__:
            places += 1
            if places == at:
                signal.raise_signal(signal.SIGINT)

    def hang(*_):
        raise AssertionError(f"the feed hangs after an interrupt at place {at}")

    before, batches = signal.signal(signal.SIGALRM, hang), [pack.ids("train")[:4]] * 10
    try:
        for at in itertools.count(1):
            places, stream = 0, Streamed(pack, CPU, 2)(batches)
            signal.setitimer(signal.ITIMER_REAL, 10)
            try:
                sys.setprofile(look)
                for _ in range(3):
                    next(stream)
                stream.close()
                sys.setprofile(None)
            except KeyboardInterrupt:
                sys.setprofile(None)
            for thread in feed_threads():
                thread.join()
            signal.setitimer(signal.ITIMER_REAL, 0)
            if places < at:
                break
    finally:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert at > 50


def test_an_error_of_the_streams_thread_reaches_the_consumer(pack):
    stream = Streamed(pack, CPU, 2)([np.array([0, 1]), np.array([10**6])])
    next(stream)
    with pytest.raises(IndexError):
        next(stream)
    assert feed_threads() == []


def broken(path, options):
    raise ValueError(f"cannot decode {path.name}")


def test_an_error_of_a_worker_reaches_the_consumer(pack):
    assert pack.raw is not None
    damaged = dataclasses.replace(pack, raw=RawFiles(pack.folder, pack.raw.source, broken))
    with pytest.raises(ValueError, match="cannot decode"):
        list(Workers(damaged, CPU, Plan(feed="workers"))([np.array([0, 1])]))


def test_workers_that_cannot_work_are_refused_before_they_start(pack, monkeypatch):
    alone = dataclasses.replace(pack, raw=None)
    with pytest.raises(TrainError, match=r'Plan.feed = "workers" reads the source files, .*choose feed="auto"'):
        open_feed(alone, Plan(feed="workers"), CPU)
    small = namedtuple("Stat", "f_bavail f_frsize")(4, 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    with pytest.raises(TrainError, match=r"Plan.workers = 4 with prefetch 2 and batch 512 .* has 16.4 kB free; lower"):
        Workers(pack, CPU, Plan(feed="workers", workers=4, batch_size=512))
    Workers(pack, CPU, Plan(feed="workers", workers=0, batch_size=512))  # in this process: no shared memory


@pytest.mark.parametrize(("free", "name"), [(1e6, "resident"), (1e4, "streamed")])
def test_auto_is_resident_where_the_pack_takes_at_most_its_share_of_free_gpu_memory(pack, monkeypatch, free, name):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2e6))
    found, reason = choose(pack, Plan(), torch.device("cuda"))
    assert found == name
    assert "30 % of free GPU memory" in reason
    assert choose(pack, Plan(), CPU)[0] == "resident"
    assert choose(pack, Plan(feed="streamed"), CPU) == ("streamed", "set in the plan")
