"""The terminal as scripts and people meet it: examples that are true, JSON that is one document, exit codes, colours on
a terminal only, tables that fit it, and bars that leave a log readable."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import toy

import nbtools as nb
from nbtools.__main__ import COMMANDS, TASK_COMMANDS, main, parser
from nbtools.measure import check

ROOT = Path(__file__).parent.parent
OPTIONS = (ROOT / "docs" / "options.md").read_text()


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


def examples(text: str) -> list[list[str]]:
    """What follows `python -m nbtools` in indented lines."""
    return [shlex.split(words, comments=True) for words in re.findall(r"^ +python -m nbtools (.+)$", text, re.M)]


# -- help


@pytest.mark.parametrize("command", [*COMMANDS, *TASK_COMMANDS])
def test_the_help_of_a_command_ends_with_one_or_two_examples_that_parse(command):
    texts = [help_of(command), *([help_of(command, "sign")] if command in TASK_COMMANDS else [])]
    for text in texts:
        found = examples(text.partition("\nexamples:\n")[2])
        assert 1 <= len(found) <= 2
        for words in found:
            assert words[0] == command
            assert parser(words).parse_args(words).act


def test_the_commands_of_the_documentation_parse():
    found = examples(OPTIONS)
    assert {words[0] for words in found} >= {"gpus", "pack", "advise", "train", "evaluate", "predict"}
    for words in found:
        assert parser(words).parse_args(words).act


def test_examples_that_cost_little_run_one_after_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = [words for command in ("demo", "pack", "advise") for words in examples(help_of(command))]
    some = [words for words in found if re.search(r"demo captcha|pack captcha|no-measure", " ".join(words))]
    assert len(some) == 3
    for words in some:
        few = ["--count", "60"] if words[0] == "demo" else []
        assert main([*words, *few]) == 0, words
        assert capsys.readouterr().out


# -- JSON


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
    assert document(capsys, "demo", "toy", str(tmp_path / "raw"), "--count", "20") == {"folder": str(tmp_path / "raw")}
    assert document(capsys, "stage", str(data)) == {"folder": str(data)}
    packed = document(capsys, "pack", "toy", str(data), "--into", str(tmp_path / "pack"))
    assert (packed["folder"], sum(packed["splits"].values()), packed["bad"]) == (str(tmp_path / "pack"), 120, [])
    advice = document(capsys, "advise", "toy", "--data", str(data), "--no-measure")
    assert set(advice["reasons"]) <= advice["plan"].keys()
    assert train("--json") == 0
    made = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["epoch"] for row in made["epochs"]] == [1]
    assert (made["run"], made["plan"]["epochs"], made["receipt"], made["stopped"]) == (run, 1, None, False)
    assert document(capsys, "watch", run) == made
    metrics = document(capsys, "evaluate", "toy", "--data", str(data), "--run", run)
    assert set(metrics) == {"loss", "accuracy"}
    [found] = document(capsys, "predict", "toy", "--run", run, file)
    assert found == {"file": file, "prediction": nb.Run.open(run, toy).predict(file)[0]}


def test_a_report_is_a_document_too_and_errors_are_its_exit_code(tmp_path, capsys):
    assert main(["demo", "sign", str(tmp_path / "clips"), "--count", "4"]) == 0
    capsys.readouterr()
    next((tmp_path / "clips").rglob("*.npz")).write_bytes(b"cut off")
    report = document(capsys, "validate", "sign", str(tmp_path / "clips"), code=1)
    assert (report["ok"], report["errors"]) == (False, len(report["rows"]))
    assert {"file", "rule", "fix"} <= report["rows"][0].keys()


# -- exit codes


def test_the_exit_codes_are_in_the_help_and_an_unknown_command_line_is_two(capsys):
    assert set(re.findall(r"^  (\d+) ", help_of().partition("exit codes:")[2], re.M)) == {
        "0",
        "1",
        "2",
        "130",
        "141",
        "143",
    }
    for words in (["nosuch"], [], ["gpus", "--nosuch"], ["gpus", "--watch", "--json"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("train sign --batch-siz 4", "no option --batch-siz; did you mean --batch-size?"),
        ("train sign --batch 4", "no option --batch; did you mean --batch-size?"),
        ("train sign --lr", "argument --lr: expected one argument"),
        ("pack captcha x --nosuch 1", "no option --nosuch"),
    ],
)
def test_an_option_that_there_is_not_is_answered_with_the_nearest_in_one_line(typed, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        main(typed.split())
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"nbtools: {sentence}")


def test_an_error_leaves_stdout_empty_and_its_code_is_one(tmp_path, capsys):
    assert main(["pack", "toy", str(tmp_path / "nothing"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith("nbtools: ")) == ("", True)


def test_a_run_stopped_by_ctrl_c_is_saved_ends_with_130_and_resumes_to_0(train, tmp_path, capsys, monkeypatch):
    steps = iter(range(1000))

    def loss(model, batch, plan):
        if next(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return trained(model, batch, plan)

    trained = toy.loss
    monkeypatch.setattr(toy, "loss", loss)
    assert train("--json") == 130
    assert json.loads(capsys.readouterr().out)["stopped"] is True
    assert "stopped by you after step" in "".join(
        map(str, nb.Run.open(tmp_path / "runs" / "toy", toy).history.of("event"))
    )
    assert train() == 0


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_process_that_is_asked_to_end_saves_and_has_its_code(data, tmp_path, number, code):
    """Python's -15 is a shell's 143."""
    run = tmp_path / "run"
    words = ["train", "toy", "--data", str(data), "--run", str(run), "--epochs", "100000", "--no-receipt"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))}
    process = subprocess.Popen([sys.executable, "-m", "nbtools", *words], env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(b"epoch 2 "):
            break
    process.send_signal(number)
    process.stderr.read()
    assert process.wait(60) == code
    assert nb.Run.open(run, toy).history.of("event")[-1]["asked"] == "stop"


def test_a_reader_that_has_gone_is_no_traceback(data, monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["stage", str(data)]) == 141
    assert capfd.readouterr().err == ""


# -- tables on a terminal


def test_training_prints_a_line_an_epoch_with_every_column(train, capsys):
    assert train("--from", "plan", "--epochs", "2") == 0
    lines = capsys.readouterr().out.split("\n")
    assert {"train_loss", "val_loss", "val_accuracy", "lr", "data_wait", "memory"} <= {*lines[0].split()}
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]


# -- gpus


def test_gpus_checks_the_machine_as_it_is():
    checked = check()
    shown = str(checked)
    for part in (torch.__version__, nb.__version__, "RAM", "GB free", "cuDNN", "TF32", "bf16", "GFLOP/s", "AMP"):
        assert part in shown


def test_gpus_watch_reads_again_and_again_until_ctrl_c(capsys, monkeypatch):
    for name in ("PERIOD", "FIRST"):
        monkeypatch.setattr(sys.modules[nb.Gpu.__module__], name, 0.02)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert main(["gpus", "--watch"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("No NVIDIA GPU (nvidia-ml-py is not installed).") >= 2
    assert len(re.findall(r"CPU: \d+ % of \d+ cores?; RAM: [\d.]+(?: MB)? of [\d.]+ GB in use", shown)) >= 2


# -- names and counts


def test_a_misspelt_run_is_answered_with_those_that_there_are(train, tmp_path, capsys):
    assert train() == 0
    capsys.readouterr()
    runs = tmp_path / "runs"
    for words in (["evaluate", "toy", "--data", "x", "--run"], ["predict", "toy", "x.npy", "--run"], ["watch"]):
        assert main([*words, str(runs / "tyo")]) == 1
        assert f"there is no such folder; did you mean {runs / 'toy'}?" in capsys.readouterr().err
    assert main(["watch", str(runs)]) == 1
    assert "the runs in it are toy" in capsys.readouterr().err
    assert main(["control", str(runs / "quite-different"), "stop"]) == 1
    assert f"the runs in {runs} are toy" in capsys.readouterr().err


def test_evaluate_and_predict_say_on_stderr_how_many_samples_were_counted(data, train, tmp_path, capsys):
    assert train() == 0
    run, files = str(tmp_path / "runs" / "toy"), sorted(map(str, data.glob("*.npy")))[:3]
    capsys.readouterr()
    assert main(["evaluate", "toy", "--data", str(data), "--run", run, "--split", "val"]) == 0
    out, err = capsys.readouterr()
    assert f"{toy.pack(data).splits['val']} samples of the val split counted" in err
    assert len(out.splitlines()) == 1
    assert main(["predict", "toy", "--run", run, *files]) == 0
    assert "3 files predicted by Run" in capsys.readouterr().err


# -- bars in a log


def test_a_training_in_a_log_has_a_line_an_epoch_and_few_of_its_bar(train, capsys):
    assert train("--epochs", "5") == 0
    err = capsys.readouterr().err
    assert "\r" not in err
    lines = [line for line in err.splitlines() if "%|" in line]
    assert 1 <= len(lines) <= 10
    assert len(re.findall("^epoch ", err, re.M)) == 5
