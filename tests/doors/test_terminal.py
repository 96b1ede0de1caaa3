"""The terminal does what the notebook does: options for settings, help, JSON, exit codes, mistakes answered. A run
in lines of text, also in a saved notebook; and how tables and values are written."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import toy
from acting import QUIET, acting, asking

import nbtools as nb
from nbtools import show
from nbtools.__main__ import COMMANDS, HOOKS, main
from nbtools.data import progress
from nbtools.tasks import sign

pytestmark = pytest.mark.usefixtures("one_cache")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.demo(tmp_path_factory.mktemp("terminal") / "raw", count=120)


@pytest.fixture
def train(data, tmp_path):
    words = ["train", "toy", "--data", str(data), "--run", str(tmp_path / "runs" / "toy"), "--no-receipt"]
    return lambda *more: main([*words, "--epochs", "1", *more])


@pytest.mark.parametrize("command", [*COMMANDS, *HOOKS])
def test_the_help_of_a_command_shows_what_it_takes_with_every_setting_of_the_plan(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "sign", "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m nbtools {command} [-h]")
    options = ["--" + name.replace("_", "-") for name in sign.PLAN.to_dict()] if command == "train" else []
    assert [option for option in options if option not in text] == []


def test_the_command_nbtools_is_this_module_and_says_its_version_and_the_machine_as_it_is(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"nbtools {nb.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == nb.__version__
    assert project["scripts"] == {"nbtools": f"{main.__module__}:{main.__name__}"}
    assert main(["gpus"]) == 0
    shown = capsys.readouterr().out
    for part in (torch.__version__, nb.__version__, "RAM", "GB free", "cuDNN", "TF32", "bf16", "GFLOP/s", "AMP"):
        assert part in shown


def test_a_run_stopped_by_ctrl_c_is_saved_ends_with_130_and_resumes_to_0(train, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "batch", acting({3: lambda: os.kill(os.getpid(), signal.SIGINT)}).batch)
    assert train() == 130
    assert nb.Run.open(tmp_path / "runs" / "toy", toy).state == "stopped"
    assert train() == 0


def test_runs_are_listed_and_compared_and_a_folder_is_predicted_into_a_csv_file(train, data, tmp_path, capsys):
    runs, other = tmp_path / "runs", str(tmp_path / "runs" / "other")
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no runs, here or below\n"
    assert train() == 0
    shutil.copytree(runs / "toy", other)
    assert main(["watch", str(runs / "tyo")]) == 1
    assert "tyo: no such folder; nb.runs lists a folder's runs" in capsys.readouterr().err
    assert main(["runs", str(runs)]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {"toy", "other"}
    assert main(["compare", str(runs / "toy"), other]) == 0
    assert nb.compare(runs / "toy", other).conclusion in capsys.readouterr().out
    table, answers = tmp_path / "out.csv", nb.Run.open(other, toy).predict(data)
    assert main(["predict", other, str(data), "--csv", str(table)]) == 0
    assert table.read_text().splitlines() == ["name,prediction", *map(",".join, answers.items())]
    assert capsys.readouterr().out == f"{table}\n"


def test_demo_pack_advise_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "runs" / "toy"
    assert main(["demo", "toy", str(raw), "--count", "150"]) == 0
    assert main(["pack", "toy", str(raw)]) == 0
    assert "  4: a, b, c, d" in capsys.readouterr().out
    assert main(["advise", "toy", "--data", str(raw), "--no-measure"]) == 0
    assert "rule of thumb" in capsys.readouterr().out
    train = ["train", "toy", "--data", str(raw), "--run", str(run), "--no-receipt", "--val", "0.4", "--batch-size", "8"]
    assert main([*train, "--epochs", "2", "--hidden", "24", "--no-compile", "--betas", "0.8,0.99"]) == 0
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["epochs"], plan["hidden"], plan["batch_size"], plan["betas"]) == (2, 24, 8, [0.8, 0.99])
    assert main([*train, "--epochs", "3"]) == 0  # resumes, with the settings it had
    assert json.loads((run / "plan.json").read_text())["hidden"] == 24
    assert "3 of 3 epochs" in capsys.readouterr().out
    for more in ([], ["--val", "0.4"]):  # as the run divided it
        assert main(["evaluate", "toy", "--data", str(raw), "--run", str(run), "--split", "val", *more]) == 0
    first, again = map(json.loads, (line for line in capsys.readouterr().out.splitlines() if line[0] == "{"))
    assert (set(first), first) == ({"loss", "accuracy"}, again)
    files = sorted(map(str, raw.glob("*.npy")))[:2]
    assert main(["predict", str(run), *files]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == files


def test_a_table_is_packed_by_a_task_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prices.py").write_text("import nbtools, torch\ntask = nbtools.regress(torch.nn.Linear(2, 1))\n")
    (tmp_path / "t.csv").write_text("a,b,c,price\n" + "1,2,x,0.5\n" * 20)
    typed = ["pack", "prices:task", str(tmp_path / "t.csv"), "--target", "price", "--inputs", "a,b", "--val", "2"]
    assert main([*typed, "--into", str(tmp_path / "pack")]) == 0
    assert "16 train, 2 val, 2 test" in capsys.readouterr().out
    assert nb.Pack.open(tmp_path / "pack").columns["x"].shape == (2,), "the columns that --inputs names"
    typed = ["train", "prices:task", "--data", *typed[2:], "--run", str(tmp_path / "run"), "--epochs", "1"]
    assert main([*typed, "--batch-size", "8", "--no-receipt", "--seed", "3", "--split-seed", "4"]) == 0
    run = nb.Run.open(tmp_path / "run")
    assert (run.plan.seed, run.card.shares) == (3, [2, 0.1, 4])
    assert nb.evaluate(run.folder, nb.Pack.open(tmp_path / "pack"))["mae"] > 0
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "t.csv")]) == 0
    assert "t.csv/row 19\t" in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_ends_a_command_without_an_error(train, tmp_path):
    train()
    command = f"{sys.executable} -u -m nbtools runs {tmp_path / 'runs'}"
    ran = subprocess.run(f"{command} | true; exit ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash", stderr=-1)
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("train toy --data {} --batch-size x", 1, "Plan.batch_size must be a whole number, got 'x'"),
        ("train sign --batch-siz 4", 2, "unrecognized arguments: --batch-siz 4; did you mean --batch-size?"),
        ("train sign --output-dir x", 2, "did you mean --run?"),
        ("trian sign", 2, "; did you mean train? See python -m nbtools --help"),
        ("gpus now", 2, "unrecognized arguments: now. See python -m nbtools"),
        ("evaluate toy --run r", 2, "the following arguments are required: --data"),
        ("pack captch x", 1, "no task 'captch': use captcha"),
        ("train toy", 1, "name the data: --data SOURCE"),
    ],
)
def test_a_mistake_is_a_sentence_with_a_near_word_and_no_run(data, tmp_path, monkeypatch, capsys, typed, code, said):
    monkeypatch.chdir(tmp_path)
    try:
        ended = main(typed.format(data).split())
    except SystemExit as end:  # argparse
        ended = end.code
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert (ended, out, said in last, last.startswith("nbtools: ")) == (code, "", True, True)
    assert not list(tmp_path.glob("runs/*/*"))


def test_the_smoke_test_needs_no_data_and_takes_settings(capsys):
    assert main(["train", "toy", "--smoke-test", "--hidden", "24"]) == 0
    assert "an epoch on demo data was trained, saved and loaded: {'loss': " in capsys.readouterr().out
    assert main(["train", "toy", "--smoke-test", "--hidden", "0"]) == 1
    assert "hidden must be at least 1" in capsys.readouterr().err


LOGGED = {"train": "train_loss", "val": "val_loss", "acc": "val_accuracy"}
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
    losses = "  ".join(f"{name} {show.number(last[key])}" for name, key in LOGGED.items())
    assert len(epochs) == 3
    assert re.match(rf"epoch 3 of 3  {re.escape(losses)}  lr \S+  \S+ samples/s$", epochs[-1])


def test_a_bar_names_each_part_of_the_receipt_and_grows_beyond_its_estimate(pack, tmp_path, monkeypatch):
    with progress.work("measuring"):
        progress.phase("turns", seconds=-1.0)
        assert progress.ongoing[0][0].total > progress.ongoing[0][0].n
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


def test_no_cell_header_or_caption_becomes_markup_or_steers_the_terminal():
    page = show.html(["<b>"], [["<img src=x onerror=alert(1)>"], ['"&'], [", 9 s" * 40]], caption="</table><script>")
    assert not [tag for tag in ("<img", "<b>", "<script", "</table><") if tag in page]
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert ", 9\xa0s" * 40 in page, "pandas would cut a long text; a unit stays with its number"
    assert "\x1b" not in show.text(["file"], [["\x1b[2Jgone\n"]])


def test_terminal_columns_line_up_with_wide_characters_and_what_holds_nothing_is_left_out():
    rows = [("漢字", "1.5 GB", None, 7), ("0001.png", "12 GB", "", 12.5), ("x", "9 GB", None, None)]
    said = "name      size    n|漢字      1.5 GB  7|0001.png  12 GB   12.5|x         9 GB    –"
    assert show.text(["name", "size", "note", "n"], rows).replace("\n", "|") == said
    assert show.text(["a"], []) == ""


SHOWN = {0.002 * 2**0.5: "0.00283", 3e-4: "0.0003", 123456.789: "123457", 1e-6: "1e-6", None: "none", True: "yes"}
MEASURED = {480.8672: "481", 0.00494975: "0.00495", 0.99954: "0.9995", 9.996: "10.0", 2e-7: "2.00e-7", math.inf: "inf"}


def test_values_read_as_they_were_typed_and_measured_ones_have_three_digits_but_no_share_below_one_shows_as_one():
    assert {value: show.shown(value) for value in SHOWN} == SHOWN
    assert {value: show.number(value) for value in MEASURED} == MEASURED
