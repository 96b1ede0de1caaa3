"""The terminal does what the notebook does, with every knob as an option."""

import dataclasses
import json

import pytest
import toy

from nbtools.__main__ import literal, main
from nbtools.train import knob


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.demo(tmp_path_factory.mktemp("cli") / "raw", count=150)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_demo_pack_advise_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "run"
    assert main(["demo", "toy", str(raw), "--count", "150"]) == 0
    assert main(["pack", "toy", str(raw)]) == 0
    assert "classes   4: a b c d" in capsys.readouterr().out
    assert main(["advise", "toy", "--data", str(raw)]) == 0
    assert "rule of thumb" in capsys.readouterr().out
    train = ["train", "toy", "--data", str(raw), "--run", str(run), "--no-receipt", "--batch-size", "8"]
    assert main([*train, "--epochs", "2", "--hidden", "24", "--no-compile", "--betas", "0.8,0.99"]) == 0
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["epochs"], plan["hidden"], plan["batch_size"], plan["betas"]) == (2, 24, 8, [0.8, 0.99])
    assert main([*train, "--epochs", "3"]) == 0  # goes on, with the knobs it had
    assert json.loads((run / "plan.json").read_text())["hidden"] == 24
    out = capsys.readouterr().out
    assert "Run" in out
    assert "3 of 3 epochs" in out
    assert main(["evaluate", "toy", "--data", str(raw), "--run", str(run), "--split", "val"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(values) == {"loss", "accuracy"}
    files = sorted(map(str, raw.glob("*.npy")))[:2]
    assert main(["predict", "toy", "--run", str(run), *files]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == files


def test_every_knob_of_the_plan_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "toy", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(toy.Plan):
        assert "--" + field.name.replace("_", "-") in text


def test_another_batch_size_moves_lr_by_the_rule_and_says_so(data, tmp_path, capsys):
    train = ["train", "toy", "--data", str(data), "--run", str(tmp_path / "run"), "--no-receipt", "--epochs", "1"]
    assert main([*train, "--from", "plan", "--lr-rule", "sqrt", "--batch-size", "64"]) == 0
    assert "lr 0.01 → 0.02 for batch 16 → 64 (sqrt rule)" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["lr"] == 0.02


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "x"], "Plan.batch_size must be a whole number, got 'x'"),
        (["--warmup-epochs", "-1"], "Plan.warmup_epochs must be ≥ 0, got -1.0"),
        (["--amp", "fp8"], "Plan.amp must be one of off, bf16, fp16, got 'fp8'"),
        (["--batch-size", "5000"], "larger than the train split"),
    ],
)
def test_a_bad_knob_is_one_sentence_and_starts_nothing(data, tmp_path, capsys, words, sentence):
    assert main(["train", "toy", "--data", str(data), "--run", str(tmp_path / "run"), *words]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("nbtools: ")
    assert sentence in err
    assert not (tmp_path / "run").exists()


def test_unknown_task_and_missing_data_are_said_by_name(tmp_path, capsys):
    for name in ("nosuchtask", "./toy.py", "../x", ""):
        assert main(["pack", name, str(tmp_path)]) == 1
        assert f"no task {name!r}: use captcha" in capsys.readouterr().err
    assert main(["pack", "toy", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stage", "demo", "pack", "advise", "train", "evaluate", "predict"])
@pytest.mark.parametrize("words", [["--help"], ["toy", "-h"]])
def test_every_command_has_help_with_a_task_and_without(command, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, *(words if command != "stage" else ["--help"])])
    assert caught.value.code == 0
    assert f"nbtools {command}" in capsys.readouterr().out


def test_percent_signs_in_helps_and_defaults_are_text(monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Plan(toy.Plan):
        half: bool = knob(False, "drop 50 % of it")

    def pack(source, *, pattern="%H"):
        return None

    monkeypatch.setattr(toy, "PLAN", Plan())
    monkeypatch.setattr(toy, "pack", pack)
    with pytest.raises(SystemExit):
        main(["train", "toy", "--help"])
    out = capsys.readouterr().out
    assert "drop 50 % of it" in out
    assert "default %H" in out


def test_an_unknown_option_is_refused_and_an_interrupt_is_no_traceback(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["pack", "toy", "x", "--nosuch", "1"])
    assert caught.value.code == 2
    assert "--nosuch" in capsys.readouterr().err

    def demo(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "demo", demo)
    assert main(["demo", "toy", str(tmp_path / "x")]) == 130
    assert capsys.readouterr().err == "nbtools: stopped by you\n"


def test_the_baseline_is_a_plan_to_train_with(data, tmp_path):
    train = ["train", "toy", "--data", str(data), "--run", str(tmp_path / "run"), "--no-receipt", "--epochs", "1"]
    assert main([*train, "--from", "baseline"]) == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan == {**toy.BASELINE.to_dict(), "epochs": 1, "betas": list(toy.BASELINE.betas)}


def test_gpus_says_what_there_is(capsys):
    assert main(["gpus"]) == 0
    assert capsys.readouterr().out.strip()


def test_literals():
    texts = ["3", "0.5", "true", "None", "a", "4,8", "0123", "1e-3"]
    assert list(map(literal, texts)) == [3, 0.5, True, None, "a", (4, 8), "0123", 0.001]


def test_few_epochs_shorten_the_warmup_of_a_plan_and_that_is_said(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toy, "PLAN", toy.PLAN.replace(epochs=30, warmup_epochs=6.0))
    command = ["train", "toy", "--data", str(data), "--run", str(tmp_path / "run"), "--from", "plan", "--no-receipt"]
    assert main([*command, "--epochs", "2"]) == 0
    assert "warmup_epochs 6 → 0.4" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["warmup_epochs"] == 0.4
    assert main([*command[:5], str(tmp_path / "other"), *command[6:], "--epochs", "2", "--warmup-epochs", "3"]) == 1
