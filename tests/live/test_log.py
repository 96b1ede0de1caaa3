"""A run in lines of text: a block at its start, a line after each epoch; in a terminal and in a saved notebook."""

import os
import re
import signal

import toy
from acting import acting, interrupted

import nbtools as nb
from nbtools.live.facts import fitting
from nbtools.show import number

SHOWN = {"train": "train_loss", "val": "val_loss", "acc": "val_accuracy"}
PLAN = toy.PLAN.replace(epochs=3, warmup_epochs=1.0, min_lr=1e-6, weight_decay=0.01)


def test_a_terminal_is_told_what_a_run_starts_with_and_every_epoch(pack, tmp_path, capsys):
    run = nb.fit(toy, pack, PLAN.replace(micro_batch_size=6), tmp_path / "run", receipt=False)
    text = capsys.readouterr()
    assert text.out == "", "which is for results"
    said = [line for line in text.err.splitlines() if line.strip() and "%|" not in line]  # without the bar
    count, last = pack.splits["train"], run.history.of("epoch")[-1]
    each = last["step"] // 3
    machine, settings, rest = said[0].split("; ")
    assert re.search(r", \d+ CPU cores?, \d+ threads?: ", machine)
    assert machine.endswith(": batch 16 in 3 parts, lr 0.01 (cosine), adamw, float32, resident feed")
    assert (
        settings == f"{count} samples · {each} steps per epoch · {3 * each} steps in 3 epochs · {each} steps of warmup"
    )
    assert rest == f"nb.watch({str(tmp_path / 'run')!r}) shows it elsewhere"
    epochs = [line for line in said if line.startswith("epoch ")]
    losses = "  ".join(f"{name} {number(last[key])}" for name, key in SHOWN.items())
    assert re.match(rf"epoch 3 of 3  {re.escape(losses)}  lr \S+  \S+ samples/s  \S+ [MG]B$", epochs[-1]), "none left"
    assert all(" s left  " in line for line in epochs[:2])


def test_a_line_that_does_not_fit_loses_fields_from_the_right_and_no_number_is_cut():
    fields = ["epoch 1 of 3", "train 1.39", "lr 0.002", "2,826 samples/s"]
    assert [fitting(fields, room) for room in (51, 50, 20)] == ["  ".join(fields), "  ".join(fields[:3]), fields[0]]


def test_a_resumed_run_says_where_and_a_finished_or_quiet_one_nothing(pack, tmp_path, capsys):
    ctrl_c = acting({12: lambda: os.kill(os.getpid(), signal.SIGINT)})
    interrupted(lambda: nb.fit(ctrl_c, pack, PLAN, tmp_path / "run", receipt=False))
    assert "from step" not in capsys.readouterr().err
    nb.fit(toy, pack, PLAN, tmp_path / "run", receipt=False)
    assert "; from step 12, in epoch 2 of 3; " in capsys.readouterr().err
    nb.fit(toy, pack, PLAN, tmp_path / "run", receipt=False)
    assert not re.search("(?m)from step|^epoch", capsys.readouterr().err)
    nb.fit(toy, pack, PLAN, tmp_path / "quiet", receipt=False, progress=False)
    assert capsys.readouterr() == ("", "")
