"""What recomputing activations saves and costs: every network that can, at its guide's sizes, on a CPU.

    python -m benchmarks.recompute [--quick]

Memory: bytes of all tensors that a train step in float32 makes, gradients included, at their peak; exact, no clock is
involved. Time: CPU time of a step on one thread, with and without in turns; the ratio is paired within a round.
"""

from __future__ import annotations

import argparse
from time import process_time
from typing import Any

import torch
from torch import Tensor

from benchmarks.paired import Figure, Receipt, in_turns, on_one_core, times
from nbtools.data import Card
from nbtools.data.pack import Column
from nbtools.measure import memory
from nbtools.train import TrainState, attempt, import_task

ROUNDS = 5
CPU = torch.device("cpu")
CASES = {  # network: samples at once, height and width in pixels, or frames
    "captcha guide": (32, 60, 160),
    "captcha small": (32, 60, 160),
    "captcha ctc": (32, 32, 240),
    "hwdb hctr": (4, 64, 800),
    "hwdb slim": (16, 64, 800),
    "hwdb crnn": (8, 64, 800),
    "segment bisenetv2": (4, 384, 384),
    "segment slim": (8, 384, 384),
    "sign transformer": (32, 60, 156),
}


def begun(case: str, size: tuple[int, int, int], recompute: bool, **settings: Any) -> tuple[TrainState, dict[str, Any]]:
    """A network's state before its first step, and a raw batch of noise in this size."""
    name, _, network = case.partition(" ")
    count, height, width = size
    options = {
        "captcha": {"layout": "lines" if network == "ctc" else "fixed", "size": [height, width], "length": 4},
        "sign": {"categories": list("ab")},
    }
    columns = {
        "image": Column("fixed", "uint8", (height, width, 3)),
        "x": Column("ragged", "float32", (width,)),
    }
    task = import_task(f"nbtools.tasks.{name}", "here")
    settings |= {"crop": height} if name == "segment" else {}
    kind: Any = type(task.PLAN)
    plan = kind(network=network, batch_size=count, checkpoint_activations=recompute, **settings)
    card = Card(name, list("abcdef"), {**options.get(name, {}), "height": height}, columns, {"train": count})
    state = TrainState(task, card, plan, CPU)
    torch.manual_seed(1)
    return state, {**raw_batch(name, network, *size), "id": torch.arange(count)}


def raw_batch(name: str, network: str, count: int, height: int, width: int) -> dict[str, Tensor]:
    """What the pack of a task would give to the network."""

    def pixels(*shape: int) -> Tensor:
        return torch.randint(256, (count, *shape), dtype=torch.uint8)

    if name == "captcha" and network != "ctc":
        return {"image": pixels(height, width), "label": torch.randint(6, (count, 4))}
    if name == "segment":
        label = torch.randint(6, (count, height // 8, width // 8)).repeat_interleave(8, 1).repeat_interleave(8, 2)
        return {"image": pixels(height, width, 3), "label": label.byte(), "distance": pixels(height, width)}
    if name == "sign":
        length = torch.linspace(height // 3, height, count).long()
        return {"x": torch.randn(count, height, width), "x_length": length, "label": torch.randint(2, (count, 2))}
    length, three = torch.linspace(width // 2, width, count).long(), torch.full((count,), 3)
    label = torch.randint(1, 7, (count, 3))
    return {"image": pixels(width, height), "image_length": length, "label": label, "label_length": three}


def peak(state: TrainState, raw: dict[str, Any]) -> int:
    """Bytes at the peak of a step."""
    state.restore_rng()
    return memory.peak(CPU, lambda: attempt(state, raw, 100, len(raw["id"])))


def seconds(state: TrainState, raw: dict[str, Any]) -> float:
    start = process_time()
    attempt(state, raw, 100, len(raw["id"]))
    return process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and time of a step with recomputed activations")
    parser.add_argument("--quick", action="store_true", help="small networks, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine, rounds = on_one_core(), 1 if quick else ROUNDS
    figures, shares = [], []
    for case in ("captcha small", "captcha ctc") if quick else CASES:
        pairs = {name: begun(case, CASES[case], name == "recomputed") for name in ("stored", "recomputed")}
        stored, less = (peak(*pair) for pair in pairs.values())
        shares.append(100 * less / stored)
        name = case.replace(" ", "_")
        figures += [Figure.of(f"{name}_stored", "MiB", [stored / 2**20]), Figure.of(name, "%", shares[-1:])]
        found = in_turns({name: lambda pair=pair: seconds(*pair) for name, pair in pairs.items()}, rounds)
        figures.append(Figure.of(f"{name}_time", "×", times(found, "recomputed", "stored")))
    result = Receipt(Figure.of("recompute_peak", "%", shares), tuple(figures), {"sizes": CASES}, machine)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
