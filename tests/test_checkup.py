"""nb.checkup: what works on this machine, row by row, kept and continued, and read by nb.advise."""

import dataclasses
import json
import os
from functools import partial

import pytest
import torch

import nbtools as nb
from nbtools.errors import MissingExtra, NbtoolsError
from nbtools.measure.advice import Machine
from nbtools.measure.checkup import Checkup, Row, home, of_here, ruled_out, save
from nbtools.measure.examples import CPU, Bench, NotHere
from nbtools.measure.levers import Levers, outcome
from nbtools.measure.tryouts import PARTS, Attempt, Found, remembering, tried
from nbtools.tasks import captcha


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def row(what="captcha, bf16", result="fails", task="nbtools.tasks.captcha", **lever):
    return Row("training", what, result, "RuntimeError: no kernel", 0.1, task, lever)


def test_packages_and_numbers_are_looked_at_and_kept(cache):
    found = nb.checkup(parts=["numbers", "packages"])
    assert found.ok
    named = {each.what: each for each in found.rows}
    assert named["torch"].text.startswith(torch.__version__)
    assert named["products in float32"].figures["flops"] > 1e8
    assert named["random numbers"].result == "works", "as on every machine"
    assert named["batch of captcha"].result == "not here"
    assert [each.part for each in found.rows] == sorted((each.part for each in found.rows), key=[*PARTS].index)
    assert Checkup.from_dict(json.loads((cache / "checkup.json").read_text())) == found
    assert "random numbers" in str(found)
    assert "<table" in found._repr_html_()


def test_what_worked_on_this_machine_is_not_tried_again(tmp_path):
    first = nb.checkup(parts=["packages"])
    worked = [each for each in first.rows if each.result == "works"]
    both = nb.checkup(tmp_path / "results.json", parts=["packages", "numbers"])
    assert [each for each in both.rows if each in worked] == worked, "times and all"
    assert Checkup.from_dict(json.loads((tmp_path / "results.json").read_text())) == both == of_here()
    again = nb.checkup(parts=["packages"], again=True)
    assert [each for each in again.rows if each in worked] != worked, "others' seconds"
    assert {each.part for each in again.rows} == {"packages", "numbers"}
    save(home(), dataclasses.replace(again, machine={**again.machine, "nbtools": "nbtools 0.1.0"}))
    assert of_here().rows == ()


def test_what_was_missing_or_failed_is_tried_again(monkeypatch):
    results: list = [MissingExtra("pip install captcha"), RuntimeError("no kernel"), None]

    def act():
        if error := results.pop(0):
            raise error
        return Found(True, "now")

    monkeypatch.setitem(PARTS, "once", (lambda _: iter([Attempt("it", act)]), 1.0))
    assert [nb.checkup(parts=["once"]).rows[0].result for _ in range(4)] == ["missing", "fails", "works", "works"]


def test_an_interrupted_checkup_continues_where_it_was(monkeypatch):
    acts = {"one": lambda: Found(True, "first"), "two": interrupted, "three": lambda: Found(True, "last")}
    monkeypatch.setitem(PARTS, "waits", (lambda _: (Attempt(what, act) for what, act in acts.items()), 1.0))
    with pytest.raises(KeyboardInterrupt):
        nb.checkup(parts=["waits"])
    [kept] = of_here().rows
    acts["two"] = lambda: Found(False, "second")
    found = nb.checkup(parts=["waits"])
    assert found.rows[0] == kept
    assert [each.result for each in found.rows] == ["works", "differs", "works"]


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("raised", "result", "text"),
    [
        (NotHere("needs CUDA"), "not here", "needs CUDA"),
        (MissingExtra("pip install captcha"), "missing", "pip install captcha"),
        (RuntimeError("no kernel\nfor this"), "fails", "RuntimeError: no kernel"),
        (AssertionError(), "fails", "AssertionError"),
    ],
)
def test_whatever_a_trial_raises_is_its_result(raised, result, text):
    def act():
        raise raised

    found = tried("training", Attempt("bf16", act, "captcha", {"amp": "bf16"}))
    assert (found.result, found.text, found.lever) == (result, text, {"amp": "bf16"})


def test_a_batch_that_does_not_fit_is_halved_here(tmp_path):
    [attempt] = [each for each in remembering(Bench(tmp_path, CPU)) if each.what == "a batch that does not fit"]
    found = tried("memory", attempt)
    assert found.result == "works", found.text
    assert "micro batch 32 → 16" in found.text


def test_an_unknown_part_is_refused():
    with pytest.raises(NbtoolsError, match=r"parts must be some of packages, numbers, .* got 'gpu'"):
        nb.checkup(parts=["gpu"])


def test_what_fails_is_ruled_out_for_its_task_and_for_ones_own_where_it_fails_everywhere():
    found = of_here()
    rows = row(amp="bf16"), row("sign, bf16", "works", "nbtools.tasks.sign", amp="bf16"), row("compile", compile=True)
    save(home(), dataclasses.replace(found, rows=rows))
    assert {*ruled_out("nbtools.tasks.captcha")} == {("amp", "bf16"), ("compile", True), ("graph", True)}
    assert {*ruled_out("nbtools.tasks.sign")} == {("graph", True)}
    assert {*ruled_out("mine:Task")} == {("compile", True), ("graph", True)}
    assert "fails here: RuntimeError: no kernel" in ruled_out("mine:Task")["compile", True]


def test_advice_leaves_out_what_fails_here_and_says_why(tmp_path, monkeypatch):
    pack = captcha.pack(captcha.demo(tmp_path / "raw", 60), into=tmp_path / "pack", progress=False)
    monkeypatch.setattr("nbtools.measure.advisor.inspect", lambda: Machine("cuda", "A100", 40, 1, 8, (8, 0)))
    assert nb.advise(captcha, pack, measure=False).plan.amp == "bf16"
    save(home(), dataclasses.replace(of_here(), rows=(row(amp="bf16"),)))
    advice = nb.advise(captcha, pack, measure=False)
    assert advice.plan.amp == "off"
    assert "nb.checkup found that it fails here: RuntimeError: no kernel" in advice.reasons["amp"]
    levers = Levers(captcha, pack, advice.plan.replace(batch_size=8, network="small"), CPU)
    assert not levers.pull("amp", 1.0), "nor is it tried"
    [(tried, _, _)] = levers.tried
    assert tried.rounds == 0
    assert "no kernel" in outcome(tried, "off")


def test_what_ended_the_process_fails_and_is_not_tried_again(monkeypatch):
    monkeypatch.setitem(
        PARTS, "ends", (lambda _: iter([Attempt("it", partial(os._exit, 3), "mine", {"graph": True})]), 1.0)
    )
    if not (child := os.fork()):
        nb.checkup(parts=["ends"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    [row] = nb.checkup(parts=["ends"]).rows
    assert (row.result, row.text) == (
        "fails",
        "the process ended while it was tried; nb.checkup(again=True) tries it anew",
    )


def test_cuda_graphs_are_tried_only_where_the_checkup_found_that_they_work():
    assert ("graph", True) in ruled_out("nbtools.tasks.captcha")
    graphs = row("captcha, graph", "works", graph=True), row("sign, graph", "fails", "nbtools.tasks.sign", graph=True)
    save(home(), dataclasses.replace(of_here(), rows=graphs))
    assert ruled_out("nbtools.tasks.captcha") == ruled_out("mine:Task") == {}
    assert "no kernel" in ruled_out("nbtools.tasks.sign")["graph", True]


@pytest.mark.full
def test_all_of_it_works_here():
    found = nb.checkup()
    assert found.ok, [(each.part, each.what, each.text) for each in found.bad]
    assert {each.part for each in found.rows} == {*PARTS}
    assert {"captcha, compile", "hwdb, a worker process"} <= {each.what for each in found.rows}
