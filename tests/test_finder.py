"""The batch finder: its choice against exhaustive search, and that nothing outside changes, wherever memory ends. It
chooses on simulated times; real ones are the benchmarks'."""

import copy
import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Job

from nbtools.errors import TrainError
from nbtools.measure import find_batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


def found(pack, job: Any = None, plan=toy.PLAN, seconds: float = 60.0, **more) -> Any:
    """A search on the job's own clock; a step takes about as long as a turn, so that few are made."""
    job = job or Job(fixed=0.1, a_sample=0.01)
    return find_batch(job, pack, plan, CPU, seconds, clock=job.clock, **more)


@settings(max_examples=4, deadline=None, derandomize=True)
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


@pytest.mark.parametrize(("most", "largest"), [(5, 4), (63, 48)])
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
    """All that must be the same after as before: a shared module bit for bit, random states, and which tensors there
    are."""

    def __init__(self):
        self.task = Shared()
        self.before = copy.deepcopy(self.now())
        self.tensors = alive()

    def now(self) -> list[Any]:
        module = self.task.module
        return [
            *(t.clone() for t in module.state_dict().values()),
            *(p.grad.clone() for p in module.parameters() if p.grad is not None),
            *(part.training for part in module.modules()),
            *(torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
            *(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
        ]

    def assert_unchanged(self) -> None:
        for before, now in zip(self.before, self.now(), strict=True):
            assert torch.equal(before, now) if isinstance(before, torch.Tensor) else before == now
        assert alive() <= self.tensors + 8, "tensors were left behind"


def alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("most", [32, 0], ids=["found", "refused"])
def test_everything_outside_is_bit_for_bit_as_before(most, toys):
    outside = Outside()
    outside.task.most = most
    if most:
        changes = {"amp": "bf16", "ema": 0.9, "deterministic": True}
        assert 2 <= found(toys, outside.task, toy.PLAN.replace(**changes), most=32).batch_size <= 32
    else:
        with pytest.raises(TrainError):
            found(toys, outside.task)
    outside.assert_unchanged()
