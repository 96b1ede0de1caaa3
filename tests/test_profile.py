"""What a step's profile measures is so, and the verdict that follows from it is right: shown on jobs built to be bound
by a known thing. Ratios are measured in turns, with one thread, on a machine that others use too."""

import copy
import dataclasses
import gc
import json
import math
import random
import statistics
import warnings
from pathlib import Path
from time import perf_counter, process_time, thread_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from jobs import JOBS, Job, Normalised, Plan

from nbtools.data import batches_left, cores, gather, lengths_of, on, open_feed
from nbtools.errors import TrainError
from nbtools.measure import Verdict
from nbtools.measure.figures import StepProfile, Tried
from nbtools.measure.pace import Pace
from nbtools.measure.parts import Bench, epoch_batches, host_and_device, memory_of, padding, shapes, typical
from nbtools.measure.profile import shares as split
from nbtools.measure.profile import step_profile
from nbtools.measure.rates import Counts, Watch, count
from nbtools.measure.syncs import synchronizing
from nbtools.measure.tries import affordable, made_ready, worth_compiling, worth_trying
from nbtools.measure.untouched import read_switches
from nbtools.measure.verdict import verdict
from nbtools.train import TrainState, checkpoint, knob, train

pytestmark = pytest.mark.alone  # measures rates

CPU = torch.device("cpu")
SECONDS = 0.5  # a measurement takes about twice as long
TRIES = 3
JOB = {job.name: job for job in JOBS}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {ragged: toy.make_pack(folder / str(ragged), 1000, ragged) for ragged in (False, True)}


def profiled(job, packs) -> StepProfile:
    """All but the precision tried: whether that is faster depends on the CPU."""
    return step_profile(job, job.pack(packs), job.plan, CPU, SECONDS, fixed=(*job.fixed, "amp"))


def achieved(job: Job, packs, change: dict) -> float:
    """samples/s with the change over without it, trained in turns; of the seconds that this thread ran, where nothing
    waits for data."""
    paces = [Pace(job, job.pack(packs), plan, CPU) for plan in (job.plan, job.plan.turn(**change))]
    clock = perf_counter if job.read else thread_time
    waiting = made_ready(paces[1].plan)
    ratios = []
    for _ in range(7 if waiting else 16):
        rates = []
        for pace in paces:
            start, samples = clock(), pace.state.samples
            pace.advance(0.02, steps=1 + 2 * waiting)
            rates.append((pace.state.samples - samples) / (clock() - start))
        ratios.append(rates[1] / rates[0])
    return statistics.median(ratios)


def achieved_by_epochs(job: Job, packs, change: dict, folder) -> float:
    """The same with all that an epoch is: an evaluation, and the checkpoint that follows; epoch by epoch in turns."""
    pack, runs = job.pack(packs), []
    for plan in (job.plan, job.plan.turn(**change)):
        state = TrainState(job, pack, plan, CPU)
        runs.append((state, train(job, state, pack)))
    seconds = [0.0, 0.0]
    for turn in range(2 * change["eval_every"]):
        for k in (0, 1) if turn % 2 else (1, 0):
            state, records = runs[k]
            start = perf_counter()
            record = next(record for record in records if record.kind == "epoch")
            if "val_loss" in record.values:
                checkpoint.write(folder, "best", state.tensors(), state.facts())
            seconds[k] += perf_counter() - start
    return seconds[0] / seconds[1]


@pytest.mark.parametrize("name", JOB)
def test_the_verdict_finds_what_a_job_is_bound_by_and_its_change_brings_what_it_predicts(name, packs, tmp_path):
    job = JOB[name]
    ratios = []
    for _ in range(TRIES):
        profile = profiled(job, packs)
        found = verdict(profile, job.plan, job.fixed)
        assert found.bound in job.bound, (found, found.evidence)
        assert (tuple(found.change) if found.change else None) == job.change, (found, found.evidence)
        if found.change is None:
            assert "tried" in found.sentence
            if "batch_size" not in job.fixed:
                assert achieved(job, packs, {"batch_size": 2 * job.plan.batch_size}) < 1.25
            return
        assert found.predicted is not None
        epochs = found.evidence["of"] == "epoch"
        got = achieved_by_epochs(job, packs, found.change, tmp_path) if epochs else achieved(job, packs, found.change)
        ratios.append(found.predicted / got)
        print(f"{name}: {found.bound}, {found.change}, predicted {found.predicted:.2f}, achieved {got:.2f}")
        if abs(ratios[0] - 1) <= 0.25:  # else twice more, and the middle of the three counts
            return
    assert statistics.median(ratios) == pytest.approx(1, abs=0.25), ratios


@pytest.fixture(scope="module")
def measured(packs):
    """One profile that the tests of what is decided from it change as they need."""
    return profiled(JOB["many tiny layers"], packs)


def shares(wait: float, host: float, **more) -> dict:
    return {"wait": wait, "host": host, "device": 1 - wait - host, "ceiling_ratio": 1 - wait, **more}


def trial(ratio: float, low: float | None = None, **change) -> Tried:
    return Tried(change, ratio, ratio if low is None else low, ratio * 1.1, 16)


def judged(measured: StepProfile, plan: Plan, **values) -> Verdict:
    calm = {"evaluation_s": 0.0, "checkpoint_s": 0.0, "augmentation": 0.0, "trials": ()}
    return verdict(dataclasses.replace(measured, **{**calm, "plan": plan.to_dict(), **values}), plan)


def test_shares_are_of_one_step_and_figures_agree(measured):
    assert measured.wait + measured.host + measured.device == pytest.approx(1)
    assert min(measured.wait, measured.host, measured.device) >= 0
    assert measured.least <= measured.samples_per_s <= measured.most
    assert 0 < measured.host_s <= measured.cached_s
    assert measured.evaluation + measured.checkpoint < 1
    assert {"step", "held"} == measured.memory.keys()


def test_a_profile_and_a_verdict_survive_json(measured):
    plan = JOB["many tiny layers"].plan
    assert StepProfile.from_dict(json.loads(json.dumps(measured.to_dict()))) == dataclasses.replace(
        measured, plan={**measured.plan, "betas": list(measured.plan["betas"])}
    )
    found = verdict(measured, plan)
    assert Verdict.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_profile_and_verdict_show_as_tables(measured):
    found = verdict(measured, JOB["many tiny layers"].plan)
    assert found.sentence in found._repr_html_()
    assert "samples/s" in measured._repr_html_()
    assert "GFLOP/s" in str(measured)
    assert str(found) == found.sentence


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        (shares(0.5, 0.3), "data"),
        (shares(0.1, 0.5), "launch"),
        (shares(0.1, 0.2, counts=Counts(8, 10, 10**12, ((2**20, 1),))), "compute"),
        (shares(0.1, 0.2, counts=Counts(8, 10, 1, ((2**30, 9),))), "memory"),
    ],
)
def test_the_bound_is_what_takes_most(measured, values, bound):
    found = judged(measured, Plan(batch_size=8), **values)
    assert found.bound == bound
    assert found.sentence.lower().startswith(f"{bound}-bound: ")


def test_a_plan_without_any_gain_is_told_to_stay(measured):
    found = judged(measured, Plan(batch_size=8), **shares(0.0, 0.1), trials=(trial(1.05, batch_size=16),))
    assert found.change is None
    assert found.predicted is None
    assert "the one change tried was not 10 % faster: batch_size=16 1.05×" in found.sentence
    assert "no change of a setting was tried" in judged(measured, Plan(batch_size=8), **shares(0.0, 0.1)).sentence


def test_a_plan_without_any_gain_names_what_was_tried(measured):
    tried = (trial(1.03, amp="bf16"), trial(0.9, channels_last=True), trial(1.3, low=0.8, batch_size=16))
    found = judged(measured, Plan(batch_size=8), **shares(0.0, 0.1), trials=tried, untried=({"compile": True},))
    assert (
        "none of the 3 changes tried was 10 % faster: amp=bf16 1.03×, channels_last=True 0.90×, batch_size=16 1.30× "
        "(but 0.80–1.43); not tried for lack of time or memory: compile=True"
    ) in found.sentence


def test_a_faster_precision_whose_loss_is_another_is_not_proposed(measured):
    tried = (dataclasses.replace(trial(1.9, amp="bf16"), drift=0.4),)
    found = judged(measured, Plan(batch_size=8), **shares(0.0, 0.1), trials=tried)
    assert found.change is None
    assert "amp=bf16 1.90×, but its loss differs by 40%" in found.sentence


@pytest.mark.parametrize(("amp", "other"), [("off", "bf16"), ("bf16", "off")])
def test_the_other_precision_is_tried_on_a_cpu_too_unless_data_are_late(measured, amp, other):
    profile = dataclasses.replace(measured, **shares(0.0, 0.1), small_s=0.0, augmentation=0.0)
    plan = Plan(batch_size=8, amp=amp)
    assert worth_trying(profile, plan, [], ()) == [{"amp": other}]
    assert worth_trying(profile, plan, [], ("amp",)) == []
    assert {"amp": other} not in worth_trying(dataclasses.replace(profile, **shares(0.8, 0.1)), plan, [], ())


def test_the_other_layout_is_tried_where_there_are_convolutions(measured):
    profile = dataclasses.replace(measured, **shares(0.0, 0.1), small_s=0.0, augmentation=0.0)
    layers = [torch.nn.Conv2d(1, 1, 1)]
    for layout in (False, True):
        plan = Plan(batch_size=8, channels_last=layout)
        assert worth_trying(profile, plan, layers, ("amp",)) == [{"channels_last": not layout}]


def test_the_pack_replaces_files_and_more_workers_do_where_it_has_to_be_files(measured):
    plan = Plan(batch_size=8, feed="workers")
    profile = dataclasses.replace(measured, **shares(0.75, 0.2, feed="workers", packed="streamed"))
    assert worth_trying(profile, plan, [], ()) == [{"feed": "streamed"}]
    assert worth_trying(profile, plan, [], ("feed",)) == [{"workers": cores()}]
    assert worth_trying(profile, plan.replace(workers=cores()), [], ("feed",)) == []
    assert worth_trying(dataclasses.replace(profile, feed="resident"), plan, [], ()) == [{"feed": "streamed"}]
    found = judged(measured, plan, **shares(0.75, 0.2, feed="workers"), trials=(trial(3.5, feed="streamed"),))
    assert found.change == {"feed": "streamed"}
    assert found.predicted == 3.5
    assert "25% of the ceiling" in found.sentence


def test_compiling_is_tried_only_where_training_lasts_long_enough_to_pay_for_it(measured):
    seconds = measured.epoch_s
    long, short = (Plan(epochs=math.ceil(lasting / seconds)) for lasting in (2000, 1000))
    assert worth_compiling(measured, short, [], ()) == []
    assert worth_compiling(measured, long, [], ()) == [{"compile": True}]
    assert worth_compiling(measured, long, [], ("compile",)) == []
    assert worth_compiling(measured, long, [torch.nn.GRU(2, 2)], ()) == []
    assert worth_compiling(measured, short, [], (), asked=True) == [{"compile": True}]
    assert worth_compiling(dataclasses.replace(measured, shapes=9), long, [], ()) == []
    assert worth_compiling(dataclasses.replace(measured, shapes=8), long, [], ()) == [{"compile": True}]
    waiting = dataclasses.replace(measured, device_type="cuda", **shares(0.0, 0.9))
    assert worth_compiling(waiting, long, [], ()) == [{"compile": True}, {"graph": True}]


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
    tried = [trial.change for trial in profile.trials]
    assert ({"compile": True} in tried) == compiler
    assert ({"compile": True} in profile.untried) != compiler


def test_of_batches_nearly_as_fast_the_smallest_is_advised(measured):
    trials = (trial(1.9, batch_size=16), trial(1.95, batch_size=32))
    found = judged(measured, Plan(batch_size=8), **shares(0.0, 0.8), trials=trials)
    assert found.change == {"batch_size": 16}
    assert found.predicted == 1.9
    assert "changes what is learned" in found.sentence


def test_a_trial_that_was_not_faster_in_most_rounds_is_no_reason(measured):
    found = judged(measured, Plan(batch_size=8), **shares(0.0, 0.8), trials=(trial(1.3, low=0.8, batch_size=16),))
    assert found.change is None


def test_of_changes_that_bring_as_much_the_one_that_learns_the_same_is_advised(measured):
    trials = (trial(2.0, batch_size=16), trial(1.95, amp="bf16"))
    assert judged(measured, Plan(batch_size=8), **shares(0.0, 0.1), trials=trials).change == {"amp": "bf16"}


def test_on_cuda_a_launch_bound_step_is_told_of_graphs_at_most(measured):
    found = judged(measured, Plan(batch_size=8), **shares(0.0, 0.6), device_type="cuda")
    assert found.change == {"graph": True}
    assert found.predicted == pytest.approx(2.5)
    assert "up to 2.5×" in found.sentence


def traced(every: float, launches: int = 2000, steps: int = 5) -> list[dict]:
    """What the profiler writes of steps whose kernels of 2 µs begin every so many µs: beside them the host's part,
    copies on a second stream, and the span of the optimizer's step over all."""
    kernels = [{"ph": "X", "cat": "kernel", "ts": 50 + every * k, "dur": 2.0} for k in range(launches * steps)]
    copies = [{"ph": "X", "cat": "gpu_memcpy", "ts": kernel["ts"] + 1, "dur": 0.5} for kernel in kernels[::100]]
    host = [{"ph": "X", "cat": "cuda_runtime", "ts": every * k, "dur": every} for k in range(launches * steps)]
    span = {"ph": "X", "cat": "gpu_user_annotation", "ts": 50, "dur": every * launches * steps}
    return [{"ph": "M", "name": "process_name"}, *host, *kernels, *copies, span]


@pytest.mark.parametrize(("every", "bound", "share"), [(10.0, "launch", 0.8), (2.0, "compute", 0.0)])
def test_on_cuda_the_devices_part_is_the_time_of_its_kernels_however_many_are_launched(
    measured, monkeypatch, every, bound, share
):
    """2,000 launches a step, twice as many as CUDA's queue holds; a step of 2,000 times `every` µs."""

    class Profiler:
        def __init__(self, **options):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps({"traceEvents": traced(every)}))

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    bench: Any = SimpleNamespace(
        state=SimpleNamespace(device=torch.device("cuda")),
        step=lambda: None,
        **dict.fromkeys(("mean", "best", "plain", "drawn"), 2000 * every / 1e6),
    )
    host_s, device_s = host_and_device(bench, bench, measured.counts, measured.rates, 0.0)
    assert device_s == pytest.approx(2000 * 2e-6)
    found = split(bench, 0.0, host_s, device_s)
    assert found["host"] == pytest.approx(share)
    arithmetic = dataclasses.replace(measured.counts, flops=10**15)
    profile = dataclasses.replace(measured, device_type="cuda", counts=arithmetic, **found)
    assert verdict(profile, Plan(batch_size=8)).bound == bound


def test_augmentation_is_named_with_its_share_where_no_knob_turns_it_off(measured):
    values = {**shares(0.0, 0.1), "augmentation": 0.75}
    found = judged(measured, Plan(batch_size=8), **values)
    assert "a cheaper augmentation makes training up to 4×" in found.sentence
    assert found.change is None
    assert judged(measured, Plan(batch_size=8, noise=0.1), **values).change == {"noise": 0.0}
    tried = judged(measured, Plan(batch_size=8, noise=0.1), **values, trials=(trial(3.0, noise=0.0),))
    assert tried.predicted == 3.0
    assert "changes what is learned" in tried.sentence


def test_a_machine_that_was_busy_is_to_be_measured_again(measured):
    busy, quiet = (judged(measured, Plan(batch_size=8), least=100.0, most=most) for most in (400.0, 200.0))
    assert "varied from 100 to 400 samples/s" in busy.sentence
    assert "varied" not in quiet.sentence


def test_a_synchronisation_is_named_by_file_and_line_and_left_to_the_person(measured):
    values = shares(0.0, 0.6, device_type="cuda", syncs=("/home/me/task.py:12",))
    found = judged(measured, Plan(batch_size=8), **values)
    assert "/home/me/task.py:12" in found.sentence
    assert found.change is None
    assert found.predicted == pytest.approx(2.5)


def test_evaluations_are_put_as_far_apart_as_the_run_still_chooses_among_five(measured):
    values = shares(0.0, 0.9, evaluation_s=9.9 * measured.train_samples / measured.samples_per_s)
    assert judged(measured, Plan(batch_size=8, epochs=20), **values).change == {"eval_every": 4}
    found = judged(measured, Plan(batch_size=8, epochs=10**4), **values)
    assert found.change == {"eval_every": 189}  # 9.9 / 189 of an epoch beside the steps: 5 % of the whole
    assert found.predicted == pytest.approx(10.9 / (1 + 9.9 / 189))


@pytest.mark.parametrize("name", ["many tiny layers with BatchNorm", "wide linears"])
def test_the_hosts_part_is_what_does_not_grow_with_the_batch(packs, name):
    """Of many layers and of few: the line through the seconds of two batch sizes, at batch 0, knows it another way."""
    job, pack = JOB[name], packs[False]
    state, ids = TrainState(job, pack, job.plan, CPU), pack.ids("train")
    benches = [Bench(job, state, on(CPU, gather(pack, ids[:size])), 100) for size in (8, 64)]
    for _ in range(20):
        for bench in benches:
            bench.advance(0.01)
    small, large = (bench.best for bench in benches)
    profile = step_profile(job, pack, job.plan, CPU, SECONDS, fixed=("batch_size",))
    assert 0.5 <= profile.host_s / ((8 * small - large) / 7) <= 2


def test_as_much_is_tried_as_the_time_allows():
    changes = [{"batch_size": 16}, {"batch_size": 32}]
    assert affordable(0.1, Plan(batch_size=8), changes, 10.0) == 2
    assert affordable(0.1, Plan(batch_size=8), changes, 2.0) == 1  # 0.3 s for the plan, 1.2 s and 2.4 s for the changes
    assert affordable(0.1, Plan(batch_size=8), changes, 1.0) == 0


def test_what_was_not_tried_is_told(measured):
    assert judged(measured, Plan(batch_size=8), untried=({"amp": "bf16"},)).evidence["untried"] == [{"amp": "bf16"}]


def test_flops_are_those_of_the_matrix_products(packs):
    job, pack = JOB["wide linears"], packs[False]
    state = TrainState(job, pack, job.plan, CPU)
    counts = count(job, state, on(CPU, gather(pack, pack.ids("train")[:32])), 100)
    rows, w = 32 * 16, 384
    forward = 2 * (rows * 8 * w + 2 * rows * w * w + 32 * w * 4)
    assert counts.flops == forward * 3 - 2 * rows * 8 * w  # the input needs no gradient


def test_an_operation_touches_what_it_reads_and_writes_and_a_view_nothing():
    x = torch.ones(2**18)
    with Watch() as watch:
        x.view(2, -1).t()
        x.add(x)
        x.mul_(2)
    assert watch.ops == 4
    assert sorted(watch.touched.elements()) == [2**21, 2**22]  # 1 MiB in and out; twice in and once out, rounded up


def test_memory_is_that_of_activations_and_of_what_is_held(packs):
    job, pack = JOB["wide linears"], packs[False]
    state = TrainState(job, pack, job.plan, CPU)
    raw = on(CPU, gather(pack, pack.ids("train")[:32]))
    found = memory_of(Bench(job, state, raw, 100))
    weights = sum(p.numel() for p in state.parameters)
    assert found["held"] * 2**20 == pytest.approx(16 * weights, rel=0.01)  # weight, gradient, two moments
    activations = 4 * 32 * 16 * 384 * 3
    assert activations <= found["step"] * 2**20 <= 3 * activations + 4 * weights


@pytest.mark.parametrize("batch_size", [7, 64])
def test_padding_is_the_share_of_zeros_that_batches_bring(packs, batch_size):
    pack, plan = packs[True], toy.PLAN.replace(batch_size=batch_size)
    ids = pack.ids("train")
    batches = batches_left(ids, lengths_of(pack, ids), plan.seed, 0, [[batch_size, 0]])
    raws = list(open_feed(pack, plan, CPU)(batches))
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


def test_the_cached_batch_is_a_whole_one_of_middling_length(packs):
    pack, plan = packs[True], toy.PLAN
    lengths = [pack.lengths("x", batch).max() for batch in epoch_batches(pack, plan)]
    ids = typical(pack, plan)
    assert len(ids) == plan.batch_size
    assert np.quantile(lengths, 0.3) <= pack.lengths("x", ids).max() <= np.quantile(lengths, 0.7)


def outside() -> list:
    """Random states and switches, as they are."""
    numbers = str(np.random.get_state())
    return [torch.get_rng_state().tolist(), random.getstate(), numbers, read_switches(), torch.get_num_threads()]


@pytest.mark.parametrize("knobs", [{}, {"deterministic": True, "micro_batch_size": 5, "ema": 0.9}], ids=len)
def test_a_run_under_way_goes_on_as_if_nobody_had_measured(packs, knobs):
    state, twin = (TrainState(toy, packs[False], toy.PLAN, CPU) for _ in range(2))
    records = train(toy, state, packs[False])
    for _ in range(5):
        next(records)
    before = outside(), copy.deepcopy(state.facts()), {k: v.clone() for k, v in state.tensors().items()}
    step_profile(toy, packs[False], toy.PLAN.replace(**knobs), CPU, 0.1)
    assert outside() == before[0]
    assert state.facts() == before[1]
    assert all(torch.equal(v, before[2][k]) for k, v in state.tensors().items())
    for _ in range(40):
        next(records)
    after = {k: v.clone() for k, v in state.tensors().items()}
    for _ in zip(range(45), train(toy, twin, packs[False]), strict=False):
        continue
    assert all(torch.equal(v, after[k]) for k, v in twin.tensors().items())


def test_a_task_that_hands_out_the_same_model_each_time_does_not_see_it_trained(packs):
    network = Normalised()
    job = dataclasses.replace(JOB["many tiny layers with BatchNorm"], network=lambda: network)
    before = copy.deepcopy(network.state_dict())
    step_profile(job, packs[False], job.plan, CPU, 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_measuring_that_fails_leaves_nothing_changed_either(packs):
    class Broken(Job):
        def metrics(self, outputs, batch):
            raise ZeroDivisionError

    before = outside()
    with pytest.raises(ZeroDivisionError):
        step_profile(Broken(**fields_of(JOB["many tiny layers"])), packs[False], Plan(batch_size=8), CPU, 0.1)
    assert outside() == before


def fields_of(job: Job) -> dict:
    return {f.name: getattr(job, f.name) for f in dataclasses.fields(job) if f.init}


def test_measuring_leaves_no_state_behind(packs):
    def states() -> int:
        gc.collect()
        return sum(type(each) is TrainState for each in gc.get_objects())

    before = states()
    step_profile(toy, packs[False], toy.PLAN, CPU, 0.1)
    assert states() == before


def test_measuring_ends_in_time(packs):
    start = process_time()
    step_profile(toy, packs[False], toy.PLAN, CPU, 1.0)
    assert process_time() - start < 3


@pytest.mark.parametrize("ragged", [False, True])
def test_a_pack_of_a_few_samples_is_measured(tmp_path, ragged):
    pack = toy.make_pack(tmp_path, 8, ragged)
    profile = step_profile(toy, pack, toy.PLAN.replace(batch_size=2), CPU, 0.05)
    assert profile.samples_per_s > 0
    assert profile.evaluation_s > 0 or not len(pack.ids("val"))
    assert verdict(profile, toy.PLAN.replace(batch_size=2)).bound in ("data", "launch", "compute", "memory")


def test_a_batch_larger_than_the_split_is_refused_as_training_refuses_it(packs):
    with pytest.raises(TrainError, match="larger than the train split"):
        step_profile(toy, packs[False], toy.PLAN.replace(batch_size=10**4), CPU, 0.1)


def waits() -> None:
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_a_warning_of_torch_is_traced_to_the_line_that_caused_it():
    here = waits.__code__.co_firstlineno + 1
    assert synchronizing(lambda: (waits(), waits())) == (f"{__file__}:{here}",)
    assert synchronizing(lambda: warnings.warn("something else", stacklevel=1)) == ()


def test_a_warning_from_within_torch_is_laid_to_its_caller():
    network = torch.nn.Identity()
    network.register_forward_hook(lambda *_: waits())
    [place] = synchronizing(lambda: network(torch.ones(1)))
    assert place.startswith(f"{__file__}:")


@pytest.mark.cuda
def test_on_cuda_a_step_that_reads_its_loss_is_traced(packs):
    class Reading(Job):
        def loss(self, model, batch, plan):
            found, n = super().loss(model, batch, plan)
            found.item()
            return found, n

    profile = step_profile(Reading(**fields_of(JOB["wide linears"])), packs[False], Plan(batch_size=32), seconds=1.0)
    assert any(place.startswith(f"{__file__}:") for place in profile.syncs)
    assert {"step", "held", "allocated", "reserved"} == profile.memory.keys()


@pytest.mark.cuda
def test_on_cuda_many_tiny_layers_are_launch_bound(packs):
    job = JOB["many tiny layers"]
    assert verdict(step_profile(job, packs[False], job.plan, seconds=1.0), job.plan).bound == "launch"
