"""What the live surface costs: CPU time of a kernel that trains captchas with panel, plot and polling, above headless.

    python -m benchmarks.surface [--quick]

Two trainings of the same captchas from the same seed run in one notebook kernel, in turns of some seconds: one
headless, one under the surface, both far into a long run; they must end with the same losses, and `whole_process`
compares their CPU time, in which the cost is below the noise. Then the live one trains alone: the cost is the CPU time
of the surface's calls and of all other threads, which send to the browser, as a share of the clock's time, to which it
keeps pace.
Nobody clicks, but the kernel's socket is looked at 20 times a second. `plot_update` is one frame, drawn and sent.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, process_time, thread_time
from typing import Any

import nbformat
from nbclient import NotebookClient
from torch import nn

from benchmarks.paired import Figure, Receipt, in_turns, times
from nbtools.live import Surface
from nbtools.tasks import captcha
from nbtools.train import History, Record, TrainState, train

ROOT = Path(__file__).parent.parent
COUNT, PAST, FRAMES = 600, 2000, 50  # images; step rows that the history has already; frames timed one by one
CELL = "from benchmarks import surface\nsurface.measure({rounds}, {steps}, {folder!r})"


def long_history(states: list[TrainState], samples: int) -> History:
    """Put the states at the end of some epochs of a logged step each 2 batches; returns the rows of such a run."""
    history, epochs = History(), -(-PAST * 64 // samples)
    for step in range(1, PAST + 1):
        machine = {"samples_per_s": 900.0 + step % 7, "data_wait": 0.01, "memory": 9e2, "wall": 0.14 * step}
        values = {"loss": 3 / step**0.5, "lr": 1e-3, **machine}
        epoch = step * epochs // (PAST + 1)
        history.append(Record("step", epoch, 2 * step, epoch * samples, values))
        if (step + 1) * epochs // (PAST + 1) > epoch:
            scores = {"train_loss": 3 / step**0.5, "val_loss": 4 / step**0.5, "val_whole_accuracy": 1 - 1 / step**0.5}
            scores |= {"epoch_time": 9.0, "wall": 0.14 * step}
            history.append(Record("epoch", epoch, 2 * step, epoch * samples, scores))
    for state in states:
        state.epoch, state.step, state.samples = epochs, 2 * PAST, epochs * samples
    return history


def headless(state: TrainState, pack: Any, losses: list[float]) -> Iterator[None]:
    history = History()
    for record in train(captcha, state, pack):
        history.append(record)
        losses += [record.values["loss"]] if "loss" in record.values else []
        yield


def live(state: TrainState, pack: Any, losses: list[float], surface: Surface, spent: list[float]) -> Iterator[None]:
    """What `fit` does around the loop, but for checkpoints. spent: CPU-seconds of each record's."""
    for record in train(captcha, state, pack):
        start = thread_time()
        record = surface.measured(record)
        surface.history.append(record)
        surface.update(record)
        assert not surface.listen()
        spent.append(thread_time() - start)
        losses += [record.values["loss"]] if "loss" in record.values else []
        yield


def measure(rounds: int, steps: int, folder: str) -> None:
    """In the kernel: what is found goes to `found.json` of the folder."""
    place = Path(folder)
    pack = captcha.pack(captcha.demo(place / "raw", count=COUNT), progress=False)
    plan = captcha.PLAN.replace(network="small", batch_size=32, epochs=10**6, warmup_epochs=0.0)
    states = [TrainState(captcha, pack, plan) for _ in range(2)]
    for module in [module for state in states for module in state.model.modules()]:
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # both would draw from the one random state of the process, in turns
    history = long_history(states, len(pack.ids("train")))
    surface = Surface(place / "run", states[1], pack, history, plan, show=True)
    losses, own, spent = {"headless": list[float](), "live": list[float]()}, list[float](), list[float]()
    with surface:
        runs = {
            "headless": headless(states[0], pack, losses["headless"]),
            "live": live(states[1], pack, losses["live"], surface, spent),
        }

        def advance(name: str) -> float:
            spent.clear()
            start, here, clock = process_time(), thread_time(), monotonic()
            for _ in range(steps):
                next(runs[name])
            took = process_time() - start
            others = took - (thread_time() - here)
            own.append(100 * (sum(spent) + others) / (monotonic() - clock))
            return took

        for name in runs:  # the first turn is slower
            advance(name)
        found = in_turns({name: lambda n=name: advance(n) for name in runs}, rounds)
        same = losses["headless"] == losses["live"]
        for _ in range(rounds + 1):
            advance("live")
        frames = [frame(surface) for _ in range(FRAMES)]
    assert same, "the surface changed the training"
    (place / "found.json").write_text(json.dumps({"cpu": found, "own": own[-rounds:], "frames": frames}))


def frame(surface: Surface) -> float:
    """CPU-ms of one frame on the training thread."""
    surface.due, start = 0.0, thread_time()
    surface.draw()
    return 1e3 * (thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the live surface costs a kernel.")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    rounds, steps = (2, 5) if quick else (15, 30)
    with tempfile.TemporaryDirectory() as folder:
        cell = nbformat.v4.new_code_cell(CELL.format(rounds=rounds, steps=steps, folder=folder))
        notebook = nbformat.v4.new_notebook(cells=[cell])
        client = NotebookClient(notebook, timeout=1800, kernel_name="python3", extra_arguments=["--log-level=ERROR"])
        (Path(folder) / "run").mkdir()
        client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        found = json.loads((Path(folder) / "found.json").read_text())
    receipt = Receipt(
        Figure.of("surface_cost", "%", found["own"]),
        (
            Figure.of("whole_process", "%", [100 * x - 100 for x in times(found["cpu"], "live", "headless")]),
            Figure.of("plot_update", "ms", found["frames"]),
            Figure.of("turn", "CPU-s", found["cpu"]["headless"]),
        ),
        {"task": "captcha small", "batch_size": 32, "steps a turn": steps, "rows of history": PAST, "threads": 1},
    )
    if not quick:
        receipt.write()
    print(receipt)


if __name__ == "__main__":
    main()
