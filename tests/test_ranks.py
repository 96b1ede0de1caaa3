"""Several processes train as one does: real ones, over gloo."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import in_turn, together
from torch import nn
from torch.distributed.nn.functional import all_reduce

from nbtools.data import Pack, batches_left
from nbtools.errors import TrainError
from nbtools.train import (
    Diverged,
    Plan,
    RankLost,
    Ranks,
    Record,
    TrainState,
    as_task,
    checkpoint,
    device,
    evaluation,
    import_task,
    join,
    obey,
    train,
)
from nbtools.train import ranks as ranked
from nbtools.train import step as stepping
from nbtools.train.task import HOOKS

QUIET = toy.PLAN.replace(dropout=0.0, noise=0.05)
TASKS = {"captcha": "small", "hwdb": "slim", "sign": "transformer", "segment": "slim"}


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Pack:
    """135 samples to train on: neither 16 nor 2, 3 or 4 divides that."""
    found = toy.make_pack(tmp_path_factory.mktemp("toy"), count=189)
    assert found.splits["train"] % 2 == 1
    return found


# -- what runs in the processes


def like(task: Any, **changes: Any) -> Any:
    return SimpleNamespace(**{name: getattr(task, name) for name in HOOKS if hasattr(task, name)} | changes)


class Seen:
    """What one rank saw: rows of rank 0, and (step, ids, plan) of each training batch."""

    def __init__(self, task: Any, pack: Pack, plan: Plan, timeout: float | None = None):
        self.ranks = join(timeout)
        self.rows: list[Record] = []
        self.batches: list[tuple[int, list[int], float, int]] = []
        self.pack, self.inner = pack, as_task(task)
        self.task = like(self.inner, batch=self.batch)
        self.state = TrainState(self.task, pack, plan, ranks=self.ranks)

    def batch(self, raw, plan, draws):
        if draws is not None:
            self.batches.append((self.state.step, raw["id"].tolist(), plan.lr, plan.batch_size))
        return self.inner.batch(raw, plan, draws)

    def run(self, watch: Callable[[TrainState, Record], Any] = lambda state, record: None) -> Seen:
        """Until the end, or until watch returns True."""
        if self.ranks is not None and not self.ranks.first:
            obey(self.task, self.state, self.pack)
            return self
        for record in train(self.task, self.state, self.pack):
            self.rows.append(record)
            if watch(self.state, record):
                break
        return self

    def end(self) -> dict[str, Any]:
        if self.ranks is not None and self.ranks.first:
            self.ranks.end()
        weights = {name: p.detach().double().numpy() for name, p in self.state.model.named_parameters()}
        buffers = {name: b.double().numpy() for name, b in self.state.model.named_buffers()}
        rows = [(r.kind, r.step, dict(r.values)) for r in self.rows]
        counted = self.ranks.bytes if self.ranks is not None else 0
        rng = self.state.rng.numpy().tobytes()
        return {**vars(self), **locals(), "ranks": None, "self": None, "task": None, "inner": None, "state": None}


def cut_as(world: int) -> None:
    """One process accumulates the parts that so many would train on, each as wide as its own longest sample."""

    def parts(raw, size, micro):
        for start, end in pairwise(ranked.shares(size, world)):
            part = {name: tensor[start:end] for name, tensor in raw.items()}
            longest = {name: int(part[f"{name}_length"].max()) for name in raw if f"{name}_length" in raw}
            yield part | {name: part[name][:, :most].contiguous() for name, most in longest.items()}

    stepping.parts = parts


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):  # of fused attention
            vars(module)["dropout"] = 0.0
    return model


def precise(task: Any) -> Any:
    """The task in float64, also where its network and loss widen to float32."""
    inner = as_task(task)

    def widened(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
                return act(*given)

        return call

    def batch(raw, plan, draws):
        found = inner.batch(raw, plan, draws)
        return {name: t.double() if t.is_floating_point() else t for name, t in found.items()}

    double = like(inner, batch=batch, model=lambda card, plan: inner.model(card, plan).double())
    double.loss, double.infer = widened(inner.loss), widened(inner.infer)
    return double


def fifty(name: str, folder: Path, plan: Plan, double: bool, cuts: int = 0) -> dict[str, Any]:
    """50 steps, and an evaluation by all and by one; cuts: in one process, the parts of so many."""
    pack, task = Pack.open(folder), as_task(toy) if name == "toy" else import_task(f"nbtools.tasks.{name}", name)
    still = like(task, model=lambda card, plan: without_dropout(task.model(card, plan)))
    seen = Seen(precise(still) if double else still, pack, plan)
    if cuts:
        cut_as(cuts)
        seen.state.recovery.micro = 1

    def watch(state: TrainState, record: Record) -> bool:
        state.evaluate_next = record.kind == "step" and state.step == 50
        return record.kind == "evaluation"

    found = seen.run(watch).end()
    if found["rows"]:
        alone = evaluation.evaluate(seen.task, seen.state.evaluated, pack, plan.while_training(), "val")
        found["alone"] = {f"val_{name}": value for name, value in alone.items()}
        found["shared"] = {name: value for name, value in found["rows"][-1][2].items() if name != "eval_time"}
    return found


def class_task(**changes: Any) -> Any:
    """The toy without BatchNorm, whose statistics would depend on who has which sample; in float64."""
    return precise(toy.with_(model=lambda card, plan: Plain(), **changes))


def small_buckets() -> None:
    """Gradients of the last layer are reduced before those of the first are there, instead of all at once."""
    torch.distributed.__dict__["_DEFAULT_FIRST_BUCKET_BYTES"] = 64


class Plain(nn.Module):
    """Two layers, whose gradients are in two buckets of DDP."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, toy.CLASSES)
        self.failing = False

    def forward(self, batch):
        hidden = self.first(batch["x"]).relu()
        if self.failing and hidden.requires_grad:
            hidden.register_hook(run_out)
        return self.last(hidden)


def run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


# -- the same mathematics


def require_same(one: dict[str, Any], several: list[dict[str, Any]], tolerance: float, least: float = 0.0) -> None:
    """least: of a norm that errors are compared with."""
    for name, wanted in one["weights"].items():
        error = np.linalg.norm(several[0]["weights"][name] - wanted)
        assert error <= tolerance * max(np.linalg.norm(wanted), least), (name, error)
        assert all((other["weights"][name] == several[0]["weights"][name]).all() for other in several)


@pytest.mark.parametrize(
    ("world", "double", "tolerance"),
    [(2, True, 1e-9), *(pytest.param(*case, marks=pytest.mark.full) for case in [(4, True, 1e-9), (4, False, 1e-3)])],
)
def test_fifty_steps_are_those_of_one_process_that_accumulates_the_same_parts(pack, world, double, tolerance):
    """In float32 with SGD: a bias before BatchNorm has no gradient but rounding errors, which AdamW would scale up."""
    plan = QUIET.replace(epochs=7, optimizer="adamw" if double else "sgd")
    [one] = together(1, fifty, "toy", pack.folder, plan, double, world)
    several = together(world, fifty, "toy", pack.folder, plan, double)
    require_same(one, several, tolerance)
    losses = [[row[2]["loss"] for row in found["rows"] if "loss" in row[2]] for found in (one, several[0])]
    assert len(losses[0]) == 50
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert several[0]["shared"] == several[0]["alone"]  # to the last bit
    steps, numbers = several[0]["rows"][-1][1], sum(weight.size for weight in one["weights"].values())
    assert {rank["counted"] for rank in several} == {
        steps * numbers * (8 if double else 4)
    }  # each gradient once a step


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("name", "network"), TASKS.items())
def test_fifty_steps_of_every_task_are_those_of_one_process(tmp_path, name, network, world):
    """Four of them in float64 only: gloo adds four numbers in an order of its own, and on shares of three samples such
    rounding errors grow to 0.3 % (captcha) and 1.3 % (hwdb) of a norm in 50 float32 steps; two have the same bits.

    Segment's batch norms see three or four images a process, one number of each in the pooled context. At its own lr a
    change of the 16th digit of all weights then grows to 5e-4 in 48 float64 steps, in one process too: so less lr. Its
    biases before a batch norm start at 0 and have no gradient but rounding errors, of which AdamW makes 1e-11.
    """
    task: Any = import_task(f"nbtools.tasks.{name}", name)
    pack = task.pack(task.demo(tmp_path / "raw", 61, **task.SMOKE), into=tmp_path / "pack", progress=False)
    plan = task.with_network(task.PLAN, pack, network).replace(network=network, amp="off", ema=None)
    plan = plan.replace(batch_size=13, micro_batch_size=None, epochs=60, eval_every=60, warmup_epochs=0)
    unstable = (name, world) == ("segment", 4)
    plan = plan.replace(lr=1e-6) if unstable else plan
    for double, tolerance in [(True, 1e-9), (False, 1e-3)][: 2 if world == 2 else 1]:
        [one] = together(1, fifty, name, pack.folder, plan, double, world, timeout=300)
        several = together(world, fifty, name, pack.folder, plan, double, timeout=300)
        require_same(one, several, tolerance, least=0.1 if unstable else 0.0)
        assert several[0]["rows"][-1][1] == 50
        assert len(several[0]["shared"]) > 1
        assert several[0]["shared"] == several[0]["alone"]


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1))
def test_shares_hold_every_sample_once_whatever_the_batch_the_processes_and_their_changes(count, size, stretches):
    """As an epoch goes: some steps by so many processes, then another number takes over."""
    ids, segments, seen = np.arange(count) * 3, [[size, 0]], []
    for world, steps in [*stretches, (3, count)]:
        for batch in batches_left(ids, None, 0, 0, segments)[:steps]:
            cuts = ranked.shares(len(batch), world)
            assert len(cuts) - 1 == max(1, min(world, len(batch) // 2))
            parts = [batch[start:end] for start, end in pairwise(cuts)]
            assert min(map(len, parts)) >= min(2, len(batch))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            seen += [sample for part in parts for sample in part]
            segments[-1][1] += 1
    assert sorted(seen) == ids.tolist()


def stretch(folder: Path, runs: Path, plan: Plan, until: int) -> dict[str, Any]:
    """Go on from the checkpoint that is there, to a step or the end of the epoch, and save."""
    seen = Seen(toy, Pack.open(folder), plan)
    first = seen.ranks is None or seen.ranks.first
    if first and (runs / "run.json").exists():
        checkpoint.load(runs, seen.state)
    seen.run(lambda state, record: record.kind == "step" and state.step >= until)
    if first:
        runs.mkdir(exist_ok=True)
        checkpoint.save(runs, seen.state, rows=0)
    return seen.end()


@pytest.mark.parametrize("worlds", [(2, 1, 3), pytest.param((3, 1, 4, 2), marks=pytest.mark.full)])
def test_an_epoch_that_other_numbers_of_processes_continue_has_every_sample_once(pack, tmp_path, worlds):
    plan, seen = QUIET.replace(epochs=1, batch_size=11), []
    for world, until in zip(worlds, (*(3, 5, 8)[: len(worlds) - 1], 99), strict=True):
        given = pack.folder, tmp_path / "run", plan, until
        for rank in [stretch(*given)] if world == 1 else together(world, stretch, *given):
            seen += [(step, sample, size) for step, ids, _, size in rank["batches"] for sample in ids]
    padding = Counter(sample for step, sample, _ in set(seen))
    assert set(padding.values()) == {1}  # no sample in two steps
    assert sorted(padding) == sorted(pack.ids("train"))
    last = len(pack.ids("train")) % 11
    assert len(seen) == len(padding) + (0 if last >= 4 else 2)  # none twice in a step, but where a share is empty


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit_with_dropout_in_every_process(pack, tmp_path):
    """The whole one is trained amid the halves, which leaves them another random state."""
    given = [("halves", 5), ("whole", 99), ("halves", 99)]
    plan = toy.PLAN.replace(epochs=2, dropout=0.4)
    calls = [(stretch, pack.folder, tmp_path / name, plan, until) for name, until in given]
    _, whole, halves = zip(*together(2, in_turn, *calls), strict=True)
    for one, other in zip(whole, halves, strict=True):
        assert all((one["weights"][name] == other["weights"][name]).all() for name in one["weights"])
        assert one["rng"] == other["rng"]
    assert whole[0]["rng"] != whole[1]["rng"]  # each drops units of its own
    assert all((whole[0]["buffers"][name] == halves[0]["buffers"][name]).all() for name in whole[0]["buffers"])


# -- what rank 0 wants


def asked(folder: Path, plan: Plan) -> dict[str, Any]:
    """Changes at several steps, one of them while an evaluation runs; a rest that is longer than the timeout."""

    def watch(state: TrainState, record: Record) -> None:
        step = state.step if record.kind == "step" else 0
        if step == 3:
            state.plan = state.plan.replace(lr=0.005)
        elif step == 5:
            state.plan = state.plan.replace(batch_size=24, lr=0.004)
        elif step == 7:
            state.evaluate_next = True
        elif step == 8:
            sleep(2.5)
        elif record.kind == "evaluating" and state.step == 7:
            state.plan = state.plan.replace(epochs=2, lr=0.003)

    return Seen(toy, Pack.open(folder), plan, timeout=2).run(watch).end()


def test_what_is_asked_of_rank_0_reaches_all_at_the_same_step_and_a_pause_may_outlast_the_timeout(pack):
    plan = QUIET.replace(epochs=4)
    one, several = asked(pack.folder, plan), together(2, asked, pack.folder, plan)
    wanted = {step: (set(ids), lr, size) for step, ids, lr, size in one["batches"]}
    lrs = {step: lr for step, (_, lr, _) in wanted.items()}
    assert [lrs[step] for step in (2, 3, 4, 5, 6, 7)] == [0.01, 0.005, 0.005, 0.004, 0.004, 0.003]
    assert max(wanted) < 16  # two epochs and not four
    found: dict[int, tuple[set[int], float, int]] = {}
    for rank in several:
        for step, ids, lr, size in rank["batches"]:
            known, *same = found.get(step, (set(), lr, size))
            assert same == [lr, size]
            found[step] = (known | set(ids), lr, size)
    assert found == wanted
    assert [row[:2] for row in several[0]["rows"] if row[0] not in ("step", "evaluating")] == [
        row[:2] for row in one["rows"] if row[0] not in ("step", "evaluating")
    ]


def refused(folder: Path) -> dict[str, Any]:
    """A plan that the run cannot follow, and the run goes on without it."""
    seen = Seen(toy, Pack.open(folder), QUIET.replace(epochs=1))
    said = []
    for _ in range(2 if seen.ranks and seen.ranks.first else 1):
        try:
            seen.run(lambda state, record: setattr(state, "plan", state.plan.replace(seed=9)) if not said else None)
        except TrainError as error:
            said.append(str(error))
    return {**seen.end(), "said": said}


def test_a_change_that_is_refused_ends_no_other_process(two):
    first, other = two["refused"]
    assert "Plan.seed cannot change" in first["said"][0]
    assert [row[0] for row in first["rows"]][-1] == "epoch"
    assert all((first["weights"][name] == other["weights"][name]).all() for name in first["weights"])


def hurried(folder: Path) -> dict[str, Any]:
    """Another thread asks for more whenever rank 0 has just told the others what is wanted."""
    seen, at = Seen(toy, Pack.open(folder), QUIET.replace(epochs=3)), set()

    def tell_and_ask(what: Any = None) -> Any:
        assert seen.ranks
        found = Ranks.tell(seen.ranks, what)
        if seen.state.step not in at:
            at.add(seen.state.step)
            size = 24 if seen.state.plan.batch_size == 16 else 16
            seen.state.plan = seen.state.plan.replace(batch_size=size, lr=seen.state.plan.lr * 0.9, epochs=2)
            seen.state.evaluate_next = True
        return found

    if seen.ranks and seen.ranks.first:
        seen.ranks.tell = tell_and_ask

    def watch(state: TrainState, record: Record) -> None:
        state.evaluate_next |= record.kind == "step" and state.step in (3, 6)

    return seen.run(watch).end()


def test_what_is_asked_while_rank_0_tells_the_others_waits_for_the_next_time_on_all(two):
    first, other = two["hurried"]
    assert "evaluation" in [row[0] for row in first["rows"]]
    settings = [{step: (lr, size) for step, _, lr, size in rank["batches"]} for rank in (first, other)]
    assert settings[0] == settings[1]
    assert len({lr for lr, _ in settings[0].values()}) > 2
    assert all((first["weights"][name] == other["weights"][name]).all() for name in first["weights"])


# -- memory, and non-finite losses


def short(folder: Path, plan: Plan, at: dict[int, tuple[str, int]]) -> dict[str, Any]:
    """Memory runs out on the last rank in some steps, forward or backward, for more than so many samples; from step 2
    on where DDP adds up gradients."""
    small_buckets()
    held = []  # whether gradients, views of the former buckets, are there when DDP makes new ones
    owed = []  # (buckets that had left, whether forward had returned) when the rank gave up

    def loss(model, batch, plan):
        step, ranks = seen.state.step + 1, seen.ranks
        where, most = at.get(step, ("", 0))
        here = bool(ranks) and ranks.rank == ranks.world - 1 and len(batch["x"]) > most
        here = here and isinstance(model, nn.Module if step == 1 else ranked.WrappedNetwork)
        if here and where == "forward":
            run_out()
        vars(seen.state.model)["failing"] = here and where == "backward"
        return toy.loss(model, batch, plan)

    def finish_buckets() -> Any:
        assert seen.ranks
        owed.append((seen.ranks.sent, seen.ranks.ddp and seen.ranks.ddp.forwarded))
        return Ranks.finish_buckets(seen.ranks)

    class Watched(ranked.WrappedNetwork):
        def __init__(self, network: nn.Module, **settings: Any):
            held.append(any(p.grad is not None for p in network.parameters()))
            super().__init__(network, **settings)

    seen = Seen(class_task(loss=loss), Pack.open(folder), plan)
    if seen.ranks:
        seen.ranks.finish_buckets = finish_buckets
        ranked.WrappedNetwork = Watched
    return {**seen.run().end(), "owed": owed, "held": held}


def test_memory_that_runs_out_on_one_rank_halves_the_parts_of_all_and_changes_nothing_else(pack):
    """In step 1 gradients are added up after backward, then meanwhile. In its second pass DDP makes new buckets; of
    these one has left in step 7 when memory runs out in backward."""
    plan = QUIET.replace(epochs=1)
    [one] = together(1, short, pack.folder, plan, {})
    for at, owed in (
        ({1: ("forward", 4), 2: ("backward", 2), 5: ("forward", 1)}, [(0, True), (0, False)]),
        ({1: ("backward", 4), 3: ("forward", 2), 7: ("backward", 1)}, [(0, False), (1, True)]),
    ):
        several = together(2, short, pack.folder, plan, at)
        said = [row[2]["what"] for row in several[0]["rows"] if row[0] == "event"]
        changes = [f"micro batch {now} → {now // 2}" for now in (8, 4, 2)]
        assert said == [f"out of memory: {change}; effective batch and lr unchanged" for change in changes]
        assert [rank["owed"] for rank in several] == [[], owed]
        assert [rank["held"] for rank in several] == [[False] * 3] * 2
        require_same(one, several, 1e-9)


@pytest.mark.full
def test_too_little_memory_on_one_rank_is_an_error_of_all(pack):
    with pytest.raises(AssertionError, match=r"out of memory with one sample at a time \(rank 1: CUDA out of memory"):
        together(2, never, pack.folder)


def never(folder: Path) -> dict[str, Any]:
    def loss(model, batch, plan):
        if seen.ranks and not seen.ranks.first:
            run_out()
        return toy.loss(model, batch, plan)

    seen = Seen(class_task(loss=loss), Pack.open(folder), QUIET)
    return seen.run().end()


def lost(folder: Path, careful: bool) -> dict[str, Any]:
    """A sample that is no number in rank 1's share of step 4; not careful: back to the start after that."""
    bad, said = [True], []

    def batch(raw, plan, draws):
        found = toy.batch(raw, plan, draws)
        if draws is not None and bad and seen.state.step == 3 and seen.ranks and not seen.ranks.first:
            found["x"][0] = torch.nan
            bad[:] = [] if not careful else bad
        return found

    seen = Seen(class_task(batch=batch), Pack.open(folder), QUIET.replace(epochs=1))
    seen.state.recovery.careful_until = 99 if careful else 0
    tensors, facts = deepcopy(seen.state.tensors()), seen.state.facts()
    try:
        seen.run()
    except Diverged as error:
        said.append(str(error))
        seen.state.load(tensors, facts)
        seen.run(lambda state, record: state.step >= 3 and record.kind == "step")
    return {**seen.end(), "said": said}


@pytest.fixture(scope="module")
def two(pack) -> dict[str, tuple[Any, ...]]:
    """What two processes found, in which everything that leaves them as they were happened in turn."""
    calls = {"refused": (refused,), "hurried": (hurried,), "careful": (lost, True), "not careful": (lost, False)}
    calls["after the end"] = (after_the_end,)
    found = together(2, in_turn, *((act, pack.folder, *more) for act, *more in calls.values()))
    return dict(zip(calls, zip(*found, strict=True), strict=True))


def test_a_sample_that_is_no_number_on_one_rank_is_refused_by_all_and_named(two):
    first, other = two["careful"]
    [said] = [row[2]["what"] for row in first["rows"] if row[0] == "event"]
    [ids] = [ids for step, ids, _, _ in other["batches"] if step == 3][:1]
    assert said == f"step 4 skipped: batch['x'] is not finite (sample ids {', '.join(map(str, ids))})"
    assert all((first["weights"][name] == other["weights"][name]).all() for name in first["weights"])
    assert all(np.isfinite(weight).all() for weight in first["weights"].values())


def test_a_non_finite_loss_is_rank_0s_to_decide_on_and_the_others_follow_it_back(two):
    first, other = two["not careful"]
    assert "the loss became nan" in first["said"][0]
    assert all((first["weights"][name] == other["weights"][name]).all() for name in first["weights"])
    assert all(np.isfinite(weight).all() for weight in first["weights"].values())


class Branched(Plain):
    """From step 3 on a layer that only some shares use, and one that none uses. never: one that is never used, too."""

    def __init__(self, never: bool):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.rare, self.early = nn.Linear(8, toy.CLASSES), nn.Linear(8, toy.CLASSES)
        self.never = nn.Linear(8, 1) if never else None
        self.at: list[int] = []

    def forward(self, batch):
        found, x = super().forward({"x": self.norm(batch["x"])}), batch["x"]
        found = found + self.early(x) if self.at[-1] < 3 else found
        return found + self.rare(x) if self.at[-1] < 3 or x.sum() > 0 else found


def branched(folder: Path, plan: Plan, never: bool, cuts: int = 0) -> dict[str, Any]:
    small_buckets()

    def loss(model, batch, plan):
        vars(seen.state.model)["at"].append(seen.state.step)
        return toy.loss(model, batch, plan)

    seen = Seen(precise(toy.with_(model=lambda card, plan: Branched(never), loss=loss)), Pack.open(folder), plan)
    if cuts:
        cut_as(cuts)
        seen.state.recovery.micro = 1
    return seen.run().end()


@pytest.mark.parametrize("never", [False, pytest.param(True, marks=pytest.mark.full)])
def test_parameters_that_some_shares_or_all_leave_out_are_trained_as_in_one_process_in_one_pass_a_step(pack, never):
    plan = QUIET.replace(epochs=2, weight_decay=0.1)
    [one] = together(1, branched, pack.folder, plan, never, 2)
    several = together(2, branched, pack.folder, plan, never)
    require_same(one, several, 1e-9)
    steps = max(row[1] for row in one["rows"])
    assert [rank["buffers"]["norm.num_batches_tracked"] for rank in several] == [steps, steps]


class Exchanging(nn.Module):
    """What SyncBatchNorm does, which a CPU lacks: it communicates in every forward and backward pass."""

    def forward(self, x):
        if not self.training:
            return x
        total = all_reduce(torch.cat([x.sum(0), x.new_tensor([len(x)])]))
        return x - total[:-1] / total[-1]


def exchanging(folder: Path, micro: int | None, careful: bool = False, fails: bool = False) -> Any:
    """Batches of 17, so that shares differ. fails: memory runs out on rank 1."""

    def loss(model, batch, plan):
        if fails and seen.ranks and not seen.ranks.first:
            run_out()
        found = model(batch["x"])
        passes.append(len(found))
        return nn.functional.cross_entropy(found, batch["label"], reduction="sum"), len(found)

    def model(card, plan):
        return nn.Sequential(nn.Linear(8, 16), Exchanging(), nn.Linear(16, toy.CLASSES))

    def batch(raw, plan, draws):
        found = toy.batch(raw, plan, draws)
        if careful and draws is not None and seen.state.step == 2 and seen.ranks and not seen.ranks.first:
            found["x"][0] = torch.nan
        return found

    device.require, passes = (lambda *_: None), []  # it refuses a CPU
    ranked.PATIENCE = 0.5
    plan = QUIET.replace(epochs=1, batch_size=17, micro_batch_size=micro, sync_batchnorm=True)
    seen = Seen(toy.with_(loss=loss, model=model, batch=batch), Pack.open(folder), plan, timeout=20)
    seen.state.recovery.careful_until = 99 if careful else 0
    try:
        found = seen.run(lambda state, record: state.step == 4).end()
    except TrainError as error:
        return f"{type(error).__name__}: {error}"
    return {**found, "passes": passes}


@pytest.mark.parametrize(("micro", "careful"), [(4, True), pytest.param(1, False, marks=pytest.mark.full)])
def test_layers_that_communicate_run_as_often_on_every_rank(pack, micro, careful):
    first, other = together(2, exchanging, pack.folder, micro, careful)
    assert len(first["passes"]) == len(other["passes"]) > 4
    assert all((first["weights"][name] == other["weights"][name]).all() for name in first["weights"])


def test_out_of_memory_amid_layers_that_communicate_ends_the_run_at_once(pack):
    first, other = together(2, exchanging, pack.folder, None, False, True)
    assert other.startswith("TrainError: out of memory on rank 1 (CUDA out of memory")
    assert "set a smaller micro_batch_size, or sync_batchnorm=False" in other
    assert first.startswith("RankLost")


def after_the_end(folder: Path) -> str:
    seen = Seen(toy, Pack.open(folder), QUIET.replace(epochs=1, shard_optimizer=True)).run()
    if not seen.ranks or not seen.ranks.first:
        return ""
    there = len(seen.state.tensors())
    assert there > 3 * len(seen.state.parameters)
    seen.ranks.end()
    with pytest.raises(TrainError) as raised:
        seen.state.tensors()
    return str(raised.value)


def test_shares_of_an_optimizer_that_are_gone_are_not_left_out_in_silence(two):
    assert "call TrainState.tensors() before Ranks.end()" in two["after the end"][0]


# -- ranks that are lost


def stopped(folder: Path, sign: int) -> list[Any] | str:
    """Rank 2 gets a signal from itself before step 4."""
    ranked.PATIENCE = 1.0

    def batch(raw, plan, draws):
        if seen.ranks and seen.ranks.rank == 2 and seen.state.step == 3 and draws is not None:
            os.kill(os.getpid(), sign)
        return toy.batch(raw, plan, draws)

    seen = Seen(toy.with_(batch=batch), Pack.open(folder), QUIET, timeout=2)
    try:
        return str(seen.run())
    except RankLost as error:
        return [*error.ranks, str(error)]


@pytest.mark.parametrize(
    ("sign", "said"),
    [
        (signal.SIGSTOP, "no answer for 2 s from rank 2 of 3"),
        pytest.param(signal.SIGKILL, "rank 2 of 3 ended", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named_by_the_others(pack, sign, said):
    for lost, message in together(3, stopped, pack.folder, sign, lost=2):
        assert lost == 2
        assert message.startswith(said)


def misled(folder: Path) -> str:
    """A task's own error, in words that a broken connection between the processes has too."""

    def batch(raw, plan, draws):
        if seen.state.step == 2 and draws is not None:
            raise RuntimeError("Connection to the label server timed out")
        return toy.batch(raw, plan, draws)

    seen = Seen(toy.with_(batch=batch), Pack.open(folder), QUIET)
    try:
        return str(seen.run())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_the_task_about_a_connection_of_its_own_stays_what_it_is(pack):
    assert together(2, misled, pack.folder) == ["RuntimeError: Connection to the label server timed out"] * 2


def test_one_process_has_no_ranks_and_a_graph_has_one_process(pack, monkeypatch):
    assert join() is None
    with pytest.raises(TrainError, match="2 train together; set graph=False"):
        device.require(QUIET.replace(graph=True, compile=True), torch.device("cuda"), 2)
