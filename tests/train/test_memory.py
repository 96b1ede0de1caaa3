"""Memory may end at any allocation of a step: the step is done once, in smaller parts, and training goes on."""

import re
import traceback
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import toy
from acting import QUIET
from kernels import MINE, started
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.errors import TrainError

PACK = partial(toy.make_pack, count=60)  # 42 to train on, so that an epoch ends with a smaller batch
ENDS = (
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)
"""What a full GPU raises: torch's allocator, cuBLAS and cuDNN, each of the last two a plain RuntimeError."""


class Full(TorchDispatchMode):
    """Memory that ends once, at the n-th operation of training's forward and backward passes that allocates: one that
    returns a tensor which is none of its arguments. What follows them allocates less than they free."""

    def __init__(self, at: int):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        makes = any(value.alias_info is None and "Tensor" in str(value.type) for value in func._schema.returns)
        makes &= any(frame.name == "gradients" for frame in traceback.extract_stack(limit=60))
        self.count += makes
        if makes and self.count == self.at:
            kind, said = ENDS[self.at % len(ENDS)]
            raise kind(said)
        return func(*args, **(kwargs or {}))


def with_memory_for(allocations: int, pack: nb.Pack) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether memory ended amid an epoch with its evaluation, and what it left behind."""
    state = nb.TrainState(toy.with_(model=toy.linear), pack, toy.PLAN.replace(epochs=1, ema=0.9), "cpu")
    with Full(allocations) as full:
        list(nb.train(state.task, state, pack))
    return full.count >= allocations, {name: value.clone() for name, value in state.tensors().items()}


def test_memory_may_end_at_any_allocation_and_training_goes_on_as_if_it_had_not(pack):
    _, expected = with_memory_for(10**9, pack)
    at, ended = 1, True
    while ended:
        ended, found = with_memory_for(at, pack)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
        at += 13
    assert at > 50


def ended(pack: nb.Pack, times: int, **names: Any) -> tuple[list[str], torch.Tensor]:
    """What was said, and the weights, after three epochs of 16, 16 and 10; memory ends so often on the sixth batch."""

    def loss(model, batch, plan):
        seen.append(1 < len(batch["x"]) <= 10 and isinstance(model, nn.Module) and model.training)
        if seen[-1] and 1 < sum(seen) <= 1 + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return toy.loss(model, batch, plan)

    seen: list[bool] = []
    state = nb.TrainState(toy.with_(loss=loss, **names), pack, toy.PLAN.replace(dropout=0.0), "cpu")
    told = [row.values["what"] for row in nb.train(state.task, state, pack) if row.kind == "event"]
    return told, nn.utils.parameters_to_vector(state.model.parameters())


def test_a_later_batch_that_does_not_fit_is_halved_until_it_does_and_the_weights_are_the_same(pack):
    told, weights = ended(pack, 2, model=toy.linear)
    halved = ("10 → 5", "5 → 2")
    assert told == [f"out of memory: micro batch {sizes}; effective batch and lr unchanged" for sizes in halved]
    assert torch.allclose(weights, ended(pack, 0, model=toy.linear)[1], 0, 1e-5)


def test_where_memory_never_suffices_for_two_samples_or_the_network_it_is_said_with_what_to_do(pack, tmp_path):
    with pytest.raises(TrainError, match="out of memory with two samples at a time, and BatchNorm needs two"):
        ended(pack, 10**6)
    model = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with pytest.raises(TrainError, match="out of memory before the first step"):
        nb.fit(toy.with_(model=model, PLAN=toy.PLAN), pack, toy.PLAN, tmp_path / "run", **QUIET)


CELL = """
from pathlib import Path
import gc, torch, toy, nbtools as nb
pack = toy.make_pack(Path("toy"), count=60)
def fit(run, hidden, *callbacks):
    plan = toy.PLAN.replace(epochs=1, hidden=hidden)
    nb.fit(toy, pack, plan, run, receipt=False, callbacks=callbacks)
def used():
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    print("used", sum({t.data_ptr(): t.nbytes for t in tensors}.values()) // 2**20, "MB")
fit("first", 16)
used()
"""


@pytest.mark.full
@pytest.mark.parametrize("stack", ["colab", MINE])
def test_a_cell_that_fails_amid_training_leaves_no_memory_behind_and_the_next_one_trains(tmp_path, stack):
    with started(stack, tmp_path) as kernel:
        used, errors = [kernel.run(CELL)], []
        for fails in (", lambda *_: 1 / 0", ""):
            cell = kernel.client.execute(f'fit("large", 400_000{fails})')  # 22 MB of weights
            kernel.end(cell)
            errors += [kernel.errors(cell)]
            used += [kernel.run("used()")]
    before, *after = (int(re.findall(r"used (\d+) MB", text)[0]) for text in used)
    assert after == pytest.approx([before] * 2, abs=1)
    assert errors == [["ZeroDivisionError"], []]
