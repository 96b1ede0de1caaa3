"""The facts above the curves: the state of a run, its steps, how long it takes and when it ends."""

import os
import signal
import time

import pytest
import toy
from acting import acting, interrupted

import nbtools as nb
from nbtools.live import Columns, facts
from nbtools.live.facts import About
from nbtools.measure import REASONS
from nbtools.train import History, Record

ABOUT = About("captcha", epochs=8, epoch_samples=3200, best="whole_accuracy")
NOW = 1_800_000_000.0  # Fri 08:00 UTC


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def history(epochs=4, batch=64, **values):
    """50 steps an epoch at 640 samples a second, an evaluation of 1 s after each."""
    found, same = History(), {"loss": 0.1, "batch_size": batch, "samples_per_s": 640.0, **values}
    for step in range(1, 50 * epochs + 1):
        row = {**same, "wall": step * 0.1 + (step - 1) // 50}
        found.append(Record("step", (step - 1) // 50, step, step * 64, row))
        if step % 50 == 0:
            ended = {**row, "epoch_time": 5.0, "eval_time": 1.0, "val_whole_accuracy": step / 400, "wall": step * 0.12}
            found.append(Record("epoch", (step - 1) // 50, step, step * 64, ended))
    return found


def told(found, about=ABOUT, status="training"):
    return dict(facts.facts(Columns(found), about, status, NOW))


def test_they_say_how_far_a_run_is_how_long_it_took_and_when_it_ends():
    """4 of 8 epochs at 640 samples a second are 20 s, and 4 evaluations of 1 s."""
    said = told(history())
    assert list(said.items())[:6] == [
        ("step", "200 of 400"),
        ("epoch", "4 of 8"),
        ("elapsed", "24 s"),
        ("time left", "24 s"),
        ("training ends", "08:00 UTC"),
        ("best whole accuracy", "0.500 in epoch 4"),
    ]
    assert told(history(), About(epochs=8, epoch_samples=3200, then="receipt"))["after training"] == "receipt"
    assert told(history(), About(epochs=80_000, epoch_samples=3200))["training ends"] == "Wed 21:19 UTC"
    assert told(History()) == {}
    assert "left" not in " ".join(told(history(), About(best="-loss"))), "of unknown length"


def test_what_is_left_counts_samples_at_the_pace_since_the_last_change():
    found = history()
    for step, what in ((100, "batch_size 64 → 512"), (200, "amp off → bf16")):
        found.append(Record("change", 3, step, step * 64, {"what": what}))
    assert told(found)["time left"] == "24 s"
    found.append(Record("step", 4, 201, 200 * 64, {"loss": 0.1, "samples_per_s": 1280.0, "wall": 24.05}))
    assert told(found)["time left"] == "14 s"


def test_a_paused_run_ends_at_no_known_time_and_one_that_is_over_has_nothing_left():
    assert told(history(), status="paused")["training ends"] == "–"
    assert told(history(), status="paused")["time left"] == "24 s"
    for status in ("done", "stopped", "diverged", "failed", "interrupted"):
        said = told(history(), status=status)
        assert (said["took"], [name for name in said if "left" in name or "ends" in name]) == ("24 s", [])


def test_what_holds_the_gpu_back_is_said_in_words_and_idle_is_no_trouble():
    reasons = f"{REASONS[0x1]}, {REASONS[0x4]}, {REASONS[0x40]}"
    facts = told(history(gpu_throttle=reasons))
    assert facts["GPU throttled by"] == "power limit, too hot (hardware)"
    assert [*facts][-1] == "GPU throttled by", "it comes and goes, and would push aside what follows it"
    assert "GPU throttled by" not in told(history(gpu_throttle=REASONS[0x1]))


def test_how_a_run_ended_is_its_state_and_its_picture_is_there_also_after_an_error(tmp_path):
    pack, plan = toy.make_pack(tmp_path / "pack"), toy.PLAN.replace(epochs=2)

    def state(name: str) -> str:
        assert (tmp_path / name / "plot.png").exists()
        return nb.Run.open(tmp_path / name, toy).state

    ctrl_c = acting({3: lambda: os.kill(os.getpid(), signal.SIGINT)})
    interrupted(lambda: nb.fit(ctrl_c, pack, plan, tmp_path / "run", receipt=False))
    assert state("run") == "stopped"
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False)
    assert state("run") == "done"
    with pytest.raises(nb.NbtoolsError, match="diverged"):
        nb.fit(toy, pack, plan.replace(lr=1e30), tmp_path / "ruined", receipt=False)
    assert state("ruined") == "diverged"
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({12: lambda: 1 / 0}), pack, plan, tmp_path / "broken", receipt=False)
    assert state("broken") == "failed"
    nb.fit(toy, pack, plan, tmp_path / "broken", receipt=False)
    assert state("broken") == "done", "no longer failed"
