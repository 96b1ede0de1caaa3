"""The terminal as scripts and people meet it: examples that are true, JSON that is one document, exit codes, and logs
that stay readable."""

import inspect
import io
import json
import os
import re
import shutil
import signal
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import toy

import nbtools as nb
from nbtools.__main__ import COMMANDS, main

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.demo(tmp_path_factory.mktemp("terminal") / "raw", count=120)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def train(data, tmp_path):
    """Train the toy for an epoch in tmp_path/runs/toy; the exit code."""
    words = ["train", "toy", "--data", str(data), "--run", str(tmp_path / "runs" / "toy"), "--no-receipt"]
    return lambda *more: main([*words, "--epochs", "1", *more])


def help_of(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    return text.getvalue()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda act: act.__name__)
def test_the_help_of_a_command_shows_what_it_takes(command):
    shown = help_of(command.__name__, *(["sign"] if "task" in inspect.signature(command).parameters else []))
    assert shown.startswith(f"usage: python -m nbtools {command.__name__} [-h] [--json]")
    assert " ".join((command.__doc__ or "").split()) in " ".join(shown.split())


def test_the_version_is_one_line_and_the_command_nbtools_is_this_module(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"nbtools {nb.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"nbtools": f"{main.__module__}:{main.__name__}"}


def document(capsys, *words: str, code: int = 0):
    """What a command prints with --json, in strict JSON."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_with_json_every_result_is_one_document_and_all_else_goes_to_stderr(data, train, tmp_path, capsys, monkeypatch):
    def demo(folder, count=100):
        print("a task of one's own that prints")
        return written(folder, count)

    written = toy.demo
    run, file = str(tmp_path / "runs" / "toy"), str(sorted(data.iterdir())[0])
    monkeypatch.setattr(toy, "demo", demo)
    assert document(capsys, "demo", "toy", str(tmp_path / "raw"), "--count", "20") == {"path": str(tmp_path / "raw")}
    assert document(capsys, "stage", str(data)) == {"path": str(data)}
    packed = document(capsys, "pack", "toy", str(data), "--into", str(tmp_path / "pack"))
    assert (packed["folder"], sum(packed["splits"].values()), packed["bad"]) == (str(tmp_path / "pack"), 120, [])
    advice = document(capsys, "advise", "toy", "--data", str(data), "--no-measure")
    assert set(advice["reasons"]) <= advice["plan"].keys()
    assert train("--json") == 0
    made = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["epoch"] for row in made["epochs"]] == [1]
    assert (made["run"], made["plan"]["epochs"], made["receipt"], made["state"]) == (run, 1, None, "done")
    assert document(capsys, "watch", run) == made
    metrics = document(capsys, "evaluate", "toy", "--data", str(data), "--run", run)
    assert set(metrics) == {"loss", "accuracy"}
    [found] = document(capsys, "predict", run, file)
    assert found == {"file": file, "prediction": nb.Run.open(run, toy).predict(file)[0]}


def test_a_report_is_a_document_too_and_errors_are_its_exit_code(tmp_path, capsys):
    assert main(["demo", "sign", str(tmp_path / "clips"), "--count", "4"]) == 0
    capsys.readouterr()
    next((tmp_path / "clips").rglob("*.npz")).write_bytes(b"cut off")
    report = document(capsys, "validate", "sign", str(tmp_path / "clips"), code=1)
    assert (report["ok"], report["errors"]) == (False, len(report["rows"]))
    assert {"file", "rule", "fix"} <= report["rows"][0].keys()


def test_the_exit_codes_are_in_the_help_and_an_unknown_command_line_is_two(capsys):
    assert re.findall(r"\d+", help_of().partition("exit codes:")[2]) == ["0", "1", "2", "130"]
    for words in (["nosuch"], [], ["gpus", "--nosuch"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "train sign --batch-siz 4",
            "unrecognized arguments: --batch-siz 4; did you mean --batch-size? See python -m nbtools",
        ),
        ("trian sign", "; did you mean train? See python -m nbtools"),
        ("gpus now", "unrecognized arguments: now. See python -m nbtools"),
    ],
)
def test_what_there_is_not_is_answered_with_the_nearest_in_one_line(typed, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(typed.split())
    assert capsys.readouterr().err.endswith(f"{said} --help\n")


def test_a_run_stopped_by_ctrl_c_is_saved_ends_with_130_and_resumes_to_0(train, capsys, monkeypatch):
    steps, trained = iter(range(1000)), toy.loss

    def loss(model, batch, plan):
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return trained(model, batch, plan)

    monkeypatch.setattr(toy, "loss", loss)
    assert train("--json") == 130
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"
    assert train() == 0


def test_a_reader_that_has_gone_is_no_traceback(data, monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["stage", str(data)]) == 141
    assert capfd.readouterr().err == ""


def test_gpus_checks_the_machine_as_it_is(capsys):
    assert main(["gpus"]) == 0
    shown = capsys.readouterr().out
    for part in (torch.__version__, nb.__version__, "RAM", "GB free", "cuDNN", "TF32", "bf16", "GFLOP/s", "AMP"):
        assert part in shown


def test_runs_are_listed_and_compared_and_a_folder_is_predicted_into_a_csv_file(train, data, tmp_path, capsys):
    runs, other = tmp_path / "runs", str(tmp_path / "runs" / "other")
    assert train() == 0
    words = ["--from", "plan", "--epochs", "1", "--no-receipt", "--run", other]
    assert main(["train", "toy", "--data", str(data), *words]) == 0
    assert main(["watch", str(runs / "tyo")]) == 1
    assert "tyo: no such folder; nb.runs lists those of a folder" in capsys.readouterr().err
    assert {row["run"] for row in document(capsys, "runs", str(runs))} == {"toy", "other"}
    assert main(["compare", str(runs / "toy"), other]) == 0
    assert nb.compare(runs / "toy", other).conclusion in capsys.readouterr().out
    assert len(document(capsys, "compare", str(runs))["runs"]) == 2
    folder, table = tmp_path / "new", tmp_path / "out.csv"
    (folder / "more").mkdir(parents=True)
    (folder / ".DS_Store").touch()
    first, second, *_ = sorted(data.iterdir())
    answers = nb.Run.open(other, toy).predict([shutil.copy(first, folder), shutil.copy(second, folder / "more")])
    assert main(["predict", other, str(folder), "--csv", str(table)]) == 0
    rows = [f"{first.name},{answers[0]}", f"more/{second.name},{answers[1]}"]
    assert table.read_text().splitlines() == ["name,prediction", *rows]
    out, err = capsys.readouterr()
    assert (out, "2 files predicted by Run" in err) == (f"{table}\n", True)


def test_a_training_in_a_log_has_a_line_an_epoch_and_few_of_its_bar(train, capsys):
    assert train("--epochs", "5") == 0
    err = capsys.readouterr().err
    assert "\r" not in err
    assert 1 <= len([line for line in err.splitlines() if "%|" in line]) <= 10
    assert len(re.findall("^epoch ", err, re.M)) == 5
