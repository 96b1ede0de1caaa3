"""What a step's profile measures is so, and the verdict that follows from it is right: on jobs whose parts take known
times, and, where operations are counted, on real ones."""

import json

import pytest
import torch
import toy
from simulated import Job

from nbtools.errors import TrainError
from nbtools.measure import StepProfile, Verdict, step_profile, verdict

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
    "launching": ({"fixed": 0.08, "a_sample": 0.005}, {"batch_size": 8}, "launch", {"batch_size": 32}, 2.0),
    "micro-batches": ({}, {"micro_batch_size": 2}, "launch", {"micro_batch_size": None}, 8.0),
    "noise": ({**STEP, "augmenting": 0.02}, {}, "memory", {"noise": 0.0}, (16 * 0.03 + 0.001) / 0.161),
    "a faster precision": (BF16, {}, "memory", {"amp": "bf16"}, 1 / 0.4),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_verdict_finds_what_a_job_is_bound_by_and_predicts_what_its_change_brings(packs, name):
    job, plan, bound, change, gain = JOBS[name]
    job, plan = Job(**{"amp": {"bf16": 1.0}, **job}), plan_of(**plan)
    profile = profiled(job, packs[False], plan)
    found = verdict(profile, plan)
    assert (found.bound, found.change) == (bound, change), found
    assert found.predicted == pytest.approx(gain, rel=0.02)
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
    assert profile.epoch_s == pytest.approx(profile.train_samples * (step + 0.16) / 16 + profile.between_s)
    assert {"step", "held"} == profile.memory.keys()
    assert profile.trials == ()


def test_profile_and_verdict_survive_json(packs):
    plan = plan_of(batch_size=8)
    profile = profiled(Job(amp={"bf16": 1.0}), packs[False], plan)
    again = StepProfile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert verdict(again, plan) == verdict(profile, plan)
    assert Verdict.from_dict(json.loads(json.dumps(verdict(profile, plan).to_dict()))) == verdict(profile, plan)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_pack_of_a_few_samples_is_measured_and_a_batch_larger_than_it_refused(tmp_path, ragged):
    pack, plan = toy.make_pack(tmp_path, 8, ragged), toy.PLAN.replace(batch_size=2)
    assert step_profile(toy, pack, plan, CPU, 0.05).samples_per_s > 0
    with pytest.raises(TrainError, match="larger than the train split"):
        step_profile(toy, pack, toy.PLAN, CPU, 0.05)
