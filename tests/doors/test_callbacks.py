"""Functions and loggers that watch a run: called with each record that has values, they may stop it, or end it."""

import sys
from typing import Any

import pytest
import toy
from acting import QUIET, STEPS, acting, asking, last_step, same

import nbtools as nb
from nbtools.errors import MissingExtra, PlanError, TrainError

pytestmark = pytest.mark.usefixtures("at_once")

PLAN = toy.PLAN.replace(epochs=2)


def test_callbacks_get_every_record_with_values_and_one_may_stop_the_run_after_the_step(pack, folder, untouched):
    seen: list[tuple[str, int]] = []

    def prune(record: nb.Record, run: nb.Run) -> Any:
        seen.append((record.kind, record.step))
        assert record.values.items() <= run.history.rows[-1].items(), "the history has it already"
        return "stop" if record.step == 12 else None

    run = nb.fit(toy, pack, PLAN, folder, callbacks=[lambda record, run: None, prune], **QUIET)
    assert seen == [*(("step", step) for step in range(1, 10)), ("epoch", 9), *(("step", s) for s in range(10, 13))]
    assert run.events == ["stopped by the callback prune after step 12; run it again to continue"]
    assert (run.state, last_step(run.folder)) == ("stopped", 12)
    assert same(nb.fit(toy, pack, PLAN, run.folder, **QUIET), untouched)


def test_a_callback_sees_the_best_model_so_far_and_its_changes_join_those_of_the_user(pack, folder):
    seen = list[tuple[float, float]]()

    def halve(record: nb.Record, run: nb.Run) -> None:
        if record.kind == "epoch":
            seen.append((nb.evaluate(run, pack, "val")["loss"], record.values["val_loss"]))
            run.plan = run.plan.replace(lr=run.plan.lr / 2)

    task = acting({STEPS: asking(folder, batch_size=8)})  # in the last step of an epoch
    run = nb.fit(task, pack, PLAN.replace(early_stop=None), folder, callbacks=[halve], **QUIET)
    assert [ours == pytest.approx(theirs) for ours, theirs in seen] == [True] * 2
    assert (run.plan.batch_size, run.plan.lr) == (8, PLAN.lr / 4)


def test_an_error_in_a_callback_is_the_users_own_and_loses_no_checkpoint(pack, folder, untouched):
    def wrong(record: nb.Record, run: nb.Run) -> None:
        if record.step == STEPS + 3:
            raise ZeroDivisionError("a mistake")

    with pytest.raises(ZeroDivisionError, match="a mistake") as caught:
        nb.fit(toy, pack, PLAN, folder, callbacks=[wrong], **QUIET)
    assert caught.traceback[-1].name == "wrong"
    assert nb.Run.open(folder, toy).state == "failed"
    assert last_step(folder) == STEPS
    assert same(nb.fit(toy, pack, PLAN, folder, **QUIET), untouched)


def test_what_is_no_callback_and_no_logger_is_refused_before_anything_is_written(pack, folder, monkeypatch):
    def refused(error, words, act: Any = nb.fit, **more):
        with pytest.raises(error, match=words):
            act(toy, pack, PLAN, folder, **more, **QUIET)

    refused(TrainError, r"callbacks must be a list of functions f\(record, run\), got 3", callbacks=3)
    refused(TrainError, r'log must be "tensorboard" or None, got \'wandb\'', log="wandb")
    refused(PlanError, r"Plan has no setting 'callback'; it has epochs", callback=[print])
    refused(PlanError, r"Plan has no setting 'callbacks'; it has epochs", nb.launch, processes=2, callbacks=[print])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(MissingExtra, r'log="tensorboard" needs tensorboard .*: pip install tensorboard$', log="tensorboard")
    assert not folder.exists()


def test_tensorboard_shows_the_rows_of_the_history_each_once_after_a_crash_and_a_way_back(pack, folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in reader.EventAccumulator(str(folder)).Reload().Scalars(tag)]

    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({STEPS + 3: lambda: 1 / 0}), pack, PLAN, folder, log="tensorboard", **QUIET)
    assert scalars("step/loss")[-1][0] > last_step(folder), "rows that the next start repeats"
    ruins = acting({4: asking(folder, force=True, lr=1000.0)})
    run = nb.fit(ruins, pack, PLAN, folder, log="tensorboard", **QUIET)
    assert "Training diverged after lr 0.01 → 1000" in " ".join(run.events)
    for kind in ("step", "epoch"):
        for name in ("lr", "loss" if kind == "step" else "val_loss"):
            rows = [(row["step"], pytest.approx(row[name])) for row in run.history.of(kind)]
            assert scalars(f"{kind}/{name}") == rows
    nb.fit(toy, pack, PLAN.replace(epochs=1), folder, log="tensorboard", fresh=True, **QUIET)
    assert len(scalars("step/loss")) == STEPS
