"""A run in lines of text: a block at its start, a line after each epoch; in a terminal and in a saved notebook."""

import base64
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import toy
from acting import acting, interrupted

import nbtools as nb
from nbtools.data import batches_left
from nbtools.live import Columns, View
from nbtools.live.facts import About
from nbtools.live.log import line_of
from nbtools.table import number
from nbtools.train import History, Plan, Record, Steps
from nbtools.train.plan import lr_at

SHOWN = {"train": "train_loss", "val": "val_loss", "acc": "val_accuracy"}
PLAN = toy.PLAN.replace(epochs=3, warmup_epochs=1.0, min_lr=1e-6, weight_decay=0.01)

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def test_a_terminal_is_told_what_a_run_starts_with_and_every_epoch(pack, tmp_path, capsys):
    run = nb.fit(toy, pack, PLAN.replace(micro_batch_size=6), tmp_path / "run", receipt=False)
    text = capsys.readouterr()
    assert text.out == "", "which is for results"
    said = [line for line in text.err.splitlines() if line.strip() and "%|" not in line]  # without the bar
    opened = {line[:11].strip(): line[11:] for line in said[:6]}
    count, last = pack.splits["train"], run.history.of("epoch")[-1]
    each = last["step"] // 3
    assert re.search(r", \d+ cores?, [\d.]+ GB RAM$", opened["device"])
    assert opened["batch"] == "16 per step, accumulated over 3 forward passes of at most 6"
    assert opened["lr"] == "0.01, warmup over 1 epoch, cosine to 1e-6"
    assert opened["optimizer"] == "adamw, weight decay 0.01, gradient norm at most 1, float32"
    assert opened["feed"].startswith("resident: ")
    assert opened["length"] == (
        f"{count} samples · {each} steps per epoch · {3 * each} steps in 3 epochs · {each} steps of warmup"
    )
    epochs = [line for line in said if line.startswith("epoch ")]
    assert ["(warmup)" in line for line in epochs] == [True, False, False]
    losses = "  ".join(f"{name} {number(last[key])}" for name, key in SHOWN.items())
    assert re.match(rf"epoch 3 of 3  {re.escape(losses)}  lr \S+  \S+ samples/s  \S+ [MG]B$", epochs[-1]), "none left"
    assert all(line.endswith(" s left") for line in epochs[:2])


def test_an_epochs_line_fits_a_notebooks_cell_without_the_memory_and_the_speed_of_a_run_with_more_metrics():
    found, scores = History(), {"val_char_accuracy": 0.98712, "val_whole_accuracy": 0.94812}
    speed, values = {"samples_per_s": 65.1234, "memory": 609.4}, {"train_loss": 0.0174, "val_loss": 0.038}
    found.append(Record("step", 9, 149, 149 * 64, {"loss": 0.02, "batch_size": 64, **speed}))
    found.append(Record("epoch", 9, 150, 9250, {**values, **scores, "lr": 0.000944, "batch_size": 64, **speed}))
    about = About(epochs=60, epoch_samples=925)
    line = line_of(Record("epoch", 9, 150, 9250, found.rows[-1]), Columns(found), about)
    assert line.startswith("epoch 10 of 60  train 0.0174  val 0.0380  char_acc 0.987  whole_acc 0.948  lr 0.000944")
    assert line.endswith(" s left")
    assert len(line) <= 104


def test_a_resumed_run_says_where_and_a_finished_or_quiet_one_nothing(pack, tmp_path, capsys):
    ctrl_c = acting({12: lambda: os.kill(os.getpid(), signal.SIGINT)})
    interrupted(lambda: nb.fit(ctrl_c, pack, PLAN, tmp_path / "run", receipt=False))
    assert "resumed" not in capsys.readouterr().err
    nb.fit(toy, pack, PLAN, tmp_path / "run", receipt=False)
    assert "resumed    from step 12, in epoch 2 of 3\n" in capsys.readouterr().err
    nb.fit(toy, pack, PLAN, tmp_path / "run", receipt=False)
    assert not re.search("(?m)^(device|resumed|epoch)", capsys.readouterr().err)
    nb.fit(toy, pack, PLAN, tmp_path / "quiet", receipt=False, progress=False)
    assert capsys.readouterr() == ("", "")


def epoch_row(epoch: int, step: int, samples: int, **values: Any) -> Record:
    row = {"train_loss": 0.5, "lr": 1e-3, "batch_size": 64, "samples_per_s": 640.0, "data_wait": 0.0}
    return Record("epoch", epoch, step, samples, {**row, "epoch_time": 5.0, **values})


def told(view: View, *records: Record) -> None:
    for record in records:
        view.history.append(record)
        view.advance(record)


def test_on_a_gpu_the_line_has_the_peak_of_the_allocators_memory(tmp_path, capsys):
    view = View(tmp_path / "run", nb.History(), Plan(epochs=2), 3200, "-loss", None, show=True)
    told(view, epoch_row(0, 50, 3200, gpu_memory_allocated=1200.0, gpu_memory_reserved=9000.0, gpu_memory_peak=7373.0))
    assert "samples/s  7.7 GB" in capsys.readouterr().err
    view.bar.close()


def test_a_saved_notebook_keeps_the_opening_and_the_newest_hundred_epochs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nbtools.live.view.in_notebook", lambda: True)
    monkeypatch.setattr("nbtools.live.png.draw", lambda *_: PIXEL)
    view = View(tmp_path / "<run>", nb.History(), Plan(epochs=130), 64, "-loss", Plan(), show=True)
    output: Any = view.output
    view.log(["device     <a & b>"], opening=True)
    view.start()
    told(view, *(epoch_row(k, k + 1, 64 * (k + 1)) for k in range(120)))
    view.due = 0.0
    view.draw()
    assert "device     &lt;a &amp; b&gt;\n… 115 lines before these" in output.log.value
    assert re.findall(r"epoch (\d+) of", output.log.value) == [str(k) for k in range(116, 121)]
    capsys.readouterr()
    view.finish([], "done")
    said = capsys.readouterr().out.splitlines()
    said = said[said.index("device     <a & b>") :]
    assert said[:2] == ["device     <a & b>", "… 20 lines before these; run.summary() has every epoch"]
    assert [line.split()[1] for line in said[2:]] == [str(k) for k in range(21, 121)]


@pytest.mark.parametrize("ragged", [False, True])
def test_steps_are_those_that_training_takes(tmp_path: Path, ragged):
    pack = toy.make_pack(tmp_path, 70, ragged)
    ids = pack.ids("train")
    lengths = pack.lengths("x", ids) if ragged else None
    for size in range(1, len(ids) + 1):
        for count in (len(ids), len(ids) - 1, 1, size):
            batches = batches_left(ids[:count], None if lengths is None else lengths[:count], 0, 0, [(size, 0)])
            assert Steps.of(Plan(batch_size=size), count).per_epoch == len(batches)


@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0, 2.5])
def test_the_steps_of_warmup_are_those_whose_lr_rises(warmup):
    plan, samples = Plan(epochs=4, batch_size=10, warmup_epochs=warmup), 200
    middles = [(step + 0.5) * 10 / samples for step in range(4 * 20)]
    rising = [middle for middle in middles if lr_at(plan, middle) < lr_at(plan, warmup) and middle < warmup]
    assert Steps.of(plan, samples).warmup == len(rising)
