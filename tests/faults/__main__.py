"""`make faults`: every part in turn, until each has its count; interrupted and started again, it continues.

    python -m faults [PART …] [--share 0.01] [--seconds 600]

What is done is kept in benchmarks/results/faults.jsonl, a line for each batch with its seeds and commit; from these
benchmarks/FAULTS.md is written. share: of the full counts. seconds: after which it stops, to be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
from faults import kills, mutations, operations

from nbtools.data import cores
from nbtools.live import png

ROOT = Path(__file__).parents[2]
DONE, PAGE = ROOT / "benchmarks" / "results" / "faults.jsonl", ROOT / "benchmarks" / "FAULTS.md"
Found = tuple[Counter[str], list[str]]

KILLS, ARCHIVES, FILES, BATCH = 3000, 1_000_000, 100_000, 2000
COUNTS = {
    **{f"kills: {name}": -(-KILLS // len(kills.CASES)) for name in kills.CASES},
    **{f"operations: {name}": 10 for name in operations.JOBS},  # tenths of all cases
    **{
        f"mutations: {name}": ARCHIVES if name in ("tar", "tar.gz", "tar.xz", "zip") else FILES
        for name in mutations.CASES
    },
    **{f"truncations: {form}": 1 for form in ("tar", "tar.gz", "tar.xz", "zip")},
}


def batch_of(part: str, start: int, count: int, root: Path) -> tuple[int, Found]:
    """(how many were done, what came of them) of one batch of a part, which seeds it with its start."""
    kind, _, name = part.partition(": ")
    if kind == "kills":
        totals, wrong = kills.swept(name, start, min(count, 50), root / "kills")
        return totals.total() - totals["runs"], (totals, wrong)
    if kind == "operations":
        return 1, operations.swept(name, root / "operations", 0.1, start / 10)
    if kind == "mutations":
        return (count := min(count, BATCH)), mutations.swept(name, range(start, start + count), root)
    return 1, mutations.truncations(name, root)


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DONE.read_text().splitlines()] if DONE.exists() else []


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", "nbtools") else "")


def run(parts: list[str], share: float, seconds: float) -> None:
    end, made_by = time.monotonic() + seconds, commit()
    machine = f"{cores()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    at = Counter()
    for line in kept():
        at[line["part"]] += line["count"]
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for part in parts:
        wanted = max(round(COUNTS[part] * share), 1)
        while at[part] < wanted and time.monotonic() < end:
            with tempfile.TemporaryDirectory(dir=memory) as folder:
                count, (totals, wrong) = batch_of(part, at[part], wanted - at[part], Path(folder))
            line = {"part": part, "start": at[part], "count": count, "commit": made_by, "machine": machine}
            line |= {"date": date.today().isoformat(), "totals": totals, "wrong": wrong}
            with open(DONE, "a") as file:
                file.write(json.dumps(line) + "\n")
            at[part] += count
            print(f"{part}: {at[part]:,} of {wanted:,}, {len(wrong)} wrong", *wrong, sep="\n", flush=True)


def page(lines: list[dict[str, Any]]) -> str:
    """The totals as a page."""
    text = [
        "# Faults: what was broken on purpose, and what came of it",
        "",
        "Written by `make faults` from `benchmarks/results/faults.jsonl`, which has the seeds of each batch. A case is",
        "wrong where something is lost, half of it passes for whole, another result is accepted, or an error is not",
        "explained. Counts are of all commits named; the wanted ones are those of the full run.",
        "",
    ]
    by_commit = Counter()
    for line in lines:
        by_commit[f"{line['commit']}, {line['date']}, {line['machine']}"] += line["count"]
    text += ["| commit, day, machine | cases |", "| --- | ---: |"]
    text += [f"| {name} | {count:,} |" for name, count in by_commit.items()]
    for kind in ("kills", "operations", "mutations", "truncations"):
        mine = [line for line in lines if line["part"].startswith(f"{kind}: ")]
        text += [
            "",
            f"## {kind.capitalize()}",
            "",
            "| part | cases | wrong | what came of them |",
            "| --- | ---: | ---: | --- |",
        ]
        for part in COUNTS:
            own = [line for line in mine if line["part"] == part]
            totals: Counter[str] = sum((Counter(line["totals"]) for line in own), Counter())
            cases, wrong = totals.total() - totals["runs"], sum(len(line["wrong"]) for line in own)
            if own:
                what = "; ".join(f"{name} {count:,}" for name, count in grouped(kind, totals).most_common())
                text.append(f"| {part.partition(': ')[2]} | {cases:,} | {wrong} | {what} |")
        totals = sum((Counter(line["totals"]) for line in mine), Counter())
        wrong = sum(len(line["wrong"]) for line in mine)
        text += ["", f"In all {totals.total() - totals['runs']:,} cases, {wrong} wrong."]
        if kind == "kills":
            inside = sum(count for name, count in totals.items() if "while" in name)
            text += [f"{inside:,} kills were inside a save. Killed in:", ""]
            text += ["| phase | kills |", "| --- | ---: |"]
            text += [f"| {name} | {count:,} |" for name, count in totals.most_common() if name != "runs"]
    return "\n".join(text) + "\n"


def grouped(kind: str, totals: Counter[str]) -> Counter[str]:
    """Of operations only how they ended; of kills only runs; the rest as it is."""
    if kind == "operations":
        return sum((Counter({name.partition(", ")[2]: count}) for name, count in totals.items()), Counter())
    return Counter({"runs": totals["runs"]}) if kind == "kills" else totals


def main() -> int:
    parser = argparse.ArgumentParser(description="break things on purpose, and count what comes of it")
    parser.add_argument("parts", nargs="*", help=f"beginnings of: {', '.join(COUNTS)}")
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which it stops, to be continued")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    png.draw = lambda *_: b"\x89PNG"
    run([part for part in COUNTS if not asked.parts or part.startswith(tuple(asked.parts))], asked.share, asked.seconds)
    lines = kept()
    PAGE.write_text(page(lines))
    print(PAGE.read_text())
    return any(line["wrong"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
