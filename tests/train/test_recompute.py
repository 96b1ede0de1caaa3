"""`Plan.checkpoint_activations`: the same bits, whatever is recomputed."""

import pytest
import torch

import nbtools as nb
from nbtools.tasks import captcha, sign


@pytest.mark.parametrize(("task", "count"), [(captcha, 24), (sign, 24)])
def test_recomputing_activations_changes_no_bit(task, count, tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    pack = task.pack(task.demo(tmp_path / "raw", count), progress=False)
    found = []
    for recompute in (False, True):
        plan = task.PLAN.replace(epochs=1, warmup_epochs=0.0, batch_size=8, checkpoint_activations=recompute)
        state = nb.TrainState(task, pack, plan)
        losses = [record.values.get("loss") for record in nb.train(task, state, pack)]
        found.append((losses, state.tensors()))
    (losses, tensors), (again, others) = found
    assert losses == again
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
