"""Claims about the batch finder: its choice against exhaustive search, its memory against the allocator's, and that
nothing outside changes, wherever memory ends."""

import copy
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from kinds import KINDS
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.data import open_feed
from nbtools.errors import NbtoolsError, TrainError
from nbtools.measure import advise, find_batch
from nbtools.measure.choice import between, choose, compared, hopeless, knee, near
from nbtools.measure.finder import Finding
from nbtools.measure.memory import Line, System, peak, ram, room
from nbtools.measure.trial import Trial, still
from nbtools.train import TrainState, attempt, train
from nbtools.train.device import out_of_memory

pytestmark = pytest.mark.alone  # measures rates

CPU = torch.device("cpu")
COUNT, MOST = 384, 128  # samples; every size tried divides them, so that no last batch is smaller
SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


@pytest.fixture(autouse=True)
def one_thread():
    """CPU time then tells the work, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return {name: kind.pack(tmp_path_factory.mktemp("kinds") / name, COUNT) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """The toy task's pack. What a first search imports is no longer looked through by gc.collect(), which is called at
    every end of memory: 0.2 s less each time."""
    pack = toy.make_pack(tmp_path_factory.mktemp("toy"))
    find_batch(toy, pack, toy.PLAN, "cpu", seconds=0.1, most=4)
    gc.collect()
    gc.freeze()
    yield pack
    gc.unfreeze()


def epoch_rate(steps, state) -> float:
    """samples/s of CPU time over the next epoch of the loop itself."""
    start = time.process_time()
    while next(steps).kind != "epoch":
        continue
    return COUNT / (time.process_time() - start)


def racers(kind, pack) -> dict[int, Callable[[], float]]:
    """batch size → samples/s over the next epoch."""
    states = {size: TrainState(kind, pack, still(kind.PLAN.replace(batch_size=size)), CPU) for size in SIZES}
    return {size: partial(epoch_rate, train(kind, state, pack), state) for size, state in states.items()}


def best_of(race: dict[int, Callable[[], float]], rounds: int) -> int:
    """The batch size with the best median, whole epochs in turns; sizes far behind in the first two rounds are out."""
    rates: dict[int, list[float]] = {size: [] for size in race}
    for k in range(rounds):
        for size in rates:
            rates[size].append(race[size]())
        if k < 2:
            most = max(max(values) for values in rates.values())
            rates = {size: values for size, values in rates.items() if max(values) > (0.5, 0.7)[k] * most}
    return max(rates, key=lambda size: statistics.median(rates[size]))


@pytest.mark.parametrize("name", KINDS)
def test_the_choice_is_within_5_percent_of_the_best_by_exhaustive_search(name, packs):
    """In the first of two searches, or in the second: others on this machine may slow one size alone for the seconds
    that a search takes, and a choice at the border of 5 % is then one of 8 %."""
    first = short_of_the_best(KINDS[name], packs[name])
    second = short_of_the_best(KINDS[name], packs[name]) if first else ""
    assert not second, f"{first}\n{second}"


def short_of_the_best(kind: Any, pack: Any) -> str:
    """What a search chose, where that is less than 95 % of the best; else "". The best of many noisy figures is a lucky
    one: once exhaustive search has named it, it meets the choice in turns of their own, as many as make the ratio sure
    to 1.5 %, or 60."""
    found = find_batch(kind, pack, kind.PLAN, "cpu", seconds=8, most=MOST)
    assert found.batch_size in SIZES
    race = racers(kind, pack)
    best = best_of(race, rounds=8)
    ratios: list[float] = [1.0] * 10 if best == found.batch_size else []
    while len(ratios) < 10 or (compared(ratios, [1.0] * len(ratios))[1] > 0.015 and len(ratios) < 60):
        pair = [race[found.batch_size](), race[best]()]
        ratios.append(pair[0] / pair[1])
    ratio, error = compared(ratios, [1.0] * len(ratios))
    return "" if ratio + 2 * error >= 0.95 else f"{ratio:.3f} ± {error:.3f} of {best}: {ratios}\n{found}"


@pytest.mark.parametrize("name", KINDS)
def test_memory_predicted_from_two_probes_is_that_of_the_allocator(name, packs):
    """At a batch 16 times the second probe's, against the most that torch's own allocator had out."""
    kind, size = KINDS[name], 128
    trial = Trial(kind, packs[name], kind.PLAN, CPU)
    assert not trial.warm(2)
    (first, _), (second, _) = trial.measure(4), trial.measure(8)
    assert first is not None
    assert second is not None
    predicted = Line.through((4, first), (8, second)).at(size)
    measured, _ = trial.measure(size)
    assert measured == pytest.approx(predicted, rel=0.02)
    assert allocated(trial, size) + trial.held() == pytest.approx(predicted, rel=0.1)


def allocated(trial: Trial, size: int) -> int:
    """Peak bytes that the CPU allocator gave out during a step with the largest shapes, by torch's profiler."""
    for parameter in trial.state.parameters:
        parameter.grad = None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        trial.run([trial.largest(size)])
    results: Any = profile.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]")
    return int(np.cumsum([size for _, size in events]).max())


GROWTH = """
import sys, tempfile
from pathlib import Path
import torch
from kinds import KINDS
from nbtools.device import resident
from nbtools.measure.memory import Line
from nbtools.measure.trial import Trial

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

torch.set_num_threads(1)
for name, kind in KINDS.items():
    trial = Trial(kind, kind.pack(Path(sys.argv[1]) / name, 1024), kind.PLAN, torch.device("cpu"))
    trial.warm(64)
    line = Line.through((8, trial.measure(8)[0]), (16, trial.measure(16)[0]))
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the most is counted anew
    trial.warm(1024)
    print(name, line.at(1024) - trial.held(), most() - before)
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="reads the resident memory that Linux tells"
)
def test_predicted_memory_is_what_the_process_grows_by(tmp_path):
    """From probes of 8 and 16 samples to a batch of 1,024, in a process whose allocator gives freed tensors back: what
    grows is what is in use. (glibc's keeps some by default: the process then grew by 14–19 % more than predicted.)"""
    freeing = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **freeing, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    root = Path(__file__).parent.parent
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert [name for name, _, _ in rows] == list(KINDS)
    for name, predicted, grown in rows:
        assert int(predicted) > 80e6
        assert int(grown) == pytest.approx(int(predicted), rel=0.1), name


def test_a_peak_counts_storages_once_and_not_what_was_there_before():
    there = torch.zeros(1000)
    with peak(CPU) as found:
        made = torch.ones(250)
        views = [made[:100], made.view(5, 50), there[10:]]
        there.add_(1)
        del made, views
        again = torch.ones(200)
    assert found.bytes == 1000
    assert len(again) == 200


class Shared:
    """The toy task, but handing out one and the same module each time, as a notebook may: it must not be trained."""

    def __init__(self) -> None:
        self.module = toy.Net(16, 0.1)
        self.module({"x": torch.randn(8, 8)}).sum().backward()  # it has gradients and BatchNorm statistics
        self.module.layers[1].eval()

    def __getattr__(self, name: str) -> Any:
        return getattr(toy, name)

    def model(self, card, plan):
        return self.module


class Outside:
    """All that must be the same after as before: a shared module bit for bit, a running state, random states,
    switches, and which tensors there are."""

    def __init__(self, pack):
        self.task: Any = Shared()
        self.state = TrainState(toy, pack, toy.PLAN, CPU)
        for raw in open_feed(pack, toy.PLAN, CPU)([pack.ids("train")[:16]]):
            attempt(toy, self.state, raw, 100)
        self.before = copy.deepcopy(self.now())
        self.tensors = alive()

    def now(self) -> list[Any]:
        module = self.task.module
        return [
            *(t.clone() for t in (*module.state_dict().values(), *self.state.tensors().values())),
            *(p.grad.clone() for p in module.parameters()),
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


@pytest.mark.parametrize("changes", [{}, {"amp": "bf16"}, {"ema": 0.9, "optimizer": "sgd"}, {"deterministic": True}])
def test_everything_outside_is_bit_for_bit_as_before(changes, toys):
    outside = Outside(toys)
    found = find_batch(outside.task, toys, toy.PLAN.replace(**changes), "cpu", seconds=0.3, most=32)
    assert 2 <= found.batch_size <= 32
    outside.assert_unchanged()


@pytest.mark.parametrize(
    ("name", "options", "packing"),
    [("captcha", {}, {}), ("hwdb", {}, {"height": 32}), ("sign", {"glosses": 4}, {}), ("segment", {}, {"size": 64})],
)
def test_each_task_is_searched_in_time_and_everything_is_as_before(name, options, packing, tmp_path, monkeypatch):
    """Asked for two seconds, with what a first step costs; at the default of 20 all stay below 30."""
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    task: Any = importlib.import_module(f"nbtools.tasks.{name}")
    pack = task.pack(task.demo(tmp_path / "raw", 48, **options), progress=False, **packing)
    plan = advise(task, pack, measure=False).plan
    before, tensors = (torch.get_rng_state(), random.getstate(), str(np.random.get_state())), alive()
    found = find_batch(task, pack, plan, "cpu", seconds=2.0)
    assert found.seconds < 1.4 * 2.0 + 8 * max(
        plan.batch_size / row.samples_per_s for row in found.rows if row.samples_per_s
    )
    assert pack.splits["train"] >= found.batch_size >= 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert alive() <= tensors + 8, "tensors were left behind"


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


def found_or_refused(task, pack) -> Finding | TrainError:
    try:
        return find_batch(task, pack, toy.PLAN, "cpu", seconds=0.05, most=16)
    except TrainError as error:
        return error


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_memory_may_end_at_any_operation(for_good, toys):
    """At each of the first operations (building, the first step with what the optimizer makes, the probes), then at
    every so many: a finding or one clear error, and nothing outside changed."""
    outside, endings = Outside(toys), {"found": 0, "refused": 0}
    points = [*range(1, 200, 2), *range(200, 4000, 97)]
    for at in points:
        with Ends(at, for_good):
            ended = found_or_refused(outside.task, toys)
        if isinstance(ended, Finding):
            assert 1 <= ended.batch_size <= 16
            endings["found"] += 1
        else:
            assert "memory" in str(ended) or "not even one sample" in str(ended)
            assert ended.__context__ is None, "it would keep the tensors of the failed step"
            endings["refused"] += 1
    outside.assert_unchanged()
    assert endings["refused"] >= 3, endings
    assert for_good or endings["found"] >= 3, endings  # an idle machine makes more operations than the last point


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("changes", [{}, {"amp": "fp16"}, {"optimizer": "sgd"}])
def test_every_step_may_end_between_any_two_operations_and_the_next_one_goes_on(changes, toys):
    """A trial after an out-of-memory anywhere in a step does the next step as if nothing had been."""
    trial = Trial(toy, toys, toy.PLAN.replace(**changes), CPU)
    at, ended = 1, True
    while ended:
        with Ends(at) as ends:
            ended = trial.warm(4)
        assert bool(ended) == (ends.count >= at)
        assert trial.warm(4) == ""
        assert all(torch.isfinite(p).all() for p in trial.state.parameters)
        at += 1
    assert at > 40


def limited(most: int, base: Any = toy) -> Any:
    """The toy task on a device where a forward pass of more samples runs out of memory."""

    def loss(model, batch, plan):
        if len(batch["x"]) > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {len(batch['x'])} samples.")
        return base.loss(model, batch, plan)

    return types.SimpleNamespace(**{**vars(toy), "model": base.model, "loss": loss})


@pytest.mark.parametrize(("most", "largest"), [(2, 2), (5, 4), (20, 16), (63, 48)])
def test_what_does_not_fit_is_never_chosen(most, largest, toys):
    found = find_batch(limited(most), toys, toy.PLAN, "cpu", seconds=1.0)
    assert found.batch_size <= largest
    rows = {row.batch_size: row for row in found.rows}
    assert all(row.fits == (size <= most) for size, row in rows.items())
    assert any(not row.fits for row in rows.values())
    assert "does not fit" in found.why
    assert "memory" in found.why


class Plain(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, toy.CLASSES)

    def forward(self, batch):
        return super().forward(batch["x"])


def test_one_sample_is_tried_where_two_do_not_fit(toys):
    task = limited(1)
    task.model = lambda card, plan: Plain()
    found = find_batch(task, toys, toy.PLAN, "cpu", seconds=0.3)
    assert found.batch_size == 1
    assert "two samples do not fit" in found.why


def test_batch_norm_on_one_sample_is_not_called_out_of_memory(toys):
    with pytest.raises(TrainError, match="two samples do not fit, and BatchNorm cannot train on one"):
        find_batch(limited(1), toys, toy.PLAN, "cpu", seconds=0.3)


def test_no_batch_of_one_is_ever_made_where_two_fit(toys):
    sizes: list[int] = []
    task = limited(10**9)
    loss = task.loss
    task.loss = lambda model, batch, plan: (sizes.append(len(batch["x"])), loss(model, batch, plan))[1]
    find_batch(task, toys, toy.PLAN, "cpu", seconds=0.3)
    assert min(sizes) == 2


@pytest.mark.parametrize("model", [None, Plain])
def test_not_even_one_sample_is_a_clear_error(model, toys):
    task = limited(0)
    if model:
        task.model = lambda card, plan: model()
    with pytest.raises(TrainError, match="not even one sample fits") as caught:
        find_batch(task, toys, toy.PLAN, "cpu", seconds=0.3)
    assert "smaller network" in str(caught.value)
    assert caught.value.__context__ is None


def test_a_limit_in_bytes_is_kept_with_headroom(packs):
    kind, pack = KINDS["cnn"], packs["cnn"]
    found = find_batch(kind, pack, kind.PLAN.replace(batch_size=256), "cpu", seconds=1.0, limit=5 * 2**20)
    chosen = next(row for row in found.rows if row.batch_size == found.batch_size)
    assert chosen.measured is not None
    assert found.limit is not None
    assert chosen.measured <= found.limit == int(0.9 * 5 * 2**20)
    assert "the limit given, 10 % kept free" in found.why
    assert found.micro_batch_size == found.batch_size
    assert f"the plan's 256 does not fit at once: forward passes of {found.batch_size}, lr unchanged" in found.why
    with pytest.raises(TrainError, match="not even one sample fits"):
        find_batch(kind, pack, kind.PLAN, "cpu", seconds=0.5, limit=1000)


def test_no_batch_is_larger_than_the_train_split_or_what_was_asked(toys, tmp_path):
    small = toy.make_pack(tmp_path, count=20)
    found = find_batch(toy, small, toy.PLAN, "cpu", seconds=0.3)
    assert max(row.batch_size for row in found.rows) <= small.splits["train"]
    asked = find_batch(toy, toys, toy.PLAN, "cpu", seconds=0.3, most=6)
    assert max(row.batch_size for row in asked.rows) <= 6
    assert "no more than 6 were asked for" in asked.why
    assert asked.complete


def test_a_finding_is_plain_values_and_a_table_with_its_evidence(toys):
    found = find_batch(toy, toys, toy.PLAN, "cpu", seconds=0.5, most=64)
    assert Finding.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.clock == "CPU time"
    assert "← chosen" in str(found)
    assert f"batch {found.batch_size}: " in found.why
    assert found.why.endswith(f"measured {found.seconds:.1f} s")
    assert "<table" in found._repr_html_()


def test_a_trial_is_gone_after_the_search_even_while_its_error_is_shown(toys, monkeypatch):
    kept: list[weakref.ref] = []
    init = Trial.__init__

    def watched(self, *args):
        init(self, *args)
        kept.append(weakref.ref(self.state.model))

    monkeypatch.setattr(Trial, "__init__", watched)
    find_batch(toy, toys, toy.PLAN, "cpu", seconds=0.2)
    with pytest.raises(NbtoolsError) as caught:
        find_batch(limited(0), toys, toy.PLAN, "cpu", seconds=0.2)
    assert len(kept) == 2
    assert [ref() for ref in kept] == [None, None], f"kept by {caught.value!r}"


def test_a_time_limit_is_kept(toys):
    start = time.perf_counter()
    find_batch(toy, toys, toy.PLAN, "cpu", seconds=1.0)
    assert time.perf_counter() - start < 4.0


def test_a_search_that_the_time_ended_says_so(toys):
    found = find_batch(toy, toys, toy.PLAN, "cpu", seconds=0.01)
    assert not found.complete
    assert "the time was up" in found.why


@pytest.mark.parametrize(
    ("rates", "chosen", "best"),
    [
        ({2: [50], 4: [96], 8: [100]}, 4, 8),  # the smallest within 5 %
        ({2: [50], 4: [94], 8: [100]}, 8, 8),
        ({2: [99], 4: [100], 8: [80]}, 2, 4),  # larger is slower
        ({64: [100]}, 64, 64),
    ],
)
def test_the_smallest_within_5_percent_is_chosen(rates, chosen, best):
    choice = choose({size: values * 8 for size, values in rates.items()})
    assert (choice.batch_size, choice.best) == (chosen, best)
    assert choice.clear


def test_ratios_are_taken_within_a_turn_and_drift_does_not_matter():
    drift = [1.0, 0.5, 0.25, 1.0, 0.7, 0.9, 0.3, 1.1]
    assert choose({4: [97 * d for d in drift], 8: [100 * d for d in drift]}).batch_size == 4
    assert hopeless({4: [70 * d for d in drift], 8: [100 * d for d in drift]}) == [4]


def test_what_is_within_5_percent_by_luck_alone_is_not_chosen():
    luck = [1.01, 0.8, 0.96, 0.98, 0.85, 0.97, 0.86, 0.99]
    choice = choose({4: [100 * x for x in luck], 8: [100.0] * 8})
    assert choice.batch_size == 8
    assert not choice.clear


def test_sizes_are_compared_over_the_turns_that_all_of_them_had():
    early = [10.0] * 8  # before the machine slowed down to a half
    assert choose({4: [*early, *[5.0] * 8], 8: [5.2] * 8}).batch_size == 4
    assert choose({4: [*early, *[4.0] * 8], 8: [5.2] * 8}).batch_size == 8


def test_neighbours_of_the_best_at_first_sight_get_turns_whatever_it_showed():
    assert near({4: 10.0, 8: 30.0, 16: 50.0, 32: 100.0, 64: 60.0}) == [16, 32, 64]
    assert near({4: 80.0, 8: 100.0, 16: 20.0, 32: 90.0}) == [4, 8, 16, 32]


def test_half_way_steps_are_tried_about_the_knee_and_the_best_and_never_above_the_cap():
    assert knee({8: 50.0, 16: 96.0, 32: 99.0, 64: 100.0}) == (16, 64)
    assert between([8, 16, 32, 64], 16, 64, cap=1000) == [12, 24, 48, 96]
    assert between([8, 16, 32, 64], 16, 64, cap=70) == [12, 24, 48, 70]
    assert between([8, 16, 32, 48], 32, 48, cap=1000) == [24]
    assert between([2], 2, 2, cap=2) == []


def test_few_turns_are_never_clear():
    assert not choose({4: [50.0], 8: [100.0]}).clear


@pytest.fixture
def linux(tmp_path) -> Callable[..., System]:
    def write(**files: str) -> System:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return System(tmp_path / "cgroup", tmp_path / "meminfo", tmp_path / "own")

    return write


GIB = 2**30
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"


def test_ram_is_what_is_available_where_no_container_limits_it(linux):
    system = linux(meminfo=MEMINFO, own="0::/\n", cgroup__memory_DOT_max="max\n", cgroup__memory_DOT_current="9\n")
    found = ram(system)
    assert found is not None
    assert (found.bytes, found.source) == (32 * GIB, "available RAM")
    assert found.usable == int(0.8 * 32 * GIB)


def test_the_limit_of_a_container_counts_less_what_it_uses_and_cannot_drop(linux):
    system = linux(
        meminfo=MEMINFO,
        own="0::/box\n",
        cgroup__box__memory_DOT_max=f"{4 * GIB}\n",
        cgroup__box__memory_DOT_current=f"{3 * GIB}\n",
        cgroup__box__memory_DOT_stat=f"anon {2 * GIB}\ninactive_file {1 * GIB}\n",
    )
    found = ram(system)
    assert found is not None
    assert (found.bytes, found.source) == (2 * GIB, "RAM that the container's limit leaves")


def test_the_limit_of_the_older_cgroups_counts_too(linux):
    system = linux(
        meminfo=MEMINFO,
        own="7:cpu,cpuacct:/x\n4:memory:/docker/1\n",
        cgroup__memory__memory_DOT_limit_in_bytes=f"{GIB}\n",
        cgroup__memory__memory_DOT_usage_in_bytes=f"{GIB // 2}\n",
        cgroup__memory__memory_DOT_stat="total_inactive_file 0\n",
    )
    found = ram(system)
    assert found is not None
    assert found.bytes == GIB // 2


def test_no_limit_is_claimed_where_the_system_does_not_say(linux):
    assert ram(linux()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody knows")
def test_this_machine_has_room():
    found = room(CPU)
    assert found is not None
    assert 2**26 < found.bytes < 2**50


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Expected more than 1 value per channel when training"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert out_of_memory(error) == expected


def test_a_cpu_allocation_that_fails_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)


def test_another_error_of_the_model_is_not_swallowed(toys):
    task = limited(10**9)
    task.loss = lambda model, batch, plan: model({"x": batch["x"][:, :3]})
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        find_batch(task, toys, toy.PLAN, "cpu", seconds=0.2)


@pytest.mark.cuda
@pytest.mark.parametrize("name", KINDS)
def test_on_cuda_memory_is_predicted_and_given_back(name, packs):
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS's workspaces stay allocated: one of this thread's, one of backward's
    del x
    kind, before = KINDS[name], torch.cuda.memory_allocated()
    found = find_batch(kind, packs[name], kind.PLAN, "cuda", seconds=4)
    for row in found.rows:
        if row.predicted and row.measured:
            assert row.measured == pytest.approx(row.predicted, rel=0.1)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
