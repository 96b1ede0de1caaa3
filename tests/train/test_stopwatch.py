"""The figures of a run are true where the device works behind the host's back; and where the loop waits for it."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.data import Pack, gather
from nbtools.measure import Stepper
from nbtools.train import meter as clock

BATCH, PIECES = 16, 50  # samples; kernels of a step
LOOP, STATE = (sys.modules[f"nbtools.train.{name}"] for name in ("loop", "state"))  # nb.train is a function


class Device:
    """A device with a queue, and the host's clock, which only `host` and waiting move. kernels: seconds of a step;
    launch: of the host for it; loading: of the host for a batch; scoring: seconds of kernels of an evaluated batch."""

    def __init__(self, kernels: float, launch: float, loading: float = 0.0, scoring: float = 0.0):
        self.kernels, self.launch, self.loading, self.scoring = kernels, launch, loading, scoring
        self.now = self.free = 0.0  # the host's clock; when the queue is empty

    def clock(self) -> float:
        return self.now

    def host(self, seconds: float) -> None:
        self.now += seconds

    def queue(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.free)


class Event:
    def __init__(self, where: Device):
        self.device, self.at = where, max(where.free, where.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "read before it has happened"
        return 1e3 * (end.at - self.at)


@pytest.fixture
def simulated(monkeypatch):
    """A function that makes the run's device a simulated one, and returns (it, task)."""

    def make(**times: float) -> tuple[Device, Any]:
        where = Device(**times)

        def send(meter: Any, *numbers: Any) -> None:
            clock.put(meter.sent, *numbers)
            meter.event, meter.host = Event(where), meter.sent.clone()

        def batch(raw, plan, draws):
            for _ in range(PIECES if draws is not None else 0):  # launched one by one
                where.host(where.launch / PIECES)
                where.queue(where.kernels / PIECES)
            where.queue(where.scoring if draws is None else 0.0)
            return toy.batch(raw, plan, draws)

        finish = nb.TrainState.lost
        monkeypatch.setattr(clock.Stopwatch, "mark", lambda watch: Event(where))
        monkeypatch.setattr(clock, "perf_counter", where.clock)
        monkeypatch.setattr(LOOP, "perf_counter", where.clock)
        monkeypatch.setattr(clock.Meter, "send", send)
        monkeypatch.setattr(nb.TrainState, "lost", lambda state: (where.wait(), finish(state))[1])
        read = LOOP.Sums.read
        monkeypatch.setattr(LOOP.Sums, "read", lambda sums: (where.wait(), read(sums))[1])
        return where, toy.with_(batch=batch)

    return make


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Pack:
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=700)


def feed_of(pack: Pack, where: Device, to: str = "cpu") -> Any:
    def feed(batches: list[np.ndarray]) -> Iterator[Any]:
        for ids in batches:
            where.host(where.loading)  # as a DataLoader does
            yield {name: tensor.to(to, non_blocking=True) for name, tensor in gather(pack, ids).items()}

    feed.name = "streamed"  # pyright: ignore[reportFunctionMemberAccess]
    return feed


CASES = {
    "eager": ({"kernels": 0.011, "launch": 0.0067}, 0.0),
    "launches bind": ({"kernels": 0.005, "launch": 0.0067}, 0.0),
    "graph": ({"kernels": 0.0104, "launch": 0.0007}, 0.0),
    "watcher": ({"kernels": 0.011, "launch": 0.0067}, 0.005),
    "graph and watcher": ({"kernels": 0.0104, "launch": 0.0007}, 0.005),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("times", "body"), CASES.values(), ids=CASES)
def test_the_speed_of_rows_is_the_devices_whatever_a_watcher_takes(pack, large, simulated, times, body, every):
    """Reported: batch / max(kernels, launch), independent of the watcher; and the wall is steps + evaluation +
    watchers, of which those count that the device idles for."""
    where, task = simulated(**times, scoring=0.002)
    data = pack if every == 1 else large
    count, plan = data.splits["train"], toy.PLAN.replace(epochs=4, batch_size=BATCH)
    state, steps = nb.TrainState(task, data, plan, "cpu"), -(-count // BATCH)
    rows = []
    for record in nb.train(task, state, data, feed_of(data, where)):
        where.host(body if record.kind == "step" and not record.values else 0.0)
        rows += [record] if record.values else []
    step = max(times["kernels"], times["launch"])
    epochs = [row for row in rows if row.kind == "epoch"]
    assert [row.kind for row in rows].count("step") == 4 * (steps // every)
    for row in epochs:  # the first step of an epoch finds no queue, and the last batch is not whole
        assert row.values["samples_per_s"] == pytest.approx(count / steps / step, rel=1 / steps)
        assert row.values["data_wait"] < 0.01, "nothing is loaded"
    for row in rows:
        if row.kind == "step" and row.samples % count and row.step % steps > 2 * every:
            assert row.values["samples_per_s"] == pytest.approx(BATCH / step, rel=0.05), row
    wall = sum(row.values["epoch_time"] + row.values["eval_time"] for row in epochs)
    idle = max(0.0, times["launch"] + body - step) * 4 * steps
    assert epochs[-1].values["wall"] == pytest.approx(wall + idle, rel=0.03)
    assert epochs[-1].values["wall"] <= where.now


@pytest.mark.parametrize(("loading", "share"), [(0.001, 0.0), (0.004, 0.0), (0.02, 1 - 0.011 / 0.0267)])
def test_rows_and_measurements_tell_how_long_the_device_waits_for_data(large, simulated, monkeypatch, loading, share):
    """A batch loaded while the device works is not waited for; else it idles from its last kernel until the batch."""
    where, task = simulated(kernels=0.011, launch=0.0067, loading=loading)
    monkeypatch.setattr("nbtools.measure.timing.finish", lambda *_: where.wait())
    plan, feed = toy.PLAN.replace(epochs=1, batch_size=BATCH), feed_of(large, where)
    turn = Stepper(task, large, plan, torch.device("cpu"), feed, where.clock).warm_up().advance(steps=20)
    [row] = [r for r in nb.train(task, nb.TrainState(task, large, plan, "cpu"), large, feed) if r.kind == "epoch"]
    assert row.values["samples_per_s"] == pytest.approx(BATCH / max(0.011, 0.0067 + loading), rel=0.06)
    assert row.values["data_wait"] == pytest.approx(share, abs=0.02)
    assert turn.samples_per_s == pytest.approx(row.values["samples_per_s"], rel=0.05)
    assert turn.waited == pytest.approx(row.values["data_wait"], abs=0.03)


def test_pauses_are_not_in_the_wall_and_a_resumed_run_adds_to_it(large, simulated):
    where, task = simulated(kernels=0.001, launch=0.002)
    state = nb.TrainState(task, large, toy.PLAN.replace(epochs=2, batch_size=BATCH), "cpu")
    for record in nb.train(task, state, large, feed_of(large, where)):
        if record.kind == "epoch":
            with state.meter.watch.paused():
                where.host(100.0)
            break
    where.host(1000.0)
    again = nb.TrainState(task, large, state.plan, "cpu")
    again.load(state.tensors(), state.facts())
    *_, last = (r for r in nb.train(task, again, large, feed_of(large, where)) if r.kind == "epoch")
    steps = 2 * -(-large.splits["train"] // BATCH)
    assert last.values["wall"] == pytest.approx(0.002 * steps, rel=0.1)


class Waits(TorchDispatchMode):
    """`meta` is the device, the CPU the host: what would wait for a GPU is noted with the function of nbtools that does
    it, and gets numbers; torch refuses what has a shape by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        name, there = func.overloadpacket._qualified_op_name, [each.device.type for each in tensors]
        if "meta" in there and name == "aten::_local_scalar_dense":
            self.note()
            return True if tensors[0].dtype == torch.bool else 1.0
        if name == "aten::copy_" and len(set(there)) == 2:
            if not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.note()
            return tensors[0]
        to = kwargs.get("device")
        if name == "aten::_to_copy" and to is not None and torch.device(to).type not in there:
            if not kwargs.get("non_blocking"):
                self.note()
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype, device=to)
        return func(*args, **kwargs)

    def note(self) -> None:
        package = str(Path(nb.__file__).parent)
        ours = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        self.places.append([name for name in ours if name not in ("<lambda>", "within_memory", "required")][-1])


def test_the_loop_waits_for_the_device_at_its_own_reads_only(pack, monkeypatch):
    """Log steps, an epoch's end and an evaluation, with a count of Python. SYSTEMS §2 and §5: `.item()` every step."""
    meta = torch.device("meta")

    def made(task: Any, model: nn.Module, plan: nb.Plan) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "lr_scale": 1.0}], lr=plan.lr, foreach=True)

    monkeypatch.setattr(STATE, "build_optimizer", made)  # fused ones take no tensors without data
    monkeypatch.setattr(clock.Meter, "received", lambda meter: meter.sent.to("cpu").tolist())
    task = toy.with_(model=lambda card, plan: toy.linear(card, plan).to(meta))
    state = nb.TrainState(task, pack, toy.PLAN.replace(epochs=2, batch_size=BATCH, clip_norm=None, noise=0.0), meta)
    with Waits() as waits:
        feed = feed_of(pack, Device(kernels=0.0, launch=0.0), "meta")
        kinds = {row.kind for row in nb.train(task, state, pack, feed) if row.values}
    assert kinds == {"step", "epoch"}
    assert "rows" in waits.places
    own = {"rows", "lost", "epoch", "read"}  # of a log row, of the weights, the epoch's loss, and the scores
    assert {*waits.places} <= own, waits.places
