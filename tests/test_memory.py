"""Memory may end at any allocation of a step: the step is done once, in smaller parts, and training goes on."""

import re
from pathlib import Path

import pytest
import toy
from faults import memory
from kernels import MINE, started

import nbtools as nb
from nbtools.errors import TrainError


@pytest.mark.parametrize("name", memory.CASES)
def test_memory_may_end_at_any_allocation_and_training_goes_on_as_if_it_had_not(name, tmp_path):
    """In a step nothing is applied twice: weights, optimizer, moving average, scaler and losses. `make faults` lets it
    end at all allocations of two processes too."""
    every = 5 if "processes" in name else 1
    totals, wrong = memory.swept(name, tmp_path, every)
    assert wrong == []
    assert totals.total() > (2 if every > 1 else 20)
    if memory.AS_IT_WAS in totals:
        assert totals[memory.HALVED] >= 0.8 * totals.total(), "only those that keep buffers may end without halving"


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
