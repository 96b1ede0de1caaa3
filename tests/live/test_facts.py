"""How a run ended is its state, which everything that shows it says; test_plot has the facts above the curves."""

import os
import signal

import pytest
import toy
from acting import acting, interrupted

import nbtools as nb


def test_how_a_run_ended_is_its_state_and_its_picture_is_there_also_after_an_error(tmp_path):
    pack, plan = toy.make_pack(tmp_path / "pack"), toy.PLAN.replace(epochs=2)

    def state(name: str) -> str:
        assert (tmp_path / name / "plot.png").exists()
        return nb.Run.open(tmp_path / name, toy).state

    ctrl_c = acting({3: lambda: os.kill(os.getpid(), signal.SIGINT)})
    interrupted(lambda: nb.fit(ctrl_c, pack, plan, tmp_path / "run", receipt=False))
    assert state("run") == "stopped"
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False)
    assert state("run") == "done"
    with pytest.raises(nb.NbtoolsError, match="diverged"):
        nb.fit(toy, pack, plan.replace(lr=1e30), tmp_path / "ruined", receipt=False)
    assert state("ruined") == "diverged"
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({12: lambda: 1 / 0}), pack, plan, tmp_path / "broken", receipt=False)
    assert state("broken") == "failed"
    nb.fit(toy, pack, plan, tmp_path / "broken", receipt=False)
    assert state("broken") == "done", "no longer failed"
