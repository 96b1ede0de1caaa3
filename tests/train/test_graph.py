"""Plan.graph: a step is recorded once and repeated on the same memory. On a CPU a tape stands in for a CUDA graph; it
repeats exactly the recorded operations, so whatever a step reads or makes anywhere else would show in its bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import toy
from cases import AUGMENT, CASES
from tape import Tape, synchronizing
from torch import nn

import nbtools as nb
from nbtools.data import gather
from nbtools.errors import TrainError
from nbtools.train import device, graph, train_step

EAGER = 99  # a warm-up longer than any run here
PLAN = toy.PLAN.replace(graph=True, ema=0.9)
HOST = "; each kernel is launched by the host"


@pytest.fixture(autouse=True)
def taped(monkeypatch):
    monkeypatch.setattr(device, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(graph, "Recorder", Tape)
    monkeypatch.setattr(graph, "synchronizing", synchronizing)


def same(ours: nb.TrainState, theirs: nb.TrainState) -> list[str]:
    """The names of what differs, if only in one bit."""
    expected = theirs.tensors()
    return [name for name, tensor in ours.tensors().items() if not torch.equal(tensor, expected[name])]


def graphs_of(state: nb.TrainState) -> graph.Graphs:
    assert state.graphs is not None
    return state.graphs


def stepped(name: str, pack: nb.Pack, steps: int, **settings: Any) -> tuple[list[float], nb.TrainState]:
    """Steps on six samples, each with ids of its own, over several epochs and with an lr that falls; every second batch
    of clips is shorter."""
    task = CASES[name].task
    torch.manual_seed(0)
    plan = CASES[name].plan.replace(batch_size=6, epochs=9, graph=True, schedule="cosine", **settings)
    state, losses = nb.TrainState(task, pack, plan.replace(**AUGMENT[name.split()[0]]), "cpu"), []
    for step in range(steps):
        raw = gather(pack, pack.ids("train")[:6])
        if "x_length" in raw and step % 2:
            raw = {key: each[:, :32] if each.ndim > 1 else each.clamp(max=32) for key, each in raw.items()}
        state.epoch, state.samples = step // 3, step * 6
        loss_sum, count = train_step(state, {**raw, "id": (torch.arange(6) + step) % 12}, 18)
        losses.append(float(loss_sum) / float(count))
    return losses, state


MIXED: dict[str, Any] = {"amp": "bf16", "clip_norm": 0.5, "ema": 0.9, "channels_last": True}


@pytest.mark.parametrize(("name", "shapes"), [("captcha small", 1), ("sign transformer", 2), ("segment slim", 1)])
def test_replayed_steps_of_every_task_without_ctc_have_the_bits_of_eager_ones(name, shapes, tmp_path, monkeypatch):
    steps, pack = 3 + 3 * shapes, CASES[name].pack(tmp_path, 12)
    losses, state = stepped(name, pack, steps, **MIXED)
    assert (graphs_of(state).off, graphs_of(state).replayed) == ("", steps - graph.WARM_UP * shapes)
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    expected, eager = stepped(name, pack, steps, **MIXED)
    assert graphs_of(eager).replayed == 0
    assert losses == expected
    assert same(state, eager) == []
    assert len(set(losses)) == len(losses)


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
    told, state = trained(toy, pack, PLAN, slower)
    assert told == ["lr 0.01 → 0.0025, weight_decay 0 → 0.1"]
    assert graphs_of(state).replayed == state.step - 2 * graph.WARM_UP - 3, "but warm-ups and each epoch's last batch"
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(toy, pack, PLAN, slower)[1]) == []


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


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("settings", [{"amp": "fp16"}, {"checkpoint_activations": True}, {"compile": True}])
def test_what_cannot_be_recorded_is_refused_in_a_sentence(pack, settings):
    with pytest.raises(TrainError, match="graph cannot replay fp16, compile or checkpoint_activations; choose one"):
        nb.TrainState(toy, pack, PLAN.replace(**settings))


def waiting(model, batch, plan):
    total, count = toy.loss(model, batch, plan)
    return total * (1 + 0 * float(batch["x"].sum())), count


def depending(model, batch, plan):
    total, count = toy.loss(model, batch, plan)
    return total * (1 + random.random()), count


class Untouched(Tape):
    def capture(self, act):
        raise AssertionError("a capture that fails may leave the allocator in one (pytorch#180395)")


class Short(Tape):
    def capture(self, act):
        super().capture(act)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


class Wrong(Tape):
    def capture(self, act):
        replay, sums = super().capture(act)
        return lambda: (replay(), sums[0].mul_(1.1)), sums


ENDS = {
    "waits for the device": (waiting, Untouched, "the host waits for the device at _local_scalar_dense"),
    "is short of memory": (toy.loss, Short, "CUDA out of memory"),
    "replays something else": (toy.loss, Wrong, "replayed, a step gives something else"),
    "depends on the host": (depending, Tape, "replayed, a step gives something else"),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_recording_fails_the_run_goes_on_eagerly_with_a_sentence_and_no_step_is_lost(pack, name, monkeypatch):
    loss, recorder, why = ENDS[name]
    monkeypatch.setattr(graph, "Recorder", recorder)
    told, state = trained(toy.with_(loss=loss), pack, PLAN)
    assert len(told) == 1
    assert told[0].startswith("graph off: ")
    assert why in told[0]
    assert told[0].endswith(HOST)
    assert "\n" not in told[0]
    assert graphs_of(state).replayed == 0
    if loss is not depending:  # whose numbers of the host the recorded step drew too
        monkeypatch.setattr(graph, "WARM_UP", EAGER)
        assert same(state, trained(toy.with_(loss=loss), pack, PLAN)[1]) == []


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
    halved = ["6 → 3"]
    assert told == [f"out of memory: micro batch {sizes}; effective batch and lr unchanged" for sizes in halved]
    assert graphs_of(state).replayed == state.step - 2 * graph.WARM_UP - 3
    full.clear()
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, trained(task, pack, PLAN, fill)[1]) == []


CHILDREN = {
    "succeeds": ("", ""),
    "ends": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "hangs": ("import time; time.sleep(60)", "timed out after 0.4 seconds"),
    "fails": ("raise SystemError('no driver')", "SystemError: no driver"),
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_process_tries_a_capture_first_until_one_succeeds_with_these_versions(name, tmp_path, monkeypatch):
    does, why = CHILDREN[name]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(graph, "PATIENCE", 0.4 if name == "hangs" else 60)
    monkeypatch.setattr(graph, "CHILD", f"open({str(tmp_path / 'tries')!r}, 'a').write('x'); {does}")
    for _ in range(2):
        answer = graph.uncapturable(torch.device("cuda", 0))
        assert answer.startswith("a trial in a child process failed: ") == bool(why)
        assert why in answer
    assert (tmp_path / "tries").read_text() == ("xx" if why else "x")
    monkeypatch.setattr(torch, "__version__", "9.9")
    graph.uncapturable(torch.device("cuda", 0))
    assert (tmp_path / "tries").read_text() == ("xxx" if why else "xx")
