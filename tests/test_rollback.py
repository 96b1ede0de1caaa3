"""A change of settings that makes training diverge costs nothing: the run goes back to before it, and undoes it."""

import json
import shutil
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import toy
from acting import QUIET, acting, asking, losses, same, texts

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.live import send, surface
from nbtools.train import checkpoint

pytestmark = pytest.mark.usefixtures("undrawn", "at_once")

PLAN = toy.PLAN.replace(epochs=6, schedule="constant")
SLOW = PLAN.replace(batch_size=2, epochs=2)  # about 65 steps an epoch, a log step every 6


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, pack):
    return nb.fit(toy, pack, PLAN, tmp_path_factory.mktemp("runs") / "untouched", **QUIET)


@pytest.fixture(scope="module")
def slow(tmp_path_factory, pack):
    return nb.fit(toy, pack, SLOW, tmp_path_factory.mktemp("runs") / "slow", **QUIET)


@pytest.mark.parametrize(
    ("knobs", "at"),
    [
        ({"lr": 1000.0}, "lr 1000, 100,000× the advised 0.01; back at step 20 with 0.01"),
        ({"lr": 1e30}, "lr 1e+30, "),  # NaN
        ({"lr": 1000.0, "clip_norm": None}, "and clip_norm none; back at step 20 with lr 0.01, clip_norm 1"),
        ({"weight_decay": 1e5}, "weight_decay 1e+05; back at step 20 with 0"),
        ({"lr": 1000.0, "batch_size": 32, "amp": "bf16"}, "back at step 20 with batch_size 16, lr 0.01, amp off"),
        (
            {"lr": 1000.0, "amp": "bf16", "betas": [0.5, 0.5]},
            "back at step 20 with lr 0.01, betas (0.9, 0.999), amp off",
        ),
    ],
)
def test_a_change_after_which_the_loss_explodes_is_undone_and_leaves_no_trace(pack, tmp_path, untouched, knobs, at):
    folder = tmp_path / "run"
    run = nb.fit(acting({20: asking(folder, force=True, **knobs)}), pack, PLAN, folder, **QUIET)
    (event,) = texts(run)
    assert event.startswith("Training diverged at ")
    assert at in event
    assert event in run.events
    assert run.plan == nb.Run.open(folder, toy).plan == PLAN
    assert not run.history.of("change")
    assert same(run, untouched)


def test_a_typo_that_is_taken_back_before_its_loss_is_read_is_rolled_back_all_the_same(pack, tmp_path, slow):
    folder = tmp_path / "run"
    task = acting({13: asking(folder, force=True, lr=1000), 15: asking(folder, lr=0.01)})
    run = nb.fit(task, pack, SLOW, folder, **QUIET)
    (event,) = texts(run)
    assert event == "Training diverged at lr 1000, 100,000× the advised 0.01; back at step 13 with 0.01"
    assert same(run, slow)


def test_a_change_that_does_not_diverge_is_as_it_was_bit_for_bit(pack, tmp_path):
    """Passes without any rollback too: that is the claim."""
    folder = tmp_path / "run"
    run = nb.fit(acting({20: asking(folder, lr=0.02, batch_size=7)}), pack, PLAN, folder, **QUIET)
    state, seen = nb.TrainState(toy, pack, PLAN), []
    for record in nb.train(toy, state, pack):
        if record.kind == "step" and "loss" in record.values:
            seen.append((record.step, record.values["loss"]))
        if state.step == 20 and state.plan is PLAN:
            state.plan = PLAN.replace(lr=0.02, batch_size=7)
    assert losses(run) == seen
    assert run.plan.lr == 0.02


def test_watching_ends_after_twenty_log_steps_and_leaves_no_mark(pack, tmp_path):
    folder = tmp_path / "run"
    nb.fit(acting({20: asking(folder, lr=0.02)}), pack, PLAN, folder, **QUIET)
    assert "anchor" not in json.loads((folder / "run.json").read_text())


def test_after_a_rollback_a_kill_resumes_from_before_the_change_also_where_it_is_kept(
    pack, tmp_path, monkeypatch, slow
):
    """Checkpoints of every step: those of the ruined weights must not be gone on from."""
    monkeypatch.setattr(sys.modules["nbtools.folder"], "SAVE_EVERY", 0.0)
    folder, kept = tmp_path / "run", tmp_path / "kept"

    def dies():
        raise ZeroDivisionError

    task = acting({13: asking(folder, force=True, lr=1000), 19: dies})  # steps 14 to 18 are ruined, then 14 again
    with pytest.raises(ZeroDivisionError):
        nb.fit(task, pack, SLOW, folder, kept, **QUIET)
    for place in (folder, kept):
        steps = [int(path.stem.split("-")[1].split(".")[0]) for path in place.glob("*-*.safetensors")]
        assert max(steps) == 13
        copy = tmp_path / f"copy of {place.name}"
        shutil.copytree(place, copy)
        again = nb.fit(toy, pack, None, copy, **QUIET)
        assert same(again, slow)
        assert ["diverged" in row["what"] for row in again.history.of("event")] == [True], "the message stays"


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_a_change_stays_on_watch_when_the_run_is_interrupted_before_its_loss_is_read(
    pack, tmp_path, monkeypatch, ends, slow
):
    monkeypatch.setattr(sys.modules["nbtools.folder"], "SAVE_EVERY", 0.0)
    folder = tmp_path / "run"

    def dies():
        raise ZeroDivisionError

    end = asking(folder, "stop") if ends == "stop" else dies
    task = acting({13: asking(folder, force=True, lr=1000), 16: end})
    if ends == "stop":
        nb.fit(task, pack, SLOW, folder, **QUIET)
    else:
        with pytest.raises(ZeroDivisionError):
            nb.fit(task, pack, SLOW, folder, **QUIET)
    assert not [row for row in nb.History(folder / "history.csv").of("step") if row["step"] > 13]
    run = nb.fit(toy, pack, None, folder, **QUIET)
    assert "Training diverged at lr 1000, 100,000× the advised 0.01; back at step 13 with 0.01" in run.events
    assert same(run, slow)


def test_a_resumed_runs_new_settings_are_on_watch_too(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    nb.fit(acting({20: asking(folder, "stop")}), pack, PLAN, folder, **QUIET)
    run = nb.fit(toy, pack, PLAN.replace(lr=1000.0), folder, **QUIET)
    assert "back at step 20 with 0.01" in " ".join(run.events)
    assert run.plan == PLAN
    assert same(run, untouched)


def test_weights_that_diverged_are_not_the_best_though_they_score_best(pack, tmp_path, slow):
    """A metric that grows with the loss, and a change between the last log step and the epoch's evaluation."""
    folder, plan = tmp_path / "run", SLOW.replace(epochs=3)
    whole = nb.fit(acting({}, BEST="loss"), pack, plan, tmp_path / "untouched", **QUIET)
    steps = slow.history.of("epoch")[0]["step"]
    task = acting({steps - 1: asking(folder, force=True, lr=1000)}, BEST="loss")
    run = nb.fit(task, pack, plan, folder, **QUIET)
    assert f"back at step {steps - 1} with 0.01" in " ".join(run.events)
    assert (
        json.loads((folder / "run.json").read_text())["best"]
        == json.loads((whole.folder / "run.json").read_text())["best"]
    )
    assert same(run, whole)


def test_a_slider_that_is_dragged_costs_one_checkpoint(pack, tmp_path, monkeypatch):
    real, steps = checkpoint.save, []

    def save(into, state, rows, best=False):
        steps.append(state.step)
        real(into, state, rows, best)

    monkeypatch.setattr(checkpoint, "save", save)
    folder = tmp_path / "run"
    actions = {step: asking(folder, lr=0.01 + step / 1e4) for step in range(20, 26)}
    run = nb.fit(acting(actions), pack, PLAN, folder, **QUIET)
    assert len(run.history.of("change")) == 6
    assert [step for step in steps if 20 <= step < 27] == [20]


def test_changes_that_are_still_on_watch_are_undone_together(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    actions = {20: asking(folder, weight_decay=0.1), 23: asking(folder, force=True, lr=1000)}
    run = nb.fit(acting(actions), pack, PLAN, folder, **QUIET)
    assert "back at step 20 with weight_decay 0, lr 0.01" in " ".join(run.events)
    assert same(run, untouched)


@dataclass(frozen=True)
class Weighted(toy.Plan):
    weight: float = nb.knob(1.0, "weight of the loss", least=0, live=True)


def test_a_loss_that_rises_since_its_weight_was_raised_has_not_diverged(pack, tmp_path):
    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return plan.weight * total, count

    folder, plan = tmp_path / "run", Weighted(epochs=6, batch_size=16, lr=1e-3)
    more: dict[str, Any] = {"loss": loss, "PLAN": plan, "model": lambda card, plan: toy.Net(16, 0.1)}
    run = nb.fit(acting({20: asking(folder, weight=10.0)}, **more), pack, plan, folder, **QUIET)
    assert run.plan.to_dict()["weight"] == 10.0
    assert not run.history.of("event")
    by_step = dict(losses(run))
    assert by_step[21] > 3 * by_step[20]


@pytest.mark.parametrize(("lr", "diverges"), [(0.02, False), (1000, True)])
def test_negative_losses_diverge_by_their_distance(pack, tmp_path, lr, diverges):
    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return total - 5 * count, count

    folder = tmp_path / "run"
    run = nb.fit(acting({20: asking(folder, force=True, lr=lr)}, loss=loss), pack, PLAN, folder, **QUIET)
    assert losses(run)[0][1] < 0
    assert bool(run.history.of("event")) is diverges


def test_noise_about_a_loss_of_zero_is_no_divergence(pack, tmp_path):
    folder, values = tmp_path / "run", [1.0] * 5 + [1e-6] * 25 + [1e-4] * 100

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return 0 * total + (values.pop(0) if getattr(model, "training", False) else 0.0) * count, count

    run = nb.fit(acting({30: asking(folder, lr=0.02)}, loss=loss), pack, PLAN, folder, **QUIET)
    assert dict(losses(run))[31] == pytest.approx(1e-4)
    assert not run.history.of("event")


def advised(lr: float) -> nb.Panel:
    """A panel of advice whose lr somebody changed."""
    panel = nb.Panel(types.SimpleNamespace(plan=PLAN, reasons={}))
    panel.fields["lr"].value = f"{lr:g}"
    return panel


def test_an_lr_that_diverges_from_the_start_is_one_sentence_and_a_lower_one_goes_on(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(TrainError) as caught:
            nb.fit(toy, pack, advised(1e30), folder, **QUIET)
        said = str(caught.value)
        assert said.startswith("Training diverged at lr 1e+30, 100,000,000,")
        assert "the advised 0.01" in said
        assert "lower Plan.lr, for instance by plan.replace(lr=0.01)" in said
        assert "sample" not in said
        assert len(said.splitlines()) <= 3
    run = nb.fit(toy, pack, PLAN, folder, **QUIET)
    assert same(run, untouched)


def test_diverging_without_advice_names_the_lr_and_blames_no_sample(pack, tmp_path):
    with pytest.raises(TrainError, match=r"^Training diverged at lr 1e\+30: .*lower Plan.lr") as caught:
        nb.fit(toy, pack, PLAN.replace(lr=1e30), tmp_path / "run", **QUIET)
    assert "sample" not in str(caught.value)


def test_a_lower_lr_that_still_diverges_is_the_one_that_is_named(pack, tmp_path):
    for lr in (1e30, 1e25):
        with pytest.raises(TrainError, match=rf"^Training diverged at lr 1e\+{f'{lr:g}'[-2:]}"):
            nb.fit(toy, pack, PLAN.replace(lr=lr), tmp_path / "run", **QUIET)


def test_a_run_that_starts_far_beyond_the_advice_says_so(pack, tmp_path):
    run = nb.fit(toy, pack, advised(1.0), tmp_path / "run", **QUIET)
    assert run.events[0] == "lr 1 is 100× the advised 0.01"


def test_back_to_best_goes_on_from_the_best_checkpoint_with_the_settings_of_now(pack, tmp_path, untouched):
    folder, best = tmp_path / "run", untouched.history.of("epoch")[0]["step"]
    metrics = {"metrics": lambda outputs, batch: {"accuracy": (1, 2)}}  # the first epoch is the best, and stays it
    task = acting({best + 12: asking(folder, eval_every=2), best + 15: asking(folder, "best")}, **metrics)
    run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert texts(run) == [f"back at step {best}, the best checkpoint: accuracy 0.5 after epoch 1"]
    assert texts(run, "change") == ["eval_every 1 → 2"]
    assert run.plan.eval_every == 2
    assert losses(run) == losses(untouched)


def test_settings_that_ruin_training_are_on_watch_also_after_going_back_to_best(pack, tmp_path, slow):
    """Asked for between the change and the first loss that shows it: the settings of now are the ruinous ones."""
    folder, best = tmp_path / "run", slow.history.of("epoch")[0]["step"]
    metrics = {"metrics": lambda outputs, batch: {"accuracy": (1, 2)}}
    actions = {best + 13: asking(folder, force=True, lr=1000), best + 15: asking(folder, "best")}
    run = nb.fit(acting(actions, **metrics), pack, SLOW, folder, **QUIET)
    assert texts(run) == [f"Training diverged at lr 1000, 100,000× the advised 0.01; back at step {best} with 0.01"]
    assert run.plan == SLOW
    assert losses(run) == losses(slow)


def test_back_to_best_while_paused_stays_paused(pack, tmp_path):
    folder, counts = tmp_path / "run", []
    seen = []

    def hold(self):
        counts.append(len(seen))
        send(folder, ["resume" if any("the best" in told for told in self.events) else "best"])

    def batch(raw, plan, draws):
        seen.extend([1] if draws is not None else [])
        if len(seen) == 30 and draws is not None:
            send(folder, ["pause"])
        return toy.batch(raw, plan, draws)

    task: Any = types.SimpleNamespace(**{**vars(toy), "batch": batch})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface.Surface, "hold", hold)
        run = nb.fit(task, pack, PLAN, folder, **QUIET)
    assert set(counts) == {30}, "a step was made during the pause"
    assert len(run.history.of("epoch")) == PLAN.epochs


def test_without_a_best_checkpoint_going_back_is_refused_in_a_sentence(pack, tmp_path, untouched):
    folder = tmp_path / "run"
    run = nb.fit(acting({3: asking(folder, "best")}), pack, PLAN, folder, **QUIET)
    assert texts(run) == ["not taken: there is no best checkpoint yet; the first evaluation chooses one"]
    assert same(run, untouched)


def test_a_damaged_best_checkpoint_is_refused_in_a_sentence_and_training_goes_on(pack, tmp_path, untouched):
    folder, (first, second, *_) = tmp_path / "run", untouched.history.of("epoch")
    best = first["step"]

    def damage():
        (folder / f"0001-{best:08d}.safetensors").write_bytes(b"")
        send(folder, ["best"])

    metrics = {"metrics": lambda outputs, batch: {"accuracy": (1, 2)}}  # the first epoch is the best, and stays it
    run = nb.fit(acting({second["step"] + 5: damage}, **metrics), pack, PLAN, folder, **QUIET)
    (event,) = texts(run)
    assert event.startswith("not taken: ")
    assert f"0001-{best:08d}.safetensors: 0 bytes that are not the" in event
    assert losses(run) == losses(untouched)


def test_a_run_killed_on_its_way_back_to_best_resumes_with_all_of_its_rows(pack, tmp_path, untouched, monkeypatch):
    folder, best = tmp_path / "run", untouched.history.of("epoch")[0]["step"]
    metrics = {"metrics": lambda outputs, batch: {"accuracy": (1, 2)}}
    task = acting({best + 12: asking(folder, "save"), best + 13: asking(folder, "best")}, **metrics)

    def killed(*_, **__):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "rewind", killed)
        with pytest.raises(RuntimeError, match="killed"):
            nb.fit(task, pack, PLAN, folder, **QUIET)
    assert losses(nb.fit(acting({}, **metrics), pack, PLAN, folder, **QUIET)) == losses(untouched)


def test_undo_takes_the_last_changes_back_one_by_one(pack, tmp_path):
    folder = tmp_path / "run"
    actions = {
        20: asking(folder, lr=0.02),
        22: asking(folder, clip_norm=None),
        24: asking(folder, "undo"),
        26: asking(folder, "undo"),
        28: asking(folder, "undo"),
    }
    run = nb.fit(acting(actions), pack, PLAN, folder, **QUIET)
    assert texts(run, "change") == [
        "lr 0.01 → 0.02",
        "clip_norm 1 → none",
        "clip_norm none → 1",
        "lr 0.02 → 0.01",
    ]
    undone = "the last change is undone"
    assert texts(run) == [undone, undone, "not taken: there is no change to undo"]
    assert run.plan == nb.Run.open(folder, toy).plan == PLAN
