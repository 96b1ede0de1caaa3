"""Requests to a run while it trains, here through control.json: buttons, fields, Ctrl-C and SIGTERM post the same."""

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import toy
from acting import QUIET, STEPS, acting, asking, beside, interrupted, last_step, refused, same, texts
from archives import forked
from jupyters import LIMIT, parent, started, until

import nbtools as nb
from nbtools import __main__ as terminal
from nbtools.errors import TrainError
from nbtools.guard import WATCHED
from nbtools.launch import Remote
from nbtools.live import send
from nbtools.run import busy
from nbtools.train import CONTROL, checkpoint

pytestmark = pytest.mark.usefixtures("at_once")

PLAN = toy.PLAN.replace(epochs=4)


@pytest.fixture
def saved(monkeypatch):
    steps, publish, place = list[int](), checkpoint.publish, checkpoint.place
    monkeypatch.setattr(checkpoint, "publish", lambda at, new: (steps.append(place(new.name)[1]), publish(at, new)))
    return steps


def history_of(folder: Path) -> str:
    path = folder / "history.csv"
    return path.read_text() if path.exists() else ""


def test_pause_stops_the_steps_saves_and_evaluates_and_resume_goes_on_bit_equal(pack, folder, untouched, saved):
    """A paused run is saved at once, since its machine may be taken; looking at it writes no more, nor takes a step."""
    counts, task = [], acting({3: asking(folder, "pause")})

    def user():
        until(lambda: last_step(folder) == 3, "the pause")
        remote = Remote(nb.Run.open(folder, toy), show=False)
        until(lambda: remote.read() or remote.requests.paused, "the pause, as it is seen elsewhere")
        send(folder, ["evaluate", "undo", "best"])
        for answer in ("evaluation,", "no best checkpoint yet", "no change to undo"):
            until(lambda answer=answer: answer in history_of(folder), answer)
        time.sleep(0.2)
        counts.append(len(task.seen))
        send(folder, ["resume"])
        until(lambda: remote.read() or not remote.requests.paused, "its end there")

    with beside(folder, user):
        run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert counts == [3]
    assert saved.count(3) == 1, "one checkpoint a batch of the evaluation"
    assert same(run, untouched)


@pytest.mark.parametrize("ctrl_c", [False, True])
def test_stop_and_ctrl_c_leave_a_usable_run_that_goes_on_bit_equal(pack, folder, untouched, ctrl_c):
    task = acting({12: lambda: os.kill(os.getpid(), signal.SIGINT) if ctrl_c else send(folder, ["stop"], {"lr": 0.02})})
    once = partial(nb.fit, task, pack, PLAN, folder, **QUIET)
    stopped = interrupted(once) if ctrl_c else once()
    assert len(task.seen) == last_step(folder) == 12
    left = "" if ctrl_c else "; not applied: lr 0.01 → 0.02"
    assert stopped.events[-1] == f"stopped by you after step 12; run it again to continue{left}"
    assert set(nb.evaluate(stopped, pack)) == {"loss", "accuracy"}
    assert same(nb.fit(toy, pack, PLAN, folder, **QUIET), untouched)


def test_evaluate_save_and_what_limits_it_are_answered_and_change_nothing(pack, folder, untouched, saved, monkeypatch):
    monkeypatch.setattr("nbtools.measure.profile.SECONDS", 0.1)
    run: Any = nb.fit(acting({17: asking(folder, "evaluate", "save", "profile")}), pack, PLAN, folder, **QUIET)
    (row,) = run.history.of("evaluation")
    assert row["step"] == 17
    assert 17 in saved
    assert {"saved at step 17", run.verdict.sentence} <= {*run.events}
    assert same(run, untouched)


def test_settings_changed_in_an_epoch_act_at_the_next_step_and_every_sample_still_comes_once(pack, folder):
    actions = {
        4: asking(folder, batch_size=7, lr="2e-3"),
        9: asking(folder, amp="bf16", clip_norm=None, weight_decay=0.1),
        12: asking(folder, batch_size=32, micro_batch_size=16),
    }
    task = acting(actions)
    run = nb.fit(task, pack, PLAN.replace(epochs=2, lr_rule="linear"), folder, **QUIET)
    by_step = {step: plan for step, plan, _ in task.seen}
    assert (by_step[4].batch_size, by_step[5].batch_size, by_step[5].lr) == (16, 7, 2e-3)
    assert (by_step[9].amp, by_step[10].amp, by_step[10].clip_norm) == ("off", "bf16", None)
    train = sorted(pack.ids("train").tolist())
    ids = [i for _, _, batch in task.seen for i in batch]
    assert sorted(ids[: len(train)]) == sorted(ids[len(train) :]) == train
    assert texts(run, "change")[0] == "batch_size 16 → 7, lr 0.01 → 0.002"
    opened = nb.Run.open(folder, toy).plan
    assert opened.weight_decay == 0.1, "plan.json keeps what was changed"
    assert opened.lr == pytest.approx(2e-3 * 32 / 7), "a batch size without an lr moves lr by the plan's rule"


REFUSED = (
    ('{"lrr": 1}', "did you mean lr"),
    ('{"do": "explode"}', "pause, resume, stop, evaluate, save, profile, best, undo, got 'explode'"),
    ('{"weight_decay": 1}', 'weight_decay 1 is large; none is advised; to apply it anyway add "force": true'),
    ('{"lr": 1000}', 'lr 1000 is 100,000× the advised 0.01; to apply it anyway add "force": true'),
    (
        '{"lr": 0.02, "clip_norm": null, "weight_decay": 0.1, "patience": 3}',
        "4 settings change at once: lr 0.01 → 0.02, weight_decay 0 → 0.1, clip_norm 1 → none, patience 5 → 3; to",
    ),
)


def test_what_cannot_be_is_explained_and_changes_nothing(pack, folder, untouched):
    actions = {2 * i + 1: partial((folder / CONTROL).write_text, text) for i, (text, _) in enumerate(REFUSED)}
    run = nb.fit(acting(actions), pack, PLAN, folder, **QUIET)
    assert len(run.events) == len(REFUSED), "each once"
    for event, (_, answer) in zip(run.events, REFUSED, strict=True):
        assert event.startswith("refused: ")
        assert answer in event
    assert texts(run) == run.events, "who asked from elsewhere reads the answers"
    assert not os.path.lexists(folder / CONTROL)
    assert same(run, untouched)


def test_requests_made_before_the_run_looks_are_all_taken_and_a_forced_one_forces_nobody_elses(pack, folder):
    steps = [
        (asking(folder, "save", lr=2e-3), asking(folder, "evaluate", clip_norm=2.0)),
        (asking(folder, lr=1000.0), asking(folder, weight_decay=0.1, force=True)),
        (lambda: (folder / CONTROL).write_text('{"do": ["stop"]}'),),
    ]
    actions = {3 + n: lambda each=each: [act() for act in each] for n, each in enumerate(steps)}
    run = nb.fit(acting(actions), pack, PLAN, folder, **QUIET)
    assert texts(run, "change") == ["lr 0.01 → 0.002, clip_norm 1 → 2"]
    assert [row["step"] for row in run.history.of("evaluation")] == [3]
    assert [text.partition(":")[0] for text in texts(run)][:2] == ["saved at step 3", "refused"]
    refused(TrainError, "name a run's folder", send, folder / "gone", ["stop"])
    assert not (folder / "gone").exists()


def test_a_request_is_never_of_an_older_run(pack, folder, tmp_path):
    folder.mkdir()
    send(folder, ["stop"])
    run = nb.fit(toy, pack, PLAN.replace(epochs=1), folder, tmp_path / "kept", **QUIET)
    assert len(run.history.of("epoch")) == 1
    assert not (tmp_path / "kept" / CONTROL).exists()


@pytest.fixture
def elsewhere(pack, folder):
    """The folder of a run that another process trains, in steps that wait, as for a GPU."""
    task = toy.with_(batch=lambda *given: time.sleep(0.005) or toy.batch(*given))
    plan = PLAN.replace(epochs=100000, eval_every=1000)
    process = forked(partial(nb.fit, **QUIET), task, pack, plan, folder)
    try:
        until((folder / "run.json").exists, "the start of the run")
        yield folder
        process.join(LIMIT)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_watch_shows_a_run_of_another_process_that_the_terminal_controls(elsewhere, capsys):
    def ask(*words: str, answer: str = "", code: int = 0):
        assert terminal.main(["control", str(elsewhere), *words]) == code
        until(lambda: answer in history_of(elsewhere), answer)

    def more(steps: int):
        since = history_of(elsewhere).count("step,")
        until(lambda: history_of(elsewhere).count("step,") > since + steps, "steps")

    def user():
        ask("lr=0.005", "save", answer="lr 0.01 → 0.005")
        more(WATCHED + 1)  # while a change is watched, a later one's rollback undoes it too
        ask("batch_size=100000", answer="refused: ")
        ask("lr=1000", code=1)
        ask("weight_decay=0.1", answer="weight_decay 0 → 0.1")
        ask("undo", answer="weight_decay 0 → 0.1 undone; back at step")
        ask("stopp", code=1)
        ask("stop")

    with beside(elsewhere, lambda: (more(1), os.kill(os.getpid(), signal.SIGINT))):
        nb.watch(elsewhere)
    assert busy(elsewhere), "an interrupt ends the watching, not the run"
    assert "is still training" in capsys.readouterr().err
    with beside(elsewhere, user):
        run = nb.watch(elsewhere)
    assert not busy(elsewhere)
    assert (run.plan.lr, run.plan.weight_decay) == (0.005, 0)
    text = capsys.readouterr().err
    for message in ("lr 0.01 → 0.005", "larger than the train split", "saved at step"):
        assert message in text
    assert "pause, resume, stop, evaluate, save, profile, best, undo, got 'stopp'" in text
    assert [row["asked"] for row in run.history.of("event") if "asked" in row] == ["save", "undo", "stop"]
    assert terminal.main(["control", str(elsewhere), "stop"]) == 1
    assert "no process on this machine is training it" in capsys.readouterr().err


def test_epochs_below_the_present_one_end_the_run_after_it_and_count_what_was_done(pack, folder):
    step = 2 * STEPS + 3
    actions = {step: asking(folder, epochs=1), step + 2: asking(folder, "stop")}
    assert texts(nb.fit(acting(actions), pack, PLAN, folder, **QUIET), "change") == ["epochs 4 → 1"]
    run = nb.fit(toy, pack, None, nb.Run.open(folder, toy), **QUIET)
    assert len(run.history.of("epoch")) == len(run.summary()) == 3
    assert (last_step(folder), "3 of 3 epochs" in repr(run), run.plan.epochs) == (3 * STEPS, True, 1)


TRAIN = """
import time, nbtools as nb, toy
from pathlib import Path
pack = toy.make_pack(Path("toy"))
def batch(raw, plan, draws):
    if draws is not None:
        with open("steps", "a") as file:
            file.write("step\\n")
        while Path("steps").stat().st_size >= 25 and not Path("go").exists():
            time.sleep(0.01)
    return toy.batch(raw, plan, draws)
held = toy.with_(batch=batch)
print("ready", flush=True)
run = nb.fit(held, pack, toy.PLAN.replace(epochs=4, feed='workers', workers=1), "run", receipt=False)
"""
"""A cell whose fifth step lasts until a file `go` is there; every step is noted in a file `steps`."""


@pytest.mark.parametrize("stack", ["colab", pytest.param("newest", marks=pytest.mark.full)])
def test_a_kernel_shut_down_finishes_the_step_saves_and_ends(stack, tmp_path, untouched):
    """By what jupyter_client's shutdown_kernel sends, SIGKILL aside: the step under way outlasts all of it."""
    steps = tmp_path / "steps"
    steps.touch()
    with started(stack, tmp_path) as kernel:
        cell = kernel.client.execute(TRAIN)
        kernel.printed("ready")
        until(lambda: steps.read_text().count("step\n") == 5, "the fifth step")
        kernel.manager.interrupt_kernel()
        kernel.client.shutdown()
        kernel.client.get_control_msg(timeout=LIMIT)
        kernel.manager.signal_kernel(signal.SIGTERM)
        (tmp_path / "go").touch()
        provisioner: Any = kernel.manager.provisioner
        assert provisioner.process.wait(LIMIT) in (0, -signal.SIGTERM)
        with suppress(Empty):
            while True:
                kernel.said.append(kernel.client.get_iopub_msg(timeout=1))
    assert last_step(tmp_path / "run") == steps.read_text().count("step\n") == 5
    shown = [m["content"].get("data", {}).get("text/plain", "") for m in kernel.said if parent(m) == cell]
    assert "after step 5; run it again to continue" in "".join(shown)
    assert [m["content"]["ename"] for m in kernel.said if m["msg_type"] == "error"] == []
    assert "nbtools" not in (tmp_path / "stderr").read_text()  # ipykernel 7 has complaints of its own
    run = nb.fit(toy, nb.Pack.open(tmp_path / "toy" / "pack"), PLAN, tmp_path / "run", **QUIET)
    assert same(run, untouched)
    assert len(run.history.of("epoch")) == PLAN.epochs


def test_sigterm_is_a_request_to_stop_and_comes_through_when_the_run_is_saved(pack, tmp_path, untouched, request):
    saved: list[bool] = []  # at each SIGTERM that comes through to whoever handles it in this process
    before = signal.signal(signal.SIGTERM, lambda *_: saved.append(last_step(tmp_path / "run") > 0))
    request.addfinalizer(partial(signal.signal, signal.SIGTERM, before))
    task = acting({5: partial(os.kill, os.getpid(), signal.SIGTERM)})
    run = nb.fit(task, pack, PLAN, tmp_path / "run", keep=tmp_path / "kept", **QUIET)
    assert run.events[-1] == "stopped by SIGTERM after step 5; run it again to continue"
    assert last_step(tmp_path / "run") == last_step(nb.Run.open(tmp_path / "kept", task).folder) == 5
    assert saved == [True]
    assert same(nb.fit(toy, pack, PLAN, tmp_path / "run", **QUIET), untouched)
    assert saved == [True]
