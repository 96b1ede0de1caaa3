"""What a step's profile measures is so, and the verdict that follows is right: on jobs whose parts take known times."""

import gc
import multiprocessing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import toy
from simulated import Job

import nbtools as nb
from nbtools.measure import Stepper, Verdict, timed, verdict
from nbtools.measure.timing import Turn
from nbtools.measure.turns import Trial

SECONDS = 4.0  # on a job's own clock: enough for rounds of several steps
PLAN = toy.PLAN.replace(epochs=4)  # few, so that evaluations are not what to change
FILES = {"feed": "workers", "workers": 0}
PACK = partial(toy.make_pack, count=1000)


def judged(job: Job, pack, plan, **more) -> Verdict:
    with job.times():
        return verdict(job, job.pack(pack), plan, SECONDS, **more)


JOBS = {  # name → job, plan, what it is bound by, the change that helps, by how much
    "files": ({"reading": 0.05, "amp": {"bf16": 1.0}}, FILES, "data", {"feed": "resident"}, (16 * 0.05 + 0.05) / 0.05),
    "launching": ({"fixed": 0.08, "amp": {"bf16": 1.0}}, {}, "memory", {"batch_size": 32}, 2.0),
    "a faster precision": ({"a_sample": 0.01, "amp": {"bf16": 0.4}}, {}, "memory", {"amp": "bf16"}, 1 / 0.4),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_verdict_says_what_a_job_is_bound_by_and_the_measured_factor_of_its_change(pack, name):
    parts, settings, bound, change, gain = JOBS[name]
    job, plan = Job(**{"fixed": 0.001 if name.startswith("a ") else 0.05, **parts}), PLAN.replace(**settings)
    result = judged(job, pack, plan)
    assert (result.limit, result.change) == (bound, change), result
    assert result.best
    assert result.best.ratio == pytest.approx(gain, rel=0.03)
    assert "measured: " in result.sentence
    assert job.now < 3.1 * SECONDS, "as long as promised, and warming up"
    assert result.wait + result.host + result.device == pytest.approx(1)
    assert replace(result, trials=tuple(Trial({}, each) for each in ((1.09,) * 4, (0.9, 1.4) * 2))).change is None


def test_shares_and_seconds_are_those_of_the_job(pack, monkeypatch):
    monkeypatch.setattr("nbtools.measure.profile.matrix_rates", lambda *_: [1e5, 3e5])  # FLOP/s
    job = Job(reading=0.01, preparing=0.001, fixed=0.02, a_sample=0.002, scoring=0.5)
    profile = judged(job, pack, PLAN.replace(**FILES), fixed=("feed",))  # data are the limit: no other change is tried
    step = 16 * 0.003 + 0.02
    assert profile.timing.step_s == pytest.approx(step + 0.16)
    assert profile.timing.device_s == pytest.approx(step)
    assert "70.2 (" in str(profile), "samples/s in three digits"
    assert profile.wait == pytest.approx(0.16 / (step + 0.16))
    assert profile.products == pytest.approx(2 * (2 * 8 * 16 + 3 * 16 * 4) * profile.timing.samples_per_s / 3e5)
    shares = {"data": (1.01, 0, 0.51), "launch": (0.9, 1.01, 0.51), "compute": (0.9, 0, 0.51), "memory": (0.9, 0, 0.49)}
    for bound, times in shares.items():
        named = zip(("wait", "host", "products"), times, strict=True)
        judged_so = replace(profile, **{name: share * profile.device for name, share in named})
        assert (profile.trials, judged_so.limit) == ((), bound)
    assert (len(profile.kernels), sum(share for _, share in profile.kernels) <= 1.001) == (5, True)
    stepper = Stepper(toy, pack, PLAN, torch.device("cpu"))
    stepper.device, stepper.turns = torch.device("mps"), [Turn(0.0, seconds=1.0, waited=0.0, steps=4, host_s=0.01)]
    assert stepper.device_s() == 0.25, "on Apple's GPU, which has no trace, launching a step is not working on it"


class Slow(Job):
    def loss(self, model: Any, batch: Any, plan: Any) -> Any:
        self.now += (1.0, 0.5)[len(self.passes)] if torch.is_grad_enabled() and len(self.passes) < 2 else 0.0
        return super().loss(model, batch, plan)


@pytest.mark.parametrize("batch", [8, 64])
def test_first_steps_are_a_figure_of_their_own_and_the_rest_agrees_with_a_runs_rows_within_5_percent(pack, batch):
    job, plan = Slow(fixed=0.05, a_sample=0.001), PLAN.replace(epochs=1, batch_size=batch)
    with job.times():
        timing = timed(job, pack, plan, 4.0)
    assert timing.cold_s == pytest.approx(1.5)
    assert timing.step_s == pytest.approx(0.05 + 0.001 * batch, rel=0.1)  # an epoch ends with a smaller batch
    state = nb.TrainState(job, pack, plan, "cpu")
    state.meter.watch.clock = job.clock
    [row] = [each for each in nb.train(job, state, pack) if each.kind == "epoch"]
    assert timing.samples_per_s == pytest.approx(row.values["samples_per_s"], rel=0.05)


def test_measuring_leaves_random_states_and_switches_as_they_were_and_prints_nothing(pack, capfd):
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    trials = verdict(toy, pack, PLAN.replace(batch_size=32, deterministic=True), 0.05).trials
    assert not any("batch_size" in trial.change for trial in trials), "an epoch would have fewer than 20 steps"
    assert not any(isinstance(each, Stepper) for each in gc.get_objects()), "its tensors would stay"
    assert capfd.readouterr() == ("", ""), "torch's profiler would"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    for act in (Stepper.warm_up, lambda stepper: stepper.repeat(8), lambda stepper: next(stepper.batches)):
        act(Stepper(toy, pack, PLAN.replace(feed="workers", workers=1), torch.device("cpu")))
        assert not multiprocessing.active_children(), "to collect them would take 10 s each"
