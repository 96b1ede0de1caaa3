"""Workers: an evaluation amid an epoch takes none of its batches, and one that is killed is replaced."""

import dataclasses
import multiprocessing
import os
import re
import signal

import pytest
import toy
from acting import QUIET, acting, same, texts
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import nbtools as nb
from nbtools.errors import TrainError

WORKERS = toy.PLAN.replace(feed="workers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on one core
]


def pids() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def test_an_evaluation_asked_for_within_an_epoch_changes_nothing_of_the_run(pack):
    def losses(look: bool) -> list[float]:
        state, found = nb.TrainState(toy, pack, WORKERS.replace(workers=2, epochs=2)), []
        for record in nb.train(toy, state, pack):
            if record.kind == "step":
                state.evaluate_next = look and state.step in (3, 12)
                found += [record.values["loss"]] if record.values else []
        return found

    assert losses(look=True) == losses(look=False)


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
    first = pack.names[pack.ids("train")[0]]

    def read(path, options):
        if path.name == first:
            os.kill(os.getpid(), signal.SIGKILL)
        return toy.read(path, options)

    deadly = dataclasses.replace(pack, raw=dataclasses.replace(pack.raw, read=read))
    with pytest.raises(TrainError, match=r"killed by SIGKILL.*, and no batch came between them; set fewer workers"):
        nb.fit(toy, deadly, plan, tmp_path / "run", **QUIET)
    assert same(
        nb.fit(toy, pack, plan, tmp_path / "run", **QUIET), nb.fit(toy, pack, plan, tmp_path / "whole", **QUIET)
    )
