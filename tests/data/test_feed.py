"""Feeds: every sample once an epoch whatever happens to the batch size, and the same batches from everywhere."""

import dataclasses
import gc
import multiprocessing
import os
import signal
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import toy
from acting import QUIET, acting, refused, same
from hypothesis import given
from hypothesis import strategies as st
from packs import pack_of
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import nbtools as nb
from nbtools.data import batches_left, choose, gather, lengths_of, open_feed, progress
from nbtools.data.feed import Workers
from nbtools.errors import PackError, TrainError
from nbtools.tasks.captcha import Plan

CPU = torch.device("cpu")
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # the same names, types and bits
SIZES = st.integers(1, 40)
FEEDS = [Plan(), Plan(feed="streamed"), *(Plan(feed="workers", workers=n) for n in (0, 2))]
ONE_CORE = "ignore:This DataLoader will create:UserWarning"
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", ONE_CORE)


@pytest.fixture(scope="module", params=[False, True], ids=["fixed", "ragged"])
def pack(request, tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), 90, ragged=request.param)


def widths(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.8, rng.normal(1200, 150, count), rng.uniform(80, 1200, count)).astype(int)


@given(st.integers(1, 300), st.booleans(), st.integers(0, 2**20), st.lists(st.tuples(SIZES, st.floats(0, 1))), SIZES)
def test_every_id_comes_once_for_any_changes_of_batch_size_and_from_any_position(count, ragged, epoch, changes, last):
    """A change regroups only what is left; what is left after k batches is the tail of what was left before them."""
    ids = np.sort(np.random.default_rng(epoch).choice(1000, count, replace=False))
    lengths = widths(count, epoch) if ragged else None
    segments, seen = [], []
    for size, share in [*changes, (last, 1.0)]:
        left = batches_left(ids, lengths, 7, epoch, [*segments, [size, 0]])
        assert all(len(batch) <= size + (size == 2) for batch in left)
        assert size == 1 or sum(map(len, left)) == 1 or all(len(batch) > 1 for batch in left)  # BatchNorm refuses one
        done = round(share * len(left))
        tail = batches_left(ids, lengths, 7, epoch, [*segments, [size, done]])
        assert [batch.tolist() for batch in tail] == [batch.tolist() for batch in left[done:]]
        others = [batches_left(ids, lengths, *place, [*segments, [size, 0]]) for place in ((8, epoch), (7, epoch + 1))]
        for other in others if len(ids) > 60 and not segments else []:
            assert np.concatenate(other).tolist() != np.concatenate(left).tolist()
        segments, seen = [*segments, [size, done]], [*seen, *left[:done]]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), ids)


def test_padding_of_simulated_text_lines_is_a_few_percent_where_random_batches_waste_a_third():
    lengths, ids = widths(20_000), np.arange(20_000)
    for size in (8, 64):
        waste = []
        for by in (None, lengths):
            batches = batches_left(ids, by, 0, 0, [[size, 0]])
            waste += [1 - lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)]
        assert waste[1] < min(0.03, waste[0] / 10)


@pytest.mark.parametrize("chosen", FEEDS)
def test_every_feed_gives_the_samples_bit_for_bit_padded_with_zeros(pack, chosen):
    """And takes no random numbers of training. A second epoch, an evaluation within one, an early end change none."""
    ids, made, before = pack.ids("train"), open_feed(pack, chosen, CPU), torch.get_rng_state()
    assert list(made([])) == []
    for epoch in (0, 1):
        batches = batches_left(ids, lengths_of(pack, ids), 3, epoch, [[7, 0]])
        for raw, batch in zip(made(batches), batches, strict=True):
            assert_equal(raw, gather(pack, batch))
            raw["x"].zero_()  # writing to a batch does not touch the pack
            if batch is batches[1]:
                assert_equal(next(iter(made(batches[3:]))), gather(pack, batches[3]))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(getattr(made, "idle", ())) == 2 * (chosen.feed == "workers"), "its processes served all four calls"


@pytest.mark.parametrize("chosen", FEEDS)
def test_a_bucket_pads_every_column_to_few_lengths_none_beyond_the_packs_longest(tmp_path, chosen):
    samples = [{"x": np.ones((7 * i % 31, 2), np.uint8), "label": np.full(i % 6, 7)} for i in range(40)]
    pack = pack_of(samples, tmp_path, ragged={"x", "label"}, bucket_by="x")
    batches = [*batches_left(np.arange(40), lengths_of(pack, np.arange(40)), 0, 0, [[3, 0]]), np.array([0])]
    shapes = set()
    feeds = (open_feed(pack, plan, CPU) for plan in (chosen, chosen.replace(bucket=8)))
    for ids, exact, padded in zip(batches, *(feed(batches) for feed in feeds), strict=True):
        assert_equal(exact, gather(pack, ids))
        for name, tensor in exact.items():
            assert torch.equal(padded[name][tuple(map(slice, tensor.shape))], tensor)
            assert padded[name].sum() == tensor.sum()
        shapes.add((padded["x"].shape[1], padded["label"].shape[1]))
    assert shapes == {(0, 0), (8, 5), (16, 5), (24, 5), (30, 5)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pack_without_arrays_is_read_from_its_dataset_whatever_the_plan_says(pack, workers):
    bare, batches = dataclasses.replace(pack), [np.array([3, 1]), np.array([5])]
    vars(bare)["arrays"] = {}
    assert len({vars(Workers(bare, CPU, Plan()).open(ids))["generator"].initial_seed() for ids in batches}) == 2
    for plan in (Plan(workers=workers), Plan(workers=workers, feed="streamed")):
        assert choose(bare, plan, CPU) == ("workers", "the pack stores no arrays (store=False)")
        for raw, batch in zip(open_feed(bare, plan, CPU)(batches), batches, strict=True):
            assert_equal(raw, gather(pack, batch))
            assert_equal(gather(bare, batch), raw)


@pytest.mark.parametrize(("free", "name"), [((1e6, 0), "resident"), ((1e4, 0), "streamed"), ((0, 1e6), "resident")])
def test_auto_is_resident_where_the_pack_takes_at_most_its_share_of_free_gpu_memory(pack, monkeypatch, free, name):
    figures = {"mem_get_info": (free[0], 2e6), "memory_reserved": 1e5 + free[1], "memory_allocated": 1e5}
    for figure, value in figures.items():
        monkeypatch.setattr(torch.cuda, figure, lambda device, value=value: value)
    found, reason = choose(pack, Plan(), torch.device("cuda"))
    assert (found, "30 % of free GPU memory" in reason) == (name, True)
    assert choose(pack, Plan(), CPU)[0] == "resident"
    assert choose(pack, Plan(feed="streamed"), CPU) == ("streamed", "set in the plan")


class Broken(torch.utils.data.Dataset):
    def __getitem__(self, i):
        raise PackError("item 1: no sound") if i == 1 else RuntimeError("no such film")


def test_workers_beside_cuda_are_forks_only_where_a_new_process_could_not_import_the_data(pack, monkeypatch):
    def method(raw: Any) -> str:
        feed = Workers(dataclasses.replace(pack, raw=raw), torch.device("cuda"), Plan(workers=1))
        return vars(feed.open(pack.ids("val")))["_DataLoader__multiprocessing_context"].get_start_method()

    assert (method(pack.raw), method(lambda i: i)) == ("forkserver", "fork")
    monkeypatch.setattr("__main__.Broken", Broken, raising=False)
    monkeypatch.setattr(Broken, "__module__", "__main__")
    assert method(Broken()) == "fork", "of a notebook's cell"


def test_workers_that_start_anew_do_not_run_the_users_script_again(pack, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("__main__.__spec__", None)
    monkeypatch.setattr("__main__.__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.setattr("nbtools.data.feed.start_method", lambda *_: "forkserver")  # as beside CUDA
    next(Workers(pack, CPU, Plan(workers=1))([pack.ids("val")]))
    assert not (tmp_path / "ran").exists()


def test_an_error_of_the_data_reaches_the_consumer_and_is_not_taken_for_the_death_of_a_worker(pack):
    stream = iter(open_feed(pack, Plan(feed="streamed"), CPU)([np.array([0, 1]), np.array([10**6])]))
    next(stream)
    with pytest.raises((IndexError, TypeError)):
        next(stream)
    plan, broken = Plan(feed="workers", workers=1), dataclasses.replace(pack, raw=Broken())
    with pytest.raises(RuntimeError, match="no such film") as held:
        next(iter(open_feed(broken, plan, CPU)([np.array([0, 1])])))
    assert not multiprocessing.active_children(), "a traceback keeps them, and its collection waits 10 s for each"
    del held
    refused(PackError, r"^item 1: no sound$", next, iter(open_feed(broken, plan, CPU)([np.array([1])])))
    with pytest.raises(TrainError, match=r'Plan.feed = "workers" reads the source files, .*choose feed="auto"'):
        open_feed(dataclasses.replace(pack, raw=None), plan, CPU)


def test_workers_collect_no_garbage_of_the_process_that_started_them(pack, tmp_path, monkeypatch):
    """Such as a loader that an interrupted cell leaves, whose own workers only that process can end."""
    for name in ("LOOK", "SHORT"):
        monkeypatch.setattr(progress, name, 0)
    read, here = type(pack.raw).__getitem__, os.getpid()
    monkeypatch.setattr(type(pack.raw), "__getitem__", lambda *item: (gc.collect(), read(*item))[1])
    gc.disable()
    left = Broken()
    vars(left)["itself"] = left
    weakref.finalize(left, lambda: os.getpid() == here or (tmp_path / "collected").touch())
    del left
    try:
        assert any(progress.side_by_side(lambda i: os.getpid() != here and (gc.collect(), True)[1], range(40)))
        assert [*open_feed(pack, Plan(feed="workers", workers=1), CPU)([np.array([0])])]
    finally:
        gc.enable()
    assert not (tmp_path / "collected").exists()


def test_an_interrupt_that_reaches_the_workers_too_ends_none_of_them(pack):
    """As a notebook's does, and a terminal's: it goes to the whole process group."""
    batches = batches_left(pack.ids("train"), None, 0, 0, [[3, 0]])
    stream = iter(open_feed(pack, Plan(feed="workers", workers=1), CPU)(batches))
    ids = next(stream)["id"].tolist()
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    assert [*ids, *(i for raw in stream for i in raw["id"].tolist())] == np.concatenate(batches).tolist()


def test_a_killed_worker_ends_the_run_in_a_sentence_and_the_same_call_resumes_bit_for_bit(pack, tmp_path, monkeypatch):
    waits = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(waits, "__defaults__", (0.05,))  # torch looks every 5 s whether its workers live
    plan = toy.PLAN.replace(feed="workers", workers=2, epochs=2)
    task = acting({3: lambda: os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)})
    said = "^a worker process .* died, probably because memory .*; set fewer .* See “The loader hangs”"
    refused(TrainError, said, nb.fit, task, pack, plan, tmp_path / "run", **QUIET)
    run = nb.fit(toy, pack, plan, tmp_path / "run", **QUIET)
    assert same(run, nb.fit(toy, pack, plan, tmp_path / "whole", **QUIET))
