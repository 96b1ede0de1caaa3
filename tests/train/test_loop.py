"""The loop: one generator, exact sums, and the field's own results."""

import copy
from typing import Any

import pytest
import torch
import toy
from torch import nn

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.train import Diverged, TrainState, train


def losses(state, pack):
    return [r.values["loss"] for r in train(state.task, state, pack) if r.kind == "step" and "loss" in r.values]


def weights(model: nn.Module):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Linear(nn.Module):
    """Without BatchNorm, which sees micro-batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, batch):
        return self.layer(batch["x"])


# -- a step


def test_training_lowers_the_loss_and_equals_a_plain_loop(pack):
    plan = toy.PLAN.replace(epochs=2, noise=0.0, dropout=0.0, schedule="constant", optimizer="adam", betas=(0.8, 0.9))
    order = []
    spied = toy.with_(
        batch=lambda raw, plan, draws: (draws and order.append(raw["id"]), toy.batch(raw, plan, draws))[1]
    )
    state = TrainState(spied, pack, plan)
    model = copy.deepcopy(state.model).train()
    logged = losses(state, pack)
    optimizer = torch.optim.Adam(model.parameters(), plan.lr, betas=plan.betas, fused=True)
    x, label = torch.from_numpy(pack.arrays["x"]), torch.from_numpy(pack.arrays["label"])[:, 0]
    for ids in order:
        loss = nn.functional.cross_entropy(model({"x": x[ids]}), label[ids])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm or 0.0)
        optimizer.step()
    assert len(order) == state.step > 0
    assert logged[-1] < 0.8 * logged[0]
    assert torch.allclose(weights(state.model), weights(model), atol=1e-6)


def head_and_body(model: Any, plan: Any) -> list[dict[str, Any]]:
    head = list(model.layers[-1].parameters())
    body = [p for p in model.parameters() if all(p is not other for other in head)]
    return [{"params": body}, {"params": head, "lr_scale": 10.0, "decays": False}]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda model, plan: [{"params": list(model.parameters())[:-1]}], "layers.4.bias must be in exactly one"),
        (lambda model, plan: [{"params": model.parameters()}, {"params": [model.layers[0].weight]}], "layers.0.weight"),
        (lambda model, plan: [{"params": [*model.parameters(), nn.Parameter(torch.ones(1))]}], "1 parameter of"),
    ],
)
def test_groups_that_forget_or_repeat_a_parameter_are_refused_by_its_name(pack, groups, said):
    with pytest.raises(TrainError, match=said):
        TrainState(toy.with_(groups=groups), pack, toy.PLAN)


@pytest.mark.parametrize("micro", [1, 5])
def test_micro_batches_give_the_gradient_of_the_whole_batch_divided_by_its_true_count(pack, micro):
    """Micro-batches with unequal numbers of counted items: the mean over items, not the mean of means."""

    def weighted(model, batch, plan):
        each = nn.functional.cross_entropy(model(batch), batch["label"], reduction="none")
        counted = batch["label"] > 0  # some micro-batches count few, or none
        return (each * counted).sum(), counted.sum()

    task = toy.with_(model=lambda card, plan: Linear(), loss=weighted)
    plan = toy.PLAN.replace(epochs=1, clip_norm=None, optimizer="sgd")
    whole, parts = TrainState(task, pack, plan), TrainState(task, pack, plan.replace(micro_batch_size=micro))
    assert losses(whole, pack) == pytest.approx(losses(parts, pack), abs=1e-5)
    assert torch.allclose(weights(whole.model), weights(parts.model), atol=1e-6)


def test_steps_in_which_nothing_counts_have_no_loss_neither_nan_nor_the_best_of_all(pack):
    task = toy.with_(loss=lambda model, batch, plan: (model(batch).sum() * 0.0, torch.tensor(0)))
    state = TrainState(task, pack, toy.PLAN.replace(epochs=1))
    rows = [record.values for record in train(task, state, pack) if record.kind in ("step", "epoch") and record.values]
    assert rows
    assert not [row for row in rows if {"loss", "train_loss"} & {*row}]
    assert torch.isfinite(weights(state.model)).all()


class Tied(nn.Module):
    """Two layers that share their weights."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.other.weight = self.one.weight

    def forward(self, batch):
        return self.head(self.other(self.one(batch["x"])))


@pytest.mark.parametrize("model", [toy.model, lambda card, plan: Tied()], ids=["toy", "tied"])
def test_the_moving_average_is_what_is_evaluated(pack, model):
    state = TrainState(toy.with_(model=model), pack, toy.PLAN.replace(ema=0.9))
    shadow = torch.zeros(0)
    for record in train(state.task, state, pack):
        if record.kind == "step":
            now = weights(state.model).clone()
            shadow = now if state.step == 1 else shadow * 0.9 + now * 0.1
    assert state.evaluated is not state.model
    assert torch.allclose(weights(state.evaluated), shadow, atol=1e-5)


@pytest.mark.full  # a minute of compilation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_channels_last_and_compile_keep_the_loss(pack):
    plan = toy.PLAN.replace(epochs=1, dropout=0.0)  # the compiler draws its dropout from numbers of its own
    expected = losses(TrainState(toy, pack, plan), pack)
    found = losses(TrainState(toy, pack, plan.replace(channels_last=True, compile=True)), pack)
    assert found == pytest.approx(expected, rel=1e-4)


# -- memory that runs out, and losses that are lost


def test_out_of_memory_in_evaluation_is_said_and_what_training_halved_evaluation_takes_too(pack):
    """Else a run that fits by halves would end at its first evaluation."""
    seen = []

    def loss(model, batch, plan):
        seen.append(len(batch["x"]))
        if len(batch["x"]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return toy.loss(model, batch, plan)

    state = TrainState(toy.with_(loss=loss), pack, toy.PLAN.replace(epochs=1))
    assert losses(state, pack)
    assert seen[0] == 16 > max(seen[1:])
    with pytest.raises(TrainError, match=r"out of memory evaluating 16 samples \(.*\); set a smaller micro_batch_size"):
        nb.evaluate(state, pack, "val")


def nan_from(step: int):
    """A loss that is no number from that step on."""
    calls = []

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        calls.append(isinstance(model, nn.Module))
        return (total * float("nan") if sum(calls) >= step and calls[-1] else total), count

    return loss


def test_a_lost_loss_is_an_error_that_names_the_steps(pack):
    with pytest.raises(Diverged, match=r"nan in steps \d+ to \d+") as caught:
        losses(TrainState(toy.with_(loss=nan_from(20)), pack, toy.PLAN), pack)
    assert caught.value.steps[0] <= 20 <= caught.value.steps[1]


def test_a_loss_lost_after_the_last_log_step_of_an_epoch_does_not_end_the_epoch(pack):
    plan = toy.PLAN.replace(batch_size=5, epochs=1)
    steps = [r for r in train(toy, TrainState(toy, pack, plan), pack) if r.kind == "step"]
    assert not steps[-1].values
    state = TrainState(toy.with_(loss=nan_from(len(steps))), pack, plan)
    with pytest.raises(Diverged, match="became non-finite in steps"):
        losses(state, pack)
    assert state.epoch == 0


# -- evaluation


def test_evaluation_is_exact_whatever_the_batch_size(pack):
    """SYSTEMS §2: the guide's test script counted batches but scored one sample of each."""
    seen = []
    spied = toy.with_(metrics=lambda outputs, batch: (seen.append(len(outputs)), toy.metrics(outputs, batch))[1])
    state = TrainState(spied, pack, toy.PLAN)
    model = state.model
    found = [nb.evaluate(state, pack, "val", batch_size=n) for n in (1, 7, 100)]
    assert sum(seen) == 3 * len(pack.ids("val")) > 30
    slow = [toy.forward_one(model, pack, i) == int(pack.sample(i)["label"][0]) for i in pack.ids("val")]
    for values in found:
        assert values["accuracy"] == sum(slow) / len(slow)
        assert values["loss"] == pytest.approx(found[0]["loss"], abs=1e-6)


def test_train_mode_returns_after_evaluation_and_validation_is_not_augmented(pack):
    modes, augmented = [], []

    def batch(raw, plan, draws):
        augmented.append(draws is not None)
        return toy.batch(raw, plan, draws)

    def loss(model, batch, plan):
        modes.append(model.training if isinstance(model, nn.Module) else "evaluation")
        return toy.loss(model, batch, plan)

    task = toy.with_(batch=batch, loss=loss)
    kinds = [record.kind for record in train(task, TrainState(task, pack, toy.PLAN.replace(epochs=2)), pack)]
    assert kinds.count("epoch") == 2
    assert "evaluating" in kinds
    assert set(modes) == {True, "evaluation"}
    assert augmented == [mode is True for mode in modes]


def test_early_stop_and_plateau_follow_the_metric(pack):
    flat = toy.with_(metrics=lambda outputs, batch: {"accuracy": (1, 2)})
    state = TrainState(flat, pack, toy.PLAN.replace(epochs=50, schedule="plateau", patience=2, early_stop=5))
    epochs = [r for r in train(flat, state, pack) if r.kind == "epoch"]
    assert state.stopped == "early stop: accuracy did not improve in 5 evaluations"
    assert [e.values["lr"] for e in epochs] == pytest.approx([0.01, 0.01, 0.01, 0.001, 0.001, 0.0001])


def test_evaluation_comes_every_n_epochs_and_at_the_last(pack):
    state = TrainState(toy, pack, toy.PLAN.replace(epochs=5, eval_every=2))
    evaluated = [r.epoch for r in train(toy, state, pack) if r.kind == "epoch" and "val_loss" in r.values]
    assert evaluated == [1, 3, 4]


def test_a_first_evaluation_that_is_no_number_is_not_the_best_for_ever(pack):
    values = iter([float("nan"), 1.0])
    task = toy.with_(metrics=lambda *_: {"accuracy": (next(values), 1)})
    state = TrainState(task, pack, toy.PLAN.replace(epochs=2, batch_size=100))  # one batch evaluates all
    losses(state, pack)
    assert state.best.value == 1.0


def test_a_best_that_names_no_metric_is_said_so(pack):
    with pytest.raises(TrainError, match="BEST is 'acc', but its metrics are loss, accuracy"):
        losses(TrainState(toy.with_(BEST="acc"), pack, toy.PLAN), pack)


# -- a changed plan


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("kind", ["step", "evaluating", "epoch"])
def test_settings_changed_while_it_trains_act_at_the_next_step_and_leave_a_row(pack, kind):
    state = TrainState(toy.with_(groups=head_and_body), pack, toy.PLAN.replace(epochs=2, schedule="constant"))
    changes, before, after = [], [], []
    for record in train(state.task, state, pack):
        if record.kind == "change":
            changes.append(record.values["what"])
        elif record.kind == "step":
            (after if changes else before).append([group["lr"] for group in state.optimizer.param_groups])
        if record.kind == kind and state.step > 4 and state.plan is state.applied and not changes:
            state.plan = state.plan.replace(lr=0.005, weight_decay=0.1, amp="fp16", batch_size=9)
    assert changes == ["batch_size 16 → 9, lr 0.01 → 0.005, weight_decay 0 → 0.1, amp off → fp16"]
    assert all(lrs == pytest.approx([0.01, 0.1]) for lrs in before)
    assert all(lrs == pytest.approx([0.005, 0.05]) for lrs in after)
    assert before
    assert after
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.1, 0.0]
    assert state.scaler is not None


@pytest.mark.parametrize("knobs", [{"optimizer": "sgd"}, {"hidden": 3}, {"seed": 1}, {"feed": "streamed"}])
def test_a_setting_that_cannot_change_is_refused_by_name_and_changes_nothing(pack, knobs):
    state = TrainState(toy, pack, toy.PLAN)
    steps = train(toy, state, pack)
    next(steps)
    state.plan = state.plan.replace(**knobs)
    with pytest.raises(TrainError, match=f"Plan.{next(iter(knobs))} cannot change in a started run"):
        next(steps)
    assert state.plan == toy.PLAN


def test_what_cannot_be_trained_is_refused_before_the_first_step(tmp_path, pack):
    with pytest.raises(TrainError, match=r"batch_size 5000 is larger than the train split \(\d+ samples\); set it to"):
        losses(TrainState(toy, pack, toy.PLAN.replace(batch_size=5000)), pack)
    single = toy.make_pack(tmp_path, count=1)
    with pytest.raises(TrainError, match=r"training needs at least 2 samples, the train split has [01] of 1; pack"):
        losses(TrainState(toy, single, toy.PLAN.replace(batch_size=1)), single)
    with pytest.raises(TrainError, match="Net has no parameter that requires a gradient"):
        TrainState(toy.with_(model=lambda card, plan: toy.Net(4, 0.0).requires_grad_(False)), pack, toy.PLAN)
    with pytest.raises(TrainError, match=r"Plan.graph replays CUDA graphs, but this device is cpu"):
        TrainState(toy, pack, toy.PLAN.replace(graph=True), device="cpu")


def test_threads_are_the_plans_while_it_trains_and_the_users_before_and_after(pack):
    seen = []

    def loss(model, batch, plan):
        seen.append(torch.get_num_threads())
        return toy.loss(model, batch, plan)

    before = torch.get_num_threads()
    try:
        for mine, plans in ((1, None), (1, 2), (2, None)):
            torch.set_num_threads(mine)
            assert losses(TrainState(toy.with_(loss=loss), pack, toy.PLAN.replace(epochs=1, threads=plans)), pack)
            assert {*seen} == {plans or mine}
            assert torch.get_num_threads() == mine
            seen.clear()
    finally:
        torch.set_num_threads(before)
