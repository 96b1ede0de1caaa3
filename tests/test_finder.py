"""Claims about the batch finder: its choice against exhaustive search, its memory against the allocator's, and that
nothing outside changes, wherever memory ends. It chooses on simulated times; real ones are the benchmarks'."""

import copy
import gc
import importlib
import json
import random
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import KINDS
from simulated import Job, ticking
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.data import open_feed
from nbtools.errors import NbtoolsError, TrainError
from nbtools.measure import advise, find_batch, memory
from nbtools.measure.batch import BatchReport, Trial, chosen, line
from nbtools.train import TrainState, attempt
from nbtools.train.device import out_of_memory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return {name: kind.pack(tmp_path_factory.mktemp("kinds") / name, 384) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """The toy task's pack. What a first search imports is no longer looked through by gc.collect(), which is called at
    every end of memory: 0.2 s less each time."""
    pack = toy.make_pack(tmp_path_factory.mktemp("toy"))
    found(pack)
    gc.collect()
    gc.freeze()
    yield pack
    gc.unfreeze()


def found(pack, job: Any = None, plan=toy.PLAN, seconds: float = 60.0, **more) -> BatchReport:
    """A search on the job's own clock; a step takes about as long as a turn, so that few are made."""
    job = job or Job(fixed=0.1, a_sample=0.01)
    return find_batch(job, pack, plan, CPU, seconds, clock=job.clock, **more)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    knee=st.floats(1.0, 100.0),
    slower=st.sampled_from([None, 16, 32]),
    best=st.sampled_from([6, 12, 24, 48, 96]),
    gain=st.floats(0.9, 1.0),
)
def test_the_choice_is_within_5_percent_of_the_best_by_exhaustive_search(toys, knee, slower, best, gain):
    """Of all sizes that it tried, whatever the knee, however a cache makes larger ones slower; and the smallest."""

    def cost(n: int) -> float:
        return 0.02 * (knee + n) * (gain if n == best else 1.0) * (1.5 if slower and n > slower else 1.0)

    report = found(toys, Job(cost=cost), seconds=600.0)
    rates = {row.batch_size: row.batch_size / cost(row.batch_size) for row in report.rows}
    most = max(rates.values())
    close = [size for size, rate in rates.items() if rate >= 0.95 * most]
    assert report.batch_size == min(close)
    assert report.complete
    powers = {size: size / cost(size) for size in (2, 4, 8, 16, 32, 64, 128)}
    assert rates[report.batch_size] >= 0.95 * max(powers.values())


def test_a_search_ends_in_time_and_says_what_ended_it(toys):
    job = Job(fixed=0.1, a_sample=0.01)
    short = found(toys, job, seconds=1.0)
    assert job.now < 3.0
    assert not short.complete
    assert "time ran out" in short.footer()
    flat = found(toys, Job(fixed=0.001, a_sample=0.1))
    assert flat.complete
    assert "throughput no longer rises" in flat.footer()
    for most, why in (
        (6, "no more than 6 were requested"),
        (None, f"the train split has {toys.splits['train']} samples"),
    ):
        asked = found(toys, Job(fixed=100.0), seconds=1e6, most=most)
        assert max(row.batch_size for row in asked.rows) <= (most or toys.splits["train"])
        assert why in asked.footer()


@pytest.mark.parametrize(("most", "largest"), [(2, 2), (5, 4), (20, 16), (63, 48)])
def test_what_does_not_fit_is_never_chosen(most, largest, toys):
    report = found(toys, Job(fixed=0.1, most=most))
    assert report.batch_size == largest
    assert all(row.fits == (row.batch_size <= most) for row in report.rows)
    assert any(not row.fits for row in report.rows)
    assert "does not fit" in report.footer()
    assert "memory" in report.footer()


class WithoutBatchNorm(Job):
    def model(self, card, plan):
        return torch.nn.Linear(8, toy.CLASSES)

    def loss(self, model, batch, plan):
        return super().loss(lambda batch: model(batch["x"]), batch, plan)


def test_one_sample_is_tried_where_two_do_not_fit_but_not_with_batch_norm(toys):
    report = found(toys, WithoutBatchNorm(most=1))
    assert report.batch_size == 1
    assert "two samples do not fit" in report.footer()
    with pytest.raises(TrainError, match="two samples do not fit, and BatchNorm cannot train on one"):
        found(toys, Job(most=1))
    job = Job(fixed=0.1)
    found(toys, job)
    assert min(size for _, size in job.passes) == 2


@pytest.mark.parametrize("kind", [Job, WithoutBatchNorm])
def test_not_even_one_sample_is_a_clear_error(kind, toys):
    with pytest.raises(TrainError, match=r"not even one sample fits.*smaller network") as caught:
        found(toys, kind(most=0))
    assert caught.value.__context__ is None, "it would keep the tensors of the failed step"


def test_a_limit_in_bytes_is_kept_with_headroom(packs, monkeypatch):
    def limited(size: int, **more):
        monkeypatch.setattr(memory, "room", lambda device: memory.Room(size, "the limit given"))
        return find_batch(kind, packs["cnn"], plan, CPU, **more)

    kind = KINDS["cnn"]
    plan = kind.PLAN.replace(batch_size=256)
    report = limited(5 * 2**20, seconds=20.0, clock=ticking(0.05))
    row = next(row for row in report.rows if row.batch_size == report.batch_size)
    assert row.memory is not None
    assert row.memory <= 0.9 * 5 * 2**20
    assert "the limit given, 10 % kept free" in report.footer()
    assert report.micro_batch_size == report.batch_size
    assert (
        f"the plan's 256 does not fit at once: forward passes of {report.batch_size}, lr unchanged" in report.footer()
    )
    with pytest.raises(TrainError, match="not even one sample fits"):
        limited(1000, seconds=0.5)


def test_a_report_is_plain_values_and_a_table_with_its_evidence(toys):
    report = find_batch(toy, toys, toy.PLAN, CPU, seconds=0.2, most=16)
    assert BatchReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "chosen" in str(report)
    assert f"{report.batch_size} is " in report.footer()
    assert "<table" in report._repr_html_()


@pytest.mark.parametrize("name", KINDS)
def test_memory_predicted_from_two_probes_is_that_of_the_allocator(name, packs):
    """At a batch 16 times the second probe's, against the most that torch's own allocator had out."""
    kind, size = KINDS[name], 128
    trial = Trial(kind, packs[name], kind.PLAN, CPU)
    trial.largest(2)
    (first, _), (second, _), (measured, _) = (trial.memory(n) for n in (4, 8, size))
    assert first is not None
    assert second is not None
    predicted = line((4, first), (8, second), size)
    assert measured == pytest.approx(predicted, rel=0.02)
    for parameter in trial.state.parameters:
        parameter.grad = None
    held = trial.memory(2)[0] or 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trial.largest(size)
    results: Any = profile.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]")
    allocated = int(np.cumsum([nbytes for _, nbytes in events]).max())
    assert allocated == pytest.approx(predicted - held, rel=0.15)


def test_a_peak_counts_storages_once_and_not_what_was_there_before():
    there = torch.zeros(1000)

    def act() -> None:
        made = torch.ones(250)
        views = [made[:100], made.view(5, 50), there[10:]]
        there.add_(1)
        del made, views
        torch.ones(200)

    assert memory.peak(CPU, act) == 1000


class Shared(Job):
    """A job that hands out one and the same module each time, as a notebook may: it must not be trained."""

    def __init__(self) -> None:
        super().__init__(fixed=0.1)
        self.module = toy.Net(16, 0.1)
        self.module({"x": torch.randn(8, 8)}).sum().backward()  # it has gradients and BatchNorm statistics
        self.module.layers[1].eval()

    def model(self, card, plan):
        return self.module


class Outside:
    """All that must be the same after as before: a shared module bit for bit, a running state, random states,
    switches, and which tensors there are."""

    def __init__(self, pack):
        self.task = Shared()
        self.state = TrainState(toy, pack, toy.PLAN, CPU)
        for raw in open_feed(pack, toy.PLAN, CPU)([pack.ids("train")[:16]]):
            attempt(self.state, raw, 100)
        self.before = copy.deepcopy(self.now())
        self.tensors = alive()

    def now(self) -> list[Any]:
        module = self.task.module
        return [
            *(t.clone() for t in (*module.state_dict().values(), *self.state.tensors().values())),
            *(p.grad.clone() for p in module.parameters() if p.grad is not None),
            *(part.training for part in module.modules()),
            *(torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
            *(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.backends.cudnn.benchmark),
        ]

    def assert_unchanged(self) -> None:
        for before, now in zip(self.before, self.now(), strict=True):
            assert torch.equal(before, now) if isinstance(before, torch.Tensor) else before == now
        assert alive() <= self.tensors + 8, "tensors were left behind"


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("changes", [{}, {"amp": "bf16", "ema": 0.9, "deterministic": True}])
def test_everything_outside_is_bit_for_bit_as_before(changes, toys):
    outside = Outside(toys)
    report = found(toys, outside.task, toy.PLAN.replace(**changes), most=32)
    assert 2 <= report.batch_size <= 32
    outside.assert_unchanged()


@pytest.mark.parametrize(
    ("name", "options", "packing"),
    [
        ("captcha", {}, {}),
        ("hwdb", {}, {"height": 32}),
        pytest.param("sign", {"glosses": 4}, {}, marks=pytest.mark.full),
        pytest.param("segment", {}, {"size": 64}, marks=pytest.mark.full),
    ],
)
def test_each_task_is_searched(name, options, packing, tmp_path):
    task: Any = importlib.import_module(f"nbtools.tasks.{name}")
    source = task.demo(tmp_path / "raw", 48, **options)
    pack = task.pack(source, into=tmp_path / "pack", progress=False, **packing)
    plan = advise(task, pack, measure=False).plan
    assert pack.splits["train"] >= find_batch(task, pack, plan, CPU, 5.0, clock=ticking(0.1)).batch_size >= 2


class Ends(TorchDispatchMode):
    """Memory ends at the operation of this number; with `for_good`, at each one after it too."""

    def __init__(self, at: int, for_good: bool = False):
        super().__init__()
        self.at, self.for_good, self.count = at, for_good, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at or (self.for_good and self.count > self.at):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Injected at {func}.")
        return func(*args, **(kwargs or {}))


def found_or_refused(pack, job) -> BatchReport | TrainError:
    try:
        return found(pack, job, seconds=3.0, most=8)
    except TrainError as error:
        return error


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_memory_may_end_at_any_operation(for_good, toys):
    """At each of the first operations (building, the first step with what the optimizer makes, the probes), then at
    every so many: a report or one clear error, and nothing outside changed."""
    outside, endings = Outside(toys), {"found": 0, "refused": 0}
    for at in [*range(1, 200, 23), *range(200, 2000, 497)]:
        with Ends(at, for_good):
            ended = found_or_refused(toys, outside.task)
        if isinstance(ended, BatchReport):
            assert 1 <= ended.batch_size <= 8
            endings["found"] += 1
        else:
            assert "memory" in str(ended) or "not even one sample" in str(ended)
            assert ended.__context__ is None, "it would keep the tensors of the failed step"
            endings["refused"] += 1
    outside.assert_unchanged()
    assert endings["refused" if for_good else "found"] >= 3, endings


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("changes", [{}, {"amp": "fp16", "optimizer": "sgd"}])
def test_every_step_may_end_between_any_two_operations_and_the_next_one_goes_on(changes, toys):
    """A trial after an out-of-memory anywhere in a step does the next step as if nothing had been."""
    trial = Trial(toy, toys, toy.PLAN.replace(**changes), CPU)
    at, ended = 1, True
    while ended:
        with Ends(at) as ends:
            ended = trial.tried(lambda: trial.largest(4))[1]
        assert bool(ended) == (ends.count >= at)
        trial.largest(4)
        assert all(torch.isfinite(p).all() for p in trial.state.parameters)
        at += 3
    assert at > 40


def test_a_trial_is_gone_after_the_search_even_while_its_error_is_shown(toys, monkeypatch):
    kept: list[weakref.ref] = []
    init = Trial.__init__

    def watched(self, *args):
        init(self, *args)
        kept.append(weakref.ref(self.state.model))

    monkeypatch.setattr(Trial, "__init__", watched)
    found(toys)
    with pytest.raises(NbtoolsError) as caught:
        found(toys, Job(most=0))
    assert [ref() for ref in kept] == [None, None], f"kept by {caught.value!r}"


@pytest.mark.parametrize(
    ("rates", "size", "best"),
    [
        ({2: [50], 4: [96], 8: [100]}, 4, 8),  # the smallest within 5 %
        ({2: [50], 4: [94], 8: [100]}, 8, 8),
        ({2: [99], 4: [100], 8: [80]}, 2, 4),  # larger is slower
        ({64: [100]}, 64, 64),
    ],
)
def test_the_smallest_within_5_percent_is_chosen(rates, size, best):
    choice = chosen({size: values * 8 for size, values in rates.items()})
    assert (choice.batch_size, choice.best, choice.clear) == (size, best, True)
    assert not chosen(rates).clear, "one turn says nothing"


def test_ratios_are_taken_within_turns_and_luck_is_not_chosen():
    drift = [1.0, 0.5, 0.25, 1.0, 0.7, 0.9, 0.3, 1.1]
    assert chosen({4: [97 * d for d in drift], 8: [100 * d for d in drift]}).batch_size == 4
    luck = [1.01, 0.8, 0.96, 0.98, 0.85, 0.97, 0.86, 0.99]
    choice = chosen({4: [100 * x for x in luck], 8: [100.0] * 8})
    assert (choice.batch_size, choice.clear) == (8, False)


GIB = 2**30
MEMINFO = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"}
V2, V1 = "sys/fs/cgroup/box/memory", "sys/fs/cgroup/memory/memory"


@pytest.mark.parametrize(
    ("files", "left", "source", "whole"),
    [
        ({}, None, "", None),
        (
            {**MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
            32 * GIB,
            "available RAM",
            64 * GIB,
        ),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "0::/box\n",
                f"{V2}.max": f"{4 * GIB}\n",
                f"{V2}.current": f"{3 * GIB}\n",
                f"{V2}.stat": f"anon {2 * GIB}\ninactive_file {1 * GIB}\n",
            },
            2 * GIB,
            "RAM left by the container's limit",
            4 * GIB,
        ),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "7:cpu,cpuacct:/x\n4:memory:/docker/1\n",
                f"{V1}.limit_in_bytes": f"{GIB}\n",
                f"{V1}.usage_in_bytes": f"{GIB // 2}\n",
                f"{V1}.stat": "total_inactive_file 0\n",
            },
            GIB // 2,
            "RAM left by the container's limit",
            GIB,
        ),
    ],
    ids=["not Linux", "no limit", "a limit, less what is used and cannot be dropped", "the older cgroups"],
)
def test_ram_is_what_the_machine_and_the_container_leave(tmp_path, files, left, source, whole):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    free = memory.ram(tmp_path)
    assert (free.bytes, free.source) == (left, source) if free is not None else left is None
    assert free is None or free.usable == int(0.8 * free.bytes)
    assert memory.ram_in_all(tmp_path) == whole


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody knows")
def test_this_machine_has_room():
    free = memory.room(CPU)
    assert free is not None
    assert 2**26 < free.bytes < 2**50


def test_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    cudnn = RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
    assert all(map(out_of_memory, (torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), cudnn, caught.value)))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("Expected more than 1 value per channel when training"))


def test_another_error_of_the_model_is_not_swallowed(toys):
    parts = {**vars(toy), "loss": lambda model, batch, plan: model({"x": batch["x"][:, :3]})}
    task: Any = types.SimpleNamespace(**parts)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        find_batch(task, toys, toy.PLAN, CPU, seconds=0.2)
