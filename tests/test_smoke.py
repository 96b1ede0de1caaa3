"""Claims about the smoke test, and about the terminal's words on what is not supported yet."""

import dataclasses
import types

import pytest
import torch
import toy

from nbtools.__main__ import main
from nbtools.errors import TrainError
from nbtools.smoke import smoke


def changed(**names) -> types.SimpleNamespace:
    """The toy task with other functions, by a name that can be imported."""
    task = types.SimpleNamespace(**{**vars(toy), **names})
    task.__module__, task.__qualname__ = "toy", "BEST"
    return task


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path))


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_task_that_works_is_trained_saved_and_loaded_without_data(amp):
    found = smoke(toy, "cpu", hidden=24, amp=amp)
    assert [what for what, *_ in found.rows] == ["data", "model", "step", "save", "load"]
    assert "364 parameters" in str(found)  # 8·24 + 24 + 2·24 + 24·4 + 4
    assert "toy on cpu: it works" in found._repr_html_()


def test_a_forward_pass_that_is_random_in_evaluation_is_found():
    class Dropping(toy.Net):
        def forward(self, batch):
            return super().forward(batch) + torch.rand(1)

    with pytest.raises(TrainError, match="must answer as the saved ones, and they differ"):
        smoke(changed(model=lambda card, plan: Dropping(plan.hidden, plan.dropout)), "cpu")


def test_a_loss_that_is_no_number_is_found():
    with pytest.raises(TrainError, match="the loss of the first step is nan"):
        smoke(changed(loss=lambda model, batch, plan: (model(batch).sum() * torch.nan, 1)), "cpu")


def test_the_terminal_needs_no_data_for_it_and_takes_knobs(capsys):
    assert main(["train", "toy", "--smoke-test", "--hidden", "24"]) == 0
    assert "364 parameters" in capsys.readouterr().out
    assert main(["train", "toy", "--smoke-test", "--hidden", "0"]) == 1
    assert "hidden must be ≥ 1" in capsys.readouterr().err


def test_several_processes_are_refused_in_one_sentence(capsys):
    assert main(["train", "toy", "--smoke-test", "--processes", "2"]) == 1
    assert capsys.readouterr().err.count("not supported yet") == 1


def test_a_task_that_checks_while_it_packs_says_where_to_look(capsys):
    assert main(["validate", "toy", "anything"]) == 1
    assert "pack.bad" in capsys.readouterr().err


def test_a_report_with_errors_ends_the_command_with_one(capsys, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Report:
        ok: bool

    def validate(source: str, *, ok: bool = True) -> Report:
        return Report(ok)

    monkeypatch.setattr(toy, "validate", validate, raising=False)
    assert main(["validate", "toy", "anything"]) == 0
    assert main(["validate", "toy", "anything", "--ok", "false"]) == 1
    assert "Report(ok=False)" in capsys.readouterr().out
