"""Interrupted anywhere and run again: the same losses and the same weights, bit for bit, as never interrupted (CPU)."""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cases
import numpy as np
import own
import pytest
import torch
import toy
from acting import QUIET
from test_loop import head_and_body

import nbtools as nb
from nbtools.train import History, TrainState, checkpoint, train

TIMES = ("samples_per_s", "data_wait", "memory", "epoch_time", "eval_time", "wall")  # what a clock decides
PLAN = toy.PLAN.replace(epochs=2)
Changes = dict[int, dict[str, Any]]


def many(model, batch, plan):
    total, count = toy.loss(model, batch, plan)
    return 2e6 * total, torch.tensor(40_000_001 * count)


def drawing(raw, plan, draws):
    batch = toy.batch(raw, plan, draws)
    return {**batch, "x": batch["x"] + random.gauss() + np.random.normal()} if draws is not None else batch


SGD = {"optimizer": "sgd", "schedule": "plateau", "patience": 1, "weight_decay": 1e-3, "lr": 0.05}
SIZES: Changes = {step: {"batch_size": size} for step, size in ((2, 5), (6, 30), (9, 7))}
CASES: dict[str, tuple[Any, Any, Changes]] = {  # task, plan, step → what changes there
    "adamw": (toy, PLAN, {}),
    "changes of batch size": (toy, PLAN, SIZES),
    "sgd, plateau, accumulation": (toy.with_(groups=head_and_body), PLAN.replace(micro_batch_size=5, **SGD), {}),
    "moving average, warmup, poly": (toy, PLAN.replace(ema=0.9, warmup_epochs=1.5, schedule="poly", min_lr=1e-5), {}),
    "draws of NumPy and Python": (toy.with_(batch=drawing), PLAN, {}),
    "fp16, large counts": (toy.with_(loss=many), PLAN.replace(amp="fp16"), {}),
    "one's own": (own.Mine, own.PLAN, SIZES),
    **{name: (cases.CASES[name].scored, cases.augmented(name), {}) for name in (*cases.LEAN, "hwdb slim")},
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    def made(name: str) -> nb.Pack:
        folder = tmp_path_factory.mktemp("pack")
        if name in cases.CASES:
            return cases.CASES[name].pack(folder / "made", 18)
        if name == "one's own":
            return own.packed("images", folder)
        return toy.make_pack(folder, count=120, ragged=name == "changes of batch size")

    return cache(made)


def log(history: History) -> list[dict[str, Any]]:
    rows = [row for row in history.rows if row["kind"] != "change"]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def same(a: TrainState, b: TrainState) -> bool:
    ours, theirs = a.tensors(), b.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def trained(pack: nb.Pack, task: Any, plan: Any, changes: Changes, stops: Any = ()) -> tuple[TrainState, History]:
    """A run that pauses after each of these records, and goes on from a checkpoint in a new state after odd ones."""
    state, history, seen = TrainState(task, pack, plan), History(), 0
    with TemporaryDirectory() as folder:
        while not state.over:
            for record in train(task, state, pack):
                history.append(record)
                seen += 1
                if record.kind == "step" and state.step in changes:
                    state.plan = state.plan.replace(**changes[state.step])
                if seen in stops:
                    break
            else:
                break
            torch.manual_seed(1234)  # the user's own random numbers, or those of a new process
            if seen % 2 == 0:
                continue
            checkpoint.publish(Path(folder), checkpoint.snapshot(state, len(history)))
            state = TrainState(task, pack, state.plan)
            found = checkpoint.load(Path(folder), state)
            assert not found.complaints
            history.cut(found.facts["rows"])
    return state, history


@pytest.mark.usefixtures("fp16_on_cpu", "one_cache")
@pytest.mark.parametrize("name", CASES)
def test_interrupted_after_any_records_equals_uninterrupted(packs, name):
    expected, rows = trained(packs(name), *CASES[name])
    for stops in ({1, 4, 5},) if name in cases.CASES else (range(50), {3, 8, 9, 17}):
        state, history = trained(packs(name), *CASES[name], stops)
        assert log(history) == log(rows)
        assert same(state, expected)


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize(("most", "amp", "epoch"), [(16, "off", 1), (8, "off", 1), (16, "fp16", 0)])
def test_a_lost_loss_goes_back_to_the_checkpoint_and_leaves_the_bad_step_out(tmp_path, packs, most, amp, epoch):
    pack = packs("adamw")
    bad = int(pack.ids("train")[8])  # of both epochs' first batches

    def batch(raw, plan, draws):
        hit = (raw["id"] == bad)[:, None] & (draws is not None and draws.epoch == epoch)
        made = toy.batch(raw, plan, draws)
        return {**made, "x": made["x"].masked_fill(hit, float("inf"))}

    def loss(model, batch, plan):
        if len(batch["x"]) > most:
            raise torch.OutOfMemoryError("simulated")
        return toy.loss(model, batch, plan)

    task, plan = toy.with_(batch=batch, loss=loss), toy.PLAN.replace(micro_batch_size=most, amp=amp)
    run = nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    told = " | ".join(run.events)
    assert "back at step" in told
    assert "skipped: batch['x'] is not finite (sample ids" in told
    assert str(bad) in told.split("(sample ids ")[1].split(")")[0].split(", ")
    assert len(run.summary()) == 3
    assert not run.summary()["train_loss"].isna().to_numpy().any()
    last = checkpoint.newest(run.folder).tensors
    assert last["optimizer.layers.0.weight.step"] == run.history.of("epoch")[-1]["step"] - 1, "all others counted"
    assert all(torch.isfinite(x).all() for name, x in last.items() if "running" in name), "BatchNorm saw the batch"
