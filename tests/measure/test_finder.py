"""The batch finder, on simulated times: its choice against exhaustive search, wherever memory or time ends."""

import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Job

from nbtools.errors import TrainError
from nbtools.measure import find_batch


def found(pack, job: Job, seconds: float = 60.0, **more):
    """A search on the job's own clock; a step takes about as long as a turn, so that few are made."""
    with job.times():
        return find_batch(job, pack, toy.PLAN, seconds, **more)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    knee=st.floats(1.0, 100.0),
    slower=st.sampled_from([None, 16, 32]),
    best=st.sampled_from([6, 12, 24, 48, 96]),
    gain=st.floats(0.9, 1.0),
)
def test_the_choice_is_within_5_percent_of_the_best_by_exhaustive_search(pack, knee, slower, best, gain):
    """Of all sizes that it tried, whatever the knee, however a cache makes larger ones slower; and the smallest."""

    def cost(n: int) -> float:
        return 0.02 * (knee + n) * (gain if n == best else 1.0) * (1.5 if slower and n > slower else 1.0)

    report = found(pack, Job(cost=cost), seconds=600.0)
    rates = {row.batch_size: row.batch_size / cost(row.batch_size) for row in report.rows}
    most = max(rates.values())
    close = [size for size, rate in rates.items() if rate >= 0.95 * most]
    assert report.batch_size == min(close)
    powers = {size: size / cost(size) for size in (2, 4, 8, 16, 32, 64, 128)}
    assert rates[report.batch_size] >= 0.95 * max(powers.values())


def test_a_search_ends_in_time_and_says_what_ended_it(pack):
    job = Job(fixed=0.1, a_sample=0.01)
    short = found(pack, job, seconds=1.0)
    assert job.now < 3.0
    assert "time ran out" in str(short)
    flat = found(pack, Job(fixed=0.001, a_sample=0.1))
    assert "throughput no longer rises" in str(flat)
    capped = found(pack, Job(fixed=100.0), seconds=1e6, most=6)
    assert max(row.batch_size for row in capped.rows) == 6


@pytest.mark.parametrize(("most", "largest"), [(5, 4), (63, 32)])
def test_what_does_not_fit_is_never_chosen(pack, most, largest):
    report = found(pack, Job(fixed=0.1, most=most))
    assert report.batch_size == largest
    assert all((not row.reason) == (row.batch_size <= most) for row in report.rows)
    assert "does not fit" in str(report)


class WithoutBatchNorm(Job):
    def model(self, card, plan):
        return toy.linear(card, plan)


def test_one_sample_is_tried_where_two_do_not_fit_and_where_not_even_one_does_it_is_a_clear_error(pack):
    assert found(pack, WithoutBatchNorm(most=1)).batch_size == 1
    with pytest.raises(TrainError, match=r"not even one sample fits.*smaller network") as caught:
        found(pack, WithoutBatchNorm(most=0))
    assert caught.value.__context__ is None, "it would keep the tensors of the failed step"
