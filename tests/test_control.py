"""A person acts on a run while it trains, here through control.json; buttons and Ctrl-C set the same wishes."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import toy

import nbtools as nb
from nbtools import __main__ as terminal
from nbtools.data import Pack
from nbtools.errors import CheckpointError, TrainError
from nbtools.folder import busy, lock
from nbtools.live import View, Wishes, control, surface
from nbtools.live.control import FILE, receive, send
from nbtools.live.plot import live
from nbtools.measure import Sampler
from nbtools.measure.machine import Reading
from nbtools.run import Run
from nbtools.train import History, Record, checkpoint

watching = sys.modules["nbtools.watch"]  # nbtools.watch is the function

QUIET: dict[str, Any] = {"receipt": False, "progress": False}
PLAN = toy.PLAN.replace(epochs=4)
LIMIT = 60.0  # seconds that anything may take on a busy machine


class Acting:
    """The toy task; what is to happen at a training step, counted from 1, happens while it computes. Keeps what it
    trained on: (step, plan, ids); acted: the steps where it happened."""

    PLAN: Any
    BASELINE: Any
    model: Any
    loss: Any
    metrics: Any
    preview: Any

    def __init__(self, **actions: Callable[[], Any]):
        self.actions = {int(name.removeprefix("at")): act for name, act in actions.items()}
        self.seen: list[tuple[int, Any, list[int]]] = []
        self.acted: list[int] = []
        for name in ("PLAN", "BASELINE", "BEST", "model", "loss", "metrics", "decode", "preview"):
            setattr(self, name, getattr(toy, name))

    def batch(self, raw, plan, draws):
        if draws is not None:
            self.seen.append((len(self.seen) + 1, plan, raw["id"].tolist()))
            if act := self.actions.pop(len(self.seen), None):
                act()
                self.acted.append(len(self.seen))
        return toy.batch(raw, plan, draws)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, pack):
    return nb.fit(toy, pack, PLAN, tmp_path_factory.mktemp("runs") / "untouched", **QUIET)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Look for control.json after each step, so that a test knows when it is read."""
    monkeypatch.setattr(surface, "LOOK_EVERY", 0.0)


@pytest.fixture
def saved(monkeypatch):
    """The steps of which checkpoints were written."""
    steps, real = [], checkpoint.save

    def save(into, state, rows, best=False):
        steps.append(state.step)
        real(into, state, rows, best)

    monkeypatch.setattr(checkpoint, "save", save)
    return steps


def weights(run: Run):
    return checkpoint.newest(run.folder)[0]


def same_weights(one: Run, other: Run) -> bool:
    ours, theirs = weights(one), weights(other)
    return set(ours) == set(theirs) and all((ours[n] == theirs[n]).all() for n in ours)


def losses(run: Run) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run.history.of("step")]


def history_of(folder: Path) -> str:
    path = folder / "history.csv"
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@contextmanager
def beside(folder: Path, person: Callable[[], None]):
    """What a person does while the run trains here; should they fail, the run is stopped and the test fails."""
    troubles: list[BaseException] = []

    def act():
        try:
            person()
        except BaseException as trouble:
            troubles.append(trouble)
            send(folder, ["stop"])

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()
    assert not troubles, troubles


def test_what_was_told_of_a_watched_run_is_not_told_again_where_a_metric_is_no_number(tmp_path):
    history, told = History(tmp_path / "history.csv"), []
    for kind, values in (("event", {"what": "one"}), ("epoch", {"val_miou": math.nan}), ("event", {"what": "two"})):
        history.append(Record(kind, 0, 1, 1, values))
    view: Any = types.SimpleNamespace(history=History(tmp_path / "history.csv"), advance=told.append, panel=None)
    run: Any = types.SimpleNamespace(folder=tmp_path, plan=toy.PLAN)
    known = watching.follow(view, 0, run, watching.Asked(tmp_path, toy.PLAN))
    history.append(Record("event", 0, 2, 2, {"what": "three", "asked": "save"}))  # a new column: all is written anew
    watching.follow(view, known, run, watching.Asked(tmp_path, toy.PLAN))
    assert [record.values.get("what") for record in told] == ["one", None, "two", "three"]


def test_pause_stops_the_steps_and_resume_goes_on_bit_equal(pack, tmp_path, untouched):
    folder, counts = tmp_path / "run", []
    task = Acting(at17=lambda: send(folder, ["pause"]))

    def person():
        wait_for(lambda: task.acted == [17] and not (folder / FILE).exists())
        counts.append(len(task.seen))
        time.sleep(0.3)
        counts.append(len(task.seen))
        send(folder, ["resume"])

    with beside(folder, person):
        run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert counts == [17, 17]
    assert losses(run) == losses(untouched)
    assert same_weights(run, untouched)


def test_a_paused_run_is_saved_at_once_since_its_machine_may_be_taken(pack, tmp_path):
    folder, found = tmp_path / "run", []
    task = Acting(at6=lambda: send(folder, ["pause"]))

    def person():
        wait_for(lambda: checkpoint.place(checkpoint.read_index(folder).get("last", "0-0")) == (0, 6))
        found.append(len(task.seen))
        send(folder, ["stop"])

    with beside(folder, person):
        nb.fit(task, pack, PLAN, folder, **QUIET)
    assert found == [6], "a step was made after the pause"


def test_stop_leaves_a_usable_run_that_goes_on_bit_equal(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    stopped = nb.fit(Acting(at12=lambda: send(folder, ["stop"])), pack, PLAN, folder, **QUIET)
    assert stopped.events[-1] == "stopped by you after step 12; run it again to continue"
    assert set(nb.evaluate(stopped, pack)) == {"loss", "accuracy"}
    gone_on = nb.fit(toy, pack, PLAN, folder, **QUIET)
    assert losses(gone_on) == losses(untouched)
    assert same_weights(gone_on, untouched)


def test_ctrl_c_is_a_wish_to_stop(pack, tmp_path):
    task = Acting(at5=lambda: os.kill(os.getpid(), signal.SIGINT))
    run = nb.fit(task, pack, PLAN, tmp_path / "run", **QUIET)
    assert len(task.seen) == 5
    assert checkpoint.place(checkpoint.names(run.folder)[0]) == (0, 5)


def test_save_now_writes_a_checkpoint_of_that_step(pack, tmp_path, saved):
    folder = tmp_path / "run"
    run = nb.fit(Acting(at7=lambda: send(folder, ["save"])), pack, PLAN, folder, **QUIET)
    assert 7 in saved
    assert "saved at step 7" in run.events


def test_evaluate_now_says_what_evaluation_says_and_changes_nothing(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    run = nb.fit(Acting(at17=lambda: send(folder, ["evaluate"])), pack, PLAN, folder, **QUIET)
    (row,) = run.history.of("evaluation")
    assert row["step"] == 17
    assert losses(run) == losses(untouched)
    assert same_weights(run, untouched)
    assert run.best == {**untouched.best, **{n: run.best[n] for n in run.best if not n.startswith("val_")}}
    stopped = tmp_path / "stopped"
    at17 = nb.fit(Acting(at17=lambda: send(stopped, ["stop"])), pack, PLAN, stopped, **QUIET)
    state = nb.TrainState(toy, pack, PLAN)
    checkpoint.load(at17.folder, state)
    found = nb.evaluate(state, pack, "val")
    assert {f"val_{name}": value for name, value in found.items()} == {n: row[n] for n in row if n.startswith("val_")}


def test_evaluate_now_is_answered_while_the_run_is_paused(pack, tmp_path):
    folder, counts = tmp_path / "run", []
    task = Acting(at6=lambda: send(folder, ["pause"]))

    def person():
        wait_for(lambda: task.acted == [6] and not (folder / FILE).exists())
        send(folder, ["evaluate"])
        wait_for(lambda: "evaluation," in history_of(folder))
        counts.append(len(task.seen))
        send(folder, ["stop"])

    with beside(folder, person):
        nb.fit(task, pack, PLAN, folder, **QUIET)
    assert counts == [6], "a step was made during the pause"


def test_looking_during_a_pause_writes_no_further_checkpoint(pack, tmp_path, saved):
    folder = tmp_path / "run"
    task = Acting(at6=lambda: send(folder, ["pause"]))

    def person():
        wait_for(lambda: task.acted == [6] and not (folder / FILE).exists())
        send(folder, ["evaluate"])
        wait_for(lambda: "evaluation," in history_of(folder))
        send(folder, ["resume"])

    with beside(folder, person):
        nb.fit(task, pack, PLAN.replace(epochs=1, batch_size=7), folder, **QUIET)
    assert saved.count(6) == 1, "one checkpoint a batch of the evaluation"


def test_evaluate_now_is_answered_in_a_pause_at_the_end_of_an_epoch_that_is_not_evaluated(pack, tmp_path):
    folder, steps = tmp_path / "run", -(-len(pack.ids("train")) // PLAN.batch_size)
    task = Acting(**{f"at{steps}": lambda: send(folder, ["pause", "evaluate"])})

    def person():
        wait_for(lambda: "evaluation," in history_of(folder))
        send(folder, ["stop"])

    with beside(folder, person):
        run = nb.fit(task, pack, PLAN.replace(eval_every=4), folder, **QUIET)
    assert len(task.seen) == steps, "a step was made during the pause"
    assert [row["step"] for row in run.history.of("evaluation")] == [steps]


def test_a_pause_holds_at_the_end_of_the_run_whatever_is_asked(pack, tmp_path):
    folder, held = tmp_path / "run", []
    steps = -(-len(pack.ids("train")) // PLAN.batch_size)
    task = Acting(**{f"at{steps}": lambda: send(folder, ["pause"])})

    def person():
        wait_for(lambda: checkpoint.place(checkpoint.read_index(folder).get("last", "0-0")) == (0, steps))
        send(folder, ["evaluate"])  # in the pause after the last step: the epoch's own evaluation answers
        wait_for(lambda: "\nepoch," in history_of(folder))
        send(folder, ["evaluate"])  # and after it there is nothing to look at that was not seen
        wait_for(lambda: not (folder / FILE).exists())
        held.append(busy(folder))
        send(folder, ["resume"])

    with beside(folder, person):
        run = nb.fit(task, pack, PLAN.replace(epochs=1), folder, **QUIET)
    assert held == [True]
    assert run.events == ["nothing new to evaluate: the last epoch ended with an evaluation"]


def test_a_knob_that_was_turned_in_the_step_of_the_stop_acts_and_is_marked_when_the_run_goes_on(pack, tmp_path):
    folder = tmp_path / "run"
    task = Acting(at3=lambda: send(folder, ["stop"], {"batch_size": 32, "micro_batch_size": 8}))
    assert nb.fit(task, pack, PLAN.replace(epochs=1), folder, **QUIET).plan.micro_batch_size == 8
    sizes = []
    going_on: Any = types.SimpleNamespace(**vars(toy))
    going_on.loss = lambda model, batch, plan: sizes.append(len(batch["x"])) or toy.loss(model, batch, plan)
    run = nb.fit(going_on, pack, None, folder, **QUIET)
    assert [row["what"] for row in run.history.of("change")] == ["batch_size 16 → 32, micro_batch_size none → 8"]
    assert sizes[0] == 8


def test_a_request_that_comes_while_the_run_is_made_ready_is_heard(pack, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()

    def model(card, plan):
        send(folder, ["stop"])
        return toy.model(card, plan)

    task = Acting()
    task.model = model
    run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert run.events == ["stopped by you after step 1; run it again to continue"]


def test_ctrl_c_while_the_last_picture_is_drawn_still_returns_the_run(pack, tmp_path, monkeypatch):
    real = surface.Surface.finish

    def finish(self, *what):
        os.kill(os.getpid(), signal.SIGINT)
        real(self, *what)

    monkeypatch.setattr(surface.Surface, "finish", finish)
    run = nb.fit(toy, pack, PLAN.replace(epochs=1), tmp_path / "run", **QUIET)
    assert (run.folder / "plot.png").exists()


def test_advice_is_a_plan_also_where_ipywidgets_does_not_import(pack, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "nbtools.live.panel.form", raising=False)
    monkeypatch.delitem(sys.modules, "nbtools.live.panel.buttons", raising=False)
    advice = types.SimpleNamespace(plan=PLAN.replace(epochs=1), reasons={})
    assert len(nb.fit(toy, pack, advice, tmp_path / "run", **QUIET).summary()) == 1


def test_an_error_between_steps_leaves_no_thread_of_the_feed_behind(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(surface.Surface, "listen", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError) as kept:  # as a notebook keeps the last traceback
        nb.fit(toy, pack, PLAN.replace(feed="streamed"), tmp_path / "run", **QUIET)
    assert kept.tb
    assert "nbtools-feed" not in [thread.name for thread in threading.enumerate()]


def test_evaluation_without_a_validation_split_is_a_sentence(pack, tmp_path, monkeypatch):
    folder, ids = tmp_path / "run", Pack.ids
    monkeypatch.setattr(Pack, "ids", lambda self, split: ids(self, split)[: None if split == "train" else 0])
    run = nb.fit(Acting(at3=lambda: send(folder, ["evaluate"])), pack, PLAN.replace(epochs=1), folder, **QUIET)
    assert "nothing to evaluate: the validation split is empty" in run.events


def test_knobs_turned_in_an_epoch_act_at_the_next_step_and_every_sample_still_comes_once(pack, tmp_path):
    folder = tmp_path / "run"
    task = Acting(
        at4=lambda: send(folder, [], {"batch_size": 7, "lr": "2e-3"}),
        at9=lambda: send(folder, [], {"amp": "bf16", "clip_norm": None, "weight_decay": 0.1}),
        at12=lambda: send(folder, [], {"batch_size": 32, "micro_batch_size": 16}),
    )
    run = nb.fit(task, pack, PLAN.replace(epochs=2), folder, **QUIET)
    by_step = {step: plan for step, plan, _ in task.seen}
    assert (by_step[4].batch_size, by_step[5].batch_size, by_step[5].lr) == (16, 7, 2e-3)
    assert (by_step[9].amp, by_step[10].amp, by_step[10].clip_norm) == ("off", "bf16", None)
    train = sorted(pack.ids("train").tolist())
    ids = [i for _, _, batch in task.seen for i in batch]
    assert sorted(ids[: len(train)]) == train
    assert sorted(ids[len(train) :]) == train
    changes = [row["what"] for row in run.history.of("change")]
    assert changes[0] == "batch_size 16 → 7, lr 0.01 → 0.002"
    assert Run.open(folder, toy).plan.weight_decay == 0.1, "plan.json keeps what was turned"


def test_a_batch_size_without_an_lr_moves_lr_by_the_plans_rule(pack, tmp_path):
    folder = tmp_path / "run"
    plan = PLAN.replace(epochs=1, lr_rule="linear")
    run = nb.fit(Acting(at2=lambda: send(folder, [], {"batch_size": 32})), pack, plan, folder, **QUIET)
    assert run.plan.lr == 0.02


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ('{"feed": "workers"}', "Plan.feed cannot change in a started run"),
        ('{"batch_size": 100000}', "larger than the train split"),
        ('{"lr": -1}', "Plan.lr must be > 0, got -1"),
        ('{"lrr": 1}', "did you mean lr"),
        ('{"do": "explode"}', "pause, resume, stop, evaluate, save, profile, best, undo, got 'explode'"),
        ('{"do": "stop", "lr": -1}', "Plan.lr must be > 0"),
        ('{"lr": 1000}', 'lr 1000 is 100,000× the advised 0.01; to apply it anyway add "force": true'),
        ('{"do": "stop", "lr": 1000, "force": false}', "lr 1000 is 100,000× the advised 0.01"),
        ('{"lr": 1000, "force": "yes"}', "\"force\" must be true or false, got 'yes'"),
        (
            '{"lr": 0.02, "clip_norm": null, "weight_decay": 0.1, "patience": 3}',
            "4 settings change at once: lr 0.01 → 0.02, weight_decay 0 → 0.1, clip_norm 1 → none, patience 5 → 3; to",
        ),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"do": "' + "x" * 200_000 + '"}', "must be a JSON object"),
        ('{"self": 1}', "no knob 'self'"),
        (f'{{"lr": 1{"0" * 400}}}', "Plan.lr must be below 2**63, got one of 1329 bits"),
        (f'{{"batch_size": 1{"0" * 400}, "lr_rule": "linear"}}', "Plan.batch_size must be below 2**63"),
    ],
)
def test_what_cannot_be_is_explained_and_changes_nothing(pack, tmp_path, untouched, monkeypatch, said, answer):
    monkeypatch.setattr(control, "UNFINISHED", 0.0)
    folder = tmp_path / "run"
    run = nb.fit(Acting(at5=lambda: (folder / FILE).write_text(said)), pack, PLAN, folder, **QUIET)
    (event,) = [e for e in run.events if e.startswith("not taken: ")]
    assert answer in event
    assert [row["what"] for row in run.history.of("event")] == [event], "who asked from elsewhere reads the answer"
    assert not (folder / FILE).exists()
    assert same_weights(run, untouched)


def test_a_folder_or_an_unreadable_file_in_its_place_is_told_once_and_costs_no_run(pack, tmp_path):
    folder = tmp_path / "run"
    task = Acting(at3=lambda: (folder / FILE).mkdir(), at6=lambda: (folder / FILE).symlink_to(folder / FILE))
    run = nb.fit(task, pack, PLAN.replace(epochs=1), folder, **QUIET)
    assert ["Is a directory" in event for event in run.events] == [True, False]
    assert "symbolic links" in run.events[1]
    assert not os.path.lexists(folder / FILE)


def test_what_is_asked_while_the_run_reads_is_not_lost(tmp_path, monkeypatch):
    wishes, real, asked = Wishes(), control.orders, []

    def orders(text):
        if not asked:
            asked.append(text)
            send(tmp_path, ["evaluate"])
        return real(text)

    send(tmp_path, ["save"])
    monkeypatch.setattr(control, "orders", orders)
    receive(tmp_path, wishes, PLAN)
    receive(tmp_path, wishes, PLAN)
    assert wishes == Wishes(save=True, evaluate=True)


def test_what_the_run_takes_while_somebody_asks_for_more_stops_nobody(tmp_path, monkeypatch):
    send(tmp_path, ["save"])
    real = Path.open

    def gone(self, *args, **kwargs):
        self.unlink(missing_ok=True)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", gone)
        send(tmp_path, ["stop"])
    wishes = Wishes()
    receive(tmp_path, wishes, PLAN)
    assert wishes == Wishes(stop=True)


def test_a_file_that_is_still_being_written_is_read_when_it_is_whole(tmp_path):
    wishes = Wishes()
    (tmp_path / FILE).write_text('{"do": ')
    receive(tmp_path, wishes, PLAN)
    assert wishes == Wishes()
    (tmp_path / FILE).write_text('{"do": ["pause", "save"], "lr": 1e-4}')
    receive(tmp_path, wishes, PLAN)
    assert wishes == Wishes(paused=True, save=True, plan=PLAN.replace(lr=1e-4))


def test_two_requests_before_the_run_looks_are_both_granted(tmp_path):
    send(tmp_path, ["save"], {"lr": 1e-3})
    send(tmp_path, ["evaluate"], {"clip_norm": 2.0})
    wishes = Wishes()
    receive(tmp_path, wishes, PLAN)
    assert wishes == Wishes(save=True, evaluate=True, plan=PLAN.replace(lr=1e-3, clip_norm=2.0))


def test_an_older_runs_request_is_not_meant_for_this_one(pack, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    send(folder, ["stop"])
    run = nb.fit(toy, pack, PLAN.replace(epochs=1), folder, **QUIET)
    assert len(run.history.of("epoch")) == 1


def test_requests_do_not_travel_to_where_the_run_is_kept(pack, tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    nb.fit(toy, pack, PLAN.replace(epochs=1), folder, **QUIET)
    send(folder, ["stop"])
    nb.fit(toy, pack, PLAN.replace(epochs=1), folder, kept, **QUIET)
    assert not (kept / FILE).exists()


SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
import toy, torch, nbtools as nb
from nbtools import surface
torch.set_num_threads(1)
from pathlib import Path
pack = toy.make_pack(Path(sys.argv[2]))
nb.fit(toy, pack, toy.PLAN.replace(epochs=100000, eval_every=1000), sys.argv[3], receipt=False, progress=False)
"""


@pytest.fixture
def elsewhere(tmp_path):
    """The folder of a run that another process trains."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path), str(folder)]
    process = subprocess.Popen(command)
    try:
        yield folder
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()


def test_watch_shows_a_run_of_another_process_that_the_terminal_controls(elsewhere, capsys):
    def person():
        wait_for(lambda: history_of(elsewhere).count("step,") > 1)
        assert terminal.main(["control", str(elsewhere), "lr=0.005", "save"]) == 0
        wait_for(lambda: "lr 0.01 → 0.005" in history_of(elsewhere))
        assert terminal.main(["control", str(elsewhere), "batch_size=100000"]) == 0
        wait_for(lambda: "not taken: " in history_of(elsewhere))
        assert terminal.main(["control", str(elsewhere), "lr=1000"]) == 1
        assert terminal.main(["control", str(elsewhere), "lr=1000", "--force"]) == 0
        wait_for(lambda: "Training diverged" in history_of(elsewhere))
        several = ["clip_norm=none", "weight_decay=0.1", "patience=3", "early_stop=99"]
        assert terminal.main(["control", str(elsewhere), *several]) == 1
        assert terminal.main(["control", str(elsewhere), *several, "--force"]) == 0
        wait_for(lambda: "patience 5 → 3" in history_of(elsewhere))
        assert terminal.main(["control", str(elsewhere), "undo"]) == 0
        wait_for(lambda: "patience 3 → 5" in history_of(elsewhere))
        assert terminal.main(["control", str(elsewhere), "stop"]) == 0

    with beside(elsewhere, person):
        run = nb.watch(elsewhere, toy)
    assert not busy(elsewhere)
    assert run.plan.lr == 0.005
    assert run.plan.early_stop is None
    told = capsys.readouterr().err
    assert "lr 0.01 → 0.005" in told
    assert "larger than the train split" in told
    assert "Training diverged at lr 1000, 100,000× the advised 0.01; back at step" in told
    assert "with 0.005" in told
    assert f"python -m nbtools control {elsewhere} lr=1000 --force" in told
    assert "4 settings change at once: weight_decay 0 → 0.1, clip_norm 1 → none" in told


def test_who_watches_is_answered_where_it_saved_and_what_limits_it(elsewhere, capsys):
    def person():
        wait_for(lambda: history_of(elsewhere).count("step,") > 1)
        for action, answer in (("save", "saved at step"), ("profile", ",profile"), ("stop", "stopped by")):
            assert terminal.main(["control", str(elsewhere), action]) == 0
            wait_for(lambda answer=answer: answer in history_of(elsewhere))

    with beside(elsewhere, person):
        run = nb.watch(elsewhere, toy)
    told = capsys.readouterr().err
    [step] = {int(step) for step in re.findall(r"saved at step (\d+)", told)}
    assert 0 < step <= run.history.rows[-1]["step"]
    assert run.verdict is not None
    assert run.verdict.sentence in told
    assert re.search(r"stopped by .* after step \d+", told)
    assert [row.get("asked") for row in run.history.of("event")] == ["save", "profile", "stop"]


def test_an_interrupt_ends_the_looking_and_not_the_run(elsewhere, capsys):
    def person():
        wait_for(lambda: history_of(elsewhere))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    with beside(elsewhere, person):
        nb.watch(elsewhere, toy)
    assert busy(elsewhere)
    assert "goes on" in capsys.readouterr().err
    send(elsewhere, ["stop"])


def test_watching_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no run here after 0 s"):
        nb.watch(tmp_path / "none", wait=0)


def test_watching_a_run_that_ended_shows_it_once(untouched, capsys):
    start = time.monotonic()
    assert len(nb.watch(untouched.folder, toy).history.of("epoch")) == 4
    assert time.monotonic() - start < 10


def test_a_run_folder_that_loses_its_plan_while_it_is_watched_is_told(untouched, tmp_path, monkeypatch):
    folder, drawn = tmp_path / "run", threading.Event()
    shutil.copytree(untouched.folder, folder)
    monkeypatch.setattr(View, "start", lambda self: drawn.set())

    def person():
        with lock(folder):
            locked.set()
            assert drawn.wait(LIMIT)
            (folder / "plan.json").unlink()
            nb.History(folder / "history.csv").append(nb.Record("change", 3, 60, 900, {"what": "lr 1 → 2"}))

    locked = threading.Event()
    with beside(folder, person):
        assert locked.wait(LIMIT)
        with pytest.raises(CheckpointError, match=r"plan\.json is missing"):
            nb.watch(folder, toy)


def test_nobody_is_asked_where_no_folder_is(tmp_path):
    with pytest.raises(TrainError, match="name the folder of a run"):
        send(tmp_path / "gone", ["stop"])
    assert not (tmp_path / "gone").exists()


def test_asking_a_run_that_nobody_trains_says_so(pack, tmp_path, capsys):
    run = nb.fit(toy, pack, PLAN.replace(epochs=1), tmp_path / "run", **QUIET)
    assert terminal.main(["control", str(run.folder), "stop"]) == 1
    assert re.search("no process of this machine trains here", capsys.readouterr().err)


class Colab(types.ModuleType):
    """google.colab, as far as giving a machine back needs it."""

    def __init__(self) -> None:
        super().__init__("google.colab")
        self.runtime = self.drive = self
        self.given_back = 0

    def unassign(self) -> None:
        self.given_back += 1

    def mount(self, point: str, force_remount: bool) -> None:
        raise MessageError("Error: credential propagation was unsuccessful")


class MessageError(Exception):
    """What Colab raises where access to Drive is not granted."""


@pytest.fixture
def colab(monkeypatch, tmp_path):
    fake = Colab()
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", fake)
    return fake


def test_release_gpu_gives_the_machine_back_when_the_run_is_kept(pack, tmp_path, colab):
    nb.fit(toy, pack, PLAN.replace(epochs=1), tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert colab.given_back == 1
    assert Run.open(tmp_path / "kept", toy).history.of("epoch")


def test_release_gpu_keeps_the_machine_while_the_run_is_on_no_other_disk(pack, tmp_path, colab):
    (tmp_path / "kept").write_text("a file where the folder should be")
    plan = PLAN.replace(epochs=1)
    run = nb.fit(toy, pack, plan, tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert any("not kept" in event for event in run.events)
    assert colab.given_back == 0
    (tmp_path / "kept").unlink()
    nb.fit(toy, pack, plan, tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert colab.given_back == 1


def test_release_gpu_does_not_take_the_machine_from_a_person_who_stopped_the_run(pack, tmp_path, colab):
    folder = tmp_path / "run"
    task = Acting(at3=lambda: send(folder, ["stop"]))
    nb.fit(task, pack, PLAN, folder, "drive:kept", release_gpu=True, **QUIET)
    assert colab.given_back == 0


def test_release_gpu_is_refused_where_the_run_would_go_with_the_machine(pack, tmp_path, colab):
    for keep in (None, tmp_path / "beside"):
        with pytest.raises(CheckpointError, match="name a folder that stays: keep="):
            nb.fit(toy, pack, PLAN, tmp_path / "run", keep, release_gpu=True, **QUIET)
    assert not (tmp_path / "run").exists()


def test_where_drive_is_declined_a_run_ends_and_its_machine_is_not_given_back(
    pack, tmp_path, colab, monkeypatch, capsys
):
    monkeypatch.delenv("NBTOOLS_DRIVE")
    monkeypatch.setattr(sys.modules["nbtools.data.drive"], "_declined", False, raising=False)
    run = nb.fit(toy, pack, PLAN.replace(epochs=1), tmp_path / "run", "drive:kept", release_gpu=True, **QUIET)
    assert run.history.of("epoch")
    assert "nothing is kept at drive:kept" in capsys.readouterr().out
    assert colab.given_back == 0, "the run was only there"


def test_a_run_kept_in_the_notebooks_former_folder_goes_on_there(pack, tmp_path, colab, capsys):
    plan = PLAN.replace(epochs=2)
    nb.fit(toy, pack, plan.replace(epochs=1), tmp_path / "first", "drive:nbtools/runs/toy", **QUIET)
    again = nb.fit(toy, pack, plan, tmp_path / "second", "drive:nbtools-data/runs/toy", **QUIET)
    assert [row["epoch"] for row in again.history.of("epoch")] == [0, 1]
    assert "using drive:nbtools/runs/toy, where notebooks used to keep it" in capsys.readouterr().out
    assert len(Run.open(tmp_path / "nbtools" / "runs" / "toy", toy).history.of("epoch")) == 2
    nb.fit(toy, pack, plan, tmp_path / "third", "drive:nbtools-data/runs/new", **QUIET)
    assert Run.open(tmp_path / "nbtools-data" / "runs" / "new", toy)


def test_gpu_readings_become_columns_and_energy_goes_on_over_sessions(pack, tmp_path):
    history = nb.History()
    history.append(nb.Record("step", 0, 1, 16, {"loss": 1.0, "gpu_energy": 2.0}))
    state = nb.TrainState(toy, pack, PLAN)
    made = surface.Surface(tmp_path / "run", state, pack, history, PLAN, False)
    made.sampler = Sampler()  # not started: a reading is put in its place
    made.sampler.readings.append(Reading(1.0, 97, 2048, 250.0, 3600.0, ("power limit",)))
    row = made.measured(nb.Record("step", 0, 2, 32, {"loss": 0.5}))
    assert row.values == {
        "loss": 0.5,
        "gpu_utilisation": 97,
        "gpu_memory_used": 2048,
        "gpu_power": 250.0,
        "gpu_energy": 3.0,
        "gpu_throttle": "power limit",
    }
    bare = nb.Record("step", 0, 3, 48)
    assert made.measured(bare) is bare


def test_asking_for_what_is_no_wish_names_the_wishes(elsewhere, capsys):
    wait_for(lambda: history_of(elsewhere))
    assert terminal.main(["control", str(elsewhere), "stopp"]) == 1
    assert "pause, resume, stop, evaluate, save, profile, best, undo, got 'stopp'" in capsys.readouterr().err
    assert terminal.main(["control", str(elsewhere), "lr=fast"]) == 1
    assert "Plan.lr must be a number, got 'fast'" in capsys.readouterr().err
    assert terminal.main(["control", str(elsewhere), "stop"]) == 0


def test_a_picture_that_cannot_be_drawn_is_told_and_costs_no_run(pack, tmp_path, monkeypatch):
    def broken(*_args, **_more):
        raise ValueError("no room for it")

    monkeypatch.setattr(live, "picture", broken)
    run = nb.fit(toy, pack, PLAN.replace(epochs=1), tmp_path / "run", **QUIET)
    assert "no picture: ValueError: no room for it" in run.events
    assert len(run.history.of("epoch")) == 1


def test_samples_that_the_task_fails_to_show_are_told_and_cost_no_run(pack, tmp_path, capsys):
    task = Acting()
    task.preview = lambda pack, i, answer: 1 / 0
    run = nb.fit(task, pack, PLAN.replace(epochs=1), tmp_path / "run", receipt=False)
    assert "no samples are shown: ZeroDivisionError: division by zero" in run.events
    assert (run.folder / "plot.png").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_while_a_step_compiles_the_surface_says_so(pack, tmp_path):
    state = nb.TrainState(toy, pack, PLAN.replace(compile=True))
    made = surface.Surface(tmp_path / "run", state, pack, nb.History(), state.plan, False)
    assert made.status == "compiling"
    made.update(nb.Record("step", 0, 1, 16))
    assert made.status == ""
    made.plot.due = time.monotonic() + 1e6
    made.update(nb.Record("change", 0, 1, 16, {"what": "batch_size 16 → 32"}))
    assert (made.status, made.plot.due) == ("compiling", 0.0), "another batch size is another program"


def test_epochs_below_the_present_one_end_the_run_after_it_and_count_what_was_done(pack, tmp_path, untouched):
    folder, steps = tmp_path / "run", untouched.history.of("epoch")[1]["step"]
    run = nb.fit(Acting(**{f"at{steps + 3}": lambda: send(folder, [], {"epochs": 1})}), pack, PLAN, folder, **QUIET)
    (event,) = run.history.of("event")
    assert event["what"] == "epochs 1 is below the present epoch 3: training ends after this epoch"
    assert event["step"] == steps + 3, "said before it ends"
    assert [row["what"] for row in run.history.of("change")] == ["epochs 4 → 1"]
    assert len(run.history.of("epoch")) == len(run.summary()) == 3
    assert "3 of 3 epochs" in repr(run)
    assert run.plan.epochs == json.loads((folder / "plan.json").read_text())["epochs"] == 1


def test_epochs_below_the_present_one_asked_for_in_its_last_step_are_marked_and_pictured(pack, tmp_path, untouched):
    folder, pictured = tmp_path / "run", []
    steps, finish = untouched.history.of("epoch")[1]["step"], View.finish

    def noted(view, *rest):
        pictured.append(view.plot.about.epochs)
        finish(view, *rest)

    task = Acting(**{f"at{steps}": lambda: send(folder, [], {"epochs": 1})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(View, "finish", noted)
        run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert [row["what"] for row in run.history.of("event")] == [
        "epochs 1 is below the present epoch 2: training ends after this epoch"
    ]
    assert [row["what"] for row in run.history.of("change")] == ["epochs 4 → 1"]
    assert (pictured, len(run.history.of("epoch"))) == ([2], 2)


def test_a_run_that_was_stopped_in_an_epoch_beyond_its_epochs_ends_that_epoch(pack, tmp_path, untouched):
    """Stopped or not, it ends at the same step with the same weights."""
    steps, ended = untouched.history.of("epoch")[1]["step"], []
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        actions = {f"at{steps + 3}": lambda folder=folder: send(folder, [], {"epochs": 1})}
        if name == "stopped":
            actions[f"at{steps + 5}"] = lambda folder=folder: send(folder, ["stop"])
        run = nb.fit(Acting(**actions), pack, PLAN, folder, **QUIET)
        ended.append(nb.fit(toy, pack, None, folder, **QUIET) if name == "stopped" else run)
    assert losses(ended[0]) == losses(ended[1])
    assert same_weights(*ended)


def test_fit_with_fewer_epochs_than_were_done_returns_the_run_with_a_sentence(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    shutil.copytree(untouched.folder, folder)
    run = nb.fit(toy, pack, PLAN.replace(epochs=2), folder, **QUIET)
    assert run.events == ["epochs 2 is below the 4 epochs done: there is nothing left to train"]
    assert "4 of 4 epochs" in repr(run)
    assert run.plan.epochs == 2
    assert same_weights(run, untouched)


def test_the_live_picture_counts_the_epochs_that_were_begun(tmp_path):
    history = nb.History()
    history.append(nb.Record("step", 25, 500, 8000, {"loss": 1.0}))
    view = View(tmp_path / "run", history, PLAN.replace(epochs=30), 320, "-loss", None, show=False)
    view.turned(PLAN.replace(epochs=3))
    assert (view.plot.about.epochs, view.bar.total) == (26, 26 * 320)
    again = View(tmp_path / "run", history, PLAN.replace(epochs=3), 320, "-loss", None, show=False)
    assert (again.plot.about.epochs, again.bar.total) == (26, 26 * 320)
