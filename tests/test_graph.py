"""Plan.graph: a step is recorded once and repeated on the same memory. On a CPU a tape stands in for a CUDA graph; it
repeats exactly the recorded operations, so whatever a step reads or makes anywhere else would show in its bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import own
import pytest
import torch
import toy
from tape import REFUSED, Tape
from test_launches import CASES
from torch import nn

import nbtools as nb
from nbtools.measure import Stepper
from nbtools.measure.profile import Tried
from nbtools.measure.stepper import untouched
from nbtools.measure.trials import Change
from nbtools.train import MOST_GRAPHS, attempt, device, graph

EAGER = 99  # a warm-up longer than any run here
PLAN = toy.PLAN.replace(graph=True, ema=0.9)


@pytest.fixture(autouse=True)
def taped(monkeypatch):
    monkeypatch.setattr(device, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(graph, "Recorder", Tape)


def same(ours: nb.TrainState, theirs: nb.TrainState) -> list[str]:
    """The names of what differs, if only in one bit."""
    expected = theirs.tensors()
    return [name for name, tensor in ours.tensors().items() if not torch.equal(tensor, expected[name])]


def graphs_of(state: nb.TrainState) -> graph.Graphs:
    assert state.graphs is not None
    return state.graphs


# -- tasks


def stepped(name: str, steps: int, **settings: Any) -> tuple[list[float], nb.TrainState]:
    """Steps on batches of their own, over several epochs and with an lr that falls; every second batch of clips is
    shorter."""
    case = CASES[name]
    torch.manual_seed(0)
    card, raw = case.data()
    size = len(raw["label"])
    plan = case.task.Plan(batch_size=size, epochs=9, graph=True, **case.settings, **settings)
    state, losses = nb.TrainState(case.task, card, plan, "cpu"), []
    for step in range(steps):
        torch.manual_seed(step)
        raw = case.data()[1]
        if "x_length" in raw and step % 2:
            raw = {key: each.clamp(max=32) if "_length" in key else each[:, :32] for key, each in raw.items()}
        state.position.epoch, state.position.samples = step // 3, step * size
        loss_sum, count = attempt(state, {**raw, "id": torch.arange(size) + 10 * step}, 3 * size)
        losses.append(float(loss_sum) / float(count))
    return losses, state


MIXED: dict[str, Any] = {"amp": "bf16", "clip_norm": 0.5, "ema": 0.9, "channels_last": True}
PARTED: dict[str, Any] = {"optimizer": "sgd", "micro_batch_size": 3, "clip_norm": 0.5}
slow = pytest.mark.full


@pytest.mark.parametrize("settings", [MIXED, pytest.param(PARTED, marks=slow)], ids=["mixed", "parted"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("captcha small", 1),
        ("sign with all settings", 2),
        ("segment slim", 1),
        *(pytest.param(name, 1, marks=slow) for name in ("captcha guide", "segment bisenetv2")),
        pytest.param("sign transformer", 2, marks=slow),
    ],
)
def test_replayed_steps_of_every_task_without_ctc_have_the_bits_of_eager_ones(name, shapes, settings, monkeypatch):
    steps = 4 + 3 * shapes
    losses, state = stepped(name, steps, **settings)
    assert (graphs_of(state).off, graphs_of(state).replayed) == ("", steps - graph.WARM_UP * shapes)
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    expected, eager = stepped(name, steps, **settings)
    assert graphs_of(eager).replayed == 0
    assert losses == expected
    assert same(state, eager) == []
    assert len(set(losses)) == len(losses)


# -- runs


def trained(task: Any, pack: nb.Pack, plan: nb.Plan, act: Any = None) -> tuple[list[str], nb.TrainState]:
    """A run, and what it tells. act: called with the state after each step."""
    random.seed(0)
    np.random.seed(0)
    state, told = nb.TrainState(task, pack, plan), []
    for record in nb.train(task, state, pack):
        told += [record.values["what"]] if record.kind in ("event", "change") else []
        if record.kind == "step" and act is not None:
            act(state)
    return told, state


def slower(state: nb.TrainState) -> None:
    if state.step == 12:
        state.plan = state.plan.replace(lr=state.plan.lr / 4, weight_decay=0.1)


def test_a_run_with_evaluations_short_batches_and_a_changed_plan_has_the_bits_of_an_eager_one(pack, monkeypatch):
    passes = []

    def loss(model, batch, plan):
        passes.append(isinstance(model, nn.Module) and model.training)
        return toy.loss(model, batch, plan)

    task = toy.with_(loss=loss)
    told, state = trained(task, pack, PLAN, slower)
    assert told == ["lr 0.01 → 0.0025, weight_decay 0 → 0.1"]
    assert sum(passes) == 2 * (graph.WARM_UP + 1) + 3, "of each plan a warm-up and a recording; each epoch's last batch"
    assert graphs_of(state).replayed == state.step - 2 * graph.WARM_UP - 3
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(task, pack, PLAN, slower)[1]) == []


def test_an_lr_in_a_tensor_is_a_float32_and_nothing_else_differs_from_a_run_without_graphs(pack):
    """lr 2⁻⁷ is the same number in both; 0.01 is not."""

    def after_two_steps(**settings: Any) -> nb.TrainState:
        state = nb.TrainState(toy, pack, PLAN.replace(schedule="constant", **settings))
        for _ in nb.train(toy, state, pack):
            if state.step == 2:
                break
        return state

    assert same(after_two_steps(lr=2**-7), after_two_steps(lr=2**-7, graph=False)) == []
    rounded, plain = after_two_steps(lr=0.01), after_two_steps(lr=0.01, graph=False)
    for ours, theirs in zip(rounded.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["classify", "mixup", "regress"])
def test_tasks_of_ones_own_are_replayed_with_the_bits_of_eager_steps(tmp_path, name, monkeypatch):
    task, data = own.TASKS[name]
    pack, plan = own.packed(data, tmp_path), own.PLAN.replace(graph=True, epochs=3)
    told, state = trained(task, pack, plan)
    assert told == []
    assert graphs_of(state).replayed > 2
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(task, pack, plan)[1]) == []


def test_a_state_that_is_loaded_amid_a_run_goes_on_with_its_own_moments(pack, monkeypatch):
    def rolled_back() -> nb.TrainState:
        state, saved = nb.TrainState(toy, pack, PLAN), None
        for record in nb.train(toy, state, pack):
            if record.kind == "step" and state.step == 6:
                saved = {name: tensor.clone() for name, tensor in state.tensors().items()}, state.facts()
            if state.step == 8:
                break
        assert saved is not None
        state.load(*saved)
        for _ in nb.train(toy, state, pack):
            continue
        return state

    state = rolled_back()
    assert graphs_of(state).replayed > 10
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, rolled_back()) == []


# -- what cannot be replayed


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("settings", [{"amp": "fp16"}, {"checkpoint_activations": True}])
def test_what_cannot_be_recorded_says_so_and_runs_as_without(pack, settings):
    told, state = trained(toy, pack, PLAN.replace(**settings))
    assert [each.partition(": ")[0] for each in told] == ["graph off"]
    assert graphs_of(state).replayed == 0


def test_a_compiled_step_is_not_recorded_as_what_it_reads_cannot_be_seen():
    assert graph.unrecordable(PLAN.replace(compile=True)).startswith("of a compiled step it cannot be seen")
    assert not graph.unrecordable(PLAN)


@pytest.mark.usefixtures("fp16_on_cpu")
def test_a_change_to_fp16_while_it_trains_says_that_steps_are_no_longer_recorded(pack):
    def change(state: nb.TrainState) -> None:
        if state.step in (8, 12):
            state.plan = state.plan.replace(amp="fp16" if state.step == 8 else "off")

    told, state = trained(toy, pack, PLAN, change)
    why = "graph off: fp16 decides on the host whether a step counts; each kernel is launched by the host"
    assert told == ["amp off → fp16", why, "amp fp16 → off"]
    assert graphs_of(state).replayed == state.step - 4 - 2 * graph.WARM_UP - 2, "two epochs end outside"


def reading(batch: Any) -> float:
    return 1 + 0 * float(batch["x"].sum())


WAITING: dict[str, tuple[Any, str]] = {
    "a value": (reading, "the host waits for the device at _local_scalar_dense"),
    "chosen rows": (lambda batch: len(batch["x"][batch["label"] >= 0]) / 16, "the host waits for the device at index"),
    "a tensor": (lambda _: torch.tensor(1.0), "the host waits for the device at lift_fresh"),
    "random": (lambda _: 1 + random.random(), "the step draws random numbers on the host"),
    "numpy": (lambda _: 1 + np.random.rand(), "the step draws random numbers on the host"),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_step_that_needs_the_host_is_told_and_never_recorded(pack, name, monkeypatch):
    factor, why = WAITING[name]

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        return total * factor(batch), count

    task = toy.with_(loss=loss)
    told, state = trained(task, pack, PLAN)
    assert told == [f"graph off: {why}; each kernel is launched by the host"]
    assert graphs_of(state).replayed == 0
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(task, pack, PLAN)[1]) == []


class Curriculum(nn.Module):
    """A number of its own that every forward pass raises."""

    def __init__(self, card, plan):
        super().__init__()
        self.network, self.share = toy.model(card, plan), 0.0

    def forward(self, batch):
        self.share += 1 / 64
        return self.network(batch) * self.share


def test_a_number_that_a_module_changes_in_each_step_is_found_and_goes_on_changing(pack, monkeypatch):
    task = toy.with_(model=Curriculum)
    told, state = trained(task, pack, PLAN)
    why = "the step changes Curriculum.share on the host"
    assert told == [f"graph off: {why}; each kernel is launched by the host"]
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(task, pack, PLAN)[1]) == []


def scheduled(weights: list[float]) -> Any:
    """A weight of the loss that each step takes from a list."""

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        if isinstance(model, nn.Module) and model.training:
            weights.append(weights.pop(0))
        return total * weights[0], count

    return loss


def smoothed(mean: list[torch.Tensor]) -> Any:
    """A tensor that each step replaces by another, which the next one reads."""

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        before = mean[0]
        mean[0] = 0.9 * before + 0.1 * total.detach()
        return total / (1 + before), count

    return loss


class Logging(nn.Module):
    """A list of its own that every forward pass makes longer."""

    def __init__(self, card, plan):
        super().__init__()
        self.network, self.seen = toy.model(card, plan), [0]

    def forward(self, batch):
        self.seen.append(len(batch["x"]))
        return self.network(batch)


CHANGING: dict[str, tuple[Any, str]] = {
    "numbers of a list": (lambda: {"loss": scheduled([1.0, 0.5, 0.25])}, "mul gets 0.25, then 1.0"),
    "a tensor": (lambda: {"loss": smoothed([torch.zeros(())])}, "mul gets another tensor in each step"),
    "a list": (lambda: {"model": Logging}, "the step changes Logging.seen on the host"),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_a_step_replaces_for_the_next_is_found_and_goes_on_changing(pack, name, monkeypatch):
    parts, why = CHANGING[name]
    told, state = trained(toy.with_(**parts()), pack, PLAN)
    assert told == [f"graph off: {why}; each kernel is launched by the host"]
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(toy.with_(**parts()), pack, PLAN)[1]) == []


ENDS = {
    "memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), "CUDA out of memory"),
    "capture": (RuntimeError(f"CUDA error: {REFUSED}\nFor debugging"), REFUSED),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_recording_fails_the_run_goes_on_without_and_no_step_is_lost(pack, name, monkeypatch):
    error, why = ENDS[name]

    class Failing(Tape):
        def capture(self, act):
            super().capture(act)
            raise error

    monkeypatch.setattr(graph, "Recorder", Failing)
    told, state = trained(toy, pack, PLAN)
    assert len(told) == 1
    assert told[0].startswith("graph off: ")
    assert why in told[0]
    assert "\n" not in told[0]
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(toy, pack, PLAN)[1]) == []


def test_out_of_memory_halves_the_batch_and_its_steps_are_recorded_anew(pack, monkeypatch):
    full = []

    def hungry(model, batch, plan):
        if full and isinstance(model, nn.Module) and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return toy.loss(model, batch, plan)

    def fill(state: nb.TrainState) -> None:
        full[:] = [state.step] if state.step >= 8 else []  # at the end of the first epoch, by its short batch

    task = toy.with_(loss=hungry)
    told, state = trained(task, pack, PLAN, fill)
    halved = ["6 → 3 for this step", "16 → 8", "8 → 4"]
    assert told[1:] == [f"out of memory: micro batch {sizes}; effective batch and lr unchanged" for sizes in halved]
    assert graphs_of(state).replayed == state.step - 2 * graph.WARM_UP - 3
    full.clear()
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(task, pack, PLAN, fill)[1]) == []


def test_only_so_many_shapes_are_recorded_which_is_said_once_and_no_short_batch():
    plan, events = nb.Plan(batch_size=4), list[str]()

    def replayed(samples: int, *widths: int) -> int:
        graphs = graph.Graphs(torch.device("cpu"), events, plan)
        for width in widths:
            for step in range(graph.WARM_UP + 2):
                raw = {"x": torch.full((width,), float(step)), "id": torch.arange(samples)}
                total, _ = graphs.step(raw, lambda raw: (7 * raw["x"].sum(), 1))
                assert float(total) == 7 * width * step
        return graphs.replayed

    assert replayed(3, 5) == 0
    assert replayed(4, *range(1, MOST_GRAPHS + 1)) == 2 * MOST_GRAPHS
    assert events == []
    assert replayed(4, *range(1, MOST_GRAPHS + 4)) == 2 * MOST_GRAPHS
    assert events == ["graph: only 8 shapes of batches are recorded; of others each kernel is launched by the host"]


def test_a_tape_repeats_what_it_recorded_and_nothing_of_what_the_host_did():
    """So what these tests would find: a number that changes, and a tensor that is replaced."""
    values, times = torch.zeros(2), [1.0]
    replay, found = Tape(torch.device("cpu")).capture(lambda: values.add_(times[0]) * 2)
    assert values.tolist() == [0, 0], "recording has no effect"
    times[0] = 5.0
    replay()
    replay()
    assert values.tolist() == [2, 2]
    assert found.tolist() == [4, 4]


# -- the advice


def test_advice_tries_it_in_turns_and_says_where_a_step_cannot_be_recorded(pack, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("nbtools.measure.trials.FASTER", 0.0)  # a tape is no faster

    def tried(task: Any) -> tuple[Tried, Stepper]:
        with untouched(cpu):
            change = Change({"graph": True}, Stepper(task, pack, PLAN.replace(graph=False), cpu))
            found = change.against(0.2)
        assert found is not None
        assert change.stepper is not None
        return found, change.stepper

    found, stepper = tried(toy)
    assert found.ratio > 0
    assert found.agrees
    assert graphs_of(stepper.state).replayed > 0
    found, _ = tried(toy.with_(loss=lambda model, batch, plan: (toy.loss(model, batch, plan)[0] * reading(batch), 16)))
    assert found.failed == "the host waits for the device at _local_scalar_dense"
