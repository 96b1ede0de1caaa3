"""Interrupted anywhere and run again: the same losses and the same weights, bit for bit, as never interrupted (CPU)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from nbtools.errors import CheckpointError, TrainError
from nbtools.fit import fit
from nbtools.live import send, surface
from nbtools.run import Run
from nbtools.train import History, TrainState, checkpoint, train

TIMES = ("samples_per_s", "data_wait", "memory", "epoch_time", "eval_time")  # what a clock decides
PLANS = {
    "adamw": toy.PLAN,
    "sgd, plateau, accumulation": toy.PLAN.replace(
        optimizer="sgd", schedule="plateau", patience=1, micro_batch_size=5, weight_decay=1e-3, lr=0.05
    ),
    "moving average, warmup, poly": toy.PLAN.replace(ema=0.9, warmup_epochs=1.5, schedule="poly", min_lr=1e-5),
    "fp16": toy.PLAN.replace(amp="fp16"),
}


@pytest.fixture(scope="module", params=["fixed", "ragged"])
def pack(request, tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=120, ragged=request.param == "ragged")


def log(rows):
    """Rows without what a clock decides."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def run_to(state, pack, history, stop=None):
    """Train until `stop` records have come; True at the end of the run."""
    for count, record in enumerate(train(toy, state, pack), 1):
        history.append(record)
        if count == stop:
            return False
    return True


def saved_and_loaded(folder, state, pack, plan, history):
    checkpoint.save(folder, state, len(history))
    torch.manual_seed(1234)  # a new process has other random numbers
    again = TrainState(toy, pack, plan)
    found = checkpoint.load(folder, again)
    assert not found.complaints
    history.cut(found.facts["rows"])
    return again


def same(a, b):
    ours, theirs = a.tensors(), b.tensors()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("name", PLANS)
def test_resumed_after_any_record_equals_uninterrupted(tmp_path, pack, name):
    plan = PLANS[name].replace(epochs=2)
    whole, rows = TrainState(toy, pack, plan), History()
    run_to(whole, pack, rows)
    records = sum(1 for _ in train(toy, TrainState(toy, pack, plan), pack))
    for stop in range(1, records + 1):
        state, history = TrainState(toy, pack, plan), History()
        run_to(state, pack, history, stop)
        state = saved_and_loaded(tmp_path / f"{name}-{stop}", state, pack, plan, history)
        assert run_to(state, pack, history)
        assert log(history.rows) == log(rows.rows), f"interrupted after record {stop} of {records}"
        same(state, whole)


def test_a_state_saved_before_0_2_resumes_amid_an_epoch(pack):
    """Its facts stood side by side, and the sum of the loss was a tensor."""
    plan = toy.PLAN.replace(epochs=2)
    whole, state, again = (TrainState(toy, pack, plan) for _ in range(3))
    run_to(whole, pack, History())
    run_to(state, pack, History(), 5)
    facts = json.loads(json.dumps(state.facts()))
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    tensors["loss_sum"] = torch.tensor(facts["sums"].pop("loss"), dtype=torch.float64)
    best = facts.pop("best")
    flat = {**facts.pop("position"), **facts.pop("sums"), **facts.pop("recovery"), **facts, **best}
    again.load(tensors, {**flat, "best": flat.pop("value")})
    run_to(again, pack, History())
    same(again, whole)


def test_twice_within_one_epoch_and_at_its_end_equals_uninterrupted(tmp_path, pack):
    plan = toy.PLAN
    whole, rows = TrainState(toy, pack, plan), History()
    run_to(whole, pack, rows)
    state, history = TrainState(toy, pack, plan), History()
    for n, stop in enumerate((2, 1, 1, 3, 1, 5, 2)):  # records since the last interruption
        run_to(state, pack, history, stop)
        state = saved_and_loaded(tmp_path / str(n), state, pack, plan, history)
    assert run_to(state, pack, history)
    assert log(history.rows) == log(rows.rows)
    same(state, whole)


def test_resumed_after_changes_of_batch_size_equals_the_same_changes_uninterrupted(tmp_path, pack):
    sizes = {2: 5, 6: 30, 9: 7}

    def run(interruptions):
        state, history = TrainState(toy, pack, toy.PLAN), History()
        ended = False
        while not ended:
            stop = interruptions.pop(0) if interruptions else None
            for count, record in enumerate(train(toy, state, pack), 1):
                history.append(record)
                if record.kind == "step" and state.step in sizes and state.plan.batch_size != sizes[state.step]:
                    state.plan = state.plan.replace(batch_size=sizes[state.step])
                if count == stop:
                    break
            else:
                ended = True
            if not ended:
                state = saved_and_loaded(tmp_path / str(time.monotonic_ns()), state, pack, state.plan, history)
        return state, history

    whole, rows = run([])
    for stops in ([1, 3, 2, 4], [5, 5], [8, 1, 1]):
        state, history = run(list(stops))
        steps = [row for row in log(history.rows) if row["kind"] != "change"]
        assert steps == [row for row in log(rows.rows) if row["kind"] != "change"]
        same(state, whole)


def test_counts_beyond_what_a_float32_holds_resume_exactly(tmp_path, pack):
    """Pixels, for example: 40 million in a few batches."""

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return total, torch.tensor(40_000_001 * count)

    task: Any = types.SimpleNamespace(**{**vars(toy), "loss": loss})
    found = []
    for stop in (None, 3):
        state, history = TrainState(task, pack, toy.PLAN.replace(epochs=1)), History()
        for count, record in enumerate(train(task, state, pack), 1):
            history.append(record)
            if count == stop:
                state = saved_and_loaded(tmp_path, state, pack, state.plan, history)
                break
        found.append([r.values for r in train(task, state, pack) if r.kind == "epoch"] or history.of("epoch"))
    assert found[0][0]["train_loss"] == found[1][0]["train_loss"]


def test_pausing_the_generator_and_using_random_numbers_between_changes_nothing(pack):
    whole = TrainState(toy, pack, toy.PLAN)
    run_to(whole, pack, History())
    state = TrainState(toy, pack, toy.PLAN)
    while not run_to(state, pack, History(), 4):
        torch.rand(100)
    assert state.step == whole.step > 0
    same(state, whole)


def test_an_interrupt_finishes_the_step_saves_and_running_again_goes_on(tmp_path, pack):
    whole = fit(toy, pack, toy.PLAN, tmp_path / "whole", receipt=False, progress=False)
    calls = []

    def batch(raw, plan, draws):
        calls.append(1)
        if len(calls) in (4, 9, 10, 17):
            os.kill(os.getpid(), signal.SIGINT)
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    handler = signal.getsignal(signal.SIGINT)
    for _ in range(8):
        run = fit(task, pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)
        assert signal.getsignal(signal.SIGINT) is handler
        if len(run.history.of("epoch")) == toy.PLAN.epochs:
            break
        assert any("stopped by you" in told for told in run.events)
    assert log(run.history.rows) == log(whole.history.rows)
    for name, value in run.model().state_dict().items():
        assert torch.equal(value, whole.model().state_dict()[name])


def test_a_second_interrupt_stops_at_once(tmp_path, pack):
    def batch(raw, plan, draws):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    with pytest.raises(KeyboardInterrupt):
        fit(task, pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)
    run = fit(toy, pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)
    assert len(run.history.of("epoch")) == toy.PLAN.epochs


KILLED = """
import sys; sys.path.insert(0, {tests!r})
import toy
from nbtools.fit import fit
from nbtools.data import Pack
sys.modules["nbtools.folder"].SAVE_EVERY = 0.0
print("ready", flush=True)
fit(toy, Pack.open({pack!r}), toy.PLAN.replace(epochs=40), {run!r}, receipt=False, progress=False)
"""


def test_killed_at_any_moment_and_run_again_equals_uninterrupted(tmp_path):
    """SIGKILL in the middle of steps and of writing checkpoints, which here follow every step."""
    pack = toy.make_pack(tmp_path, count=120)
    code = KILLED.format(tests=str(Path(toy.__file__).parent), pack=str(pack.folder), run=str(tmp_path / "run"))
    for delay in (0.05, 0.21, 0.34):
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(toy.__file__).parents[1]
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        threading.Event().wait(delay)
        child.kill()
        child.wait()
        child.stdout.close()
    plan = toy.PLAN.replace(epochs=40)
    again = fit(toy, pack, plan, tmp_path / "run", receipt=False, progress=False)
    whole = fit(toy, pack, plan, tmp_path / "whole", receipt=False, progress=False)
    assert log(again.history.rows) == log(whole.history.rows)
    for name, value in again.model().state_dict().items():
        assert torch.equal(value, whole.model().state_dict()[name])


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_it_taken(tmp_path, pack):
    whole = fit(toy, pack, toy.PLAN, tmp_path / "whole", receipt=False, progress=False)
    folder = tmp_path / "run"
    fit(toy, pack, toy.PLAN, folder, receipt=False, progress=False)
    newest = checkpoint.names(folder)[0]
    data = (folder / f"{newest}.safetensors").read_bytes()
    for damage in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1]), b""):
        (folder / f"{newest}.safetensors").write_bytes(damage)
        run = fit(toy, pack, toy.PLAN, folder, receipt=False, progress=False)
        assert any("it is damaged; the one before it is taken" in told for told in run.events)
        assert log(run.history.rows) == log(whole.history.rows)


def test_a_run_does_not_go_on_with_another_network_or_other_data(tmp_path, pack):
    folder = tmp_path / "run"
    fit(toy, pack, toy.PLAN.replace(epochs=1), folder, receipt=False, progress=False)
    with pytest.raises(TrainError, match=r"Plan.hidden cannot change in a started run, got 16 → 17; keep the value"):
        fit(toy, pack, toy.PLAN.replace(hidden=17), folder, receipt=False, progress=False)
    other = toy.make_pack(tmp_path / "other", count=80)
    with pytest.raises(CheckpointError, match=r"trained on another pack.*name another run folder"):
        fit(toy, other, toy.PLAN.replace(epochs=1), folder, receipt=False, progress=False)
    longer = fit(toy, pack, toy.PLAN.replace(epochs=2, lr=0.005), folder, receipt=False, progress=False)
    assert [row["what"] for row in longer.history.of("change")] == ["epochs 1 → 2, lr 0.01 → 0.005"]
    assert len(longer.summary()) == 2


def test_a_lost_local_folder_comes_back_from_where_it_is_kept(tmp_path, pack):
    whole = fit(toy, pack, toy.PLAN, tmp_path / "whole", receipt=False, progress=False)
    calls = []

    def batch(raw, plan, draws):
        calls.append(1)
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    fit(task, pack, toy.PLAN, tmp_path / "vm1" / "run", keep=tmp_path / "drive", receipt=False, progress=False)
    again = fit(toy, pack, toy.PLAN, tmp_path / "vm2" / "run", keep=tmp_path / "drive", receipt=False, progress=False)
    assert log(again.history.rows) == log(whole.history.rows)
    assert Run.open(tmp_path / "drive", toy).best == again.best
    assert not list((tmp_path / "drive").glob("*.part"))


def test_trouble_on_drive_is_told_and_training_ends_well(tmp_path, pack):
    (tmp_path / "drive").write_text("a file where the folder should be")
    run = fit(
        toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", keep=tmp_path / "drive", receipt=False, progress=False
    )
    assert any("not kept" in told for told in run.events)
    assert len(run.summary()) == 1


def test_a_lost_loss_goes_back_to_the_checkpoint_and_leaves_the_bad_step_out(tmp_path, pack):
    """One sample's values overflow the loss; the run names it, leaves its step out, and goes on."""
    bad = int(pack.ids("train")[7])

    def batch(raw, plan, draws):
        made = toy.batch(raw, plan, draws)
        hit = (raw["id"] == bad)[:, None] & (draws is not None and draws.epoch == 1)
        return {**made, "x": made["x"].masked_fill(hit, float("inf"))}

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    run = fit(task, pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)
    told = " | ".join(run.events)
    assert "back to step" in told
    assert "left out: batch['x'] is not finite (sample ids" in told
    named = told.split("(sample ids ")[1].split(")")[0]
    assert str(bad) in named.split(", ")
    assert len(run.summary()) == 3
    assert not run.summary()["train_loss"].isna().to_numpy().any()


def test_a_knob_that_was_turned_before_the_loss_was_lost_stays_turned_and_marked(tmp_path, pack, monkeypatch):
    """The checkpoint to go back to was saved under the old plan, and its history ends before the mark."""
    monkeypatch.setattr(surface, "LOOK_EVERY", 0.0)
    folder, bad, seen = tmp_path / "run", int(pack.ids("train")[7]), []

    def batch(raw, plan, draws):
        made = toy.batch(raw, plan, draws)
        seen.append(raw)
        if len(seen) == 2:
            send(folder, [], {"micro_batch_size": 8})
        hit = (raw["id"] == bad)[:, None] & (draws is not None)
        return {**made, "x": made["x"].masked_fill(hit, float("inf"))}

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    run = fit(task, pack, toy.PLAN.replace(epochs=1), folder, receipt=False, progress=False)
    assert [row["what"] for row in run.history.of("change")] == ["micro_batch_size none → 8"]
    assert checkpoint.newest(folder).facts["state"]["recovery"]["micro"] == 8
    assert "back to step 0" in " ".join(run.events)


def test_a_loss_that_is_always_lost_stops_with_what_to_do(tmp_path, pack):
    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return total * float("nan"), count

    task: Any = types.SimpleNamespace(**{**vars(toy), "loss": loss})
    with pytest.raises(TrainError, match=r"four steps had to be left out.*lower Plan.lr"):
        fit(task, pack, toy.PLAN, tmp_path / "run", receipt=False, progress=False)
