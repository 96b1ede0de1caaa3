"""A run in lines of text: a block at its start, a line after each epoch; in a terminal and in a saved notebook."""

import re

import pytest
import toy
from acting import QUIET, acting, asking

import nbtools as nb
from nbtools.data import progress
from nbtools.show import number

SHOWN = {"train": "train_loss", "val": "val_loss", "acc": "val_accuracy"}
PLAN = toy.PLAN.replace(epochs=3, warmup_epochs=1.0, min_lr=1e-6, weight_decay=0.01)


def test_a_terminal_is_told_what_a_run_starts_with_and_every_epoch(pack, tmp_path, capsys):
    run = nb.fit(toy, pack, PLAN, tmp_path / "run", receipt=False)
    text = capsys.readouterr()
    assert text.out == "", "which is for results"
    said = [line for line in text.err.splitlines() if line.strip() and "%|" not in line]  # without the bar
    count, last = pack.splits["train"], run.history.of("epoch")[-1]
    each = last["step"] // 3
    start = f"{count} samples · {each} steps per epoch · {3 * each} steps in 3 epochs · {each} steps of warmup"
    settings = ": batch 16, lr 0.01 (cosine), adamw, float32, resident feed"
    for part in (start, settings, f"nb.watch({str(run.folder)!r})"):
        assert part in said[0]
    epochs = [line for line in said if line.startswith("epoch ")]
    losses = "  ".join(f"{name} {number(last[key])}" for name, key in SHOWN.items())
    assert len(epochs) == 3
    assert re.match(rf"epoch 3 of 3  {re.escape(losses)}  lr \S+  \S+ samples/s$", epochs[-1])


def test_an_estimate_of_the_time_left_that_is_exceeded_grows():
    with progress.work("measuring"):
        progress.phase("turns", seconds=-1.0)
        assert progress.ongoing[0][0].total > progress.ongoing[0][0].n


def test_each_part_of_the_receipt_is_named_as_it_begins(pack, tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(progress.tqdm, "set_postfix_str", lambda bar, name, refresh: names.append(name))
    run = nb.fit(toy, pack, PLAN.replace(amp="bf16"), tmp_path / "run", progress=False, receipt=True)
    assert run.receipt is not None
    assert {*names} >= {*(rung.name for rung in run.receipt.rungs[1:]), "what limits it"}


@pytest.mark.usefixtures("at_once")
def test_a_resumed_run_says_where_and_a_quiet_one_nothing(pack, tmp_path, capsys):
    nb.fit(acting({12: asking(tmp_path / "run", "stop")}), pack, PLAN, tmp_path / "run", receipt=False)
    capsys.readouterr()
    nb.fit(toy, pack, PLAN, tmp_path / "run", receipt=False)
    assert "; from step 12, in epoch 2 of 3; " in capsys.readouterr().err
    nb.fit(toy, pack, PLAN, tmp_path / "quiet", **QUIET)
    assert capsys.readouterr() == ("", "")
