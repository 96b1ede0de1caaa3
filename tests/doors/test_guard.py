"""A change of settings that makes training diverge costs nothing: the run goes back to before it, and undoes it."""

import re
import shutil
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import toy
from acting import QUIET, acting, asking, losses, same, texts

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.launch import Remote
from nbtools.train import checkpoint

pytestmark = pytest.mark.usefixtures("at_once", "written")

PLAN = toy.PLAN.replace(epochs=2, batch_size=2, schedule="constant")  # about 65 steps an epoch, a log step every 6
MANY = {"lr": 1000.0, "batch_size": 32, "amp": "bf16", "betas": [0.5, 0.5], "clip_norm": None}
CHANGED = "batch_size 2 → 32, lr 0.01 → 1000, betas (0.9, 0.999) → (0.5, 0.5), clip_norm 1 → none, amp off → bf16"
TWO = {20: {"weight_decay": 0.1}, 23: {"lr": 1000}}


def first_is_best() -> dict[str, Any]:
    """Metrics that are 0.5 when they are tried and in the first evaluation, of 24 batches, and 0.25 from then on."""
    calls = count()
    return {"metrics": lambda outputs, batch: {"accuracy": (1, 2 if next(calls) < 25 else 4)}}


def fit_and_end(task: Any, pack: Any, folder: Any, keep: Any = None) -> None:
    with pytest.MonkeyPatch.context() as patch, suppress(ZeroDivisionError):
        patch.setattr("nbtools.folder.SAVE_EVERY", 0.0)
        patch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
        nb.fit(task, pack, PLAN, folder, keep, **QUIET)


@pytest.mark.parametrize(("actions", "changed"), [({20: MANY}, CHANGED), (TWO, "lr 0.01 → 1000, weight_decay 0 → 0.1")])
def test_a_change_that_explodes_the_loss_is_undone_and_leaves_no_trace(pack, folder, untouched, actions, changed):
    task = acting({step: asking(folder, force=True, **settings) for step, settings in actions.items()})
    run = nb.fit(task, pack, PLAN, folder, **QUIET)
    event = f"Training diverged after {changed}, which was undone; back at step 20"
    assert texts(run) == [event]
    assert event in run.events
    assert run.plan == nb.Run.open(folder, toy).plan == PLAN
    assert not run.history.of("change")
    assert same(run, untouched)


def test_after_a_rollback_a_kill_resumes_from_before_the_change_also_where_kept(pack, folder, tmp_path, untouched):
    """Checkpoints of every step: those of the ruined weights must not be gone on from."""
    task = acting({13: asking(folder, force=True, lr=1000), 19: lambda: 1 / 0})  # 14 to 18 are ruined, then 14
    fit_and_end(task, pack, folder, tmp_path / "kept")
    assert task.acted == [13]
    for place in (folder, nb.Run.open(tmp_path / "kept", toy).folder):
        assert checkpoint.place(checkpoint.names(place)[0])[1] == 13
        copy = shutil.copytree(place, tmp_path / f"copy of {place.name}")
        assert same(nb.fit(toy, pack, None, copy, **QUIET), untouched)


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_a_change_stays_on_watch_when_the_run_is_interrupted_before_its_loss_is_read(pack, folder, ends, untouched):
    end: Any = (lambda: 1 / 0) if ends == "kill" else asking(folder, "stop")
    fit_and_end(acting({13: asking(folder, force=True, lr=1000), 16: end}), pack, folder)
    assert not [row for row in nb.History(folder / "history.csv").of("step") if row["step"] > 13]
    run = nb.fit(toy, pack, None, folder, **QUIET)
    assert "Training diverged after lr 0.01 → 1000, which was undone; back at step 13" in run.events
    assert same(run, untouched)


def test_an_lr_that_diverges_from_the_start_is_one_sentence_and_a_lower_one_goes_on(pack, folder, untouched):
    with pytest.raises(TrainError) as caught:
        nb.fit(toy, pack, PLAN.replace(lr=1e25), folder, **QUIET)
    said = str(caught.value)
    assert said.startswith("Training diverged at lr 1e25: more than 3 steps had to be skipped")
    assert "lower lr, in the panel or by plan.replace(lr=" in said
    assert "sample" not in said, "no sample is to blame"
    assert nb.Run.open(folder, toy).state == "diverged"
    assert same(nb.fit(toy, pack, PLAN, folder, **QUIET), untouched)


def test_back_to_best_goes_on_from_the_best_checkpoint_with_the_settings_of_now(pack, folder, untouched):
    best = untouched.history.of("epoch")[0]["step"]
    task = acting({best + 12: asking(folder, eval_every=2), best + 15: asking(folder, "best")}, **first_is_best())
    run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert texts(run) == [f"the best checkpoint: back at step {best}"]
    assert texts(run, "change") == ["eval_every 1 → 2"]
    assert run.plan.eval_every == 2
    assert losses(run) == losses(untouched)


@pytest.mark.parametrize("way", ["best", "undo"])
def test_a_way_back_to_damaged_files_is_refused_and_the_run_goes_on(pack, folder, way, untouched):
    def damage():
        for file in folder.glob("*.safetensors"):
            file.write_bytes(b"")

    task = acting({80: asking(folder, lr=0.02), 82: damage, 83: asking(folder, way)}, **first_is_best())
    run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert re.search(r"refused: .*safetensors: damaged or missing", texts(run)[0])
    assert len(run.history.of("epoch")) == len(untouched.history.of("epoch"))


def test_undo_goes_back_to_before_the_last_changes_and_where_there_are_none_is_refused(pack, folder, untouched):
    """Steps 20 and 22 change a setting each, 26 one that is taken back before it is applied."""
    actions = {step: asking(folder, "undo") for step in (24, 28)} | {26: asking(folder, "undo", lr=0.02)}
    actions |= {3: asking(folder, "best"), 20: asking(folder, lr=0.02), 22: asking(folder, clip_norm=None)}
    watched = list[Remote]()

    def watch(record, run):  # at each row, also at that of a change, which is not in plan.json yet
        watched[:] = watched or [Remote(nb.Run.open(folder), show=False)]
        watched[0].read()
        assert watched[0].plans.plan.lr == run.plan.lr

    run = nb.fit(acting(actions, **first_is_best()), pack, PLAN, folder, callbacks=[watch], **QUIET)
    nothing, undone, taken, refused = texts(run)
    assert nothing.startswith("refused: there is no best checkpoint yet")
    assert undone == "lr 0.01 → 0.02, clip_norm 1 → none undone; back at step 20"
    assert taken == "the last change was taken back before it was applied"
    assert refused.startswith("refused: there is no change to undo")
    assert not run.history.of("change")
    assert run.plan == nb.Run.open(folder, toy).plan == PLAN
    assert same(run, untouched)


def test_an_undo_to_the_step_of_a_return_keeps_the_row_of_that_return(pack, folder, untouched):
    def change(record, run):
        if "diverged" in str(record.values.get("what")):
            run.plan = run.plan.replace(lr=0.02)  # from the next step on

    task = acting({20: asking(folder, force=True, lr=1000), 27: asking(folder, "undo")})
    run = nb.fit(task, pack, PLAN, folder, callbacks=[change], **QUIET)
    first, second = texts(run)
    assert first == "Training diverged after lr 0.01 → 1000, which was undone; back at step 20"
    assert second == "lr 0.01 → 0.02 undone; back at step 20"
    assert same(run, untouched)


def test_a_kept_run_resumes_that_an_undo_took_to_before_its_last_start(pack, folder):
    kept = folder.with_name("kept")
    for actions in (
        {10: asking(folder, lr=0.02), 15: asking(folder, "stop")},
        {2: asking(folder, "undo"), 4: asking(folder, "stop")},  # starts at step 15, ends at 12
        {2: asking(folder, "stop")},  # starts at step 12, ends at 14
        {},
    ):
        run = nb.fit(acting(actions), pack, PLAN, folder, kept, **QUIET)
    assert "lr 0.01 → 0.02 undone; back at step 10" in " ".join(texts(run))
    assert len(run.history.of("epoch")) == PLAN.epochs
    assert same(nb.Run.open(kept, toy), run)


def test_weights_that_diverged_are_not_the_best_though_they_score_best(pack, folder, tmp_path, untouched):
    """A metric that grows with the loss, and a change between the last log step and the epoch's evaluation."""
    whole = nb.fit(acting({}, BEST="loss"), pack, PLAN, tmp_path / "untouched", **QUIET)
    steps = untouched.history.of("epoch")[0]["step"]
    run = nb.fit(acting({steps - 1: asking(folder, force=True, lr=1000)}, BEST="loss"), pack, PLAN, folder, **QUIET)
    assert f"undone; back at step {steps - 1}" in " ".join(run.events)
    assert run.best["epoch"] == whole.best["epoch"]
    assert same(run, whole)
