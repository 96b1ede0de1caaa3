"""The terminal does what the notebook does, with every setting as an option."""

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence

import pytest
import toy

from nbtools.__main__ import main
from nbtools.train import knob


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.demo(tmp_path_factory.mktemp("cli") / "raw", count=150)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def train(data, tmp_path):
    """Train the toy in tmp_path/run; the exit code."""
    words = ["train", "toy", "--data", str(data), "--run", str(tmp_path / "run"), "--no-receipt"]
    return lambda *more: main([*words, *more])


def planned(folder) -> dict:
    return json.loads((folder / "run" / "plan.json").read_text())


def test_demo_pack_advise_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "run"
    assert main(["demo", "toy", str(raw), "--count", "150"]) == 0
    assert main(["pack", "toy", str(raw)]) == 0
    assert "  4: a b c d" in capsys.readouterr().out
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


def test_another_batch_size_moves_lr_by_the_rule_and_says_so(train, tmp_path, capsys):
    assert train("--epochs", "1", "--from", "plan", "--lr-rule", "sqrt", "--batch-size", "64") == 0
    assert "from the given settings follows lr 0.01 → 0.02" in capsys.readouterr().err
    assert planned(tmp_path)["lr"] == 0.02


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
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("typed", "code", "sentence"),
    [
        ("pack nosuchtask x", 1, "no task 'nosuchtask': use captcha"),
        ("pack toy no/such/folder --json", 1, "no/such/folder"),
        ("pack captch x", 1, "did you mean captcha?"),
        ("pack --val 0.2 toy x", 1, "no task '--val': use captcha"),
        ("evaluate toy --run r", 2, "the following arguments are required: --data"),
        ("train toy", 1, "name the data: --data SOURCE"),
        ("validate toy anything", 1, "pack.bad"),
    ],
)
def test_what_is_asked_for_wrongly_is_answered_in_a_sentence(typed, code, sentence, capsys):
    try:
        found = main(typed.split())
    except SystemExit as end:  # argparse
        found = end.code
    out, err = capsys.readouterr()
    assert (found, out, sentence in err) == (code, "", True)


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


@pytest.mark.parametrize(("kind", "text"), [(int | None, "x"), (tuple[int, int], "4"), (float, "1,2")])
def test_a_value_of_another_type_is_refused(kind, text, monkeypatch, capsys):
    def demo(folder, *, size=1):
        raise AssertionError

    demo.__annotations__["size"] = kind
    monkeypatch.setattr(toy, "demo", demo)
    assert main(["demo", "toy", "x", "--size", text]) == 1
    assert re.fullmatch(rf"nbtools: --size must be .*, got '{text}'\n", capsys.readouterr().err)


def test_the_smoke_test_needs_no_data_and_takes_settings(capsys):
    assert main(["train", "toy", "--smoke-test", "--hidden", "24"]) == 0
    assert "364 parameters" in capsys.readouterr().out  # 8·24 + 24 + 2·24 + 24·4 + 4
    assert main(["train", "toy", "--smoke-test", "--hidden", "0"]) == 1
    assert "hidden must be at least 1" in capsys.readouterr().err
