"""Staging and packing against the least that they could take: a plain copy and extraction, and decoding on all cores.

    python -m benchmarks.staging [--quick]

Staging checks an archive's SHA-256 and every name in it, syncs and publishes: its speed over that of `shutil.copyfile`
and `tarfile.extractall`, of a tar of many small images and of one of few large files, in turns, by the wall clock. One
on local disk is extracted where it lies; from Drive, for which a folder stands in, it is copied too.
Packing, of each task's demo data: samples/s over the cores times those of reading the samples one after another; and
the same of reading on all cores, with the samples thrown away where they were read, and handed over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import nbtools as nb
from benchmarks.paired import Figure, Receipt, in_turns, times
from nbtools.data import cores, side_by_side
from nbtools.tasks import captcha, hwdb, segment, sign

ROUNDS, IMAGES, LARGE, MEGABYTES = 7, 4000, 8, 32
TASKS = {
    "captcha": (captcha, 8000),
    "hwdb": (hwdb, 8000),
    "sign": (sign, 4000),
    "segment": (segment, 500),
}  # seconds' worth of samples
ALONE = "one after another"


def seconds(act: Callable[[], Any]) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start


def archived(folder: Path) -> Path:
    with tarfile.open(folder.with_suffix(".tar"), "w") as tar:
        tar.add(folder, folder.name)
    return folder.with_suffix(".tar")


def plainly(tar: Path, into: Path) -> None:
    """Copy and extract, as a notebook's first cell would."""
    into.mkdir()
    shutil.copyfile(tar, into / tar.name)
    with tarfile.open(into / tar.name) as opened:
        opened.extractall(into / "files", filter="data")


def staged(tar: Path, into: Path) -> None:
    nb.stage(tar, into=into, progress=False)


def from_drive(tar: Path, into: Path) -> None:
    nb.stage(f"drive:{tar.name}", into=into, progress=False)


def timed(act: Callable[[Path, Path], None], tar: Path, into: Path) -> float:
    """Seconds, without those in which the files are deleted again, and with nothing left to write from before."""
    os.sync()
    took = seconds(lambda: act(tar, into))
    shutil.rmtree(into)
    return took


def packing(task: Any, source: Path, place: Path, rounds: int) -> dict[str, list[float]]:
    """samples/s: of reading the files one after another, on all cores with the samples thrown away, and handed over,
    and of packing."""
    first, packs = task.pack(source, into=place / "first", progress=False), count()
    raw, number = first.raw, len(first)

    def packed() -> None:
        task.pack(source, into=place / f"pack{next(packs)}", progress=False)

    def rate(act: Callable[[], Any]) -> float:
        os.sync()
        took = seconds(act)
        for made in place.glob("pack*"):
            shutil.rmtree(made)
        return number / took

    acts = {
        ALONE: lambda: [raw[i] for i in range(number)],
        "thrown away": lambda: [*side_by_side(lambda i: raw[i] and None, range(number))],
        "handed over": lambda: sum(1 for _ in side_by_side(raw.__getitem__, range(number))),
        "packed": packed,
    }
    found = in_turns({name: lambda act=act: rate(act) for name, act in acts.items()}, rounds)
    shutil.rmtree(place)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="staging over copy and extraction, packing over decoding on all cores")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    rounds, images, large, size = (1, 64, 2, 1) if quick else (ROUNDS, IMAGES, LARGE, MEGABYTES)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        place, numbers = Path(folder), count()
        os.environ["NBTOOLS_CACHE"] = str(place / "cache")
        os.environ["NBTOOLS_DRIVE"] = str(place / "drive")
        (place / "drive").mkdir()
        source = captcha.demo(place / "images", count=images)
        (place / "large").mkdir()
        for k in range(large):
            (place / "large" / f"{k}.bin").write_bytes(np.random.default_rng(k).bytes(size << 20))
        for name, tar in {"small files": archived(source), "large files": archived(place / "large")}.items():
            (place / "drive" / tar.name).hardlink_to(tar)
            acts = {"plain": plainly, "staged": staged, "from Drive": from_drive}
            turns = {
                act: lambda do=do, tar=tar: timed(do, tar, place / f"at{next(numbers)}") for act, do in acts.items()
            }
            found = in_turns(turns, rounds)
            figures += [Figure.of(f"{name}, {act}", "s", each) for act, each in found.items()]
            figures += [
                Figure.of(f"{name}: {act}", "× plain", times(found, "plain", act)) for act in acts if act != "plain"
            ]
        shares: list[list[float]] = []
        for name, (task, samples) in TASKS.items():
            made = task.demo(place / name, count=64 if quick else samples)
            rates = packing(task, made, place / "packs", rounds)
            figures.append(Figure.of(f"{name}: read on one core", "samples/s", rates[ALONE]))
            for act in ("thrown away", "handed over", "packed"):
                share = [rate / (cores() * alone) for rate, alone in zip(rates[act], rates[ALONE], strict=True)]
                figures.append(Figure.of(f"{name}: {act}", "×", share))
            shares.append(share)
    settings = {"images": images, "samples": {name: samples for name, (_, samples) in TASKS.items()}, "cores": cores()}
    settings["promise"] = "staging ≥ 0.9×, packing ≥ 0.9"
    result = Receipt(Figure.of("packing_share", "×", min(shares, key=median)), tuple(figures), settings)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
