"""Memory may end at any allocation of a step: the step is done once, in smaller parts, and training goes on."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from faults import memory
from kernels import MINE, started
from ranks import together

import nbtools as nb
from nbtools.data import feed
from nbtools.errors import TrainError
from nbtools.train import device, join, obey
from nbtools.train.evaluation import fed


@pytest.mark.parametrize("name", memory.CASES)
def test_memory_may_end_at_any_allocation_and_training_goes_on_as_if_it_had_not(name, tmp_path):
    """In a step nothing is applied twice: weights, optimizer, moving average, scaler and losses. `make faults` lets it
    end at all allocations of two processes too."""
    every = 5 if "processes" in name else 1
    totals, wrong = memory.swept(name, tmp_path, every)
    assert wrong == []
    assert totals.total() > (2 if every > 1 else 20)
    if memory.AS_IT_WAS in totals:  # of a step
        assert totals[memory.HALVED] >= 0.8 * totals.total(), "only those that keep buffers may end without halving"


def short_of(times: int, rank: int = 0):
    """A loss for which memory runs out so many times on a rank's share of the second epoch's last batch, of ten."""

    def loss(model, batch, plan):
        own, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        seen.append(
            own == rank and 1 < len(batch["x"]) <= 10 // world and isinstance(model, torch.nn.Module) and model.training
        )
        if seen[-1] and 1 < sum(seen) <= 1 + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return toy.loss(model, batch, plan)

    seen: list[bool] = []
    return loss


def ended(folder: Path, times: int, rank: int = 0, **names: Any) -> tuple[int | None, list[str], torch.Tensor]:
    """The micro batch, what was said, and the weights after three epochs of batches of 16, 16 and 10."""
    task, ranks = toy.with_(loss=short_of(times, rank), **names), join()
    pack, plan = nb.Pack.open(folder), toy.PLAN.replace(dropout=0.0)
    state = nb.TrainState(task, pack, plan, "cpu", ranks)
    told = []
    if ranks is None or ranks.first:
        told = [row.values["what"] for row in nb.train(task, state, pack) if row.kind == "event"]
        if ranks is not None:
            ranks.end()
    else:
        obey(task, state, pack)
    return state.recovery.micro, told, torch.cat([weight.detach().view(-1) for weight in state.parameters])


AGAIN = "out of memory: a small batch is tried once more, since larger ones fitted"


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    return toy.make_pack(tmp_path_factory.mktemp("odd"), count=60).folder  # 42 to train


def test_memory_that_runs_out_once_on_a_small_last_batch_changes_nothing(odd):
    micro, told, weights = ended(odd, 1)
    assert (micro, told) == (None, [AGAIN])
    assert torch.equal(weights, ended(odd, 0)[2])


def test_a_small_last_batch_that_does_not_fit_is_halved_for_its_step_only(odd):
    micro, told, weights = ended(odd, 3, model=memory.SMALL.model)
    halved = [memory.SAID.format(*sizes).replace(";", " for this step;") for sizes in ((10, 5), (5, 2))]
    assert (micro, told) == (None, [AGAIN, *halved])
    assert torch.allclose(weights, ended(odd, 0, model=memory.SMALL.model)[2], 0, 1e-5)


def test_batchnorm_that_would_get_single_samples_ends_the_run_with_what_to_do(odd):
    with pytest.raises(TrainError, match="more than one sample at a time, which BatchNorm needs; use a smaller"):
        ended(odd, 10**6)


def test_processes_agree_on_trying_a_small_last_batch_once_more(odd):
    [(micro, told, weights), (other, _, same)] = together(2, ended, odd, 1, 1)
    assert (micro, other, told) == (None, None, [AGAIN])
    assert torch.equal(weights, same)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("plan", [nb.Plan(feed="streamed"), nb.Plan(feed="workers", workers=0)], ids=lambda p: p.feed)
def test_a_batch_for_which_memory_ends_is_read_once_more_and_then_ends_the_run_in_a_sentence(
    pack, monkeypatch, plan, times
):
    """Raised in the feed's thread or in its loader; in the pack's own arrays it is part of an epoch above."""
    calls, real = [], feed.on

    def full(*given):
        calls.append(1)
        if 1 < len(calls) <= 1 + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*given)

    monkeypatch.setattr(feed, "on", full)
    batches, made = [np.arange(k, k + 4) for k in range(0, 16, 4)], feed.open_feed(pack, plan, torch.device("cpu"))
    if times == 1:
        assert [raw["id"].tolist() for raw in fed(made, batches)] == [batch.tolist() for batch in batches]
    else:
        with pytest.raises(TrainError, match=r"out of memory reading a batch \(CUDA out of memory\); use a smaller"):
            list(fed(made, batches))


@pytest.mark.parametrize(("kind", "said"), memory.ENDS, ids=["torch", "cublas", "cudnn"])
def test_a_network_for_which_memory_never_suffices_is_said_so(pack, tmp_path, kind, said):
    def model(card, plan):
        raise kind(said)

    with pytest.raises(TrainError, match="out of memory before the first step"):
        nb.fit(toy.with_(model=model, PLAN=toy.PLAN), pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)


PREPARED = f"""
import gc, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
from pathlib import Path
import nbtools as nb, toy
from nbtools.train.device import give_back, resident
pack, quick = toy.make_pack(Path("toy"), count=60), {{"epochs": 1, "batch_size": 32}}

def loss(model, batch, plan):
    found = toy.loss(model, batch, plan)
    if plan.hidden > 16 and fails:
        fails.pop()
        assert fails
    return found

def used():
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    print('used', resident() // 2**20, sum({{t.data_ptr(): t.nbytes for t in tensors}}.values()) // 2**20)

task, fails = toy.with_(loss=loss), [1, 2]
nb.fit(task, pack, toy.PLAN.replace(**quick), "first", receipt=False)
give_back(torch.device("cpu"))  # what malloc keeps for the next step
used()
"""
FAILING = 'nb.fit(task, pack, toy.PLAN.replace(hidden=400_000, **quick), "failed", receipt=False)'  # 22 MB of weights


@pytest.mark.parametrize("stack", ["colab", pytest.param(MINE, marks=pytest.mark.full)])
def test_a_cell_that_fails_amid_training_leaves_no_memory_behind_and_the_next_one_trains(tmp_path, stack):
    with started(stack, tmp_path) as kernel:
        before = megabytes(kernel.run(PREPARED))
        failed = kernel.client.execute(FAILING)
        kernel.end(failed)
        assert kernel.errors(failed) == ["AssertionError"]
        assert megabytes(kernel.run("used()")) == pytest.approx(before, rel=0.05, abs=1)
        again = kernel.client.execute(FAILING)
        kernel.end(again)
        assert kernel.errors(again) == []


def megabytes(text: str) -> list[int]:
    """Of the process and of its tensors."""
    found = re.search(r"used (\d+) (\d+)", text)
    assert found, text
    return [*map(int, found.groups())]


def test_of_several_processes_one_that_lacks_memory_outside_of_a_step_lets_all_start_again(monkeypatch):
    """TrainError would end the run: it is what a user has to change."""

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(TrainError, match="out of memory reading a batch"):
        device.required(full, "reading a batch")
    monkeypatch.setattr(device, "world", lambda: 2)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory reading a batch"):
        device.required(full, "reading a batch")
    with pytest.raises(TrainError, match="before the first step"):
        device.required(full)
