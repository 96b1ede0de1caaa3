"""Settings for speed are tried on real batches within the time that suits a run, and kept where they are reliably
faster and learn the same: on a job whose parts take known times."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import toy
from simulated import Job
from torch import nn

import nbtools as nb
from nbtools.live.log import opening
from nbtools.measure import expected, tried_before
from nbtools.measure.levers import LEAST, MOST
from nbtools.table import duration
from nbtools.train import device as devices

pytestmark = pytest.mark.usefixtures("frozen", "two_threads")


@pytest.fixture
def two_threads(monkeypatch):
    """As torch has it on two cores. Only the number: where other tests run, two threads wait for each other."""
    count = [2]
    monkeypatch.setattr(devices, "OWN_THREADS", [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: count.__setitem__(0, number))


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=600)


@dataclass
class Turned(Job):
    """A job at a batch of its own. factors: (setting, value) → the factor of its passes; losses: of its loss."""

    factors: dict[tuple[str, Any], float] = field(default_factory=dict)
    losses: dict[tuple[str, Any], float] = field(default_factory=dict)
    threads: set[tuple[int | None, int]] = field(default_factory=set)

    def suggest(self, card, accelerator):
        return {"batch_size": (16, "as it is")}

    def model(self, card, plan):
        network = toy.model(card, plan)
        network.add_module("unused", nn.Conv2d(1, 1, 1))  # a layout is tried where there are convolutions
        return network

    def loss(self, model, batch, plan):
        self.threads.add((plan.threads, torch.get_num_threads()))
        start = self.now
        total, count = super().loss(model, batch, plan)
        factor = math.prod(f for (name, value), f in self.factors.items() if getattr(plan, name) == value)
        self.now = start + (self.now - start) * factor
        return total * math.prod(f for (name, value), f in self.losses.items() if getattr(plan, name) == value), count


def advised(job: Job, pack: Any, seconds: float | None = 16.0) -> Any:
    return nb.advise(job, pack, seconds=seconds, clock=job.clock)


QUIET: dict[str, Any] = {"receipt": False, "progress": False}
LEVERS = {"threads": 1, "channels_last": True, "feed": "streamed"}


@pytest.mark.parametrize(
    ("setting", "factor", "loss", "kept", "why"),
    [
        *((setting, 0.5, 1.0, True, "2.00× as fast as") for setting in LEVERS),
        ("threads", 0.98, 1.0, False, "it is used only where reliably 5 % faster"),
        ("channels_last", 2.0, 1.0, False, "0.50× as fast as"),
        ("threads", 0.5, 1.5, False, "but its loss differs by 50 %"),
    ],
)
def test_a_setting_is_kept_where_it_is_reliably_faster_and_learns_the_same(tmp_path, setting, factor, loss, kept, why):
    job, value = Turned(fixed=0.1, amp={"bf16": 1.0}), LEVERS[setting]
    job.factors, job.losses = {(setting, value): factor}, {(setting, value): loss}
    advice = advised(job, toy.make_pack(tmp_path, count=400))
    assert getattr(advice.plan, setting) == (value if kept else getattr(toy.PLAN, setting))
    assert why in advice.evidence[setting]
    assert {"amp", setting} <= {name for each in advice.levers for name in each.change} <= {"amp", *LEVERS}
    assert (setting in advice.reasons and "measured here" in advice.reasons[setting]) == kept or setting == "feed"
    assert torch.get_num_threads() == 2


def test_what_is_kept_is_what_the_next_is_compared_with(pack):
    """Half in bf16, and half of that in one thread: each is twice as fast as all before it."""
    job = Turned(fixed=0.1, amp={"bf16": 0.5}, factors={("threads", 1): 0.5})
    advice = advised(job, pack)
    assert (advice.plan.amp, advice.plan.threads) == ("bf16", 1)
    assert "2.00× as fast as 2 threads" in advice.evidence["threads"]
    assert advice.profile.samples_per_s == pytest.approx(16 / (0.1 / 4), rel=0.01)
    assert (1, 1) in job.threads
    assert (None, 1) not in job.threads
    assert "Tried by nb.advise before training: bf16 2.00×" in tried_before(job, pack)[0]


@pytest.mark.parametrize(
    ("step_s", "epochs", "budget", "most"),
    [(0.1, 10, LEAST, 16), (0.1, 700, 20, 26), (0.5, 10, LEAST, 20), (1.0, 5, LEAST, 24), (0.5, 10**4, MOST, 72)],
    ids=["half a minute", "half an hour", "two minutes", "two minutes of long steps", "days"],
)
def test_measuring_takes_the_time_that_suits_the_run(tmp_path, step_s, epochs, budget, most):
    """A run of minutes 12 s, of half an hour 20, of days a minute; long steps leave out what there is no time for."""
    job = Turned(fixed=0.05, a_sample=(step_s - 0.05) / 16, amp={"bf16": 1.0})
    job.PLAN = toy.PLAN.replace(epochs=epochs)
    advice = advised(job, toy.make_pack(tmp_path, count=600), None)
    trial = advice.lr_trial
    assert budget / 2 <= job.now - trial.seconds <= most, advice.profile.skipped
    assert trial.seconds <= 1.1 * min(max(15, 0.1 * epochs * advice.profile.steps_s), 120)
    assert advice.profile.steps_s * epochs == pytest.approx(advice.samples / 16 * step_s * epochs, rel=0.1)


def test_advice_and_run_say_how_long_training_takes_and_how_long_with_the_baseline(tmp_path):
    job = Turned(reading=0.02, fixed=0.1, amp={"bf16": 1.0})
    pack = job.pack(toy.make_pack(tmp_path, count=600))
    advice = advised(job, pack)
    steps = 3 * advice.samples
    now, then = (duration(3 * advice.profile.between_s + steps * s) for s in (0.1 / 16, 0.1 / 16 + 0.02))
    said = f"about {now} at the measured speed, {then} with the baseline's settings"
    assert f"{said}." in str(advice)
    assert said in nb.Panel(advice).form.proposal
    assert expected(job, pack, advice.plan) == said
    assert f"expected   {said}" in opening(nb.TrainState(job, pack, advice.plan, "cpu"), pack)
    assert expected(job, pack, advice.plan.replace(amp="bf16")) == ""
    assert expected(job, pack, advice.plan.replace(epochs=6)).startswith("about ")


def test_a_run_computes_with_the_threads_of_its_plan_and_the_next_with_the_users_own(pack, tmp_path, monkeypatch):
    monkeypatch.undo()  # with torch's own numbers
    job, before = Turned(), torch.get_num_threads()
    for k, threads in enumerate((before + 1, None)):
        nb.fit(job, pack, toy.PLAN.replace(epochs=1, threads=threads), tmp_path / str(k), **QUIET)
    assert {(before + 1, before + 1), (None, before)} <= job.threads
    assert job.threads <= {(before + 1, before + 1), (None, before), (before + 1, before), (None, before + 1)}, (
        "tried out"
    )
