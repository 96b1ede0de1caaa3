"""The facts above the curves: the state of a run, its steps, how long it takes and when it ends."""

import dataclasses
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import toy
from acting import acting, asking, interrupted

import nbtools as nb
from nbtools.fit import afterwards
from nbtools.live import Columns, View, facts
from nbtools.live.facts import About
from nbtools.live.picture import picture
from nbtools.measure import REASONS
from nbtools.train import History, Record, kept_until

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


def test_how_far_a_run_is_kept_is_a_fact_from_the_first_step_on(tmp_path):
    pack, words = toy.make_pack(tmp_path / "pack"), []

    def batch(raw, plan, draws):
        if draws is not None:
            words.append(kept_until(tmp_path / "run"))
        return toy.batch(raw, plan, draws)

    plan = toy.PLAN.replace(epochs=1)
    nb.fit(toy.with_(batch=batch), pack, plan, tmp_path / "run", keep=tmp_path / "kept", receipt=False, progress=False)
    assert words[0] == "nothing yet"
    last = kept_until(tmp_path / "run")
    assert re.fullmatch(r"step \d+", last)
    assert told(history(), dataclasses.replace(ABOUT, kept=last))["kept"] == last


def test_every_fact_keeps_its_place_from_the_first_step_on():
    """A fact of unknown length would push those after it aside, and one that comes later would too."""
    first = History()
    first.append(Record("step", 0, 1, 64, {"loss": 1.0, "batch_size": 64, "samples_per_s": 640.0}))
    early, late = ([*told(found).items()] for found in (first, history()))
    assert [name for name, _ in early] == [name for name, _ in late]
    assert [value for name, value in early if name.startswith("best")] == ["–"]
    assert [facts.room(*fact) for fact in early] == [facts.room(*fact) for fact in late]
    assert facts.room("step", "9 of 1,200") == facts.room("step", "1,100 of 1,200") >= len("1,200 of 1,200")


def test_what_follows_training_is_named_after_the_facts(tmp_path):
    pack, plan = toy.make_pack(tmp_path / "pack"), toy.PLAN.replace(eval_samples=4)
    assert afterwards(plan, pack, tmp_path, True) == "final evaluation + receipt"
    (tmp_path / "receipt.json").touch()
    assert afterwards(plan, pack, tmp_path, True) == "final evaluation"
    assert afterwards(toy.PLAN, pack, tmp_path, False) == ""


def test_what_is_left_counts_samples_at_the_pace_since_the_last_change():
    found = history()
    for step, what in ((100, "batch_size 64 → 512"), (200, "amp off → bf16")):
        found.append(Record("change", 3, step, step * 64, {"what": what}))
    assert told(found)["time left"] == "24 s"
    found.append(Record("step", 4, 201, 200 * 64, {"loss": 0.1, "samples_per_s": 1280.0, "wall": 24.05}))
    assert told(found)["time left"] == "14 s"


@pytest.mark.parametrize(("done", "batch"), [(0, 64), (1, 64), (70, 64), (100, 48), (399, 100), (12, 3200)])
def test_the_steps_of_the_whole_run_are_those_done_and_those_left_with_the_present_batch(done, batch):
    """Counted one by one: the rest of the epoch, then whole epochs."""
    found = History()
    found.append(Record("step", done // 50, done, done * 64, {"loss": 1.0, "batch_size": batch}))
    counted, left = done, [3200 - done * 64 % 3200, *[3200] * (7 - done // 50)]
    for count in left:
        while count > 0:
            counted, count = counted + 1, count - batch
    assert told(found)["step"] == f"{done} of {counted:,}"


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


def test_the_state_is_a_badge_in_a_colour_of_its_own():
    shown = {
        state: facts.html(picture(Columns(history()), ABOUT, state))
        for state in (facts.STARTING, *facts.HUES, facts.STOPPED)
    }
    assert all(f"</i>{state}</b>" in page for state, page in shown.items())
    assert len({re.search(r"background:(#\w+)", page)[1] for page in shown.values()}) == 7  # pyright: ignore[reportOptionalSubscript]
    assert "waiting for the first step" in facts.html(picture(Columns(), ABOUT, "compiling"))


def test_a_run_shows_each_state_it_is_in_and_how_it_ended(tmp_path, monkeypatch):
    """Stopped by the user, resumed to its end, and another that diverges."""
    seen: list[str] = []
    notes: list[str] = []
    draw, finish = View.draw, View.finish

    def drawn(self: View, status: str = "training") -> None:
        seen.append(status)
        draw(self, status)

    def finished(self: View, previews: Any, status: str, path: Path | None = None, note: str = "") -> None:
        seen.append(status)
        notes.append(note)
        finish(self, previews, status, path, note)

    monkeypatch.setattr(View, "draw", drawn)
    monkeypatch.setattr(View, "finish", finished)
    pack, plan = toy.make_pack(tmp_path / "pack"), toy.PLAN.replace(epochs=2)
    ctrl_c = acting({3: lambda: os.kill(os.getpid(), signal.SIGINT)})
    interrupted(lambda: nb.fit(ctrl_c, pack, plan, tmp_path / "run", receipt=False))
    assert list(dict.fromkeys(seen)) == ["training", "stopped"]
    seen.clear()
    monkeypatch.setattr("nbtools.measure.trials.SECONDS", 0.1)
    monkeypatch.setattr("nbtools.live.surface.LOOK_EVERY", 0.0)
    limited = acting({2: asking(tmp_path / "limited", "profile")})
    nb.fit(limited, pack, plan.replace(epochs=1), tmp_path / "limited", receipt=False)
    assert list(dict.fromkeys(seen)) == ["training", "measuring", "evaluating", "done"]
    seen.clear()
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False)
    assert list(dict.fromkeys(seen)) == ["training", "evaluating", "done"]
    seen.clear()
    with pytest.raises(nb.NbtoolsError, match="diverged"):
        nb.fit(toy, pack, plan.replace(lr=1e30), tmp_path / "ruined", receipt=False)
    assert seen[-1] == "diverged"
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({12: lambda: 1 / 0}), pack, plan, tmp_path / "broken", receipt=False)
    assert seen[-1] == "failed"
    written = {name: (tmp_path / name / "plot.png").exists() for name in ("run", "ruined", "broken")}
    assert all(written.values()), "also where an error ended it"
    again = {
        "run": "done: the best model is",
        "ruined": "change what the error says and run {} again",
        "broken": "mend what the",
    }
    for name, ended in (("run", "done"), ("ruined", "diverged"), ("broken", "failed")):
        assert any(note.startswith(again[name].format("this cell")) for note in notes)
        nb.watch(tmp_path / name, toy)
        assert seen[-1] == ended
        assert notes[-1].startswith(again[name].format("it"))
        assert str(tmp_path / name) in notes[-1], "where the model is"
    nb.fit(toy, pack, plan, tmp_path / "broken", receipt=False)
    assert nb.Run.open(tmp_path / "broken", toy).state == "done", "no longer failed"
