"""What a step's profile measures is so, and the verdict that follows from it is right: shown on jobs built to be bound
by a known thing. Ratios are measured in turns, with one thread, on a machine that others use too."""

import copy
import dataclasses
import json
import statistics
from time import perf_counter

import numpy as np
import pytest
import torch
import toy
from jobs import JOBS, Job, Plan

from nbtools import checkpoint
from nbtools.loop import train
from nbtools.measure.pace import Pace
from nbtools.measure.profile import StepProfile, step_profile
from nbtools.measure.verdict import Verdict, verdict
from nbtools.state import TrainState

CPU = torch.device("cpu")
SECONDS = 0.7  # a measurement takes about twice as long
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
    return step_profile(job, job.pack(packs), job.plan, CPU, SECONDS, fixed=job.fixed)


def achieved(job: Job, packs, change: dict, rounds: int = 10) -> float:
    """samples/s with the change over without it, trained in turns."""
    before, after = (Pace(job, job.pack(packs), plan, CPU) for plan in (job.plan, job.plan.turn(**change)))
    for _ in range(rounds):
        before.advance(0.03, steps=1)
        after.advance(0.03, steps=1)
    return statistics.median(b[0] / a[0] for a, b in zip(before.rates, after.rates, strict=True))


def achieved_by_epochs(job: Job, packs, change: dict, folder) -> float:
    """The same with all that an epoch is: its evaluation, and the checkpoint that follows it."""
    pack, paces = job.pack(packs), []
    epochs = change["eval_every"]
    for plan in (job.plan, job.plan.turn(**change)):
        state = TrainState(job, pack, plan, CPU)
        paces.append((state, train(job, state, pack)))
    seconds = [0.0, 0.0]
    for k in (0, 1, 1, 0):
        state, records = paces[k]
        start, until = perf_counter(), state.epoch + epochs
        while state.epoch < until:
            record = next(records)
            if record.kind == "epoch" and "val_loss" in record.values:
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
            assert "nothing worth changing" in found.sentence
            return
        assert found.predicted is not None
        epochs = found.evidence["of"] == "epoch"
        got = achieved_by_epochs(job, packs, found.change, tmp_path) if epochs else achieved(job, packs, found.change)
        ratios.append(found.predicted / got)
        if abs(ratios[0] - 1) <= 0.25:  # else twice more, and the middle of the three counts
            return
    assert statistics.median(ratios) == pytest.approx(1, abs=0.25), ratios
