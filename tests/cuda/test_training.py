"""Runs on a GPU: the same however fed and interrupted, without a wait in a step, and with the figures of a clock."""

import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
import toy
from cases import CASES, LEAN, run

import nbtools as nb
from nbtools.data import gather, on
from nbtools.measure import Stepper, find_batch, timed, untouched
from nbtools.measure.machine import precisions
from nbtools.train import TrainState, checkpoint, step, synchronizing, train, train_step
from nbtools.train import device as devices

pytestmark = pytest.mark.cuda
READS = {"meter.py", "state.py", "loop.py", "evaluation.py"}  # where the loop itself waits: log steps, ends of epochs


def state_of(name, pack, device, **changes):
    """With deterministic=True; graphs of lines have one width."""
    one_width = {"bucket": 200} if CASES[name].ctc and changes.get("graph") else {}
    plan = CASES[name].plan.replace(deterministic=True, **one_width, **changes)
    return TrainState(CASES[name].scored, pack, plan, device)


def trained(name, pack, device, evaluating=False, **changes):
    with untouched(device):
        return run(CASES[name].scored, pack, state_of(name, pack, device, **changes), evaluating)


def require_same(found, expected, again):
    assert found[0] == expected[0] == again[0]
    assert [key for key, tensor in found[1].items() if not torch.equal(tensor, expected[1][key])] == []


@pytest.mark.parametrize("name", LEAN)
def test_streamed_and_resident_batches_evaluated_or_not_make_one_run(name, packs, device):
    resident, again = (trained(name, packs(name), device, feed="resident") for _ in range(2))
    require_same(trained(name, packs(name), device, evaluating=True, feed="streamed"), resident, again)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", LEAN)
def test_a_resumed_run_is_the_uninterrupted_one(name, graph, packs, device, tmp_path):
    case, pack = CASES[name], packs(name)
    whole, again = (trained(name, pack, device, ema=0.9, graph=graph) for _ in range(2))
    with untouched(device):
        first, second = (state_of(name, pack, device, ema=0.9, graph=graph) for _ in range(2))
        for record in train(case.scored, first, pack):
            if record.kind == "step" and record.step == 3:
                break
        first.meter.rows()  # on a GPU step 3's is still to come, and would become part of the next
        saved = checkpoint.snapshot(first, rows=0)
        second.load(saved.tensors, saved.facts["state"])
        resumed = run(case.scored, pack, second)
    whole, again = ((losses[-len(resumed[0]) :], left) for losses, left in (whole, again))
    require_same(resumed, whole, again)


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small_here")
def test_nothing_in_a_step_waits_for_the_device(name, amp, packs, device):
    case = CASES[name]
    with untouched(device):
        plan = case.plan.replace(amp=amp, ema=0.9, clip_norm=1.0)
        stepper = Stepper(case.task, packs(name), plan, device, learning=True).warm_up()
        batches = [next(stepper.batches) for _ in range(3)]
        for raw in batches:  # uploads tables of their sizes, which stay
            stepper.step(raw)
        _, lines = synchronizing(lambda: [stepper.step(raw) for raw in batches])
    assert lines == []


def test_the_loop_waits_at_its_own_reads_only(tmp_path, device):
    pack = toy.make_pack(tmp_path)
    records = train(toy, TrainState(toy, pack, toy.PLAN.replace(epochs=2, batch_size=16)), pack)
    for _ in range(5):
        next(records)
    _, lines = synchronizing(lambda: [record for record in records if record.kind == "step"])
    here = Path(nb.__file__).parent
    ours = {Path(line.rpartition(":")[0]).name for line in lines if line.startswith(str(here))}
    assert ours <= READS, lines


def test_a_read_is_traced_to_its_line(gpu):
    _, lines = synchronizing(lambda: torch.ones(1, device=gpu).item())
    assert [line.rpartition(":")[0] for line in lines] == [__file__]


@contextmanager
def limited(device, more, monkeypatch):
    """Inside, this process gets at most so many more bytes; in a dry run, a pass of more than 16 samples gets none."""
    if device.type == "cuda":
        devices.give_back()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + more) / total, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return

    def backward(state, raw, *more):
        if len(raw["id"]) > 16:
            raise torch.OutOfMemoryError("a dry run's memory is out")
        return passed(state, raw, *more)

    passed = step.backward
    with monkeypatch.context() as patch:
        patch.setattr(step, "backward", backward)
        yield


def test_a_batch_that_does_not_fit_is_halved_and_the_run_trains_on(packs, device, monkeypatch):
    name, losses, peaks = "segment slim", [], {}
    case, pack = CASES[name], packs(name)
    plan, ids = case.plan.replace(batch_size=32, crop=96), pack.ids("train")[:32]
    with untouched(device):
        raw = on(device, gather(pack, ids))
        for size in (2, 2, 32, 32) if device.type == "cuda" else ():
            state = TrainState(case.task, pack, plan, device)
            torch.cuda.reset_peak_memory_stats(device)
            train_step(state, {key: tensor[:size] for key, tensor in raw.items()})
            peaks[size] = torch.cuda.max_memory_allocated(device)  # of the second: the first also loads kernels
            del state
        more = (peaks[32] - peaks[2]) // 3 if peaks else 0
        for scarce in (False, True):
            state = TrainState(case.task, pack, plan, device)
            train_step(state, {key: tensor[:2] for key, tensor in raw.items()})  # loads kernels, makes moments
            with limited(device, more, monkeypatch) if scarce else untouched(device):
                losses.append([float(train_step(state, raw)[0]) for _ in range(3)])
                halved = [event for event in state.events if "micro batch 32 → 16" in event]
            assert len(halved) == scarce, state.events
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.05), "but for BatchNorm's halves"
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("name", ["captcha small", "hwdb slim", "sign transformer"])
def test_memory_is_predicted_and_given_back(name, packs, gpu):
    """By second steps: the first of a shape may take cuDNN's largest workspace."""
    x = torch.ones(8, 8, device=gpu, requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS's workspaces stay: one of this thread's, one of backward's
    del x
    case, pack = CASES[name], packs(name, 240)
    with untouched(gpu):
        before = torch.cuda.memory_allocated(gpu)
    rows = find_batch(case.task, pack, case.plan, seconds=8).rows
    sizes = [(row.batch_size, row.memory) for row in rows if row.memory]
    (low, first), (middle, second), (high, third) = sizes[-3:]
    predicted = first + (second - first) * (high - low) / (middle - low)
    assert third == pytest.approx(predicted, rel=0.1, abs=2**26)
    with untouched(gpu):
        assert torch.cuda.memory_allocated(gpu) <= before + 2**22, "but for tables of sizes"


@pytest.mark.parametrize(("graph", "watcher"), [(False, 0.0), (True, 0.0), (False, 0.005)])
def test_rows_are_within_three_percent_of_a_clock_around_whole_epochs(graph, watcher, packs, device):
    """And `timed` within five of them. A watcher of 5 ms a step is in `wall` alone where the device has work for it."""
    name, dry = ("captcha small", True) if device.type == "cpu" else ("captcha guide", False)
    pack = packs(name, 48 if dry else 12_000)
    plan = CASES[name].plan.replace(epochs=4, eval_every=4, batch_size=8 if dry else 256, graph=graph)
    state, walls, reported, kept, since = TrainState(CASES[name].task, pack, plan, device), [], [], [], None
    for record in train(CASES[name].task, state, pack):
        if record.kind == "step" and watcher:
            time.sleep(watcher)
        if record.kind == "epoch":
            if not dry:
                torch.cuda.synchronize(device)
            now, wall = time.perf_counter(), state.meter.watch.wall
            if since is not None:
                walls.append(now - since[0])
                kept.append(wall - since[1])
                reported.append(pack.splits["train"] / record.values["samples_per_s"])
            since = now, wall
    print("seconds an epoch: clock", walls, "wall", kept, "rows", reported)
    for clock, wall, steps in zip(walls[:-1], kept[:-1], reported[:-1], strict=True):  # the last one evaluates
        assert wall == pytest.approx(clock, rel=0.03)
        assert steps <= 1.03 * clock
        assert dry or watcher or steps == pytest.approx(clock, rel=0.03)
    if not watcher:
        timing = timed(CASES[name].task, pack, plan, seconds=0.1 if dry else 3.0)
        print("samples/s:", timing)
        expected = pack.splits["train"] / median(reported[:-1])
        assert dry or timing.samples_per_s == pytest.approx(expected, rel=0.05)


def test_each_format_is_measured_and_torch_is_left_as_it_was(device):
    before = torch.get_float32_matmul_precision()
    rates = {name: max(each, default=0.0) for name, each in precisions(device).items()}
    assert torch.get_float32_matmul_precision() == before
    assert rates["float32"] > 1e9
    if device.type == "cuda":
        assert rates["fp16"] > rates["float32"] > 1e11
        assert (rates["TF32"] > rates["float32"]) == (torch.cuda.get_device_capability(device) >= (8, 0))
