"""The options of the guide's script do here what they say."""

import io
import json
import pkgutil
import subprocess
import sys
from contextlib import redirect_stderr

import pandas as pd
import pytest

import nbtools.tasks
from nbtools.__main__ import main
from nbtools.tasks import sign
from nbtools.train import device

pytestmark = pytest.mark.usefixtures("one_cache")

COLUMNS = ["epoch", "train_loss", "val_loss", "val_gloss_acc", "val_cat_acc", "lr", "epoch_time"]
ON_A_GPU = ["gpu_memory_allocated", "gpu_memory_reserved"]
TASKS = sorted({module.name for module in pkgutil.iter_modules(nbtools.tasks.__path__)} - {"common"})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return sign.demo(tmp_path_factory.mktemp("raw"), 40, glosses=4, features=True, frames=(10, 16))


def train(data, run, *more: str) -> int:
    return main(["train", "sign", "--data", str(data), "--run", str(run), "--network", "gru", "--no-receipt", *more])


def plan_of(run) -> dict:
    return json.loads((run / "plan.json").read_text())


def rows(run) -> pd.DataFrame:
    found = pd.read_csv(run / "history.csv")
    return found.loc[found.kind == "epoch"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """(the folder of a run of two epochs, what the terminal showed)."""
    run = tmp_path_factory.mktemp("runs") / "run"
    with redirect_stderr(io.StringIO()) as shown:
        assert train(data, run, "--epochs", "2") == 0
    return run, shown.getvalue()


def test_the_column_names_of_the_log_are_the_scripts_but_for_two(trained):
    found = rows(trained[0]).rename(columns={"val_gloss_accuracy": "val_gloss_acc", "val_cat_accuracy": "val_cat_acc"})
    assert set(COLUMNS) <= set(found.columns)
    if device.pick().type == "cuda":
        assert set(ON_A_GPU) <= set(found.columns)
    assert found["epoch"].tolist() == [0, 1]


def test_a_split_that_is_not_there_is_named_with_those_that_are(data, trained, capsys):
    assert main(["evaluate", "sign", "--data", str(data), "--run", str(trained[0])]) == 1
    assert "the test split is empty; choose one that is not (train: 30, val: 10)" in capsys.readouterr().err


def test_a_plateau_lowers_the_lr_and_an_early_stop_stops(data, tmp_path):
    flat = ["--lr", "1e-9", "--lr-rule", "none", "--schedule", "plateau", "--patience", "1", "--warmup-epochs", "0"]
    assert train(data, tmp_path / "run", "--epochs", "9", *flat, "--early-stop", "4") == 0
    found = rows(tmp_path / "run")
    assert len(found) < 9
    assert found["lr"].iloc[-1] < 0.2 * found["lr"].iloc[0]


def test_the_keys_choose_what_is_read(data, tmp_path, capsys):
    assert main(["pack", "sign", str(data), "--feature-key", "none", "--into", str(tmp_path / "keypoints")]) == 0
    assert "features" not in capsys.readouterr().out
    assert main(["pack", "sign", str(data), "--kp-key", "nothing", "--into", str(tmp_path / "wrong")]) == 1
    assert "nothing" in capsys.readouterr().err


def test_the_smoke_test_needs_no_data(capsys):
    assert main(["train", "sign", "--smoke-test", "--network", "gru"]) == 0
    assert "equal outputs" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "pack", "advise", "train", "evaluate", "validate", "features"])
def test_no_option_is_there_twice(command, capsys):
    """The script stopped at its start: two of its options had one name."""
    for task in TASKS if command not in ("validate", "features") else ["sign"]:
        with pytest.raises(SystemExit) as end:
            main([command, task, "--help"])
        assert end.value.code == 0
        assert f"usage: python -m nbtools {command}" in capsys.readouterr().out


@pytest.mark.full
def test_the_allocators_settings_are_the_users_until_cuda_starts_and_it_starts_late():
    """The script made them when CUDA was up, where they do nothing. Here nobody makes any, and neither importing all
    nor reading a command line starts CUDA: what a notebook sets before it trains counts."""
    code = """
import os, torch
before = dict(os.environ)
def started(*_): raise SystemExit("CUDA is started")
torch.cuda._lazy_init = started
import nbtools
from nbtools.__main__ import parser
from nbtools.tasks import captcha, hwdb, sign
given = ["train", "sign", "--data", "x", "--run", "y", "--amp", "bf16"]
parser(given).parse_args(given)
sign.PLAN.replace(network="gru")
assert {k: v for k, v in os.environ.items() if "ALLOC" in k} == {k: v for k, v in before.items() if "ALLOC" in k}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
