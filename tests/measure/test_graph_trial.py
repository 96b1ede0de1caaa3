"""The trial of CUDA graphs in a child process: whatever becomes of it, this process goes on and says why."""

import pytest
import torch
import toy

from nbtools.measure import graphs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=120)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('capture failed')", "a child process that tried it failed: capture failed"),
        ("import os; os.kill(os.getpid(), 9)", "died with <Signals.SIGKILL: 9>"),
        ("import time; time.sleep(60)", "a child process that tries it did not end in 1 s"),
        ("print('no answer')", "a child process that tried it failed: Expecting value"),
    ],
    ids=["error", "killed", "hangs", "no answer"],
)
def test_a_child_that_gives_no_answer_is_a_reason(pack, monkeypatch, code, why):
    monkeypatch.setattr(graphs, "CHILD", code)
    monkeypatch.setattr(graphs, "PATIENCE", 1.0 if "sleep" in code else 60.0)
    ratios, said = graphs.beside(toy, pack, toy.PLAN, {}, CPU, 0.1)
    assert ratios == []
    assert why in said


def test_a_child_trains_the_task_on_the_pack_in_turns(pack):
    """Without graphs on a CPU: both are the same plan."""
    ratios, why = graphs.beside(toy, pack, toy.PLAN, {}, CPU, 0.2)
    assert why == ""
    assert len(ratios) >= 1
    assert all(ratio > 0 for ratio in ratios)


def test_a_task_that_no_other_process_can_import_is_tried_in_this_one(pack, monkeypatch):
    own = toy.with_()
    monkeypatch.setattr(graphs, "task_name", lambda task: "__main__:own")
    monkeypatch.setattr(graphs, "CHILD", "raise SystemExit('no child is asked')")
    assert graphs.beside(own, pack, toy.PLAN, {}, CPU, 0.1)[0]
