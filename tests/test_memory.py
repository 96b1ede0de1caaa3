"""Memory may end at any allocation of a step: the step is done once, in smaller parts, and training goes on."""

import gc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from kernels import MINE, started
from ranks import together
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.train import evaluation, join, obey

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
        if makes(func):
            self.take()
        return func(*args, **(kwargs or {}))

    def take(self) -> None:
        self.count += self.on
        if self.on and self.count == self.at:
            kind, said = ENDS[self.at % len(ENDS)]
            raise kind(said)


def makes(func: Any) -> bool:
    return any(value.alias_info is None and "Tensor" in str(value.type) for value in func._schema.returns)


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


class Small(nn.Module):
    """Without BatchNorm, whose statistics depend on the parts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, toy.CLASSES))

    def forward(self, batch):
        return self.layers(batch["x"])


SMALL = toy.with_(model=lambda card, plan: Small())
SGD = PLAIN.replace(optimizer="sgd", dropout=0.0)


@pytest.mark.parametrize("micro", [None, 8], ids=["whole", "accumulated"])
def test_a_step_in_which_memory_ended_is_the_undisturbed_one_within_1e_6(pack, monkeypatch, micro):
    monkeypatch.setattr(gc, "collect", lambda: 0)
    plan = SGD.replace(micro_batch_size=micro)
    expected = outcome(undisturbed(SMALL, pack, plan, 0, micro), 0)
    for at in range(1, 1000):
        run, full = Run(SMALL, pack, plan), Full(at)
        run.step_within(full)
        if full.count < at:
            break
        run.step()
        for name, tensor in outcome(run, 0).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=f"{name}, allocation {at}")
    assert at > 20


def test_memory_may_end_at_any_allocation_of_an_evaluation(pack, monkeypatch):
    """Of the network, loss and metrics, and of the sums; the batch of a sample is retried in halves."""
    full, real = Full(0), evaluation.score

    def watched(*given: Any) -> None:
        before, full.on = full.on, True
        try:
            real(*given)
        finally:
            full.on = before

    monkeypatch.setattr(evaluation, "score", watched)
    model = nb.TrainState(toy, pack, toy.PLAN, "cpu").model
    expected = evaluation.evaluate(toy, model, pack, toy.PLAN, "val", progress=False)
    while full.count >= full.at:
        full.at, full.count = full.at + 1, 0
        with full:
            found = evaluation.evaluate(toy, model, pack, toy.PLAN, "val", progress=False)
        assert found == pytest.approx(expected, abs=1e-6), f"allocation {full.at}"
    assert full.at > 30


class FullOfLarge(Full):
    """Of allocations of at least 64 bytes: a few numbers fit into a block that CUDA's allocator has."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if makes(func) and isinstance(made, torch.Tensor) and made.nbytes >= 64:
            self.take()
        return made


class Ends:
    """A feed of several runs, in whose first steps memory ends at these allocations in turn."""

    name = "own"

    def __init__(self, pack: nb.Pack, full: Full, at: Sequence[int]):
        self.pack, self.full, self.at, self.counts = pack, full, list(at), []

    def __call__(self, batches):
        self.full.at, self.full.count = self.at.pop(0), 0
        for k, ids in enumerate(batches):
            raw = {name: torch.from_numpy(array[ids]) for name, array in self.pack.arrays.items()}
            self.full.on = k == 0
            yield {**raw, "id": torch.from_numpy(ids)}
            self.full.on = False
            self.counts += [self.full.count] if k == 0 else []


def ended_on_rank_1(folder: Path, at: Sequence[int]) -> Any:
    """Of rank 0 what it said and the weights after two steps of each run, of rank 1 how much memory these took."""
    ranks, pack, full = join(), Pack.open(folder), FullOfLarge(0)
    assert ranks is not None
    if not ranks.first:
        feed = Ends(pack, full, at)
        with full:
            obey(SMALL, nb.TrainState(SMALL, pack, SGD, "cpu", ranks), pack, feed)
        return feed.counts
    found = []
    for _ in at:
        state, told = nb.TrainState(SMALL, pack, SGD, "cpu", ranks), []
        records = nb.train(SMALL, state, pack)
        while state.step < 2:
            told += [record.values["what"] for record in [next(records)] if record.kind == "event"]
        records.close()
        found.append((told, torch.cat([weight.detach().view(-1) for weight in state.model.parameters()])))
    ranks.end()
    return found


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)], ids=["some", "each"])
def test_memory_may_end_at_any_allocation_of_one_of_two_processes(pack, every):
    at = [10**6, *range(1, 17, every)]
    found, counts = together(2, ended_on_rank_1, pack.folder, at)
    ends = [k for k in range(1, len(at)) if counts[k] >= at[k]]
    assert len(ends) > 10 / every
    assert counts[0] < at[-1], "memory ended at all of them"
    for _, weights in found:
        torch.testing.assert_close(weights, found[0][1], rtol=0, atol=1e-6)
    assert [k for k, (told, _) in enumerate(found) if told] == ends


@pytest.mark.parametrize(("kind", "said"), ENDS, ids=["torch", "cublas", "cudnn"])
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
