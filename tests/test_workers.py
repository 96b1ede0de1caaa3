"""Workers: they live from epoch to epoch, an evaluation amid an epoch takes none of its batches, and how many pay is
measured where a feed has any."""

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import traceback
from collections import namedtuple

import pytest
import torch
import toy
from acting import QUIET, acting, same, texts
from simulated import Job
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import nbtools as nb
from nbtools.data import Workers
from nbtools.data.pack import RawFiles
from nbtools.errors import TrainError
from nbtools.measure import find_workers, memory, workers
from nbtools.measure.workers import Setting, WorkersReport, chosen, refusal
from nbtools.train import Plan, TrainState, train

CPU = torch.device("cpu")
WORKERS = toy.PLAN.replace(feed="workers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on one core
]


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 2)


def searched(job: Job, pack) -> WorkersReport:
    """On the job's own clock, on which other processes take no time."""
    return find_workers(job, job.pack(pack), WORKERS, seconds=1.0, clock=job.clock)


def pids() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def test_workers_live_from_epoch_to_epoch_also_where_one_is_left_early(pack):
    feed = Workers(pack, CPU, Plan(feed="workers", workers=2))
    batches = [pack.ids("train")[i : i + 8] for i in range(0, 80, 8)]
    assert len(list(feed(batches))) == 10
    first = pids()
    assert len(first) == 2
    stream = feed(batches)
    next(stream)
    stream.close()
    again = [raw["id"].tolist() for raw in feed(batches[::-1])]
    assert again == [batch.tolist() for batch in batches[::-1]]  # and nothing of what the one left early had prefetched
    assert pids() == first


@pytest.mark.parametrize("count", [0, 2])
def test_a_call_amid_another_takes_none_of_its_batches(pack, count):
    feed = Workers(pack, CPU, Plan(feed="workers", workers=count))
    train_ids, val_ids = pack.ids("train")[:40].reshape(5, 8), pack.ids("val")[:16].reshape(2, 8)
    outer, seen = feed(list(train_ids)), []
    seen.append(next(outer)["id"].tolist())
    assert [raw["id"].tolist() for raw in feed(list(val_ids))] == val_ids.tolist()
    seen += [raw["id"].tolist() for raw in outer]
    assert seen == train_ids.tolist()


@pytest.mark.parametrize("count", [0, 2])
def test_an_evaluation_asked_for_within_an_epoch_changes_nothing_of_the_run(pack, count):
    def losses(look: bool) -> list[float]:
        state, found = TrainState(toy, pack, WORKERS.replace(workers=count, epochs=2)), []
        feed = Workers(pack, CPU, state.plan)
        for record in train(toy, state, pack, feed):
            if record.kind == "step":
                state.evaluate_next = look and state.step in (3, 12)
                found += [record.values["loss"]] if record.values else []
        feed.idle.clear()  # ends its processes at once; those of a cycle of garbage are waited for
        return found

    assert losses(look=True) == losses(look=False)


def test_an_error_of_a_worker_is_raised_and_the_next_call_has_new_workers(pack):
    broken = dataclasses.replace(pack, raw=Broken(pack.raw.folder, pack.raw.source, pack.raw.read))
    feed = Workers(broken, CPU, Plan(feed="workers", workers=1))
    ids = pack.ids("train")
    with pytest.raises(ValueError, match="cannot decode") as caught:
        list(feed([ids[:4]]))
    assert len(list(feed([ids[1:5]]))) == 1
    traceback.clear_frames(caught.tb)
    feed.idle.clear()


@pytest.fixture
def impatient(monkeypatch):
    """torch looks every 5 s whether its workers live."""
    looks = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(looks, "__defaults__", (0.05,))


def kill_one() -> None:
    os.kill(max(pid for pid in pids() if pid), signal.SIGKILL)


@pytest.mark.usefixtures("impatient")
def test_a_killed_worker_is_replaced_and_the_run_is_the_same_bit_for_bit(pack, tmp_path):
    """Also where the user's own DataLoader has had torch raise wherever this process is."""
    next(iter(DataLoader(pack.raw, num_workers=1)))
    plan = WORKERS.replace(workers=2, epochs=2)
    run = nb.fit(acting({5: kill_one, 12: kill_one}), pack, plan, tmp_path / "run", **QUIET)
    assert same(run, nb.fit(toy, pack, plan, tmp_path / "whole", **QUIET))
    for text in texts(run):
        assert re.fullmatch(
            r"worker process \d+ was killed by SIGKILL, as by a system whose memory runs out; others continue with the "
            "next batch",
            text,
        )
    assert len(texts(run)) == 2
    assert not pids()


@pytest.mark.usefixtures("impatient")
def test_a_sample_that_kills_each_worker_ends_the_run_which_then_resumes_without_it(pack, tmp_path):
    plan = WORKERS.replace(workers=1, epochs=1)
    deadly = dataclasses.replace(pack, raw=Deadly(pack.raw.folder, pack.raw.source, pack.raw.read))
    with pytest.raises(TrainError, match=r"killed by SIGKILL.*, and no batch came between them; set fewer workers"):
        nb.fit(toy, deadly, plan, tmp_path / "run", **QUIET)
    assert same(
        nb.fit(toy, pack, plan, tmp_path / "run", **QUIET), nb.fit(toy, pack, plan, tmp_path / "whole", **QUIET)
    )


class Deadly(RawFiles):
    """Whose first training sample ends the process that reads it."""

    def __getitem__(self, i):
        if i == self.pack.ids("train")[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class Broken(RawFiles):
    """Whose first training sample cannot be decoded."""

    def __getitem__(self, i):
        if i == self.pack.ids("train")[0]:
            raise ValueError("cannot decode")
        return super().__getitem__(i)


def test_where_decoding_takes_the_time_workers_pay_and_the_finder_sees_it(pack, two_cores):
    """And what they made ready before the clock began is not counted as their speed."""
    job, others = Job(reading=0.01, fixed=0.02), multiprocessing.active_children()
    found = searched(job, pack)
    rates = {(each.workers, each.prefetch): each.samples_per_s for each in found.settings}
    assert list(rates)[:3] == [(0, 2), (1, 2), (2, 2)]
    assert rates[0, 2] == pytest.approx(16 / 0.18, rel=0.2)
    assert rates[1, 2] == pytest.approx(16 / 0.02, rel=0.2)
    assert found.workers in (1, 2)  # on this clock as fast as each other
    assert found.settings[0].data_wait == pytest.approx(0.16 / 0.18, rel=0.05)
    assert "× that without workers; training still waits 0 % of the time for data" in found.reason
    assert set(multiprocessing.active_children()) <= set(others)
    assert WorkersReport.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert "<table" in found._repr_html_()


def test_a_dev_shm_too_small_is_a_reason_and_no_bus_error(pack, two_cores, monkeypatch):
    small = namedtuple("Stat", "f_bavail f_frsize")(1, 1024)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    found = searched(Job(), pack)
    assert found.workers == 0
    assert [each.workers for each in found.settings if each.skipped] == [1, 2]
    assert "/dev/shm has 1.0 kB free; lower workers or prefetch" in found.settings[1].skipped
    assert "/dev/shm" in str(found)


def test_workers_that_ram_has_no_room_for_are_not_started(pack, two_cores, monkeypatch):
    monkeypatch.setattr(workers, "ram", lambda: memory.Room(2**20, "available RAM"))
    started = []
    real = Workers.open
    monkeypatch.setattr(Workers, "open", lambda self, first: (started.append(self.plan.workers), real(self, first))[1])
    found = searched(Job(), pack)
    assert max(started) == 1  # the one that is weighed
    assert "of available RAM is usable" in found.settings[2].skipped


def test_a_reader_of_the_notebook_itself_is_not_sent_to_processes_that_cannot_import_it(pack, monkeypatch):
    def read(path, options):
        raise AssertionError

    read.__module__ = "__main__"
    own = dataclasses.replace(pack, raw=RawFiles(pack.raw.folder, pack.raw.source, read))
    plan = WORKERS.replace(workers=2)
    said = refusal(own, plan, torch.device("cuda"), 0)
    assert "defined in the notebook, where a forkserver process cannot import it; put it in a file" in said
    assert refusal(pack, plan, torch.device("cuda"), 0) == ""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")
    assert refusal(own, plan, CPU, 0) == ""


@pytest.mark.parametrize("feed", ["auto", "resident", "streamed"])
def test_a_feed_without_workers_is_not_measured_and_the_reason_is_said(pack, feed, monkeypatch):
    monkeypatch.setattr(workers, "tried", None)
    found = find_workers(toy, pack, toy.PLAN.replace(feed=feed, workers=3))
    assert found.settings == ()
    assert found.workers == 3
    assert "it uses no workers, so there is nothing to measure" in str(found)


def test_without_the_source_files_the_finder_says_what_the_feed_says(pack):
    with pytest.raises(TrainError, match="reads the source files, but they are not here"):
        find_workers(toy, dataclasses.replace(pack, raw=None), WORKERS)


def test_the_fewest_workers_within_five_percent_of_the_best_are_chosen():
    rates = {0: 100.0, 1: 95.0, 2: 190.0, 4: 199.0, 8: 200.0}
    settings = [Setting(number, 2, rate, rate, rate) for number, rate in rates.items()]
    assert chosen(settings)[:2] == (2, 2)
    assert chosen([*settings, Setting(8, 4, 220.0, 220.0, 220.0)])[:2] == (8, 4)
    assert chosen([*settings, Setting(16, 2, skipped="too small")])[:2] == (2, 2)
    number, _, reason = chosen(settings[:2])
    assert (number, reason) == (0, "no workers: 100 samples/s without them is the best rate")
    assert "95 % of the best" in chosen(settings)[2]
