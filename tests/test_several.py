"""What several processes would give: the rows are the contract of one batch, a step takes what its parts take, and the
parts are measured by real processes."""

import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import toy
from ranks import together
from serving import until
from simulated import Job

import nbtools as nb
from nbtools.__main__ import main
from nbtools.measure import advisor as advising
from nbtools.measure import several
from nbtools.measure.several import LINKS, THUMB, Link, Parts, Scaling, buckets_of, expected, judged, least_bytes, ways
from nbtools.tasks import captcha

A_SAMPLE = 0.03  # seconds, beside which a busy machine's delays are short
PLAN = toy.PLAN.replace(batch_size=5)


class Sleeping:
    """The toy task, whose passes take their time without any work: no other program on this machine matters."""

    PLAN, BASELINE, model, batch = PLAN, PLAN, staticmethod(toy.model), staticmethod(toy.batch)

    @staticmethod
    def loss(model: Any, batch: Any, plan: Any) -> Any:
        time.sleep(A_SAMPLE * len(batch["x"]))
        return toy.loss(model, batch, plan)


class Failing(Sleeping):
    @staticmethod
    def model(card: Any, plan: Any) -> Any:
        raise nb.NbtoolsError("no network of this name")


class Lost(Sleeping):
    """Rank 1 fails, and rank 0 loses the connection to it in the same second."""

    @staticmethod
    def loss(model: Any, batch: Any, plan: Any) -> Any:
        if os.environ.get("RANK") == "1":
            raise ValueError("a fault of the user's own")
        return toy.loss(model, batch, plan)


class Endless(Sleeping):
    @staticmethod
    def loss(model: Any, batch: Any, plan: Any) -> Any:
        Path(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(600)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=300)


@pytest.fixture
def forked(monkeypatch):
    """Processes that have imported torch already, in place of torchrun's."""
    monkeypatch.setattr(several, "start", lambda place, n, asked: together(n, several.take_part, *asked))


# -- the rows


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "rows"),
    [
        (64, None, 2, [(1, 64, 1), (2, 32, 1)]),
        (512, 128, 3, [(1, 128, 4), (3, 86, 2)]),  # the largest of 170, 171, 171 in two passes
        (1536, 512, 3, [(1, 512, 3), (3, 512, 1)]),  # the guide's three A100
        (3072, 512, 3, [(1, 512, 6), (3, 512, 2)]),  # out of memory: 2 × 512 a GPU
    ],
)
def test_a_batch_is_processes_times_micro_times_passes_and_the_plan_the_same_for_any_number(
    batch, micro, processes, rows
):
    plan = toy.PLAN.replace(batch_size=batch, micro_batch_size=micro)
    found = list(ways([plan], processes))
    assert [(row.processes, row.micro, row.passes) for row in found] == rows
    assert {(row.batch_size, row.lr) for row in found} == {(batch, plan.lr)}
    assert all(row.changes == {} and row.processes * row.micro * row.passes >= batch for row in found)


def test_so_many_times_the_batch_has_its_lr_by_the_rule_and_is_one_plan_for_all(tmp_path):
    pack = toy.make_pack(tmp_path, count=1500)
    advice = nb.advise(toy, pack, measure=False, processes=3)
    scaling = advice.scaling
    assert scaling is not None
    same, larger = scaling.rows[1], scaling.rows[3]
    assert (same.processes, same.batch_size, same.lr, same.changes) == (3, 16, advice.plan.lr, {})
    assert (larger.processes, larger.micro, larger.passes, larger.batch_size) == (3, 16, 1, 48)
    assert larger.lr == pytest.approx(advice.plan.lr * 3**0.5, rel=1e-2)
    plan = advice.plan.replace(**larger.changes)
    assert (plan.batch_size, plan.lr, plan.micro_batch_size) == (48, larger.lr, 16)
    assert [row.passes for row in scaling.rows if row.processes == 1] == [1, 3]
    assert scaling.worth is None
    for shown in (str(advice), advice._repr_html_()):
        assert "whether they are worth it has not been measured here yet" in shown


def test_a_batch_that_the_data_or_the_lr_rules_do_not_allow_has_no_row(tmp_path):
    advice = nb.advise(toy, toy.make_pack(tmp_path, count=100), measure=False, processes=3)
    assert advice.scaling is not None
    assert [row.batch_size for row in advice.scaling.rows] == [advice.plan.batch_size] * 2


# -- the model of a step


def test_the_buckets_are_those_of_distributed_data_parallel():
    sizes = [3000, 4 * 2**20, 700_000, 30 * 2**20, 17, 900_000, 2**20, 40, 26 * 2**20, 5000]
    tensors = [torch.empty(size, dtype=torch.uint8) for size in reversed(sizes)]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, [2**20, 25 * 2**20])  # pyright: ignore[reportPrivateImportUsage]
    assert buckets_of(sizes) == tuple(sum(len(tensors[i]) for i in group) for group in groups)
    assert sum(buckets_of(sizes)) == sum(sizes)


def test_a_process_without_samples_measures_two_as_it_trains_two():
    """Five samples are two shares; the third process takes two samples as padding."""
    found = [several.Peers(rank, 3).share(np.arange(5)).tolist() for rank in range(3)]
    assert found == [[0, 1], [2, 3, 4], [0, 1]]


SLOW = Link("wire", 0.001, 1e9, "measured")


def test_a_step_is_its_slowest_share_and_the_all_reduce_that_nothing_hides():
    """On a CPU all of it. 2 processes send as many bytes as there are gradients, 4 half as many again."""
    assert [least_bytes(100, n) for n in (1, 2, 4)] == [0, 100, 150]
    parts = Parts(0.1, ((64, 0.055),), (2_000_000, 3_000_000))
    plans = [toy.PLAN.replace(batch_size=64)]
    one, two = expected(plans, parts, [SLOW], 2, hidden=False)
    assert (one.samples_per_s, one.speedup, one.efficiency) == pytest.approx((640, 1, 1))
    assert two.exposed_s == pytest.approx(0.007)  # two of 1 ms, 2 ms and 3 ms of bytes
    assert two.step_s == pytest.approx(0.062)
    assert (two.speedup, two.efficiency) == pytest.approx((100 / 62, 50 / 62))


@pytest.mark.parametrize(
    ("share", "passes", "exposed"),
    [
        (0.6, 1, 0.004),  # 0.4 s of backward hide all but the last bucket
        (0.003, 1, 0.005),  # 2 ms of 7
        (0.006, 2, 0.005),  # only the last pass reduces
    ],
)
def test_on_gpus_the_backward_pass_hides_all_but_the_last_bucket_where_it_is_long_enough(share, passes, exposed):
    plan = toy.PLAN.replace(batch_size=64, micro_batch_size=32 // passes)
    parts = Parts(0.1, ((64, share),), (2_000_000, 3_000_000))
    assert expected([plan], parts, [SLOW], 2, hidden=True)[1].exposed_s == pytest.approx(exposed)


def rows_with(speedups: dict[str, float], processes: int = 3):
    one, several_ = ways([toy.PLAN.replace(batch_size=512)], processes)
    step = {link: 0.1 / speedup for link, speedup in speedups.items()}
    made = [dataclasses.replace(several_, link=k, step_s=step[k], speedup=v) for k, v in speedups.items()]
    return [dataclasses.replace(one, step_s=0.1, speedup=1.0), *made]


@pytest.mark.parametrize(
    ("speedups", "worth", "said"),
    [
        ({"NVLink": 2.9, "Ethernet": 2.1}, True, "worth it over NVLink, Ethernet; "),
        ({"NVLink": 2.9, "Ethernet": 0.4}, True, "worth it over NVLink; "),
        ({"NVLink": 1.9, "Ethernet": 0.4}, False, "not worth it; "),
    ],
)
def test_gpus_are_worth_it_where_each_added_one_gives_half_of_one(speedups, worth, said):
    found, why = judged(rows_with(speedups), 1_024_000, None)
    assert found == worth
    assert said in why
    assert "2× in all (ours)" in why
    assert "over NVLink, " in why
    price = "The run takes 1 min 09 s instead of 3 min 20 s, for 1.03× the GPU hours"
    assert (price in why) == (worth and speedups["NVLink"] == 2.9)


def test_a_larger_batch_is_named_beside_the_plans_own_which_trains_the_same():
    one, same = rows_with({"NVLink": 2.5})
    larger = dataclasses.replace(same, batch_size=1536, micro=512, speedup=2.9, changes={"batch_size": 1536})
    _, why = judged([one, same, larger], 1000, None)
    assert "batch 1,536 as 3 × 512 × 1; 2.50× with the plan's own batch, which trains the same" in why


@pytest.mark.parametrize(("speedup", "worth"), [(1.04, False), (1.06, True)])
def test_on_the_same_cores_processes_have_to_do_more_than_one(speedup, worth):
    found, why = judged(rows_with({"gloo": speedup}, 2), 1000, (2, 1))
    assert found == worth
    assert "2 processes with 1 thread each train 1.0" in why
    assert ("not worth it on this CPU" in why) == (not worth)


# -- what is measured


def test_where_the_gpus_are_not_here_the_share_is_timed_and_the_links_are_rules_of_thumb(pack, monkeypatch):
    """On the job's own clock a pass of so many samples takes 0.1 s and 10 ms a sample: of 16 samples 0.26 s, of the
    largest of three shares 0.16 s."""
    monkeypatch.setattr(several, "on_this_machine", lambda device, processes: False)
    job = Job(fixed=0.1, a_sample=0.01)
    plan = toy.PLAN.replace(batch_size=16)
    found = several.find_scaling(job, pack, [plan, plan.replace(batch_size=48, micro_batch_size=16)], 3, 0.1, job.clock)
    assert [row.link for row in found.rows] == ["", *[link.name for link in LINKS], "", *[link.name for link in LINKS]]
    assert found.rows[0].step_s == pytest.approx(0.26)
    assert [row.step_s for row in found.rows[1:4]] == pytest.approx([0.16] * 3, rel=1e-2)
    assert [row.speedup for row in found.rows[5:]] == pytest.approx([3.0] * 3, rel=1e-2)
    assert str(found).count(THUMB) == 3
    assert found.gradient_bytes == sum(4 * p.numel() for p in toy.model(None, plan).parameters())
    halved = several.find_scaling(job, pack, [plan.replace(compress_gradients=True)], 3, 0.1, job.clock)
    assert halved.gradient_bytes == found.gradient_bytes / 2
    assert Scaling.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.fixture
def scaling(pack, forked, monkeypatch) -> Scaling:
    """Of two real processes, with advice by the rules."""
    monkeypatch.setattr(advising, "measured", lambda task, pack, thumb, *_: thumb)
    found = nb.advise(Sleeping, pack, seconds=1.0, processes=2).scaling
    assert found is not None
    return found


def test_two_processes_measure_the_slowest_share_and_the_all_reduce_and_the_result_is_kept(pack, scaling, monkeypatch):
    """5 samples are 2 and 3, which takes 3/5 of the time, and twice as many are 5 and 5."""
    one, two, _, larger = scaling.rows
    assert 5 * A_SAMPLE < one.step_s < 8 * A_SAMPLE
    assert 1.3 < two.speedup < 1.9, "of the mean share it were 2"
    assert two.speedup < larger.speedup < 2.1
    [link] = scaling.links
    assert (link.name, link.source) == ("gloo", "measured")
    assert 1e-6 < link.latency_s <= two.exposed_s < one.step_s
    assert scaling.worth
    assert f"2 processes with 1 thread each train {larger.speedup:.2f}× the samples/s of one" in str(scaling)
    monkeypatch.setattr(several, "start", None)
    for measure in (True, False):
        assert nb.advise(Sleeping, pack, measure=measure, seconds=1.0, processes=2).scaling == scaling


def test_what_cannot_be_measured_says_so(pack, monkeypatch):
    with pytest.raises(nb.NbtoolsError, match="processes must be at least 1, got 0"):
        nb.advise(toy, pack, measure=False, processes=0)
    with pytest.raises(nb.NbtoolsError, match=r"can import, got .*has no name there.*; write it to a file"):
        several.find_scaling(SimpleNamespace(**vars(toy)), pack, [toy.PLAN], 2)
    tiny = several.find_scaling(toy, pack, [toy.PLAN.replace(batch_size=4)], 3)
    assert (tiny.worth, "fewer than two samples for each of 3 processes" in str(tiny)) == (False, True)
    monkeypatch.setattr(several.devices, "pick", lambda: torch.device("mps"))
    with pytest.raises(nb.NbtoolsError, match="need CUDA or a CPU"):
        several.find_scaling(toy, pack, [toy.PLAN], 2)


@pytest.mark.parametrize(("load", "busy"), [(0.4, False), (7.3, True)])
def test_a_busy_machine_is_named_since_processes_wait_for_its_cores(pack, monkeypatch, load, busy):
    monkeypatch.setattr(several, "on_this_machine", lambda device, processes: False)
    monkeypatch.setattr(several.os, "getloadavg", lambda: (load, 0.0, 0.0))
    job = Job()
    found = several.find_scaling(job, pack, [toy.PLAN], 2, 0.1, job.clock)
    assert ("other programs were busy (load 7.3): measure again" in str(found)) == busy


@pytest.mark.full
def test_the_terminal_measures_in_processes_of_torchrun_and_shows_the_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advising, "measured", lambda task, pack, thumb, *_: thumb)
    raw = captcha.demo(tmp_path / "raw", 400)
    assert main(["advise", "captcha", "--data", str(raw), "--processes", "2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"2 processes with 1 threads? each train \d+\.\d\d× the samples/s of one with", said)
    assert re.search(r"MB of gradients a step; gloo .* GB/s and .* µs, measured; measured on ", said)
    assert not multiprocessing.active_children()


@pytest.mark.full
def test_a_process_that_fails_is_named_by_its_own_error(pack):
    with pytest.raises(nb.NbtoolsError, match=r"2 processes could not be measured: .*no network of this name"):
        several.find_scaling(Failing, pack, [PLAN], 2)
    with pytest.raises(nb.NbtoolsError, match=r"measured: rank 1 failed with ValueError: a fault of the user's own$"):
        several.find_scaling(Lost, pack, [PLAN], 2)


@pytest.mark.full
def test_processes_end_with_the_one_that_measures(pack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import sys; import nbtools as nb, test_several as t; from nbtools.measure.several import find_scaling; "
    code += "find_scaling(t.Endless, nb.Pack.open(sys.argv[1]), [t.PLAN], 2)"
    paths = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, "-c", code, str(pack.folder)], env={**os.environ, "PYTHONPATH": paths})
    try:
        pid = until(lambda: Path("rank-0").exists() and Path("rank-0").read_text(), "ranks", 60)
    finally:
        process.kill()
        process.wait()
    until(lambda: not Path("/proc", pid).exists(), "the end of all processes", 40)
