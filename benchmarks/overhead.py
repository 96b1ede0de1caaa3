"""What a training loop costs above the tensor work that it drives, in CPU-µs a step.

    python -m benchmarks.overhead [--quick]

The work, the same for all: gather a batch from resident tensors, set lr (cosine, every step), zero_grad, forward,
backward, clip the gradient norm, fused AdamW, add loss and count to sums on the device. `bare` does nothing else, with
torch's own calls. nbtools also yields a record a step, and reads the loss and writes rates every 25. Its peers run
without loggers, progress bars and checkpoints, and set lr by hand. All begin with the same weights, see the same
batches, and must end every epoch with the same loss, bit for bit.

They run in one process and in turns of a few steps, each an epoch a round.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import tempfile
import warnings
from functools import partial
from pathlib import Path
from time import process_time

from benchmarks import tiny
from benchmarks.loops import CLIP, CONTESTANTS, EPOCHS, PLAN, SLICE, Batches, Contestant, Losses
from benchmarks.paired import Figure, Receipt, above, in_turns, on_one_core
from nbtools.data import Pack

SAMPLES = 2**13  # a power of two: progress, and so lr, is then exact however it is computed


def present() -> dict[str, Contestant]:
    """The contestants whose package is installed; a line for each that is not."""
    found = {}
    for name, (contestant, package) in CONTESTANTS.items():
        if importlib.util.find_spec(package):
            found[name] = contestant
        else:
            print(f"{name} left out: {package} is not installed (pip install 'nbtools[bench]')")
    return found


def measured(contestants: dict[str, Contestant], pack: Pack, rounds: int) -> dict[str, list[float]]:
    """CPU-µs a step of each contestant in each round: an epoch, after one that carries the start.

    Raises SystemExit where a loss is not bare's, bit for bit.
    """
    losses: dict[str, Losses] = {name: [] for name in contestants}
    running = {name: contestant(pack, losses[name]) for name, contestant in contestants.items()}
    slices = len(Batches(pack)) // SLICE

    def advance(name: str) -> float:
        start = process_time()
        next(running[name])
        return (process_time() - start) * 1e6 / (slices * SLICE)

    turns = {name: partial(advance, name) for name in running}
    in_turns(turns, 1, slices)
    found = in_turns(turns, rounds, slices)
    for name, came in losses.items():
        if came != losses["bare"]:
            raise SystemExit(f"{name} does other work: its losses are {came}, bare's {losses['bare']}")
    return found


def receipt(found: dict[str, list[float]], machine: dict[str, str]) -> Receipt:
    unit = "CPU-µs/step"
    whole = [Figure.of(f"step_{name}", unit, values) for name, values in found.items()]
    over = [Figure.of(f"{name}_above_bare", unit, above(found, name, "bare")) for name in found if name != "bare"]
    packages = {package for name, (_, package) in CONTESTANTS.items() if name in found}
    conditions = {
        "promise": "≤ 100 CPU-µs a step above bare",
        "step": f"MLP {tiny.FEATURES}-{tiny.HIDDEN}-{tiny.CLASSES}, batch {PLAN.batch_size}, clip {CLIP}, fused AdamW",
        "same_losses": "bit for bit, every epoch of every run",
        **{package: importlib.metadata.version(package) for package in sorted(packages)},
    }
    headline = Figure.of("loop_overhead", unit, above(found, "nbtools", "bare"))
    return Receipt(headline, (*whole, *over), conditions, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time a step that loops cost above bare PyTorch")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine = on_one_core()
    warnings.simplefilter("ignore")  # the peers' advice about workers and loggers
    with tempfile.TemporaryDirectory() as folder:
        pack = tiny.pack(Path(folder), SAMPLES // 8 if quick else SAMPLES)
        result = receipt(measured(present(), pack, rounds=2 if quick else EPOCHS - 1), machine)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
