"""The terminal does what the notebook does, with every setting as an option: help, JSON, exit codes, readable logs, and
mistakes that are answered in a sentence."""

import dataclasses
import inspect
import io
import json
import os
import shutil
import signal
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

import nbtools as nb
from nbtools.__main__ import COMMANDS, main
from nbtools.train import knob

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
    assert shown.startswith(f"usage: python -m nbtools {command.__name__} [-h]")
    assert " ".join((command.__doc__ or "").split()) in " ".join(shown.split())


def test_the_version_is_one_line_and_the_command_nbtools_is_this_module(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"nbtools {nb.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"nbtools": f"{main.__module__}:{main.__name__}"}


def test_a_report_with_errors_is_exit_code_one(tmp_path, capsys):
    assert main(["demo", "sign", str(tmp_path / "clips"), "--count", "4"]) == 0
    next((tmp_path / "clips").rglob("*.npz")).write_bytes(b"cut off")
    assert main(["validate", "sign", str(tmp_path / "clips")]) == 1
    assert ".npz" in capsys.readouterr().out


def test_a_run_stopped_by_ctrl_c_is_saved_ends_with_130_and_resumes_to_0(train, tmp_path, monkeypatch):
    steps, trained = iter(range(1000)), toy.loss

    def loss(model, batch, plan):
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return trained(model, batch, plan)

    monkeypatch.setattr(toy, "loss", loss)
    assert train() == 130
    assert nb.Run.open(tmp_path / "runs" / "toy", toy).state == "stopped"
    assert train() == 0


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
    assert main(["runs", str(runs)]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {"toy", "other"}
    assert main(["compare", str(runs / "toy"), other]) == 0
    assert nb.compare(runs / "toy", other).conclusion in capsys.readouterr().out
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


def planned(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / "toy" / "plan.json").read_text())


def test_demo_pack_advise_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "runs" / "toy"
    assert main(["demo", "toy", str(raw), "--count", "150"]) == 0
    assert main(["pack", "toy", str(raw)]) == 0
    assert "  4: a, b, c, d" in capsys.readouterr().out
    assert main(["advise", "toy", "--data", str(raw), "--no-measure"]) == 0
    assert "rule of thumb" in capsys.readouterr().out
    train = ["train", "toy", "--data", str(raw), "--run", str(run), "--no-receipt", "--batch-size", "8"]
    assert main([*train, "--epochs", "2", "--hidden", "24", "--no-compile", "--betas", "0.8,0.99"]) == 0
    plan = planned(tmp_path)
    assert (plan["epochs"], plan["hidden"], plan["batch_size"], plan["betas"]) == (2, 24, 8, [0.8, 0.99])
    assert main([*train, "--epochs", "3"]) == 0  # resumes, with the settings it had
    assert planned(tmp_path)["hidden"] == 24
    assert "3 of 3 epochs" in capsys.readouterr().out
    assert main(["evaluate", "toy", "--data", str(raw), "--run", str(run), "--split", "val"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {"loss", "accuracy"}
    files = sorted(map(str, raw.glob("*.npy")))[:2]
    assert main(["predict", str(run), *files]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == files


def test_every_setting_of_the_plan_is_an_option_and_percent_signs_are_text(monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Plan(toy.Plan):
        half: bool = knob(False, "drop 50 % of it")

    monkeypatch.setattr(toy, "PLAN", Plan())
    monkeypatch.setattr(toy, "pack", lambda source, *, pattern="%H": None)
    with pytest.raises(SystemExit):
        main(["train", "toy", "--help"])
    text = capsys.readouterr().out
    assert [f.name for f in dataclasses.fields(Plan) if "--" + f.name.replace("_", "-") not in text] == []
    assert "drop 50 % of it" in text
    assert "default %H" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "x"], "--batch-size must be int, got 'x'"),
        (
            ["--from", "basline"],
            "--from must be one of advised, measured, plan, baseline, got 'basline'; did you mean base",
        ),
        (["--amp", "fp8"], "Plan.amp must be one of off, bf16, fp16, got 'fp8'"),
        (["--batch-size", "5000"], "larger than the train split"),
        (["--processes", "0"], "processes (--processes) must be at least 1, got 0"),
    ],
)
def test_a_bad_option_is_one_sentence_and_starts_nothing(train, tmp_path, capsys, words, sentence):
    assert train(*words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("nbtools: ")
    assert sentence in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "code", "sentence"),
    [
        (
            "train sign --batch-siz 4",
            2,
            "unrecognized arguments: --batch-siz 4; did you mean --batch-size? See python -m",
        ),
        ("trian sign", 2, "; did you mean train? See python -m nbtools --help"),
        ("gpus now", 2, "unrecognized arguments: now. See python -m nbtools"),
        ("evaluate toy --run r", 2, "the following arguments are required: --data"),
        ("pack nosuchtask x", 1, "no task 'nosuchtask': use captcha"),
        ("pack captch x", 1, "did you mean captcha?"),
        ("pack toy no/such/folder", 1, "no/such/folder"),
        ("train toy", 1, "name the data: --data SOURCE"),
        ("validate toy anything", 1, "has no validate; define it"),
    ],
)
def test_what_is_asked_for_wrongly_is_answered_in_a_sentence_with_the_nearest_word(typed, code, sentence, capsys):
    try:
        ended = main(typed.split())
    except SystemExit as end:  # argparse
        ended = end.code
    out, err = capsys.readouterr()
    assert (ended, out, sentence in err) == (code, "", True)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (str, "a,b", "a,b"),
        (int, "-3", -3),
        (float, "1e-3", 0.001),
        (str | None, "None", None),
        (str | int, "0123", "0123"),
        (int | tuple[int, int] | None, "4, 8", (4, 8)),
        (tuple[float, ...], "1,0.5", (1, 0.5)),
        (int | str | Iterable[int | str] | None, "7,sky", (7, "sky")),
        (Sequence[str] | None, "012", "012"),
    ],
)
def test_an_option_is_read_by_its_annotation_and_a_boolean_one_is_a_bare_flag(kind, text, value, monkeypatch, capsys):
    def demo(folder, *, one_more=1, twice=False, thrice=True):
        return repr((one_more, twice, thrice))

    demo.__annotations__["one_more"] = kind
    monkeypatch.setattr(toy, "demo", demo)
    assert main(["demo", "toy", "x", "--one-more", text, "--twice", "--no-thrice"]) == 0
    assert capsys.readouterr().out == f"{(value, True, False)!r}\n"
    assert main(["demo", "toy", "x"]) == 0
    assert capsys.readouterr().out == "(1, False, True)\n"


def test_the_smoke_test_needs_no_data_and_takes_settings(capsys):
    assert main(["train", "toy", "--smoke-test", "--hidden", "24"]) == 0
    assert "364 parameters" in capsys.readouterr().out  # 8·24 + 24 + 2·24 + 24·4 + 4
    assert main(["train", "toy", "--smoke-test", "--hidden", "0"]) == 1
    assert "hidden must be at least 1" in capsys.readouterr().err
