"""SIGKILL in the middle of runs, which then resume: the same losses, order of samples and weights, bit for bit, as of a
run that nobody disturbed.

Every run is a forked child that saves after each step. It is killed at a random moment, or during a random
operation on the disk, where a write is half done; started again, killed again, until it ends. Some runs are kept, and
after some kills their own folder is lost too. What a run was doing is in three bytes of shared memory.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy
from archives import fault_at, kill
from faults.forks import DONE, Child
from faults.jobs import losses_of, weights_of
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import nbtools as nb
from nbtools import disk, folder
from nbtools.data import Pack, Snapshots
from nbtools.live import png
from nbtools.train import History, checkpoint

Options = dict[str, Any]
TINY: dict[str, tuple[Options, Options]] = {  # of the demo, changes of the recommended plan
    "own": ({"count": 60}, {"epochs": 2}),
    "captcha": ({"count": 24}, {"epochs": 2, "batch_size": 8, "network": "small", "warmup_epochs": 0}),
    "hwdb": (
        {"count": 12, "characters": 9, "length": (2, 3), "height": 32},
        {"epochs": 1, "batch_size": 2, "network": "crnn", "warmup_epochs": 0},
    ),
    "sign": ({"count": 24}, {"epochs": 2, "batch_size": 8, "warmup_epochs": 0}),
    "segment": (
        {"count": 12},
        {"epochs": 2, "batch_size": 4, "network": "slim", "crop": 64, "warmup_epochs": 0},
    ),
}
FEEDS: dict[str, Options] = {
    "resident": {"feed": "resident"},
    "streamed": {"feed": "streamed"},
    "workers 2": {"feed": "workers", "workers": 2},
}
CASES = {f"{task}, {feed}, gloo {world}": (task, feed, world) for world in (1, 2) for task in TINY for feed in FEEDS}
PHASES = ("start", "a batch", "a step", "an evaluation")
WORK = ("", "a save", "a removal of old checkpoints", "a copy to where it is kept")  # at the same time
KEPT = 0.3  # of the runs
LOST = ", its folder lost too"


class Case:
    """A task, its pack and plan; what an undisturbed run of them gives, and how long that takes. patch: what to change
    in nbtools before a run."""

    def __init__(self, name: str, root: Path, patch: Callable[[], object] = lambda: None) -> None:
        self.patch, self.stores = patch, list[Child]()
        task, feed, self.world = CASES[name]
        self.root, self.shared = root, mmap.mmap(-1, 3)
        os.environ["NBTOOLS_CACHE"] = str(root / "cache")
        options, changes = TINY[task]
        module = toy if task == "own" else importlib.import_module(f"nbtools.tasks.{task}")
        self.pack: Pack = module.pack(module.demo(root / "raw", **options), into=root / "pack", progress=False)
        self.plan = module.PLAN.replace(**changes, **FEEDS[feed])
        self.task = noting(module, self.shared, root / "order")
        self.clear()
        start = time.monotonic()
        for child in self.started():
            code, text = child.end()
            assert code == DONE, text
        self.parted()
        self.seconds = time.monotonic() - start
        self.operations = int(text) if text.isdecimal() else 200
        self.expected = self.found()
        self.order = lines(root / "order")
        assert len(set(self.order)) == len(self.order)

    def started(self, at: int | None = None, keep: Path | None = None) -> list[Child]:
        """The processes of a run, rank 0 last; it is killed in the operation `at`."""
        self.shared[:] = bytes(3)
        if self.world == 1:
            return [Child(lambda: self.train(at, keep))]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.meeting_place(), "WORLD_SIZE": str(self.world)}
        meet |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        own = [{**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.world)]
        return [Child(lambda r=rank: self.train(at if r == 0 else None, keep), own[rank]) for rank in (1, 0)]

    def meeting_place(self) -> str:
        """The port of a store in a process of its own: a process that is forked while a thread of the store works may
        find that thread's locks held for ever."""
        found, told = os.pipe()

        def serve() -> None:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(told, str(store.port).encode())
            signal.pause()

        self.stores.append(Child(serve))
        os.close(told)
        port = os.read(found, 8).decode()
        os.close(found)
        return port

    def parted(self) -> None:
        """The end of a life's store."""
        for child in self.stores:
            child.kill()
            child.end()
        self.stores.clear()

    def train(self, at: int | None, keep: Path | None) -> int:
        """→ operations on the disk."""
        folder.SAVE_EVERY, folder.SAVE_SHARE, png.draw = 0.0, float("inf"), lambda *_: b"\x89PNG"
        checkpoint.publish = self.marked(checkpoint.publish, 1)
        checkpoint.prune = self.marked(checkpoint.prune, 2)
        Snapshots.take = self.marked(Snapshots.take, 3, place=2)
        self.patch()
        calls = fault_at(pytest.MonkeyPatch(), sys.maxsize if at is None else at, kill)
        nb.fit(self.task, self.pack, self.plan, self.root / "run", keep, receipt=False, progress=False)
        return len(calls)

    def marked(self, real: Callable[..., Any], work: int, place: int = 1) -> Callable[..., Any]:
        def inside(*args: Any, **more: Any) -> Any:
            before, self.shared[place] = self.shared[place], work
            result = real(*args, **more)
            self.shared[place] = before
            return result

        return inside

    def found(self) -> tuple[list[str], dict[str, bytes]]:
        """Rows and tensors of the run that is there."""
        return list(map(repr, losses_of(self.root / "run"))), dict(weights_of(self.root / "run"))

    def differs(self) -> str:
        """In what that run is not the undisturbed one, and what was said in all of its lives; "" if in nothing."""
        (rows, tensors), (wanted, others) = self.found(), self.expected
        names = [name for name in sorted(tensors.keys() | others.keys()) if tensors.get(name) != others.get(name)]
        wrong = f"{len(names)} tensors differ: {', '.join(names[:5])}" if names else ""
        for row, other in zip_longest(rows, wanted, fillvalue="missing"):
            if row != other:
                wrong = f"a row is {row}, and should be {other}"
                break
        return f"{wrong}; events: {'; '.join(self.note()) or 'none'}" if wrong else ""

    def note(self) -> dict[str, None]:
        """What was said so far. A life that resumes cuts rows after its checkpoint, so each is noted at its end."""
        rows = History(self.root / "run" / "history.csv").rows
        self.events |= {f"{row['what']} (step {row['step']})": None for row in rows if "what" in row}
        return self.events

    def lost(self) -> str:
        """What a kill has left damaged or missing of that to which the run can go back; "" if nothing."""
        run, events = self.root / "run", self.note()
        if not checkpoint.names(run):
            return ""
        try:
            index = checkpoint.read_index(run)
            found = [checkpoint.read(run, name) for name in checkpoint.reached(run, index.get("last"))]
            if "best" in index:
                checkpoint.read(run, index["best"])
        except nb.NbtoolsError as error:
            return f"after a kill: {error}; events: {'; '.join(events) or 'none'}"
        rows, counted = len(History(run / "history.csv")), found[0].facts["rows"]
        return (
            f"after a kill: {rows} rows, and checkpoint {found[0].name} counts on {counted}" if rows < counted else ""
        )

    def clear(self) -> None:
        for name in ("run", "kept"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        (self.root / "order").unlink(missing_ok=True)
        self.events: dict[str, None] = {}

    def killed_run(self, rng: random.Random) -> tuple[Counter[str], str]:
        """(phases in which one run was killed, what is wrong at its end)."""
        self.clear()
        phases: Counter[str] = Counter()
        keep = self.root / "kept" if rng.random() < KEPT else None
        while True:
            at = rng.randrange(self.operations * (2 if keep else 1)) if rng.random() < 0.5 else None
            children = self.started(at, keep)
            if at is None:
                time.sleep(rng.random() * self.seconds)
                children[-1].kill()
            code, text = children[-1].end()
            for other in children[:-1]:  # torchrun ends the other ranks
                other.kill()
                other.end()
            self.parted()
            if code != -signal.SIGKILL:
                break
            if wrong := self.lost():
                return phases, wrong
            lost = keep is not None and rng.random() < 0.5
            if lost:
                shutil.rmtree(self.root / "run", ignore_errors=True)
            phases[f"{PHASES[self.shared[0]]}: {WORK[self.shared[1] or self.shared[2]]}{LOST if lost else ''}"] += 1
        if code != DONE:
            return phases, f"it does not resume: {text}"
        return phases, self.differs() or self.misplaced(lines(self.root / "order"))

    def killed_at(self, at: int) -> str:
        """What is wrong with a run that was killed during an operation, and then resumed."""
        self.clear()
        self.started(at)[-1].end()
        if wrong := self.lost():
            return wrong
        code, text = self.started()[-1].end()
        return text if code != DONE else self.differs()

    def misplaced(self, order: list[str]) -> str:
        """Each life goes through the batches in the order of the undisturbed run, and leaves none out."""
        places, done = {line: place for place, line in enumerate(self.order)}, 0
        before = -1
        for line in order:
            place = places.get(line, -1)
            if place < 0 or (place != before + 1 and place > done):
                return f"batch {line} is out of order"
            done, before = max(done, place + 1), place
        return "" if done == len(self.order) else "batches were left out"


def noting(module: Any, shared: mmap.mmap, order: Path) -> Any:
    """The task, which notes what it does, and on rank 0 the samples of each batch before it trains on them."""

    def batch(raw: Any, plan: Any, draws: Any) -> Any:
        if os.environ.get("RANK", "0") != "0":
            return module.batch(raw, plan, draws)
        shared[0] = 1 if draws is not None else 3
        if draws is not None:
            with open(order, "a") as file:
                file.write(json.dumps([draws.epoch, raw["id"].tolist()]) + "\n")
        made = module.batch(raw, plan, draws)
        shared[0] = 2 if draws is not None else 3
        return made

    return SimpleNamespace(**{**vars(module), "batch": batch})


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def in_place() -> None:
    """What the guides' programs do: write over the old file."""

    def write(path: Path, data: Any, digest: str = "") -> Path:
        with open(path, "wb", buffering=0) as file:
            disk.write(file, data.encode() if isinstance(data, str) else data)
        return path

    disk.write_atomic = write


def swept(name: str, seed: int, kills: int, root: Path) -> tuple[Counter[str], list[str]]:
    """(kills by phase, what went wrong)."""
    case, totals, wrong, rng = Case(name, root), Counter(), [], random.Random(f"{name} {seed}")
    while totals.total() < kills:
        before = totals.total()
        phases, trouble = case.killed_run(rng)
        totals += phases
        wrong += [f"{name}, seed {seed}, the run after {before} kills: {trouble}"] if trouble else []
    return totals, wrong
