"""Memory may end at any allocation of a step: the step is done once, in smaller parts, and training goes on."""

import gc
from typing import Any

import pytest
import torch
import toy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.errors import TrainError

pytestmark = pytest.mark.usefixtures("fp16_on_cpu")

ENDS = (
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)
"""What a full GPU raises: torch's allocator, cuBLAS and cuDNN, each of the last two a plain RuntimeError."""


class Full(TorchDispatchMode):
    """Memory that ends once, at the n-th operation since `on` that allocates: one that returns a tensor which is none
    of its arguments. Views and in-place operations take nothing, fused updates among them."""

    def __init__(self, at: int):
        super().__init__()
        self.at, self.on, self.count = at, False, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        makes = any(value.alias_info is None and "Tensor" in str(value.type) for value in func._schema.returns)
        if self.on and makes:
            self.count += 1
            if self.count == self.at:
                kind, said = ENDS[self.at % len(ENDS)]
                raise kind(said)
        return func(*args, **(kwargs or {}))


class Run:
    """The first steps of a training, one by one, and the feed that they read: what batches take does not count."""

    name = "own"

    def __init__(self, task: Any, pack: nb.Pack, plan: nb.Plan):
        self.pack, self.full = pack, None
        self.state = nb.TrainState(task, pack, plan, "cpu")
        self.records = nb.train(task, self.state, pack, self)
        self.losses: list[float] = []
        self.told: list[str] = []

    def __call__(self, batches):
        for ids in batches:
            raw = {name: torch.from_numpy(array[ids]) for name, array in self.pack.arrays.items()}
            if self.full is not None:
                self.full.on = True
            yield {**raw, "id": torch.from_numpy(ids)}
            if self.full is not None:
                self.full.on = False

    def step(self) -> None:
        while (record := next(self.records)).kind != "step":
            self.told.append(record.values["what"])
        self.losses.append(record.values["loss"])

    def step_within(self, full: Full) -> None:
        self.full = full
        with full:
            self.step()
        self.full = None


PLAIN = toy.PLAN.replace(noise=0.0, ema=0.9)
CASES = {  # the plan, and the steps before the one that memory ends in
    "adamw, at the first step": (PLAIN, 0),
    "sgd, fp16, micro-batches, later": (PLAIN.replace(optimizer="sgd", amp="fp16", micro_batch_size=8, dropout=0.0), 3),
}


def parted(model: nn.Module, plan: nb.Plan) -> list[dict]:
    """Two groups of parameters, each an update of its own."""
    found = list(model.parameters())
    return [{"params": found[:2], "lr_scale": 10.0}, {"params": found[2:], "decays": False}]


@pytest.mark.parametrize("name", CASES)
def test_memory_may_end_at_any_allocation_of_a_step_and_nothing_is_applied_twice(pack, monkeypatch, name):
    """Weights, optimizer, moving average, scaler and losses are those of a run that took the smaller parts unasked.
    Later than in the first pass of a shape, dropout and BatchNorm's statistics are left out: see `step`."""
    monkeypatch.setattr(gc, "collect", lambda: 0)  # after each end: most of this test's time
    task = toy.with_(groups=parted)
    plan, before = CASES[name]
    ends = plan.micro_batch_size or plan.batch_size
    expected = {micro: outcome(undisturbed(task, pack, plan, before, micro), before) for micro in (ends, ends // 2)}
    at, halved, ended = 1, 0, True
    while ended:
        run = Run(task, pack, plan)
        for _ in range(before):
            run.step()
        full = Full(at)
        run.step_within(full)
        ended = full.count >= at
        run.step()
        micro = run.state.recovery.micro or plan.batch_size
        assert run.told == ([] if micro == ends else [SAID.format(ends, micro)]), at
        differing = [k for k, v in outcome(run, before).items() if not torch.equal(v, expected[micro][k])]
        assert not differing, f"allocation {at} of the step: {differing}"
        halved += micro < ends
        at += 1
    assert halved >= 0.8 * (at - 2) > 20, "of the allocations only those that keep buffers may end without halving"


SAID = "out of memory: micro batch {} → {}; effective batch and lr unchanged"


def undisturbed(task: Any, pack: nb.Pack, plan: nb.Plan, before: int, micro: int) -> Run:
    run = Run(task, pack, plan)
    for _ in range(before):
        run.step()
    run.state.recovery.micro = micro
    run.step()
    run.step()
    return run


def outcome(run: Run, before: int) -> dict[str, torch.Tensor]:
    """All that a run is, by name."""
    found = {name: tensor.clone() for name, tensor in run.state.tensors().items()}
    if before:
        found = {name: tensor for name, tensor in found.items() if "running" not in name and "tracked" not in name}
    facts = run.state.facts()
    scale = facts["scaler"]["scale"] if facts["scaler"] else 0.0
    samples = facts["position"]["samples"], facts["position"]["skipped"]
    return {**found, "losses": torch.tensor([*run.losses, scale, *samples])}


@pytest.mark.parametrize(("kind", "said"), ENDS, ids=["torch", "cublas", "cudnn"])
def test_a_network_for_which_memory_never_suffices_is_said_so(pack, tmp_path, kind, said):
    def model(card, plan):
        raise kind(said)

    with pytest.raises(TrainError, match="out of memory before the first step"):
        nb.fit(toy.with_(model=model, PLAN=toy.PLAN), pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)
