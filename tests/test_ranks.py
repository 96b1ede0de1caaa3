"""Several processes train as one does: real ones, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from ranks import together
from torch import nn

from nbtools.data import Pack
from nbtools.train import (
    Plan,
    Record,
    TrainState,
    as_task,
    evaluation,
    import_task,
    join,
    obey,
    train,
)
from nbtools.train import ranks as ranked
from nbtools.train import step as stepping

QUIET = toy.PLAN.replace(dropout=0.0, noise=0.05)
TASKS = ("captcha", "hwdb", "sign", "segment")


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Pack:
    """135 samples to train on: neither 16 nor 2, 3 or 4 divides that."""
    found = toy.make_pack(tmp_path_factory.mktemp("toy"), count=189)
    assert found.splits["train"] % 2 == 1
    return found


# -- what runs in the processes


class Seen:
    """What one rank saw: rows of rank 0, and (step, ids, plan) of each training batch."""

    def __init__(self, task: Any, pack: Pack, plan: Plan, timeout: float | None = None):
        self.ranks = join(timeout)
        self.rows: list[Record] = []
        self.batches: list[tuple[int, list[int], float, int]] = []
        self.pack, self.inner = pack, as_task(task)
        self.task = SimpleNamespace(
            **{name: getattr(self.inner, name) for name in ("loss", "metrics", "model", "BEST")}
        )
        self.task.batch, self.task.groups = self.batch, self.inner.groups
        self.state = TrainState(self.task, pack, plan, ranks=self.ranks)

    def batch(self, raw, plan, draws):
        if draws is not None:
            self.batches.append((self.state.step, raw["id"].tolist(), plan.lr, plan.batch_size))
        return self.inner.batch(raw, plan, draws)

    def run(self, watch: Callable[[TrainState, Record], Any] = lambda state, record: None) -> Seen:
        """Until the end, or until watch returns True."""
        if self.ranks is not None and not self.ranks.first:
            obey(self.task, self.state, self.pack)
            return self
        for record in train(self.task, self.state, self.pack):
            self.rows.append(record)
            if watch(self.state, record):
                break
        return self

    def end(self) -> dict[str, Any]:
        if self.ranks is not None and self.ranks.first:
            self.ranks.end()
        weights = {name: p.detach().double().numpy() for name, p in self.state.model.named_parameters()}
        buffers = {name: b.double().numpy() for name, b in self.state.model.named_buffers()}
        rows = [(r.kind, r.step, dict(r.values)) for r in self.rows]
        counted = self.ranks.bytes if self.ranks is not None else 0
        rng = self.state.rng.numpy().tobytes()
        return {**vars(self), **locals(), "ranks": None, "self": None, "task": None, "inner": None, "state": None}


def cut_as(world: int) -> None:
    """One process accumulates the parts that so many would train on."""

    def parts(raw, size, micro):
        for start, end in pairwise(ranked.shares(size, world)):
            yield {name: tensor[start:end] for name, tensor in raw.items()}

    stepping.parts = parts


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def precise(task: Any) -> Any:
    """The task in float64, loss included."""
    torch.Tensor.float = torch.Tensor.double  # what a loss widens to
    wide = {name: getattr(as_task(task), name) for name in ("loss", "metrics", "groups", "BEST")}

    def batch(raw, plan, draws):
        found = as_task(task).batch(raw, plan, draws)
        return {name: t.double() if t.is_floating_point() else t for name, t in found.items()}

    return SimpleNamespace(**wide, batch=batch, model=lambda card, plan: task.model(card, plan).double())


def fifty(name: str, folder: Path, plan: Plan, double: bool, cuts: int = 0) -> dict[str, Any]:
    """50 steps; cuts: in one process, the parts of so many. Metrics: of the last row, and as one process finds them."""
    pack, task = Pack.open(folder), as_task(toy) if name == "toy" else import_task(f"nbtools.tasks.{name}", name)
    still = SimpleNamespace(**{hook: getattr(task, hook) for hook in ("loss", "metrics", "groups", "BEST", "batch")})
    still.model = lambda card, plan: without_dropout(task.model(card, plan))
    seen = Seen(precise(still) if double else still, pack, plan)
    if cuts:
        cut_as(cuts)
        seen.state.recovery.micro = 1
    found = seen.run(lambda state, record: state.step >= 50 and record.kind == "epoch").end()
    if not cuts and found["rows"]:
        metrics = evaluation.evaluate(seen.task, seen.state.evaluated, pack, plan, "val")
        found["metrics"] = {f"val_{name}": value for name, value in metrics.items()}
    return found


# -- the same mathematics


def require_same(one: dict[str, Any], several: list[dict[str, Any]], tolerance: float) -> None:
    for name, wanted in one["weights"].items():
        error = np.linalg.norm(several[0]["weights"][name] - wanted)
        assert error <= tolerance * np.linalg.norm(wanted), (name, error)
        assert all((other["weights"][name] == several[0]["weights"][name]).all() for other in several)


@pytest.mark.parametrize(("world", "double", "tolerance"), [(2, True, 1e-9), (4, False, 1e-3)])
def test_fifty_steps_are_those_of_one_process_that_accumulates_the_same_parts(pack, world, double, tolerance):
    """In float32 with SGD: a bias before BatchNorm has no gradient but rounding errors, which AdamW would scale up."""
    plan = QUIET.replace(epochs=7, optimizer="adamw" if double else "sgd")
    [one] = together(1, fifty, "toy", pack.folder, plan, double, world)
    several = together(world, fifty, "toy", pack.folder, plan, double)
    require_same(one, several, tolerance)
    losses = [[row[2]["loss"] for row in found["rows"] if "loss" in row[2]] for found in (one, several[0])]
    assert len(losses[0]) >= 50
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    last = [row for row in several[0]["rows"] if row[0] == "epoch"][-1][2]
    assert several[0]["metrics"].items() <= last.items()  # to the last bit
    assert several[0]["counted"] == several[1]["counted"] > 0


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", TASKS)
def test_fifty_steps_of_every_task_are_those_of_one_process(tmp_path, name, world):
    task: Any = import_task(f"nbtools.tasks.{name}", name)
    pack = task.pack(task.demo(tmp_path / "raw", 61, **task.SMOKE), into=tmp_path / "pack", progress=False)
    slim = {"network": "slim"} if name in ("hwdb", "segment") else {}
    plan = task.PLAN.replace(
        batch_size=13, epochs=60, micro_batch_size=None, amp="off", ema=None, eval_every=60, **slim
    )
    for double, tolerance in ((True, 1e-9), (False, 1e-3)):
        [one] = together(1, fifty, name, pack.folder, plan, double, world, timeout=300)
        several = together(world, fifty, name, pack.folder, plan, double, timeout=300)
        require_same(one, several, tolerance)
        rows = [row for row in several[0]["rows"] if row[0] == "epoch" and "val_loss" in row[2]]
        assert all(several[0]["metrics"].items() <= row[2].items() for row in rows[-1:])
