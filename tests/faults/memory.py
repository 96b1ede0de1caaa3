"""Memory ends at each allocation in turn: of a step, of an evaluation, of a whole epoch with its batches, of one of two
processes. Training goes on, a step in smaller parts, and its result is that of a run in which memory sufficed."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from ranks import together
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.data import Pack
from nbtools.train import device, evaluation, join, obey

ENDS = (
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)
"""What a full GPU raises: torch's allocator, cuBLAS and cuDNN, each of the last two a plain RuntimeError."""

SAID = "out of memory: micro batch {} → {}; effective batch and lr unchanged"
HALVED, AS_IT_WAS = "in smaller parts", "as it was"
Ended = Iterator[tuple[str, str, str]]  # of each allocation: which, how training went on, what is wrong


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
    """The first steps of a training, one by one, and the feed that they read: what batches take counts in an epoch."""

    name = "own"

    def __init__(self, task: Any, pack: Pack, plan: nb.Plan):
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

    def outcome(self, statistics: bool) -> dict[str, Tensor]:
        """All that a run is, by name, with or without BatchNorm's statistics."""
        found = {name: tensor.clone() for name, tensor in self.state.tensors().items()}
        if not statistics:
            found = {name: tensor for name, tensor in found.items() if "running" not in name and "tracked" not in name}
        facts = self.state.facts()
        scale = facts["scaler"]["scale"] if facts["scaler"] else 0.0
        samples = facts["position"]["samples"], facts["position"]["skipped"]
        return {**found, "losses": torch.tensor([*self.losses, scale, *samples])}


# -- a step


def a_step(task: Any, plan: nb.Plan, before: int = 0, within: float = 0.0) -> Callable[[Pack, int], Ended]:
    """before: the steps before the one that memory ends in. within: 0.0: all is bit for bit that of a run which took
    the smaller parts unasked; else this close to one that never did. Later than in the first pass of a shape, dropout
    and BatchNorm's statistics are left out: see `TrainState.step`."""

    def swept(pack: Pack, every: int) -> Ended:
        ends = plan.micro_batch_size or plan.batch_size
        expected = {micro: undisturbed(task, pack, plan, before, micro) for micro in (ends, ends // 2)}
        for at in count(1, every):
            run, full = Run(task, pack, plan), Full(at)
            for _ in range(before):
                run.step()
            run.step_within(full)
            if full.count < at:
                return
            run.step()
            micro = run.state.recovery.micro or plan.batch_size
            wanted = expected[ends if within else micro]
            found = run.outcome(before == 0)
            trouble = [name for name, tensor in found.items() if not torch.allclose(tensor, wanted[name], 0, within)]
            if run.told != ([] if micro == ends else [SAID.format(ends, micro)]):
                trouble += run.told
            yield f"allocation {at} of the step", HALVED if micro < ends else AS_IT_WAS, ", ".join(trouble)

    return swept


def undisturbed(task: Any, pack: Pack, plan: nb.Plan, before: int, micro: int) -> dict[str, Tensor]:
    run = Run(task, pack, plan)
    for _ in range(before):
        run.step()
    run.state.recovery.micro = micro
    run.step()
    run.step()
    return run.outcome(before == 0)


def parted(model: nn.Module, plan: nb.Plan) -> list[dict]:
    """Two groups of parameters, each an update of its own."""
    found = list(model.parameters())
    return [{"params": found[:2], "lr_scale": 10.0}, {"params": found[2:], "decays": False}]


class Small(nn.Module):
    """Without BatchNorm, whose statistics depend on the parts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, toy.CLASSES))

    def forward(self, batch):
        return self.layers(batch["x"])


# -- an evaluation


def an_evaluation(pack: Pack, every: int) -> Ended:
    """Of the network, loss and metrics, and of the sums; the batch of a sample is retried in halves."""
    full, real = Full(0), evaluation.score

    def watched(*given: Any) -> None:
        before, full.on = full.on, True
        try:
            real(*given)
        finally:
            full.on = before

    model = nb.TrainState(toy, pack, toy.PLAN, "cpu").model

    def scores() -> dict[str, Any]:
        return evaluation.evaluate(toy, model, pack, toy.PLAN, "val", progress=False)

    expected = scores()
    evaluation.score = watched
    try:
        for full.at in count(1, every):
            full.count = 0
            with full:
                found = scores()
            if full.count < full.at:
                return
            same = found == pytest.approx(expected, abs=1e-6)
            yield (
                f"allocation {full.at} of the evaluation",
                "the same scores",
                "" if same else f"the scores are {found}",
            )
    finally:
        evaluation.score = real


# -- an epoch


def an_epoch(plan: nb.Plan) -> Callable[[Pack, int], Ended]:
    """From its first batch, which the pack's own feed reads, to the scores of the moving average."""

    def epoch(pack: Pack, full: Full) -> dict[str, Tensor]:
        state = nb.TrainState(COUNTED, pack, plan, "cpu")
        full.on = True
        with full:
            [scores] = [record.values for record in nb.train(COUNTED, state, pack) if record.kind == "epoch"]
        scored = {name: torch.tensor(scores[name]) for name in ("train_loss", "val_loss", "val_accuracy")}
        return {**state.tensors(), **scored}

    def swept(pack: Pack, every: int) -> Ended:
        expected = epoch(pack, Full(0))
        for at in count(1, every):
            full = Full(at)
            found = epoch(pack, full)
            if full.count < at:
                return
            trouble = [name for name, tensor in found.items() if not torch.allclose(tensor, expected[name], 0, 1e-6)]
            yield f"allocation {at} of the epoch", "the same epoch", ", ".join(trouble)

    return swept


def counted(model: nn.Module, batch: Any, plan: Any) -> tuple[Tensor, Tensor]:
    """The count on the device, as of losses that leave samples out."""
    found, _ = toy.loss(model, batch, plan)
    return found, (batch["label"] >= 0).sum()


# -- one of two processes


class FullOfLarge(Full):
    """Of allocations of at least 64 bytes: a few numbers fit into a block that CUDA's allocator has."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if makes(func) and isinstance(made, Tensor) and made.nbytes >= 64:
            self.take()
        return made


class Ends:
    """A feed of several runs, in whose first steps memory ends at these allocations in turn."""

    name = "own"

    def __init__(self, pack: Pack, full: Full, at: Sequence[int]):
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


def one_of_two_processes(pack: Pack, every: int) -> Ended:
    at = [10**6, *range(1, 17, every)]
    found, counts = together(2, ended_on_rank_1, pack.folder, at)
    assert counts[0] < 16, "memory may end later than it was tried"
    for (told, weights), where, taken in list(zip(found, at, counts, strict=True))[1:]:
        ended, same = taken >= where, torch.allclose(weights, found[0][1], 0, 1e-6)
        if not same or bool(told) != ended:
            yield f"allocation {where} of rank 1", HALVED, f"{'the same' if same else 'other'} weights; it said {told}"
        elif ended:
            yield f"allocation {where} of rank 1", HALVED, ""


PLAIN = toy.PLAN.replace(noise=0.0, ema=0.9)
SGD = PLAIN.replace(optimizer="sgd", dropout=0.0)
SMALL = toy.with_(model=lambda card, plan: Small())
COUNTED = toy.with_(model=SMALL.model, loss=counted)
EPOCH = SGD.replace(epochs=1, batch_size=64)
PARTED = toy.with_(groups=parted)
CASES: dict[str, Callable[[Pack, int], Ended]] = {
    "the first step, adamw": a_step(PARTED, PLAIN),
    "a later step, sgd, fp16, micro-batches": a_step(PARTED, SGD.replace(amp="fp16", micro_batch_size=8), before=3),
    "without BatchNorm, to 1e-6": a_step(SMALL, SGD, within=1e-6),
    "without BatchNorm, micro-batches, to 1e-6": a_step(SMALL, SGD.replace(micro_batch_size=8), within=1e-6),
    "an evaluation": an_evaluation,
    "an epoch": an_epoch(EPOCH),
    "an epoch, micro-batches": an_epoch(EPOCH.replace(micro_batch_size=32)),
    "one of two processes, to 1e-6": one_of_two_processes,
}


def swept(name: str, root: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    """(allocations by how training went on, what went wrong), of every so many."""
    pack, totals, wrong = toy.make_pack(root), Counter(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # after each end: most of the time
        patch.setattr(device, "FP16_DEVICES", ("cuda", "mps", "cpu"))
        try:
            for where, how, trouble in CASES[name](pack, every):
                totals[how] += 1
                wrong += [f"{name}, {where}: {trouble}"] if trouble else []
        except Exception:
            wrong.append(f"{name}, after {totals.total()} allocations: {traceback.format_exc()}")
    return totals, wrong
