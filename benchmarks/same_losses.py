"""Whether this tree trains as another revision does, bit for bit: packs, losses and weights.

    python -m benchmarks.same_losses [REVISION] [--task captcha …] [--steps 50] [--quick]

For each task the other revision writes demo data and proposes a plan by its rules. Both revisions pack that data, and
train the plan for so many steps in each feed, on one thread of this machine. Compared are the bytes of the packs'
arrays, every logged loss and the weights at the end. Without a revision: whether what is not committed yet changes any.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

COUNTS = {"captcha": 400, "hwdb": 60, "sign": 96, "segment": 48}  # samples of the demo data
FEEDS = ("resident", "streamed", "workers")
ROOT = Path(__file__).resolve().parent.parent


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def trained(name: str, raw: Path, given: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """What the nbtools on the path makes of this data; given: the plan as a dict, None: by the rules. Uses public names
    only, so that it runs in any revision."""
    import nbtools as nb

    task = importlib.import_module(f"nbtools.tasks.{name}")
    if not raw.exists():
        task.demo(raw, count=COUNTS[name])
    with tempfile.TemporaryDirectory() as folder:
        pack = task.pack(raw, into=Path(folder) / "pack", progress=False)
        plan = nb.advise(task, pack, measure=False).plan
        if given is not None:  # settings that the other revision lacks are off, as for a run that began with it
            plan = type(plan).from_dict({key: value for key, value in given.items() if key in plan.to_dict()})
        found: dict[str, Any] = {"plan": plan.to_dict()}
        found["pack"] = {path.name: digest(path.read_bytes()) for path in sorted(pack.folder.glob("*.npy"))}
        for feed in FEEDS:
            state = nb.TrainState(task, pack, plan.replace(feed=feed, workers=0, epochs=max(plan.epochs, steps)))
            losses = []
            for record in nb.train(task, state, pack):
                if record.kind == "step" and "loss" in record.values:
                    losses.append(float(record.values["loss"]).hex())
                if state.step >= steps:
                    break
            weights = b"".join(tensor.contiguous().numpy().tobytes() for tensor in state.model.state_dict().values())
            found[feed] = {"losses": losses, "weights": digest(weights)}
    return found


def by_revision(tree: Path, name: str, raw: Path, given: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--inside", name, str(raw), json.dumps(given), str(steps)]
    place = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "NBTOOLS_DEVICE": "cpu"}
    ran = subprocess.run(command, cwd=tree, env=place, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{tree}: {name} ended with {ran.returncode}:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    from benchmarks.paired import Figure, Receipt

    parser = argparse.ArgumentParser(description="packs, losses and weights of two revisions, bit for bit")
    parser.add_argument("revision", nargs="?", help="what git calls it: a commit, tag or branch")
    parser.add_argument("--task", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="three steps, to see that it runs")
    asked = parser.parse_args()
    steps = 3 if asked.quick else asked.steps
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", asked.revision or "HEAD"], check=True, capture_output=True, text=True
    ).stdout
    different, compared = [], 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(other), commit.strip()], check=True)
        try:
            for name in asked.task:
                raw = Path(folder) / name
                before = by_revision(other, name, raw, None, steps)
                now = by_revision(ROOT, name, raw, before["plan"], steps)
                for what in ("pack", *FEEDS):
                    compared += 1
                    same = before[what] == now[what]
                    print(f"{name}, {what}: {'same' if same else f'{before[what]} became {now[what]}'}", flush=True)
                    different += [] if same else [f"{name}, {what}"]
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(other)], check=True)
    headline = Figure("same_losses", "differences", len(different), compared, 0, len(different))
    conditions = {"revision": commit.strip(), "steps": steps, "tasks": asked.task, "different": different}
    receipt = Receipt(headline, (), conditions)
    if asked.revision and not asked.quick:
        receipt.write()
    print(receipt)
    if different:
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        torch.set_num_threads(1)
        _, _, task, place, plan, many = sys.argv
        print(json.dumps(trained(task, Path(place), json.loads(plan), int(many))))
    else:
        main()
