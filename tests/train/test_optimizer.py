"""Optimizers and schedules of one's own; and state goes to the parameters of its name, though the network changes."""

import math
from functools import partial
from typing import Any

import own
import pytest
import torch
from acting import QUIET
from problems import points
from test_resume import log, same, trained
from torch import nn

import nbtools as nb
from nbtools.errors import TrainError

PACK = partial(own.packed, "points")
PLAN = nb.Plan(epochs=4, batch_size=16, lr=8e-3, schedule="constant")


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, algorithm 2, with a step size in its groups that grows, and a list in its state."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "d": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"] * group["d"]
            group["d"] *= 1.01
            for p in group["params"]:
                if p.grad is None:
                    continue
                _, [average] = self.state[p].setdefault("averages", ({}, [torch.zeros_like(p)]))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - b1).sign(), alpha=-lr)
                average.lerp_(p.grad, 1 - b2)


def one_cycle(plan):
    """The rise to the peak over 30 % and the fall to its 25e4-th that OneCycleLR makes by default."""

    def factor(t):
        start, end, share = (1 / 25, 1.0, t / 0.3) if t < 0.3 else (1.0, 1 / 25e4, (t - 0.3) / 0.7)
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

    return factor


def two_groups(groups, plan):
    """SGD with Nesterov, whose biases learn ten times as fast."""
    [group] = groups
    parts = [[p for p in group["params"] if (p.dim() == 1) == bias] for bias in (False, True)]
    rates = [{"params": part, "lr": lr} for part, lr in zip(parts, (plan.lr, 10 * plan.lr), strict=True)]
    return torch.optim.SGD(rates, momentum=0.9, nesterov=True)


GIVEN: dict[str, dict[str, Any]] = {
    "Lion": {"optimizer": Lion},
    "two groups": {"optimizer": two_groups},
    "OneCycle": {"schedule": lambda plan: lambda t: torch.tensor(one_cycle(plan)(t))},
    "both": {"optimizer": partial(Lion, weight_decay=0.1), "schedule": one_cycle},
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_own_optimizer_or_schedule_learns_and_the_history_has_its_lr(pack, tmp_path, name):
    run = nb.fit(nb.classify(points, **GIVEN[name]), pack, PLAN, tmp_path / "run", **QUIET)
    assert run.best["val_loss"] < 0.9 * run.history.of("epoch")[0]["val_loss"]
    shape = one_cycle(PLAN) if "schedule" in GIVEN[name] else lambda t: 1.0
    count = pack.splits["train"]
    middles = [(start + min(start + 16, count)) / 2 for start in range(0, count, 16)]  # of an epoch's steps, in samples
    expected = [PLAN.lr * shape((epoch + middle / count) / PLAN.epochs) for epoch in range(4) for middle in middles]
    assert [row["lr"] for row in run.history.of("step")] == pytest.approx(expected)


FIXED = {"optimizer": lambda groups, plan: two_groups(groups, plan.replace(lr=0.01))}  # whatever the plan's lr


@pytest.mark.parametrize("given", [*GIVEN.values(), FIXED], ids=[*GIVEN, "rates of its own"])
def test_interrupted_equals_uninterrupted_after_an_lr_and_a_batch_size_changed(pack, given):
    task, changes = nb.classify(points, **given), {7: {"batch_size": 10, "lr": PLAN.lr / 3}}
    state, history = trained(pack, task, PLAN, changes, {1, 3, 12, 23})
    expected, rows = trained(pack, task, PLAN, changes)
    assert log(history) == log(rows)
    assert same(state, expected)


def test_a_changed_lr_is_a_factor_on_every_group_and_its_weight_decay_is_not_the_plans(pack):
    def after(given, **changes):
        state, _ = trained(pack, nb.classify(points, optimizer=given), PLAN.replace(weight_decay=0.5), {3: changes})
        assert not state.built_in
        return state.optimizer.param_groups

    assert [g["lr"] for g in after(two_groups, lr=PLAN.lr / 3)] == pytest.approx([PLAN.lr / 3, 10 * PLAN.lr / 3])
    [lion] = after(partial(Lion, weight_decay=0.1), lr=PLAN.lr / 3)
    assert (lion["lr"], lion["weight_decay"]) == (pytest.approx(PLAN.lr / 3), 0.1)
    with pytest.raises(TrainError, match=r"Plan\.weight_decay has no effect on the task's own optimizer, got 0.5"):
        after(Lion, weight_decay=0.1)


def test_groups_of_a_task_keep_their_scale_and_their_decay_under_an_own_optimizer(pack):
    task: Any = nb.classify(points, optimizer=partial(Lion, weight_decay=0.1), schedule=lambda plan: lambda t: 0.5)
    task.groups = lambda model, plan: [
        {"params": model[0].parameters(), "betas": (0.5, 0.7)},
        {"params": model[2:].parameters(), "lr": 4 * PLAN.lr, "weight_decay": 0.0},
    ]
    state = nb.TrainState(task, pack, PLAN.replace(epochs=1, warmup_epochs=1, checkpoint_activations=True))
    assert [("no effect" in each, "built-in" in each) for each in state.events] == [(True, False), (False, True)]
    history = list(nb.train(task, state, pack))
    state.plan = state.plan.replace(warmup_epochs=0)
    with pytest.raises(TrainError, match=r"Plan\.warmup_epochs has no effect on the task's own schedule"):
        next(nb.train(task, state, pack))
    assert {record.values["lr"] for record in history if record.kind == "step"} == {PLAN.lr / 2}
    assert [g["lr"] for g in state.optimizer.param_groups] == pytest.approx([PLAN.lr / 2, 2 * PLAN.lr])
    assert [g["weight_decay"] for g in state.optimizer.param_groups] == [0.1, 0.0]
    task.optimizer = nb.classify(points).optimizer
    before = nb.TrainState(task, pack, PLAN)
    after = nb.TrainState(task, pack, PLAN.replace(lr=10 * PLAN.lr))  # as it was changed when the run resumes
    after.load(before.tensors(), before.facts())
    assert [g["lr_scale"] for g in after.optimizer.param_groups] == pytest.approx([1, 4])
    assert [g["betas"] for g in after.optimizer.param_groups] == [(0.5, 0.7), PLAN.betas]


def test_another_optimizer_or_schedule_in_the_folder_of_a_run_is_refused(pack, tmp_path):
    nb.fit(nb.classify(points, optimizer=Lion), pack, PLAN, tmp_path / "run", **QUIET)
    other = nb.classify(points, optimizer=partial(torch.optim.SGD, momentum=0.9), schedule=one_cycle)
    with pytest.raises(nb.NbtoolsError, match=r"optimizer: Lion → SGD\(momentum=0\.9\).*schedule: default → one_cycle"):
        nb.fit(other, pack, PLAN, tmp_path / "run", **QUIET)


class Net(nn.Module):
    def __init__(self, *order: str):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU())
        self.head = nn.Linear(5, 2)
        self._modules = {name: self._modules[name] for name in order}

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd"}, {"ema": 0.9}], ids=["adamw", "sgd", "ema"])
def test_moments_go_to_the_parameters_of_their_name_new_ones_start_without_and_misfits_are_refused(pack, settings):
    """A frozen body, then all trained, with the parameters in another order; and the reverse."""
    frozen, whole, plan = Net("body", "head"), Net("head", "body"), PLAN.replace(epochs=1, **settings)
    frozen.body.requires_grad_(False)
    for before, after in ((frozen, whole), (whole, frozen)):
        old, _ = trained(pack, nb.classify(before), plan, {})
        theirs, state = old.tensors(), nb.TrainState(nb.classify(after), pack, plan.replace(epochs=2))
        state.load(theirs, old.facts())
        ours = {name: tensor for name, tensor in state.tensors().items() if name.startswith("optimizer.")}
        trainable = [name for name, p in after.named_parameters() if p.requires_grad]
        assert {name.removeprefix("optimizer.").rpartition(".")[0] for name in ours} == set(trainable)
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]) if name in theirs else not tensor.any(), name
        said = [event for event in state.events if "without saved optimizer state" in event]
        assert bool(said) == (after is whole)
        assert all("body.0.weight, body.0.bias, body.2.weight and 1 more" in event for event in said)
        list(nb.train(state.task, state, pack))
        assert all(torch.isfinite(p).all() for p in state.model.parameters())
        with pytest.raises(nb.NbtoolsError, match=r"state of head.weight has the shape \(2, 4\).*has \(2, 5\)"):
            state.load({**theirs, "optimizer.head.weight.exp_avg": torch.zeros(2, 4)}, old.facts())


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_steps_are_counted_in_float32_whatever_torchs_default_is(name, tmp_path):
    """CUDA's fused kernels read their bytes as such, and so a bias correction of 0."""
    torch.set_default_dtype(torch.float64)
    try:
        state = nb.TrainState(nb.classify(points(2, 2)), PACK(tmp_path), PLAN.replace(optimizer=name))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {kept["step"].dtype for kept in state.optimizer.state.values()} == {torch.float32}
