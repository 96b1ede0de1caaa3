"""Advice that was measured: evidence beside each number, kept beside the pack, and never measured by surprise."""

import dataclasses
import html
import json
from typing import Any

import pytest
import toy

import nbtools as nb
from nbtools.live import send, surface
from nbtools.measure import advice as act
from nbtools.measure import profile
from nbtools.measure.finder import Row

SECONDS = 1.0


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=600)


@pytest.fixture(scope="module")
def advice(pack):
    return nb.advise(toy, pack, seconds=SECONDS)


def own(**changes) -> Any:
    """A task like toy, but for some of its names."""
    names = {name: value for name, value in vars(toy).items() if not name.startswith("__")}
    return type("Own", (), {**names, **changes})


@pytest.fixture
def no_measuring(monkeypatch):
    def surprise(*_args, **_more):
        raise AssertionError("it measured")

    for name in ("find_batch", "find_precision", "step_profile", "find_workers"):
        monkeypatch.setattr(act, name, surprise)


def test_each_measured_number_has_its_evidence_and_the_rest_its_rule(advice):
    assert f"measured {advice.batches.seconds:.1f} s" in advice.evidence["batch_size"]
    assert "rule of thumb" in advice.reasons["lr"]
    assert advice.verdict.sentence in str(advice)
    assert {"setting", "measured here"} <= set(advice.table()[0])
    for name, value, reason, *_ in advice.table()[1][: len(advice.reasons)]:
        assert value == getattr(advice.plan, name)
        assert reason


def test_what_was_found_is_kept_beside_the_pack_and_comes_back_the_same(advice, pack, no_measuring):
    assert act.shelf(pack).parent == pack.folder.parent
    assert not any("advice" in path.name for path in pack.folder.iterdir())
    for again in (nb.advise(toy, pack), nb.advise(toy, pack, measure=False)):
        assert json.dumps(again.to_dict()) == json.dumps(advice.to_dict())
        assert again.plan == advice.plan


def test_another_machine_pack_or_task_is_measured_anew(advice, pack, monkeypatch):
    thumb = nb.advise(toy, pack, measure=False)
    mine = act.label(toy, pack, thumb, False)
    assert act.label(own(), pack, thumb, False) != mine
    assert (
        act.label(toy, dataclasses.replace(pack, card=dataclasses.replace(pack.card, digest="x")), thumb, False) != mine
    )
    monkeypatch.setattr(act, "machine", lambda: {"device": "another"})
    assert act.label(toy, pack, thumb, False) != mine


def test_rules_alone_when_nothing_was_measured_before(tmp_path, no_measuring):
    pack = toy.make_pack(tmp_path, count=60)
    advice = nb.advise(toy, pack, measure=False)
    assert advice.evidence == {}
    assert advice.table()[0] == ("setting", "value", "reason")
    assert "nothing here was measured" in advice.note


def test_training_without_a_plan_never_measures(tmp_path, no_measuring):
    pack = toy.make_pack(tmp_path, count=60)
    run = nb.fit(own(PLAN=toy.PLAN.replace(epochs=1)), pack, run=tmp_path / "run", receipt=False, progress=False)
    assert len(run.history.of("epoch")) == 1


def test_a_file_of_an_older_version_is_measured_again_and_replaced(tmp_path):
    pack = toy.make_pack(tmp_path, count=60)
    act.shelf(pack).write_text("{")
    nb.advise(toy, pack, seconds=0.3)
    shelved = json.loads(act.shelf(pack).read_text())
    (key,) = shelved
    del shelved[key]["evidence"]
    shelved[key]["older"] = 1
    act.shelf(pack).write_text(json.dumps(shelved))
    again = nb.advise(toy, pack, seconds=0.3)
    found = json.loads(act.shelf(pack).read_text())
    assert found == {key: {"version": act.VERSION, **json.loads(json.dumps(again.to_dict()))}}


def test_where_nothing_can_be_kept_the_advice_says_so(tmp_path, monkeypatch):
    pack = toy.make_pack(tmp_path, count=60)
    act.shelf(pack).mkdir()
    assert "Not kept for the next time" in nb.advise(toy, pack, seconds=0.3).note


def test_the_tasks_own_batch_size_is_not_overruled_by_speed(tmp_path):
    pack = toy.make_pack(tmp_path, count=600)
    task = own(suggest=lambda card, accelerator: {"batch_size": (12, "learns best so")})
    advice = nb.advise(task, pack, seconds=SECONDS)
    assert (advice.plan.batch_size, advice.reasons["batch_size"]) == (12, "learns best so")
    assert "measured" in advice.evidence["batch_size"]


def test_a_search_that_a_busy_machine_cut_short_does_not_shrink_the_batch(advice):
    short = dataclasses.replace(advice.batches, complete=False, rows=(Row(2, 10.0, 9.0, 11.0, 3, None, 100, True),))
    rows = (*short.rows, Row(64, None, None, None, 0, None, None, True))
    assert not act.conclusive(dataclasses.replace(short, rows=rows), toy.PLAN.replace(batch_size=64))
    timed = (*short.rows, Row(64, 90.0, 89.0, 91.0, 3, None, 200, True))
    assert act.conclusive(dataclasses.replace(short, rows=timed), toy.PLAN.replace(batch_size=64))
    assert act.conclusive(dataclasses.replace(short, complete=True), toy.PLAN.replace(batch_size=64))


def test_a_run_asked_what_limits_it_answers_and_goes_on_bit_equal(pack, tmp_path, monkeypatch):
    folder, steps = tmp_path / "run", []

    def batch(raw, plan, draws):
        steps.append(1) if draws is not None else None
        if len(steps) == 5:
            send(folder, ["profile"])
        return toy.batch(raw, plan, draws)

    monkeypatch.setattr(surface, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(profile, "SECONDS", 0.3)
    plan = toy.PLAN.replace(epochs=2)
    undisturbed = nb.fit(toy, pack, plan, tmp_path / "undisturbed", receipt=False, progress=False)
    run = nb.fit(own(batch=batch), pack, plan, folder, receipt=False, progress=False)
    assert run.verdict is not None
    assert run.profile is not None
    assert run.verdict.sentence in run.events
    assert [row["loss"] for row in run.history.of("step")] == [row["loss"] for row in undisturbed.history.of("step")]


def test_the_summary_shows_the_verdict_and_is_still_a_frame(pack, tmp_path):
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", progress=False)
    assert run.verdict is not None
    for shown in (repr(run.summary().round(3)), run.summary().round(3)._repr_html_()):
        assert html.escape(run.verdict.sentence) in html.escape(html.unescape(str(shown)))
    assert list(run.summary().index) == [1]


def other_batches(advice, *rows: tuple[int, bool]):
    """Those of an advised batch of 16 and a largest of 64, where (batch size, whether it fits) was measured."""
    plan = advice.plan.replace(batch_size=16, lr=1e-3, micro_batch_size=None, optimizer="adamw")
    tried = tuple(Row(size, 100.0 if fits else None, 90.0, 110.0, 3 * fits, None, 100, fits) for size, fits in rows)
    batches = dataclasses.replace(advice.batches, batch_size=16, rows=tried)
    return dataclasses.replace(advice, plan=plan, largest=plan.replace(batch_size=64, lr=2e-3), batches=batches)


@pytest.mark.parametrize(
    ("rows", "micro", "why"),
    [
        (((16, True), (32, True), (64, True)), None, "by the sqrt rule, rule of thumb (arXiv 2205.10287)"),
        (((16, True), (32, True), (64, False)), 32, "; in 2 passes: 64 does not fit at once"),
        (((16, True), (32, True)), 32, "; in 2 passes: more than 32 at once was not tried"),
    ],
    ids=["timed", "too large", "not tried"],
)
def test_the_advice_shows_other_batches_with_their_lr_and_passes_from_the_largest_down(advice, rows, micro, why):
    shown = other_batches(advice, *rows)
    plans, reasons = zip(*shown.other_batches(), strict=True)
    assert [plan.batch_size for plan in plans] == [64, 12, 8, 4]
    assert [plan.micro_batch_size for plan in plans] == [micro, None, None, None]
    assert plans[0].lr == pytest.approx(2e-3)
    assert plans[2].lr == pytest.approx(1e-3 / 2**0.5, rel=1e-3)
    assert reasons[0].endswith(why)
    assert "or batch 64" in str(shown)
    assert "lr 0.000707" in shown._repr_html_()


def test_what_is_gone_names_what_to_use_instead(advice, pack):
    with pytest.raises(nb.NbtoolsError, match=r"no longer takes noise.*turn\(batch_size"):
        nb.advise(toy, pack, noise=True)
    with pytest.raises(AttributeError, match="other_batches"):
        assert advice.ladder
