"""What a step's profile measures is so, and the verdict that follows from it is right: on jobs whose parts take known
times, and, where operations are counted, on real ones."""

import dataclasses
import gc
import json
import math
import random
import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from simulated import Job
from torch import nn

from nbtools import table
from nbtools.data import cores, gather, on, open_feed
from nbtools.errors import TrainError
from nbtools.measure import Stepper, StepProfile, Verdict, memory, step_profile, verdict
from nbtools.measure.profile import Skipped, Tried, device_seconds, flops, memory_of, padding, shapes
from nbtools.measure.stepper import epoch_batches, read_switches, typical
from nbtools.measure.trials import worth_trying
from nbtools.train import TrainState, checkpoint, knob, synchronizing, train

CPU = torch.device("cpu")
SECONDS = 4.0  # on a job's own clock: enough for rounds of several steps
FILES = {"feed": "workers", "workers": 0}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {ragged: toy.make_pack(folder / str(ragged), 1000, ragged) for ragged in (False, True)}


def plan_of(**changes) -> toy.Plan:
    """Few epochs, so that evaluations are not what to change."""
    return toy.PLAN.replace(**{"epochs": 4, "batch_size": 16, **changes})


def profiled(job: Job, pack, plan, **more) -> StepProfile:
    return step_profile(job, job.pack(pack), plan, CPU, SECONDS, clock=job.clock, **more)


STEP = {"fixed": 0.001, "a_sample": 0.01}  # on this clock the toy's few products need no time: bound by memory
BF16 = {**STEP, "amp": {"bf16": 0.4}}
JOBS = {  # name → job, plan, what it is bound by, the change that helps, by how much
    "files": ({"reading": 0.05}, FILES, "data", {"feed": "resident"}, (16 * 0.05 + 0.05) / 0.05),
    "files that help little": ({"reading": 0.002, **STEP}, FILES, "memory", {"feed": "resident"}, 0.193 / 0.161),
    "nothing but launching": ({}, {"batch_size": 8}, "launch", {"batch_size": 32}, 4.0),
    "launching": ({"fixed": 0.08, "a_sample": 0.005}, {"batch_size": 8}, "launch", {"batch_size": 32}, 2.0),
    "micro-batches": ({}, {"micro_batch_size": 2}, "launch", {"micro_batch_size": None}, 8.0),
    "a step": (STEP, {}, "memory", None, None),
    "noise": ({**STEP, "augmenting": 0.02}, {}, "memory", {"noise": 0.0}, (16 * 0.03 + 0.001) / 0.161),
    "a faster precision": (BF16, {}, "memory", {"amp": "bf16"}, 1 / 0.4),
    "another loss": ({**BF16, "loss_in_bf16": 1.5}, {}, "memory", None, None),
    "much scoring": ({**STEP, "scoring": 2.0}, {"epochs": 50}, "memory", {"eval_every": 10}, None),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_verdict_finds_what_a_job_is_bound_by_and_predicts_what_its_change_brings(packs, name):
    job, plan, bound, change, gain = JOBS[name]
    job, plan = Job(**{"amp": {"bf16": 1.0}, **job}), plan_of(**plan)
    profile = profiled(job, packs[False], plan)
    found = verdict(profile, plan)
    assert (found.bound, found.change) == (bound, change), found
    if gain is not None:
        assert found.predicted == pytest.approx(gain, rel=0.02)
    if change is None:
        assert "tried" in found.sentence
    assert profile.wait + profile.host + profile.device == pytest.approx(1)


def test_shares_and_seconds_are_those_of_the_job(packs):
    job = Job(reading=0.01, preparing=0.001, augmenting=0.002, fixed=0.02, a_sample=0.002, scoring=0.5)
    profile = profiled(job, packs[False], plan_of(**FILES), fixed=("feed", "batch_size", "noise", "amp", "workers"))
    step = 16 * 0.005 + 0.02
    assert profile.samples_per_s == pytest.approx(16 / (step + 0.16))
    assert profile.ceiling == pytest.approx(16 / step)
    assert profile.ceiling_ratio == pytest.approx(step / (step + 0.16))
    assert profile.wait == pytest.approx(0.16 / (step + 0.16))
    assert profile.batching == pytest.approx(0.016 / (step + 0.16))
    assert profile.augmentation == pytest.approx(0.032 / (step + 0.16))
    assert profile.fixed == pytest.approx(0.02 / step)
    assert profile.host == pytest.approx((1 - profile.wait) * profile.fixed)
    val = len(packs[False].ids("val"))
    batches = -(-val // 16)
    assert profile.evaluation_s == pytest.approx(batches * 0.5 + val * 0.011, rel=0.1)  # some batches stand for all
    assert profile.epoch_s == pytest.approx(profile.train_samples * (step + 0.16) / 16 + profile.between_s)
    assert {"step", "held"} == profile.memory.keys()
    assert profile.trials == ()


@pytest.fixture(scope="module")
def measured(packs):
    """One profile that the tests of what is decided from it change as they need."""
    return profiled(Job(amp={"bf16": 1.0}), packs[False], plan_of(batch_size=8))


def shares(wait: float, host: float, **more) -> dict:
    return {"wait": wait, "host": host, "device": 1 - wait - host, "ceiling_ratio": 1 - wait, **more}


def trial(ratio: float, low: float | None = None, **change) -> Tried:
    return Tried(change, ratio, ratio if low is None else low, ratio * 1.1, 16)


def judged(measured: StepProfile, plan: Any = None, **values) -> Verdict:
    plan = plan or plan_of(batch_size=8, noise=0.0)
    calm = {"evaluation_s": 0.0, "checkpoint_s": 0.0, "augmentation": 0.0, "trials": ()}
    return verdict(dataclasses.replace(measured, **{**calm, "plan": plan.to_dict(), **values}), plan)


def test_profile_and_verdict_survive_json_and_show_as_tables(measured):
    plain = json.loads(json.dumps(measured.to_dict()))
    plain |= {"host_s": 0.1}  # which older versions wrote
    again = StepProfile.from_dict(plain)
    assert again == dataclasses.replace(measured, plan={**measured.plan, "betas": list(measured.plan["betas"])})
    found = verdict(measured, plan_of(batch_size=8))
    assert Verdict.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert table.escaped(found.sentence) in found._repr_html_()
    assert "GFLOP/s" in str(measured)
    assert str(found) == found.sentence


LIMITS = {
    "data": "Loading data is the limit: training waits for it 50 % of each ",
    "launch": "The fixed cost is the limit: 50 % of each ",
    "compute": "The processor is the limit: busy 70 % of each ",
    "memory": "Memory bandwidth is the limit: 40 % of each ",
}


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        (shares(0.5, 0.3), "data"),
        (shares(0.1, 0.5), "launch"),
        (shares(0.1, 0.2, flops_per_s=4e9, matrix=1e10), "compute"),
        (shares(0.1, 0.2, flops_per_s=3e9, matrix=1e10), "memory"),
    ],
)
def test_the_bound_is_what_takes_most(measured, values, bound):
    found = judged(measured, **values)
    assert found.bound == bound
    assert found.sentence.startswith(LIMITS[bound])
    assert "measure again on a quiet machine" in judged(measured, **values, least=1.0, most=4.0).sentence


def test_where_no_change_is_worth_it_those_that_were_tried_are_named(measured):
    found = judged(measured, **shares(0.0, 0.1), trials=(trial(1.05, batch_size=16),))
    assert (found.change, found.predicted) == (None, None)
    assert found.sentence.endswith(
        " The one change tried was not 10 % faster. A smaller network or smaller inputs would help."
    )
    assert "tried" not in judged(measured, **shares(0.0, 0.1)).sentence
    assert judged(measured, **shares(0.0, 0.8)).sentence.endswith(" Fewer, larger layers would help.")
    slow = tuple(trial(0.9 + k / 100, batch_size=k) for k in range(6))
    found = judged(measured, **shares(0.0, 0.1), trials=slow)
    assert " None of the 6 changes tried was 10 % faster." in found.sentence
    tried = (trial(1.03, amp="bf16"), trial(0.9, channels_last=True), trial(1.3, low=0.8, batch_size=16))
    found = judged(measured, **shares(0.0, 0.1), trials=tried, skipped=(Skipped({"compile": True}, "time"),))
    assert (
        " None of the 3 changes tried is worth it: batch_size=16 1.30× (but 0.80–1.43). There was no time to "
        "try compile=True. A smaller"
    ) in found.sentence
    left = tuple(Skipped({"batch_size": size}, lack) for size, lack in ((16, "time"), (64, "memory"), (128, "memory")))
    found = judged(measured, **shares(0.0, 0.1), skipped=left).sentence
    assert "There was no time to try batch_size=16, and no memory to try batch_size=64, batch_size=128. " in found
    other = (dataclasses.replace(trial(1.9, amp="bf16"), drift=0.4),)
    found = judged(measured, **shares(0.0, 0.1), trials=other)
    assert found.change is None
    assert "amp=bf16 1.90×, but its loss differs by 40 %" in found.sentence


def test_of_changes_that_bring_as_much_the_smaller_or_the_one_that_learns_the_same_is_proposed(measured):
    trials = (trial(1.9, batch_size=16), trial(1.95, batch_size=32))
    found = judged(measured, **shares(0.0, 0.8), trials=trials)
    assert (found.change, found.predicted) == ({"batch_size": 16}, 1.9)
    assert "changes what is learned" in found.sentence
    trials = (trial(2.0, batch_size=16), trial(1.95, amp="bf16"))
    assert judged(measured, **shares(0.0, 0.1), trials=trials).change == {"amp": "bf16"}


def test_what_is_worth_trying(measured):
    quiet = dataclasses.replace(measured, **shares(0.0, 0.1), fixed=0.0, augmentation=0.0)
    plan, convolution = plan_of(batch_size=8), [nn.Conv2d(1, 1, 1)]
    for amp, other in (("off", "bf16"), ("bf16", "off")):
        assert worth_trying(quiet, plan.replace(amp=amp), [], ()) == [{"amp": other}]
    assert worth_trying(quiet, plan, [], ("amp",)) == []
    assert worth_trying(dataclasses.replace(quiet, **shares(0.8, 0.1)), plan, [], ()) == [{"feed": "streamed"}]
    for layout in (False, True):
        other = plan.replace(channels_last=layout)
        assert worth_trying(quiet, other, convolution, ("amp",)) == [{"channels_last": not layout}]
    assert worth_trying(quiet, plan.replace(compile=True), convolution, ()) == []


def test_the_pack_replaces_files_and_more_workers_do_where_it_has_to_be_files(measured):
    plan = plan_of(batch_size=8, feed="workers")
    profile = dataclasses.replace(measured, **shares(0.75, 0.2, feed="workers", packed="streamed"))
    assert worth_trying(profile, plan, [], ()) == [{"feed": "streamed"}]
    assert worth_trying(profile, plan, [], ("feed",)) == [{"workers": cores()}]
    assert worth_trying(profile, plan.replace(workers=cores()), [], ("feed",)) == []
    assert worth_trying(dataclasses.replace(profile, feed="resident"), plan, [], ()) == [{"feed": "streamed"}]


def test_compiling_is_tried_only_where_training_lasts_long_enough_to_pay_for_it(measured):
    def compiles(seconds: float, layers: list[nn.Module], *fixed: str, shapes: int = 1) -> bool:
        plan = plan_of(epochs=math.ceil(seconds / measured.epoch_s))
        return {"compile": True} in worth_trying(dataclasses.replace(measured, shapes=shapes), plan, layers, fixed)

    assert not compiles(1000, [])
    assert compiles(2000, [])
    assert not compiles(2000, [], "compile")
    assert not compiles(2000, [nn.GRU(2, 2)])
    assert not compiles(2000, [], shapes=9)
    assert compiles(2000, [], shapes=8)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
@pytest.mark.parametrize("compiler", [True, False])
def test_a_compiled_step_is_tried_in_turns_with_the_plan_where_there_is_a_compiler(
    packs, monkeypatch, tmp_path, compiler
):
    torch._dynamo.reset()
    if not compiler:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what was compiled before is not there
        monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    plan = toy.PLAN.replace(epochs=10**7)
    profile = step_profile(toy, packs[False], plan, CPU, 0.1, fixed=("batch_size", "feed", "noise"))
    [trial] = [trial for trial in profile.trials if trial.change == {"compile": True}]
    assert ("no-such-compiler" in trial.objection) != compiler


@pytest.mark.parametrize(("fixed", "tried"), [(0.025, 3), (0.15, 2), (0.5, 1), (1.0, 0)])
def test_as_much_is_tried_as_the_time_allows(packs, fixed, tried):
    """In 8 s: for each change 3 steps of the plan in turns with 4 of its own, of the same size, of twice, of four
    times."""
    job = Job(a_sample=fixed / 8, fixed=fixed, amp={"bf16": 1.0})
    profile = profiled(job, packs[False], plan_of(batch_size=8), fixed=("compile",))
    assert len(profile.trials) == tried
    assert len(profile.trials) + len(profile.skipped) == 3
    assert {each.lack for each in profile.skipped} <= {"time"}


def test_what_does_not_fit_into_memory_is_not_tried_for_that_reason(packs, monkeypatch):
    monkeypatch.setattr(memory, "room", lambda device: memory.Room(1, "a test"))
    plan = plan_of(batch_size=8)
    profile = profiled(Job(a_sample=0.003, fixed=0.02), packs[False], plan, fixed=("compile", "amp"))
    assert [(each.change["batch_size"], each.lack) for each in profile.skipped] == [(16, "memory"), (32, "memory")]
    assert "There was no memory to try batch_size=16, batch_size=32." in verdict(profile, plan).sentence


def test_on_cuda_a_launch_bound_step_is_told_of_graphs_and_of_lines_that_wait(measured):
    found = judged(measured, **shares(0.0, 0.6), device_type="cuda")
    assert found.change == {"graph": True}
    assert found.predicted == pytest.approx(2.5)
    assert "up to 2.5×" in found.sentence
    found = judged(measured, **shares(0.0, 0.6, device_type="cuda", syncs=("/home/me/task.py:12",)))
    assert "/home/me/task.py:12" in found.sentence
    assert found.change is None
    assert found.predicted == pytest.approx(2.5)


@pytest.mark.parametrize(("every", "share"), [(10.0, 0.2), (2.0, 1.0)])
def test_on_cuda_the_devices_part_is_the_time_of_its_kernels_however_many_are_launched(every, share):
    """What the profiler writes of 2,000 kernels of 2 µs that begin every so many µs: next to them the host's part,
    copies on a second stream, and the span of the optimizer's step over all."""
    kernels = [{"cat": "kernel", "ts": 50 + every * k, "dur": 2.0} for k in range(2000)]
    copies = [{"cat": "gpu_memcpy", "ts": kernel["ts"] + 1, "dur": 0.5} for kernel in kernels[::100]]
    host = [{"cat": "cuda_runtime", "ts": every * k, "dur": every} for k in range(2000)]
    span = {"cat": "gpu_user_annotation", "ts": 50, "dur": every * 2000}
    worked = device_seconds([{"ph": "M", "name": "process_name"}, *host, *kernels, *copies, span])
    assert worked == pytest.approx(share * every * 2000 / 1e6)


def test_augmentation_is_named_with_its_share_where_no_setting_turns_it_off(measured):
    values = {**shares(0.0, 0.1), "augmentation": 0.75}
    found = judged(measured, **values)
    assert "a cheaper augmentation makes training up to 4×" in found.sentence
    assert found.change is None
    noisy = plan_of(batch_size=8, noise=0.1)
    assert judged(measured, noisy, **values).change == {"noise": 0.0}
    tried = judged(measured, noisy, **values, trials=(trial(3.0, noise=0.0),))
    assert tried.predicted == 3.0
    assert "changes what is learned" in tried.sentence


def test_evaluations_are_put_as_far_apart_as_the_run_still_chooses_among_five(measured):
    values = shares(0.0, 0.9, evaluation_s=9.9 * measured.train_samples / measured.samples_per_s)
    assert judged(measured, plan_of(batch_size=8, epochs=20, noise=0.0), **values).change == {"eval_every": 4}
    found = judged(measured, plan_of(batch_size=8, epochs=10**4, noise=0.0), **values)
    assert found.change == {"eval_every": 189}  # 9.9 / 189 of an epoch next to the steps: 5 % of the whole
    assert found.predicted == pytest.approx(10.9 / (1 + 9.9 / 189))


class Wide(nn.Module):
    """Few wide linears over 16 positions: matrix products and little else."""

    def __init__(self, width: int = 384):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, batch):
        return self.head(self.layers(batch["x"][:, None].expand(-1, 16, -1)).mean(1))


def own(**parts) -> Any:
    return SimpleNamespace(**{**vars(toy), **parts})


def test_flops_and_memory_are_those_of_the_matrix_products_and_what_is_held(packs):
    sizes = set()

    def loss(model, batch, plan):
        sizes.add(len(batch["x"]))
        return toy.loss(model, batch, plan)

    task, pack = own(model=lambda card, plan: Wide(), loss=loss), packs[False]
    raw = on(CPU, gather(pack, pack.ids("train")[:32]))
    stepper = Stepper(task, pack, plan_of(batch_size=32), CPU)
    rows, w = 32 * 16, 384
    forward = 2 * (rows * 8 * w + 2 * rows * w * w + 32 * w * 4)
    assert flops(stepper.state, raw) == forward * 3 - 2 * rows * 8 * w  # the input needs no gradient
    sizes.clear()
    halves = Stepper(task, pack, plan_of(batch_size=32, micro_batch_size=16), CPU)
    assert flops(halves.state, raw) == forward * 3 - 2 * rows * 8 * w
    assert sizes == {16}, "a batch that does not fit at once is counted in parts that do"
    stepper.step(raw)
    found, weights = memory_of(stepper.on(iter([raw]))), sum(p.numel() for p in stepper.state.parameters)
    assert found["held"] * 2**20 == pytest.approx(16 * weights, rel=0.01)  # weight, gradient, two moments
    activations = 4 * 32 * 16 * 384 * 3
    assert activations <= found["step"] * 2**20 <= 3 * activations + 4 * weights


def test_padding_is_the_share_of_zeros_that_batches_bring(packs):
    pack, plan = packs[True], toy.PLAN.replace(batch_size=7)
    raws = list(open_feed(pack, plan, CPU)(epoch_batches(pack, plan)))
    elements = sum(raw["x"].shape[0] * raw["x"].shape[1] for raw in raws)
    assert padding(pack, plan) == {"x": pytest.approx(1 - sum(int(raw["x_length"].sum()) for raw in raws) / elements)}
    assert padding(packs[False], plan) == {}


def test_a_bucket_makes_the_lengths_of_batches_few(packs):
    @dataclasses.dataclass(frozen=True)
    class Bucketed(toy.Plan):
        bucket: int = knob(1, "", least=1)

    batches = epoch_batches(packs[True], Bucketed(batch_size=8))
    lengths = [int(packs[True].lengths("x", batch).max()) for batch in batches]
    assert shapes(packs[True], Bucketed(batch_size=8)) == len(set(lengths)) > 8
    assert shapes(packs[True], Bucketed(batch_size=8, bucket=8)) == len({-(-n // 8) for n in lengths}) <= 3
    assert shapes(packs[False], Bucketed(batch_size=8)) == 1
    real, whole = (
        sum(map(sum, (packs[True].lengths("x", batch) for batch in batches))),
        [-(-n // 8) * 8 for n in lengths],
    )
    elements = sum(len(batch) * n for batch, n in zip(batches, whole, strict=True))
    assert padding(packs[True], Bucketed(batch_size=8, bucket=8))["x"] == pytest.approx(1 - real / elements)


def test_the_cached_batch_is_a_whole_one_of_middling_length(packs):
    pack, plan = packs[True], toy.PLAN
    lengths = [pack.lengths("x", batch).max() for batch in epoch_batches(pack, plan)]
    [(ids, samples)] = typical(pack, plan)
    assert len(ids) == plan.batch_size
    assert samples == pytest.approx(len(ids), rel=0.3)
    assert np.quantile(lengths, 0.3) <= pack.lengths("x", ids).max() <= np.quantile(lengths, 0.7)


def states() -> int:
    gc.collect()
    return sum(type(each) is TrainState for each in gc.get_objects())


def test_a_run_under_way_goes_on_as_if_nobody_had_measured(packs):
    state, twin = (TrainState(toy, packs[False], toy.PLAN, CPU) for _ in range(2))
    records = train(toy, state, packs[False])
    for _ in range(5):
        next(records)
    alive, before = states(), (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    switches = read_switches()
    step_profile(toy, packs[False], toy.PLAN.replace(deterministic=True, micro_batch_size=5, ema=0.9), CPU, 0.1)
    assert states() == alive, "a model that was measured stays in memory"
    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before
    assert read_switches() == switches
    for _ in range(40):
        next(records)
    for _ in zip(range(45), train(toy, twin, packs[False]), strict=False):
        continue
    ours, theirs = state.tensors(), twin.tensors()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("ragged", [False, True])
def test_a_pack_of_a_few_samples_is_measured_and_a_batch_larger_than_it_refused(tmp_path, ragged):
    pack, plan = toy.make_pack(tmp_path, 8, ragged), toy.PLAN.replace(batch_size=2)
    assert step_profile(toy, pack, plan, CPU, 0.05).samples_per_s > 0
    with pytest.raises(TrainError, match="larger than the train split"):
        step_profile(toy, pack, toy.PLAN, CPU, 0.05)


def waits() -> None:
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_a_warning_of_torch_is_traced_to_the_line_that_caused_it():
    here = waits.__code__.co_firstlineno + 1
    assert synchronizing(lambda: (waits(), waits()))[1] == (f"{__file__}:{here}",)
    assert synchronizing(lambda: warnings.warn("something else", stacklevel=1) or 5) == (5, ())
    network = nn.Identity()
    network.register_forward_hook(lambda *_: waits())
    _, [line] = synchronizing(lambda: network(torch.ones(1)))
    assert line.startswith(f"{__file__}:"), "a warning from within torch is laid to its caller"


def test_a_checkpoint_costs_training_its_copy_however_long_another_thread_writes_it(packs, monkeypatch):
    monkeypatch.setattr(checkpoint, "publish", lambda *_: time.sleep(1.0))
    monkeypatch.setattr(checkpoint, "write", lambda *_: time.sleep(1.0))
    profile = step_profile(toy, packs[False], toy.PLAN, CPU, 0.2)
    assert profile.checkpoint_s < 0.1
