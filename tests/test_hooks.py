"""What a task may bring beside what it must: parameter groups, its own way to answer, evaluations for the end."""

import dataclasses
import json
import shutil
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbtools.data import Pack, batches_left, open_feed
from nbtools.errors import NbtoolsError, TrainError
from nbtools.fit import fit
from nbtools.live.view import Previews
from nbtools.run import Run, evaluate
from nbtools.train import Sums, TrainState, evaluation, loop, plan, train
from tests import toy


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("hooks"), 60)


def task(**more: Any) -> Any:
    names = ("PLAN", "BASELINE", "BEST", "model", "batch", "loss", "metrics", "decode")
    return SimpleNamespace(**{name: getattr(toy, name) for name in names}, **more)


def head_and_body(model: Any, plan: plan.Plan) -> list[dict[str, Any]]:
    head = list(model.layers[-1].parameters())
    body = [p for p in model.parameters() if all(p is not other for other in head)]
    return [{"params": body}, {"params": head, "lr_scale": 10.0, "decays": False}]


# -- parameter groups


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_groups_step_as_torch_does_with_their_own_lr_and_weight_decay(pack, optimizer):
    knobs = {"epochs": 1, "optimizer": optimizer, "weight_decay": 0.1, "clip_norm": None, "schedule": "constant"}
    plan = toy.PLAN.replace(**knobs, dropout=0.0, noise=0.0)
    ours, theirs = (TrainState(task(**more), pack, plan) for more in ({"groups": head_and_body}, {}))
    body, head = head_and_body(theirs.model, plan)
    kinds = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.999)})}
    kind, extra = kinds[optimizer]
    parts = [{"params": body["params"], "lr": plan.lr}, {"params": head["params"], "lr": 10 * plan.lr}]
    reference = kind([parts[0], {**parts[1], "weight_decay": 0.0}], weight_decay=0.1, **extra)
    for _ in train(ours.task, ours, pack):
        pass
    batches = batches_of(pack, plan)
    for raw in batches:
        reference.zero_grad()
        total, count = toy.loss(theirs.model.train(), toy.batch(raw, plan, None), plan)
        (total / count).backward()
        reference.step()
    assert ours.step == len(batches)
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        if name != "layers.0.bias":  # BatchNorm takes it away again: Adam then follows rounding
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def batches_of(pack, plan):
    return list(
        open_feed(pack, plan, torch.device("cpu"))(batches_left(pack.ids("train"), None, plan.seed, 0, [[16, 0]]))
    )


def test_a_turned_weight_decay_leaves_alone_what_does_not_decay(pack):
    state = TrainState(task(groups=head_and_body), pack, toy.PLAN)
    for record in train(state.task, state, pack):
        if record.kind == "step" and state.step == 1:
            state.plan = state.plan.replace(weight_decay=0.2)
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.2, 0.0]
    assert state.optimizer.param_groups[1]["lr"] == pytest.approx(10 * state.position.lr)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda model, plan: [{"params": list(model.parameters())[:-1]}], "layers.4.bias must be in just one"),
        (lambda model, plan: [{"params": model.parameters()}, {"params": [model.layers[0].weight]}], "layers.0.weight"),
        (lambda model, plan: [{"params": [*model.parameters(), nn.Parameter(torch.ones(1))]}], "1 parameter of"),
    ],
)
def test_groups_that_forget_or_repeat_a_parameter_are_refused_by_its_name(pack, groups, said):
    with pytest.raises(TrainError, match=said):
        TrainState(task(groups=groups), pack, toy.PLAN)


def test_a_run_with_groups_resumes_bit_for_bit(tmp_path, pack):
    mine = task(groups=head_and_body, __name__="mine")
    whole, halves = (TrainState(mine, pack, toy.PLAN) for _ in range(2))
    for _ in train(mine, whole, pack):
        pass
    for _ in train(mine, halves, pack):
        if halves.step == 4:
            break
    resumed = TrainState(mine, pack, toy.PLAN)
    resumed.load({k: v.clone() for k, v in halves.tensors().items()}, json.loads(json.dumps(halves.facts())))
    for _ in train(mine, resumed, pack):
        pass
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


# -- its own way to answer, and what it costs


@dataclass(frozen=True)
class Plan(toy.Plan):
    passes: int = plan.knob(3, "forward passes an answer", least=1, live=True)

    def while_training(self):
        return self.replace(passes=1)


CALLS: list[int] = []


def infer(model, batch, plan):
    CALLS.append(plan.passes)
    return sum(model(batch) for _ in range(plan.passes)) / plan.passes


@pytest.fixture
def costly():
    CALLS.clear()
    plan = Plan(**{**toy.PLAN.to_dict(), "epochs": 2})
    mine = task(infer=infer, Plan=Plan)
    mine.PLAN = mine.BASELINE = plan
    return mine


def test_costly_answers_are_left_to_the_end_where_the_best_weights_see_all_of_them(tmp_path, pack, costly):
    looked: list[int] = []
    costly.infer = lambda model, batch, plan: looked.append(len(batch["x"])) or infer(model, batch, plan)
    plan = costly.PLAN.replace(eval_samples=5)
    run = fit(costly, pack, plan, run=tmp_path / "run", receipt=False, progress=False)
    assert looked == [5, 5, pack.splits["val"]]
    amid = len(CALLS) - CALLS[::-1].index(1)
    assert set(CALLS[:amid]) == {1}
    assert set(CALLS[amid:]) == {3}
    assert run.final["epoch"] == run.best["epoch"]
    assert run.final["values"] == evaluate(run, pack, "val")
    assert any(f"all {pack.splits['val']} validation samples" in said for said in run.events)


def test_the_last_evaluation_is_not_made_twice_nor_where_nothing_was_left_out(tmp_path, pack, costly):
    fit(costly, pack, costly.PLAN, run=tmp_path / "run", receipt=False, progress=False)
    CALLS.clear()
    fit(costly, pack, costly.PLAN, run=tmp_path / "run", receipt=False, progress=False)
    assert CALLS == []
    plain = fit(toy, pack, toy.PLAN, run=tmp_path / "plain", receipt=False, progress=False)
    assert plain.final == {}


def test_once_other_weights_are_the_best_what_was_found_of_earlier_ones_is_no_longer_told(tmp_path, pack, costly):
    folder, plan = tmp_path / "run", costly.PLAN.replace(lr=1e-6)
    first = fit(costly, pack, plan, run=folder, receipt=False, progress=False)
    before = first.final
    costly.infer = lambda model, batch, plan: interrupted(infer(model, batch, plan), plan)
    more = plan.replace(epochs=4, lr=0.03)
    longer = fit(costly, pack, more, run=folder, receipt=False, progress=False)
    assert longer.best["epoch"] != before["epoch"]
    assert longer.final == {}
    assert longer.events[-1] == "no last evaluation: stopped by you; run it again for it"


def interrupted(outputs, plan):
    if plan.passes == 3:
        raise KeyboardInterrupt
    return outputs


@pytest.mark.parametrize("trouble", [TrainError("out of memory"), OSError("no space")])
def test_a_last_evaluation_that_fails_costs_neither_the_run_nor_its_receipt(tmp_path, pack, costly, trouble):
    def failing(model, batch, plan):
        if plan.passes == 3:
            raise trouble
        return model(batch)

    costly.infer = failing
    run = fit(costly, pack, costly.PLAN, run=tmp_path / "run", receipt=False, progress=False)
    assert run.final == {}
    assert f"no last evaluation: {type(trouble).__name__}: {trouble}" in run.events


def test_who_stops_a_run_waits_for_no_last_evaluation(tmp_path, pack, costly, monkeypatch):
    folder, end_epoch = tmp_path / "run", loop.end_epoch
    monkeypatch.setattr(loop, "end_epoch", lambda *given: signal.raise_signal(signal.SIGINT) or end_epoch(*given))
    plan = costly.PLAN.replace(epochs=1)
    stopped = fit(costly, pack, plan, run=folder, receipt=False, progress=False)
    assert len(stopped.history.of("epoch")) == 1
    assert 3 not in CALLS
    assert stopped.final == {}


def test_early_stop_too_ends_with_the_whole_split(tmp_path, pack, costly):
    plan = costly.PLAN.replace(epochs=30, early_stop=1)
    run = fit(costly, pack, plan, run=tmp_path / "run", receipt=False, progress=False)
    assert len(run.history.of("epoch")) < 30
    assert run.final["epoch"] == run.best["epoch"]


def test_without_a_validation_split_nothing_is_evaluated_at_the_end(tmp_path, pack, costly, monkeypatch):
    ids = Pack.ids
    monkeypatch.setattr(Pack, "ids", lambda self, split: ids(self, split)[: None if split == "train" else 0])
    pack = dataclasses.replace(pack, card=dataclasses.replace(pack.card, splits={**pack.splits, "val": 0}))
    run = fit(costly, pack, costly.PLAN, run=tmp_path / "run", receipt=False, progress=False)
    assert run.final == {}
    assert CALLS == []


def test_the_last_evaluation_is_kept_and_comes_back_with_its_run(tmp_path, pack, costly):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    run = fit(costly, pack, costly.PLAN, run=folder, keep=kept, receipt=False, progress=False)
    shutil.rmtree(folder)
    CALLS.clear()
    back = fit(costly, pack, costly.PLAN, run=folder, keep=kept, receipt=False, progress=False)
    assert back.final == run.final
    assert back.final
    assert CALLS == []


def test_a_live_knob_of_the_task_may_change_in_a_started_run(tmp_path, pack, costly):
    fit(costly, pack, costly.PLAN, run=tmp_path / "run", receipt=False, progress=False)
    more = costly.PLAN.replace(epochs=3, passes=2)
    run = fit(costly, pack, more, run=tmp_path / "run", receipt=False, progress=False)
    assert run.final["plan"]["passes"] == 2
    with pytest.raises(TrainError, match="hidden"):
        fit(costly, pack, more.replace(hidden=8), run=tmp_path / "run", receipt=False, progress=False)


def test_a_run_is_evaluated_with_other_knobs_than_it_was_trained_with(tmp_path, pack, costly):
    run = fit(costly, pack, costly.PLAN, run=tmp_path / "run", receipt=False, progress=False)
    CALLS.clear()
    evaluate(run, pack, "test", passes=7)
    assert set(CALLS) == {7}
    assert Run.open(tmp_path / "run", costly).plan == costly.PLAN


@pytest.mark.parametrize(
    ("knobs", "said"),
    [({"pases": 7}, "pases.*passes"), ({"hidden": 8}, "Plan.hidden"), ({"optimizer": "sgd"}, "Plan.optimizer")],
)
def test_a_knob_that_there_is_not_or_that_answers_cannot_follow_is_refused(tmp_path, pack, costly, knobs, said):
    state = TrainState(costly, pack, costly.PLAN)
    with pytest.raises(NbtoolsError, match=said):
        evaluate(state, pack, "val", **knobs)


@pytest.mark.parametrize("most", [1, 2, 5, 11])
def test_a_part_of_a_split_is_the_same_samples_each_time_evenly_spaced(pack, most):
    state = TrainState(toy, pack, toy.PLAN)
    seen = []
    for _ in range(2):
        spied = dataclasses.replace(pack)
        ids: list[int] = []
        mine = task()
        mine.batch = lambda raw, plan, draws, ids=ids: ids.extend(raw["id"].tolist()) or toy.batch(raw, plan, draws)
        list(evaluation.score_split(mine, state.model, spied, toy.PLAN, "val", Sums(), most=most))
        seen.append(ids)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == min(most, pack.splits["val"])
    assert set(seen[0]) <= set(pack.ids("val").tolist())


@pytest.mark.parametrize(("most", "partial"), [(None, False), (1, True), (9, True), (10, False), (11, False)])
def test_evaluations_of_some_samples_are_partial_for_a_task_without_costly_answers_too(most, partial):
    assert evaluation.is_partial(toy.PLAN.replace(eval_samples=most), 10) == partial


def test_the_live_picture_waits_for_no_costly_answers(pack, costly):
    costly.preview = toy.preview
    assert Previews(TrainState(costly, pack, costly.PLAN), pack).now()
    assert CALLS == [1]
