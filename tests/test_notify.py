"""A web hook is told once how a run ended, and its address stays a secret."""

import math
import time
from contextlib import nullcontext

import hooks
import pytest
import toy
from acting import QUIET, acting, asking

import nbtools as nb
from nbtools import notify
from nbtools.__main__ import main
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train import Diverged

PLAN = toy.PLAN.replace(epochs=2)


@pytest.fixture
def hook(tmp_path, monkeypatch):
    with hooks.listening(tmp_path, monkeypatch) as hook:
        yield hook


def lost(model, batch, plan):
    total, count = toy.loss(model, batch, plan)
    return total * math.nan, count


def test_a_web_hook_gets_one_post_with_state_and_best(pack, tmp_path, hook):
    run = nb.fit(toy, pack, PLAN, tmp_path / "run", notify=hook.address, **QUIET)
    [(path, headers, said)] = hook.posts
    assert path == f"/hooks/{hooks.SECRET}"
    assert headers["Content-Type"] == "application/json"
    assert (said["run"], said["state"]) == ("run", "done")
    best = {name: value for name, value in run.best.items() if name.startswith("val_")}
    assert said["best"] == {"epoch": run.best["epoch"], **best}
    assert said["text"].startswith("run: done, best accuracy ")
    nb.fit(toy, pack, PLAN, tmp_path / "run", notify=hook.address, **QUIET)
    assert len(hook.posts) == 1, "it was finished before"


@pytest.mark.parametrize(
    ("state", "task", "error"),
    [
        ("stopped", {"act": "stop"}, None),
        ("diverged", {"loss": lost}, Diverged),
        ("failed", {"act": ZeroDivisionError}, ZeroDivisionError),
    ],
)
def test_it_is_told_of_every_other_end_too(state, task, error, pack, tmp_path, hook):
    def fail():
        raise ZeroDivisionError

    folder = tmp_path / "run"
    acts = {"stop": {3: asking(folder, "stop")}, ZeroDivisionError: {3: fail}}
    told = acting(acts.get(task.pop("act", None), {}), **task)
    plan = PLAN.replace(epochs=100_000, eval_every=100_000)
    with pytest.raises(error) if error else nullcontext():
        nb.fit(told, pack, plan, folder, notify=hook.address, **QUIET)
    [(_, _, said)] = hook.posts
    assert (said["state"], said["best"], said["text"]) == (state, {}, f"run: {state}")
    assert nb.Run.open(folder, toy).state == state, "one word for it"


@pytest.mark.parametrize(
    "trouble", ["status", "redirect", "the certificate of another", "not an address", "unencodable"]
)
def test_a_hook_that_cannot_be_reached_costs_no_run_and_its_address_is_nowhere(trouble, pack, tmp_path, hook, capfd):
    hook.status = {"status": 404, "redirect": 302}.get(trouble, 200)
    other = {
        "the certificate of another": f"https://localhost:{hook.address.split(':')[2]}",
        "not an address": f"https://127.0.0.1:x/{hooks.SECRET}",
        "unencodable": f"https://127.0.0.1/\n{hooks.SECRET}é",
    }
    run = nb.fit(toy, pack, PLAN, tmp_path / "run", notify=other.get(trouble, hook.address), receipt=False)
    assert len(hook.posts) == (trouble in ("status", "redirect")), "a redirect is not followed"
    [told] = [event for event in run.events if "web hook" in event]
    assert told.startswith("the web hook of notify= was not reached: ")
    everything = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    everything += [text.encode() for text in (*capfd.readouterr(), *run.events)]
    for piece in (hooks.SECRET, "127.0.0.1", "localhost"):
        assert not any(piece.encode() in text for text in everything)


def test_the_address_of_a_hook_that_answers_is_nowhere_either(pack, tmp_path, hook, capfd):
    run = nb.fit(toy, pack, PLAN, tmp_path / "run", notify=hook.address, receipt=False)
    texts = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    texts += [text.encode() for text in (*capfd.readouterr(), *run.events)]
    assert not any(hooks.SECRET.encode() in text for text in texts)


def test_a_hook_that_hangs_holds_the_run_for_its_patience_only(pack, tmp_path, hook, monkeypatch):
    monkeypatch.setattr(notify, "PATIENCE", 0.5)
    hook.seconds = 3.0
    start = time.monotonic()
    run = nb.fit(toy, pack, PLAN, tmp_path / "run", notify=hook.address, **QUIET)
    assert time.monotonic() - start < 2.5
    assert "the web hook of notify= was not reached: " in "".join(run.events)


@pytest.mark.parametrize("address", ["http://secret.example", "secret.example", 5, ""])
def test_only_https_is_accepted_before_anything_starts_and_the_refusal_does_not_repeat_it(pack, tmp_path, address):
    with pytest.raises(TrainError, match=r"begins with https://") as caught:
        nb.fit(toy, pack, PLAN, tmp_path / "run", notify=address, **QUIET)
    assert "secret" not in str(caught.value).replace("it is a secret", "")
    assert not (tmp_path / "run").exists()
    with pytest.raises(NbtoolsError, match=r"begins with https://"):
        nb.launch(toy, pack, PLAN, tmp_path / "run", notify=address, processes=1)


def test_train_in_a_terminal_tells_a_hook(tmp_path, hook):
    source, run = toy.demo(tmp_path / "data", 60), tmp_path / "run"
    asked = ["train", "toy", "--data", str(source), "--run", str(run), "--epochs", "1", "--no-receipt"]
    assert main([*asked, "--notify", hook.address]) == 0
    assert [said["state"] for _, _, said in hook.posts] == ["done"]
    assert main([*asked, "--notify", "http://example.org"]) == 1
