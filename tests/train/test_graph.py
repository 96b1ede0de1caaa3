"""Plan.graph, with a tape in place of a CUDA graph: what a step reads or makes elsewhere would show in its bits."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from acting import QUIET
from cases import CASES, LEAN, augmented, run
from tape import Tape, cudnn_ctc, synchronizing
from test_resume import Changes, same, trained
from torch import Tensor

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.tasks.common import ctc
from nbtools.train import device, graph

EAGER = 99  # a warm-up longer than any run here
PLAN = toy.PLAN.replace(graph=True, ema=0.9)


@pytest.fixture(autouse=True)
def taped(monkeypatch, own_cache):
    monkeypatch.setattr(device, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(graph, "Recorder", Tape)
    monkeypatch.setattr(graph, "synchronizing", synchronizing)


def by_operator(outputs: Any, labels: Tensor, lengths: Tensor, reduction: str = "sum") -> Tensor:
    each = ctc.cudnn_losses(outputs[0], labels, outputs[1], lengths)
    return each if reduction == "none" else each.sum()


@pytest.mark.parametrize("name", [*LEAN, "hwdb slim"])
def test_replayed_steps_of_every_task_have_the_bits_of_eager_ones(name, tmp_path, monkeypatch):
    """In mixed precision, with an lr that falls, all that is drawn, clips of two lengths and lines of one."""
    monkeypatch.setattr(torch.ops.aten, "_cudnn_ctc_loss", SimpleNamespace(Tensor=cudnn_ctc), raising=False)
    monkeypatch.setattr(ctc, "loss", by_operator)
    mixed: Any = {"amp": "bf16", "clip_norm": 0.5, "ema": 0.9, "channels_last": True, "schedule": "cosine"}
    mixed |= {"bucket": 200} if CASES[name].ctc else {}
    plan, ends = augmented(name).replace(batch_size=4, epochs=4, graph=True, **mixed), []
    pack = CASES[name].pack(tmp_path, 12)
    for warm_up in (graph.WARM_UP, EAGER):
        monkeypatch.setattr(graph, "WARM_UP", warm_up)
        state: Any = nb.TrainState(CASES[name].scored, pack, plan, "cpu")
        ends.append((run(state.task, pack, state)[0], state))
        assert (state.graphs.off, state.graphs.replayed > 3) == ("", warm_up != EAGER)
    (losses, replayed), (expected, eager) = ends
    assert losses == expected
    assert same(replayed, eager)
    assert len(set(losses)) == len(losses) > 8


SLOWER: Changes = {12: {"lr": PLAN.lr / 4, "weight_decay": 0.1, "micro_batch_size": 5}}


def telling(task: Any, pack: nb.Pack, plan: nb.Plan = PLAN, changes: Changes | None = None) -> tuple[list[str], Any]:
    random.seed(0)
    state, history = trained(pack, task, plan, changes or {})
    return [row["what"] for row in history.rows if "what" in row], state


def test_a_run_with_evaluations_short_batches_and_a_changed_plan_has_the_bits_of_an_eager_one(pack, monkeypatch):
    told, state = telling(toy, pack, changes=SLOWER)
    assert told == ["micro_batch_size none → 5, lr 0.01 → 0.0025, weight_decay 0 → 0.1"]
    assert state.graphs.replayed == state.step - 2 * graph.WARM_UP - 3, "but warm-ups and each epoch's last batch"
    plain = telling(toy, pack, PLAN.replace(graph=False), SLOWER)[1].parameters
    assert torch.allclose(state.parameters[0], plain[0]), "replays read the lr"
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, telling(toy, pack, changes=SLOWER)[1])


def test_a_state_that_is_loaded_amid_a_run_goes_on_with_its_own_moments(pack, monkeypatch):
    def rolled_back() -> Any:
        state, saved = nb.TrainState(toy, pack, PLAN), []
        for record in nb.train(toy, state, pack):
            if record.kind == "step" and state.step == 6:
                saved = [{name: tensor.clone() for name, tensor in state.tensors().items()}, state.facts()]
            if state.step == 8:
                break
        state.load(*saved)
        list(nb.train(toy, state, pack))
        return state

    state = rolled_back()
    assert state.graphs.replayed > 10
    monkeypatch.setattr(graph, "WARM_UP", EAGER)
    assert same(state, rolled_back())


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


class Twice(Tape):
    def capture(self, act):
        replay, (loss, count) = super().capture(act)
        return lambda: (replay(), first := loss.clone(), replay(), loss.copy_(first)), (loss, count)


class Broken(Tape):
    def capture(self, act):
        return lambda: torch.ones(2) @ torch.ones(3), super().capture(act)[1]


ENDS = {
    "waits for the device": (waiting, Untouched, "the host waits for the device at _local_scalar_dense"),
    "fails in a child": (toy.loss, Untouched, "no driver"),
    "is short of memory": (toy.loss, Short, "CUDA out of memory"),
    "fails at the first replay": (toy.loss, Broken, "same number of elements"),
    "draws on the host": (toy.loss, Untouched, "the host draws random numbers in it"),
    "replays something else": (toy.loss, Twice, "a replayed step gives a different result"),
    "depends on the host": (depending, Tape, "a replayed step gives a different result"),
}


@pytest.mark.parametrize("name", ENDS)
def test_where_recording_fails_the_run_goes_on_eagerly_with_a_sentence_and_no_step_is_lost(pack, name, monkeypatch):
    loss, recorder, why = ENDS[name]
    monkeypatch.setattr(graph, "Recorder", recorder)
    monkeypatch.setattr(graph, "uncapturable", lambda device: why * name.endswith("child"))
    if name.startswith("draws"):  # a GPU has a generator of its own
        numbers = torch.Generator()
        own = property(lambda self: numbers, lambda self, _: None)
        monkeypatch.setattr(graph.Graphs, "numbers", own, raising=False)
    told, state = telling(toy.with_(loss=loss), pack)
    [sentence] = told
    assert re.fullmatch(f"graph off: .*{why}.*; each kernel is launched by the host", sentence), "in one line"
    assert state.graphs.replayed == 0
    if loss is not depending:  # whose numbers of the host the recorded step drew too
        monkeypatch.setattr(graph, "WARM_UP", EAGER)
        assert same(state, telling(toy.with_(loss=loss), pack)[1])


def test_a_step_whose_capture_ended_the_process_before_stays_eager_and_others_do_not(pack, tmp_path, monkeypatch):
    tried = set()

    class Seen(Tape):
        def capture(self, act):
            tried.update((tmp_path / "cache" / "captured").iterdir())
            return super().capture(act)

    monkeypatch.setattr(graph, "Recorder", Seen)
    assert telling(toy, pack)[1].graphs.replayed
    [path] = tried
    assert not path.exists(), "this process goes on"
    path.touch()
    told, state = telling(toy, pack)
    why = f"an earlier capture of this step ended its process (remove {path} to try again)"
    assert (told, state.graphs.replayed) == ([f"graph off: {why}; each kernel is launched by the host"], 0)
    assert telling(toy, pack, PLAN.replace(amp="bf16"))[1].graphs.replayed


def test_out_of_memory_halves_the_batch_and_its_steps_are_recorded_anew(pack):
    def hungry(model, batch, plan):
        if isinstance(model, torch.nn.Module) and 4 < len(batch["x"]) < PLAN.batch_size:  # an epoch's last batch
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return toy.loss(model, batch, plan)

    told, state = telling(toy.with_(loss=hungry), pack)
    assert told == ["out of memory: micro batch 6 → 3; effective batch and lr unchanged"]
    assert state.graphs.replayed == state.step - 2 * graph.WARM_UP - 3


HERE = {"amp": ("fp16", "needs CUDA, but .* cpu; use amp=bf16 or amp=off"), "graph": (True, "replays CUDA graphs")}


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("setting", HERE)
def test_what_needs_a_gpu_is_refused_without_but_a_finished_run_opens_and_is_read(pack, tmp_path, monkeypatch, setting):
    plan = toy.PLAN.replace(epochs=1, **{setting: HERE[setting][0]})
    nb.fit(toy, pack, plan, tmp_path / "run", **QUIET)
    monkeypatch.undo()  # another machine
    run = nb.fit(toy, pack, plan, tmp_path / "run", **QUIET)
    assert (run.over, run.plan, nb.evaluate(run, pack)) == (True, plan, nb.evaluate(run, pack, amp="off"))
    for where, epochs in (("never", 1), ("run", 2)):
        with pytest.raises(TrainError, match=rf"Plan\.{setting} .*{HERE[setting][1]}"):
            nb.fit(toy, pack, plan.replace(epochs=epochs), tmp_path / where, **QUIET)
    assert (nb.Run.open(run.folder).over, (tmp_path / "never").exists()) == (True, False)


CHILDREN = {
    "succeeds": ("", ""),
    "ends": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "hangs": ("import time; time.sleep(60)", "timed out after 0.4 seconds"),
    "fails": ("raise SystemError('no driver')", "SystemError: no driver"),
}


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
    for owner, version, value in ((torch, "__version__", "9.9"), (torch._C, "_cuda_getDriverVersion", lambda: 13020)):
        monkeypatch.setattr(owner, version, value, raising=False)
        graph.uncapturable(torch.device("cuda", 0))
    assert (tmp_path / "tries").read_text() == ("xxxx" if why else "xxx")
