"""Interrupted anywhere and run again: the same losses and the same weights, bit for bit, as never interrupted (CPU)."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import toy
from acting import QUIET
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nbtools.errors import TrainError
from nbtools.fit import fit
from nbtools.train import History, TrainState, checkpoint, train

TIMES = ("samples_per_s", "data_wait", "memory", "epoch_time", "eval_time", "wall")  # what a clock decides
PLAN = toy.PLAN.replace(epochs=2)


def many(model, batch, plan):
    """Counts beyond what a float32 holds: of pixels, for example."""
    total, count = toy.loss(model, batch, plan)
    return 2e6 * total, torch.tensor(40_000_001 * count)


def groups(model, plan):
    first, *rest = model.parameters()
    return [{"params": [first], "lr_scale": 10.0, "decays": False}, {"params": rest}]


SGD = {"optimizer": "sgd", "schedule": "plateau", "patience": 1, "weight_decay": 1e-3, "lr": 0.05}
CASES: dict[str, tuple[Any, Any, dict[int, int]]] = {  # task, plan, step → batch size from there
    "adamw": (toy, PLAN, {}),
    "changes of batch size": (toy, PLAN, {2: 5, 6: 30, 9: 7}),
    "sgd, plateau, accumulation": (toy.with_(groups=groups), PLAN.replace(micro_batch_size=5, **SGD), {}),
    "moving average, warmup, poly": (toy, PLAN.replace(ema=0.9, warmup_epochs=1.5, schedule="poly", min_lr=1e-5), {}),
    "fp16, large counts": (toy.with_(loss=many), PLAN.replace(amp="fp16"), {}),
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=120)


@pytest.fixture(scope="module")
def ragged(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("ragged"), count=120, ragged=True)


def log(history):
    """Rows without what a clock decides, and without changes: a resumed run may begin with one."""
    rows = [row for row in history.rows if row["kind"] != "change"]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def same(a: TrainState, b: TrainState):
    ours, theirs = a.tensors(), b.tensors()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def trained(pack, task, plan, sizes, stops=()) -> tuple[TrainState, History]:
    """A run that pauses after each of these records, and goes on from a checkpoint in a new state after odd ones."""
    state, history, seen = TrainState(task, pack, plan), History(), 0
    with TemporaryDirectory() as folder:
        while not state.over:
            for record in train(task, state, pack):
                history.append(record)
                seen += 1
                if record.kind == "step" and state.step in sizes:
                    state.plan = state.plan.replace(batch_size=sizes[state.step])
                if seen in stops:
                    break
            else:
                break
            torch.manual_seed(1234)  # the user's own random numbers, or those of a new process
            if seen % 2 == 0:
                continue
            checkpoint.save(Path(folder), state, len(history))
            state = TrainState(task, pack, state.plan)
            found = checkpoint.load(Path(folder), state)
            assert not found.complaints
            history.cut(found.facts["rows"])
    return state, history


@pytest.fixture(scope="module")
def uninterrupted(pack, ragged):
    return cache(lambda name: trained(pack_for(name, pack, ragged), *CASES[name]))


def pack_for(name, pack, ragged):
    return ragged if name == "changes of batch size" else pack


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(set(range(50)))
@given(st.sets(st.integers(1, 20), min_size=1, max_size=5))
def test_interrupted_after_any_records_equals_uninterrupted(pack, ragged, uninterrupted, name, stops):
    state, history = trained(pack_for(name, pack, ragged), *CASES[name], stops)
    expected, rows = uninterrupted(name)
    assert log(history) == log(rows)
    same(state, expected)


def overflowing(pack, epoch: int, before=lambda: None) -> tuple[Any, int]:
    """The toy task, one of whose samples overflows in training in an epoch; before: called in each batch."""
    bad = int(pack.ids("train")[7])

    def batch(raw, plan, draws):
        before()
        made = toy.batch(raw, plan, draws)
        hit = (raw["id"] == bad)[:, None] & (draws is not None and draws.epoch == epoch)
        return {**made, "x": made["x"].masked_fill(hit, float("inf"))}

    return toy.with_(batch=batch), bad


@pytest.mark.parametrize("most", [16, 8], ids=["whole batches", "of which half fits in memory"])
def test_a_lost_loss_goes_back_to_the_checkpoint_and_leaves_the_bad_step_out(tmp_path, pack, most):
    task, bad = overflowing(pack, epoch=1)

    def loss(model, batch, plan):
        if len(batch["x"]) > most:
            raise torch.OutOfMemoryError("simulated")
        return toy.loss(model, batch, plan)

    task.loss = loss
    run = fit(task, pack, toy.PLAN.replace(micro_batch_size=most), tmp_path / "run", **QUIET)
    told = " | ".join(run.events)
    assert "back at step" in told
    assert "skipped: batch['x'] is not finite (sample ids" in told
    assert str(bad) in told.split("(sample ids ")[1].split(")")[0].split(", ")
    assert len(run.summary()) == 3
    assert not run.summary()["train_loss"].isna().to_numpy().any()
    last = checkpoint.newest(run.folder).tensors.items()
    assert all(torch.isfinite(tensor).all() for name, tensor in last if "running" in name), "BatchNorm saw the batch"


def test_a_loss_that_is_always_lost_stops_with_what_to_do(tmp_path, pack):
    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return total * float("nan"), count

    with pytest.raises(TrainError, match=r"more than 3 steps had to be skipped.*lower lr"):
        fit(toy.with_(loss=loss), pack, toy.PLAN, tmp_path / "run", **QUIET)
