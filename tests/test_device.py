"""Claims about the device: how malloc is told to keep what tensors free."""

import ast
import os
import subprocess
import sys

import pytest

from nbtools import device

STEPS = """
import resource, sys, torch
from torch import nn
sys.path.insert(0, "tests")
import toy
from pathlib import Path
from nbtools.loop import train
from nbtools.state import TrainState

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, batch):
        deep = self.layers[0](batch["x"].repeat(64, 1))  # activations of 4 MiB each: malloc maps such by default
        return self.layers[2](self.layers[1](deep * 1.0)).view(64, -1, 4).mean(0)

toy.model = lambda card, plan: Wide()
torch.set_num_threads(1)
state = TrainState(toy, toy.make_pack(Path(sys.argv[1]), 320), toy.PLAN.replace(batch_size=64, epochs=6), "cpu")
faults, losses = [], []
for record in train(toy, state, toy.Pack.open(Path(sys.argv[1]) / "pack")):
    if record.kind == "epoch":
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        losses.append(record.values["train_loss"])
print((faults[-1] - faults[2], losses))
"""


@pytest.mark.skipif(device.glibc() is None, reason="another C library frees in its own way")
def test_training_on_a_cpu_keeps_its_memory_and_loses_none_of_its_bits(tmp_path):
    """Page faults of the last three epochs, with malloc as nbtools sets it and as a person's own setting leaves it."""
    kept, losses = ran(tmp_path / "kept", {})
    freed, same = ran(tmp_path / "freed", {"MALLOC_ARENA_MAX": "8"})
    assert kept * 10 < freed
    assert losses == same


def ran(folder, settings):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(folder)],
        env={**plain, **settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)
