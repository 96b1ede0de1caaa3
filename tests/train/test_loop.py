"""The loop: one generator, exact sums, the field's own results; and memory that ends at any allocation of a step."""

import copy
import sys
import traceback
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import toy
from acting import QUIET, acting, refused
from torch import nn
from torch.nn.utils import parameters_to_vector as vector
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.train import Diverged, TrainState, train


def rows(state: TrainState, pack: nb.Pack, kind: str = "step") -> list[nb.Record]:
    return [record for record in train(state.task, state, pack) if record.kind == kind and record.values]


def losses(state: TrainState, pack: nb.Pack) -> list[float]:
    return [row.values["loss"] for row in rows(state, pack) if "loss" in row.values]


def trains(model: Any) -> bool:
    """Whether a loss is computed to train: an evaluation passes a function of its own."""
    return isinstance(model, nn.Module)


def test_training_lowers_the_loss_and_equals_a_plain_loop(pack):
    plan = toy.PLAN.replace(epochs=2, noise=0.0, dropout=0.0, schedule="constant", optimizer="adam", betas=(0.8, 0.9))
    task = acting()
    state = TrainState(task, pack, plan)
    model = copy.deepcopy(state.model).train()
    logged = losses(state, pack)
    optimizer = torch.optim.Adam(model.parameters(), plan.lr, betas=plan.betas, fused=True)
    x, label = torch.from_numpy(pack.arrays["x"]), torch.from_numpy(pack.arrays["label"])[:, 0]
    for _, _, ids in task.seen:
        loss = nn.functional.cross_entropy(model({"x": x[ids]}), label[ids])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm or 0.0)
        optimizer.step()
    assert len(task.seen) == state.step > 0
    assert all(parameter.grad is None for parameter in state.parameters), "memory that the receipt needs"
    assert logged[-1] < 0.8 * logged[0]
    assert torch.allclose(vector(state.model.parameters()), vector(model.parameters()), atol=1e-6)


@pytest.mark.parametrize("micro", [None, 1, 5])
def test_micro_batches_and_small_weights_give_the_gradient_of_the_whole_batch_divided_by_its_true_count(pack, micro):
    def weighted(model, batch, plan):
        each = nn.functional.cross_entropy(model(batch), batch["label"], reduction="none")
        counted = batch["label"] > 0  # some micro-batches count few, or none
        return (each * counted).sum(), counted.sum()

    def light(model, batch, plan):
        total, count = weighted(model, batch, plan)
        return 1e-4 * total[None], (1e-4 * count + 0 * total)[None]  # (1,) each, and a count with a gradient

    plan = toy.PLAN.replace(epochs=1, clip_norm=None, optimizer="sgd")
    whole = TrainState(toy.with_(model=toy.linear, loss=weighted), pack, plan)
    parts = TrainState(toy.with_(model=toy.linear, loss=light), pack, plan.replace(micro_batch_size=micro))
    assert losses(whole, pack) == pytest.approx(losses(parts, pack), abs=1e-5)
    assert torch.allclose(vector(whole.model.parameters()), vector(parts.model.parameters()), atol=1e-6)


def test_steps_in_which_nothing_counts_have_no_loss_neither_nan_nor_the_best_of_all(pack):
    task = toy.with_(loss=lambda model, batch, plan: (model(batch).sum() * 0.0, torch.tensor(0)))
    state = TrainState(task, pack, toy.PLAN.replace(epochs=1))
    logged = [record for record in train(task, state, pack) if record.values]
    assert {row.kind for row in logged} >= {"step", "epoch"}
    assert not [row for row in logged if row.values.keys() & {"loss", "train_loss"}]
    assert torch.isfinite(vector(state.model.parameters())).all()


def test_the_moving_average_is_what_is_evaluated(pack):
    state = TrainState(toy, pack, toy.PLAN.replace(ema=0.9))
    shadow = torch.zeros(0)
    for record in train(toy, state, pack):
        if record.kind == "step":
            now = vector(state.model.parameters()).clone()
            shadow = now if state.step == 1 else shadow * 0.9 + now * 0.1
    assert state.evaluated is not state.model
    assert torch.allclose(vector(state.evaluated.parameters()), shadow, atol=1e-5)


def head_and_body(model: Any, plan: Any) -> list[dict[str, Any]]:
    body, head = model.layers[:-1], model.layers[-1]
    return [{"params": body.parameters()}, {"params": head.parameters(), "lr_scale": 10.0, "decays": False}]


UNTRAINABLE: dict[str, dict[str, Any]] = {  # what is said → hooks of the task and settings
    "layers.4.bias must be in exactly one": {"groups": lambda net, _: [{"params": [*net.parameters()][:-1]}]},
    "1 parameter of": {"groups": lambda net, _: [{"params": [*net.parameters(), nn.Parameter(torch.ones(1))]}]},
    "Net has no parameter .*, and put a list of": {"model": lambda *_: toy.Net(4, 0.0).requires_grad_(False)},
    r"batch_size 5000 is larger than the train split \(\d+ samples\); set it to": {"batch_size": 5000},
    "does not require grad.*; compute the loss in torch only": {"loss": lambda f, x, _: f(x).argmax(1).float().mean()},
    r"loss must return .*; got a float; .* without \.item\(\)": {"loss": lambda f, x, _: f(x).mean().item()},
    "; BatchNorm needs two": {"loss": lambda f, x, _: nn.BatchNorm1d(4)(f(x)).sum(), "batch_size": 1},
    "BEST is 'acc', but its metrics are loss, accuracy": {"BEST": "acc"},
}


@pytest.mark.parametrize("said", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused_by_name(pack, said):
    settings = {name: value for name, value in UNTRAINABLE[said].items() if hasattr(toy.PLAN, name)}
    with pytest.raises(TrainError, match=said):
        losses(TrainState(toy.with_(**UNTRAINABLE[said]), pack, toy.PLAN.replace(epochs=1, **settings), "cpu"), pack)


def test_a_split_of_one_sample_trains_nothing_nor_does_another_pack_than_the_states(tmp_path, pack):
    single = toy.make_pack(tmp_path, count=1)
    refused(TrainError, "is not the pack of this state; make another", losses, TrainState(toy, pack, toy.PLAN), single)
    with pytest.raises(TrainError, match=r"training needs at least 2 samples, the train split has [01] of 1; pack"):
        losses(TrainState(toy, single, toy.PLAN.replace(batch_size=1)), single)


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


@pytest.mark.parametrize(("batch_size", "step"), [(16, 20), (5, 27)], ids=["amid a run", "after the last log step"])
def test_a_lost_loss_is_an_error_that_names_the_steps_and_ends_no_epoch(pack, batch_size, step):
    calls = []

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        calls.append(trains(model))
        return (total * float("nan") if sum(calls) >= step and calls[-1] else total), count

    plan = toy.PLAN.replace(batch_size=batch_size)
    epoch, left = divmod(step, -(-pack.splits["train"] // batch_size))
    assert (left == 0) == (batch_size == 5), "the last step of an epoch"
    state = TrainState(toy.with_(loss=loss), pack, plan)
    with pytest.raises(Diverged, match=r"nan in steps \d+ to \d+|became non-finite in steps") as caught:
        losses(state, pack)
    assert caught.value.steps[0] <= step <= caught.value.steps[1]
    assert state.epoch == epoch - (left == 0)


def test_evaluation_is_exact_whatever_the_batch_size(pack):
    seen = []
    spied = toy.with_(metrics=lambda outputs, batch: (seen.append(len(outputs)), toy.metrics(outputs, batch))[1])
    state = TrainState(spied, pack, toy.PLAN)
    ids = pack.ids("val")
    found = [nb.evaluate(state, pack, "val", batch_size=n) for n in (1, 7, 100)]
    assert sum(seen) == 3 * len(ids) > 30
    with torch.no_grad():
        one_by_one = [int(state.model.eval()({"x": x[None]}).argmax()) for x in torch.from_numpy(pack.arrays["x"][ids])]
    for values in found:
        assert values["accuracy"] == (pack.arrays["label"][ids, 0] == one_by_one).mean()
        assert values["loss"] == pytest.approx(found[0]["loss"], abs=1e-6)


def test_every_n_epochs_and_at_the_last_comes_an_evaluation_not_augmented_after_which_train_mode_returns(pack):
    modes, augmented = [], []
    task = toy.with_(
        batch=lambda *given: augmented.append(given[2] is not None) or toy.batch(*given),
        loss=lambda *given: modes.append(trains(given[0]) and given[0].training) or toy.loss(*given),
    )
    records = rows(TrainState(task, pack, toy.PLAN.replace(epochs=5, eval_every=2)), pack, "epoch")
    assert [row.epoch for row in records if "val_loss" in row.values] == [1, 3, 4]
    assert augmented == modes
    assert {*modes} == {True, False}


def test_early_stop_and_plateau_follow_the_metric_and_count_evaluations(pack):
    flat = toy.with_(metrics=lambda outputs, batch: {"accuracy": (1, 2)})
    plan = toy.PLAN.replace(epochs=50, schedule="plateau", patience=2, early_stop=5, eval_every=2)
    state = TrainState(flat, pack, plan)
    lrs = [row.values["lr"] for row in rows(state, pack, "epoch")]
    assert state.stopped == "early stop: accuracy did not improve in 5 evaluations"
    assert lrs == pytest.approx([0.01] * 6 + [0.001] * 4 + [0.0001] * 2)


def test_the_loop_lets_cudnn_tune_for_whole_batches_that_are_to_come_and_not_for_an_epochs_last(pack, monkeypatch):
    seen = []
    monkeypatch.setattr(sys.modules[train.__module__], "autotuning", lambda *of: seen.append(of[2]) or nullcontext())
    rows(TrainState(toy, pack, toy.PLAN.replace(epochs=2)), pack, "epoch")
    each = -(-pack.splits["train"] // toy.PLAN.batch_size)
    assert seen == [2 * each] * (each - 1) + [0] + [each] * (each - 1) + [0]


@pytest.mark.parametrize(
    ("values", "scored", "best", "stale"),
    [([0.5, 0.7, 0.7, 0.7, 0.7], [1.0, 0.5, 0.6, 0.4, 0.4], [1, 2, 4, 5], 3), ([float("nan"), 1.0], [1, 1], [2], 0)],
)
def test_ties_go_to_the_lower_loss_then_to_the_later_epoch_but_end_no_patience(pack, values, scored, best, stale):
    """And a first evaluation that is no number is not the best for ever."""
    given, losses = iter(values), iter(scored)

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return (total if trains(model) else total * 0 + next(losses) * count), count

    task = toy.with_(loss=loss, metrics=lambda *_: {"accuracy": (next(given), 1)})
    state = TrainState(task, pack, toy.PLAN.replace(epochs=len(values), batch_size=100))  # one batch evaluates all
    chosen = []
    for record in train(task, state, pack):
        if record.kind == "epoch" and state.improved:
            chosen.append(record.epoch + 1)
            state.improved = False
    assert (chosen, state.best.value, state.best.stale) == (best, values[-1], stale)


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("kind", ["step", "evaluating", "epoch"])
def test_settings_changed_while_it_trains_act_at_the_next_step_and_leave_a_row(pack, kind):
    state = TrainState(toy.with_(groups=head_and_body), pack, toy.PLAN.replace(epochs=2, schedule="constant"))
    changes, before, after = [], set(), set()
    for record in train(state.task, state, pack):
        if record.kind == "change":
            changes.append(record.values["what"])
        elif record.kind == "step":
            (after if changes else before).add(tuple(group["lr"] for group in state.optimizer.param_groups))
        if record.kind == kind and state.step > 4 and state.plan is state.applied and not changes:
            state.plan = state.plan.replace(lr=0.005, weight_decay=0.1, amp="fp16", batch_size=9)
    assert changes == ["batch_size 16 → 9, lr 0.01 → 0.005, weight_decay 0 → 0.1, amp off → fp16"]
    assert (before, after) == ({(0.01, 0.1)}, {(0.005, 0.05)})
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.1, 0.0]
    assert state.scaler.is_enabled()


@pytest.mark.parametrize("knobs", [{"optimizer": "sgd"}, {"hidden": 3}, {"seed": 1}, {"feed": "streamed"}])
def test_a_setting_that_cannot_change_is_refused_by_name_and_changes_nothing(pack, knobs):
    state = TrainState(toy, pack, toy.PLAN)
    steps = train(toy, state, pack)
    next(steps)
    state.plan = state.plan.replace(**knobs)
    refused(TrainError, f"Plan.{next(iter(knobs))} cannot change in a started run", next, steps)
    assert state.plan == toy.PLAN


ENDS = (
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
)
"""What a full GPU raises: torch's allocator, cuBLAS and cuDNN, each of the last two a plain RuntimeError."""


class Full(TorchDispatchMode):
    """Memory that ends once, at the n-th operation of training's forward and backward passes that allocates: one that
    returns a tensor which is none of its arguments. What follows them allocates less than they free."""

    def __init__(self, at: int):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        makes = any(value.alias_info is None and "Tensor" in str(value.type) for value in func._schema.returns)
        makes &= any(frame.name == "gradients" for frame in traceback.extract_stack(limit=60))
        self.count += makes
        if makes and self.count == self.at:
            kind, said = ENDS[self.at % len(ENDS)]
            raise kind(said)
        return func(*args, **(kwargs or {}))


def with_memory_for(allocations: int, pack: nb.Pack) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether memory ended amid an epoch with its evaluation, and what it left behind."""
    state = TrainState(toy.with_(model=toy.linear), pack, toy.PLAN.replace(epochs=1, ema=0.9), "cpu")
    with Full(allocations) as full:
        list(train(state.task, state, pack))
    return full.count >= allocations, {name: value.clone() for name, value in state.tensors().items()}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("few"), count=60)


def test_memory_may_end_at_any_allocation_and_training_goes_on_as_if_it_had_not(few):
    _, expected = with_memory_for(10**9, few)
    at, ended = 1, True
    while ended:
        ended, found = with_memory_for(at, few)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
        at += 13
    assert at > 50


def ended(pack: nb.Pack, times: int, **names: Any) -> tuple[list[str], torch.Tensor]:
    """What was said, and the weights, after three epochs of 16, 16 and 10; memory ends so often on the sixth batch."""

    def loss(model, batch, plan):
        seen.append(1 < len(batch["x"]) <= 10 and isinstance(model, nn.Module) and model.training)
        if seen[-1] and 1 < sum(seen) <= 1 + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return toy.loss(model, batch, plan)

    seen: list[bool] = []
    state = TrainState(toy.with_(loss=loss, **names), pack, toy.PLAN.replace(dropout=0.0), "cpu")
    told = [row.values["what"] for row in train(state.task, state, pack) if row.kind == "event"]
    return told, vector(state.model.parameters())


def test_a_later_batch_that_does_not_fit_is_halved_until_it_does_and_the_weights_are_the_same(few):
    told, weights = ended(few, 2, model=toy.linear)
    halved = ("10 → 5", "5 → 2")
    assert told == [f"out of memory: micro batch {sizes}; effective batch and lr unchanged" for sizes in halved]
    assert torch.allclose(weights, ended(few, 0, model=toy.linear)[1], 0, 1e-5)


def test_where_memory_never_suffices_for_two_samples_or_the_network_it_is_said_with_what_to_do(few, tmp_path):
    refused(TrainError, "out of memory with two samples at a time, and BatchNorm needs two", ended, few, 10**6)
    model = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with pytest.raises(TrainError, match="out of memory before the first step"):
        nb.fit(toy.with_(model=model, PLAN=toy.PLAN), few, toy.PLAN, tmp_path / "run", **QUIET)
