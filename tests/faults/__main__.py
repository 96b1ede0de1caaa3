"""`make faults`: all parts side by side, until each has its count; interrupted and started again, it continues.

    python -m faults [PART …] [--minutes 30] [--processes 2] [--anew]

What is done is kept in benchmarks/results/faults.jsonl, a line for each part and commit with its seeds; from these
benchmarks/FAULTS.md is written. Ends with 1 where one of its own cases was wrong.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from faults import kills, memory, mutations, operations, stagers
from faults.forks import DONE as RETURNED
from faults.forks import Child
from faults.jobs import JOBS

from nbtools import disk
from nbtools.data import cores
from nbtools.live import png

ROOT = Path(__file__).parents[2]
DONE, PAGE = ROOT / "benchmarks" / "results" / "faults.jsonl", ROOT / "benchmarks" / "FAULTS.md"
Line = dict[str, Any]

KILLS, SHARES = 3000, 50
ARCHIVES, OTHERS = 1_000_000, 100_000  # files of each format
COUNTS = {
    **{f"kills: {name}": -(-KILLS // len(kills.CASES)) for name in kills.CASES},
    **{f"operations: {name}": SHARES for name in JOBS},
    **{f"full: {name}": 1 for name in JOBS},
    **{f"gone: {name}": 1 for name, job in JOBS.items() if job.far},
    **{f"memory: {name}": 1 for name in memory.CASES},
    **{f"stagers: {name}": 200 for name in stagers.CASES},
    **{f"mutations: {name}": ARCHIVES if name in mutations.FORMS else OTHERS for name in mutations.CASES},
    **{f"truncations: {form}": 1 for form in mutations.FORMS},
}
KINDS = {  # what the seeds of a part count, and how many at once: some seconds' worth
    "kills": ("SIGKILLs", 20),
    "operations": (f"{SHARES}ths of all cases", 1),
    "full": ("passes", 1),
    "gone": ("passes", 1),
    "memory": ("passes", 1),
    "stagers": ("rounds", 20),
    "mutations": ("files", 5000),
    "truncations": ("passes", 1),
}
LIMIT = 1800.0  # seconds of a batch


def batch(part: str, start: int, count: int) -> Line:
    """What came of a batch of a part, whose seeds begin with its start."""
    kind, _, name = part.partition(": ")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        root = Path(folder) / "it"
        if kind == "kills":
            totals, wrong = kills.swept(name, start, count, root)
        elif kind == "operations":
            totals, wrong = operations.swept(name, root, start, SHARES)
        elif kind == "memory":
            totals, wrong = memory.swept(name, root)
        elif kind == "stagers":
            totals, wrong = stagers.swept(start, count, root)
        elif kind == "mutations":
            totals, wrong = mutations.swept(name, range(start, start + count), root)
        elif kind == "truncations":
            totals, wrong = mutations.truncations(name, root)
        else:
            totals, wrong = operations.swept(name, root, how=kind)
    return {"totals": totals, "wrong": wrong}


def due(parts: list[str], at: Counter[str]) -> tuple[str, int, int] | None:
    """(part, start, count) of the next batch: of the part that is furthest behind."""
    if not parts:
        return None
    behind = min(parts, key=lambda part: at[part] / COUNTS[part])
    count = min(KINDS[behind.partition(":")[0]][1], COUNTS[behind] - at[behind])
    return (behind, at[behind], count) if count > 0 else None


def run(parts: list[str], minutes: float, processes: int, anew: bool = False) -> tuple[list[Line], bool]:
    """(all lines, those of earlier calls too; whether a case of this call was wrong). anew: what other commits have
    done does not count."""
    end, about = time.monotonic() + 60 * minutes, {"commit": commit(), "machine": machine()}
    lines = recorded()
    before = sorted((line for line in lines if not anew or line["commit"] == about["commit"]), key=lambda x: x["start"])
    at = Counter({line["part"]: line["start"] + line["count"] for line in before})
    running: dict[Child, tuple[str, int, int]] = {}
    any_wrong = False
    while True:
        while len(running) < processes and time.monotonic() < end and (following := due(parts, at)):
            at[following[0]] += following[2]
            running[Child(lambda following=following: json.dumps(batch(*following)), limit=LIMIT)] = following
        if not running:
            return lines, any_wrong
        time.sleep(0.05)
        for child, found in [(child, found) for child in running if (found := child.ended())]:
            part, start, count = running.pop(child)
            line = {**about, "date": date.today().isoformat(), "part": part, "start": start, "count": count}
            if found[0] != RETURNED and part in parts:
                parts.remove(part)  # the next ones would probably end so too
            line |= came_of(found, f"{part}, from seed {start} on")
            any_wrong |= bool(line["wrong"])
            print(f"{part}: {start + count:,} of {COUNTS[part]:,}", flush=True)
            print(*line["wrong"], sep="\n", end="\n" if line["wrong"] else "", flush=True)
            lines = list(merged([*lines, line]))
            disk.write_atomic(DONE, "".join(json.dumps(line) + "\n" for line in lines))


def recorded() -> list[Line]:
    return list(map(json.loads, DONE.read_text().splitlines())) if DONE.exists() else []


def came_of(found: tuple[int, str], seeds: str) -> Line:
    """The line of a batch; an error of its own is one of its cases, and what followed is missing."""
    code, text = found
    why = f"killed by signal {-code}" if code < 0 else text
    line = json.loads(ast.literal_eval(text)) if code == RETURNED else {"totals": {}, "wrong": [f"{seeds}: {why}"]}
    return {"totals": line["totals"], "wrong": [plain(one) for one in line["wrong"]]}


def plain(text: str) -> str:
    """Without the folders of this machine."""
    text = re.sub(rf"({tempfile.gettempdir()}|/dev/shm)/tmp\w+/?", "", text)
    for folder in (sys.prefix, sys.base_prefix, ROOT):
        text = text.replace(f"{folder}/", "")
    return text


def merged(lines: list[Line]) -> Iterator[Line]:
    """In order, batches that follow one another as one line."""
    same = ("part", "commit", "machine")
    last: Line = {}
    for line in sorted(lines, key=lambda line: (line["commit"], line["part"], line["start"])):
        if last and all(last[name] == line[name] for name in same) and last["start"] + last["count"] == line["start"]:
            totals = Counter(last["totals"]) + Counter(line["totals"])
            count, wrong = last["count"] + line["count"], last["wrong"] + line["wrong"]
            last = {**last, "date": line["date"], "count": count, "totals": totals, "wrong": wrong}
            continue
        if last:
            yield last
        last = line
    yield last


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "nbtools", "tests")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def machine() -> str:
    return f"{cores()} cores, Python {platform.python_version()}, torch {torch.__version__}"


# -- the page


def total(lines: list[Line]) -> tuple[Counter[str], int]:
    """(cases by what came of them, those that were wrong)."""
    return sum((Counter(line["totals"]) for line in lines), Counter()), sum(len(line["wrong"]) for line in lines)


def page(lines: list[Line]) -> str:
    """The totals as a page."""
    text = [
        "# Faults: what was broken on purpose, and what came of it",
        "",
        "Written by `make faults` from `benchmarks/results/faults.jsonl`, which has the seeds. A case is wrong where",
        "something is lost, half of it passes for whole, another result is accepted, or an error is not explained.",
        "",
        "| commit, day, machine | cases | wrong |",
        "| --- | ---: | ---: |",
    ]
    by_commit: dict[str, list[Line]] = {}
    for line in sorted(lines, key=lambda line: line["date"]):
        by_commit.setdefault(f"{line['commit']}, {line['date']}, {line['machine']}", []).append(line)
    for name, own in by_commit.items():
        totals, wrong = total(own)
        text.append(f"| {name} | {totals.total():,} | {wrong} |")
    for kind, (unit, _) in KINDS.items():
        mine = [line for line in lines if line["part"].startswith(f"{kind}: ")]
        if mine:
            text += ["", f"## {kind.capitalize()}", "", *section(kind, unit, mine)]
    if any(line["wrong"] for line in lines):
        text += ["", "## What was wrong", "", "`benchmarks/LOG.md` says what became of each.", ""]
        text += ["| commit | case |", "| --- | --- |"]
        text += [f"| {line['commit']} | {brief(one)} |" for line in lines for one in line["wrong"]]
    return "\n".join(text) + "\n"


def brief(wrong: str) -> str:
    """What is said about a case, of a traceback its last call or error, as a cell of a table."""
    first, *rest = (part.strip().replace("|", r"\|") for part in wrong.strip().splitlines())
    last = rest[0 if "most recent call first" in first else -1] if rest else ""
    return f"{first.partition('Traceback (most')[0].strip()} {last}".strip()


def section(kind: str, unit: str, lines: list[Line]) -> Iterator[str]:
    yield f"| part | {unit} of those wanted | cases | wrong | what came of them |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for part in dict.fromkeys(line["part"] for line in lines):
        own = [line for line in lines if line["part"] == part]
        totals, wrong = total(own)
        done = f"{sum(line['count'] for line in own):,} of {COUNTS.get(part, 0):,}"
        yield f"| {part.partition(': ')[2]} | {done} | {totals.total():,} | {wrong} | {came(kind, totals)} |"
    totals, wrong = total(lines)
    yield from ("", f"In all {totals.total():,} cases, {wrong} wrong.")
    if kind == "kills":
        yield from histogram(totals)


def came(kind: str, totals: Counter[str]) -> str:
    """How cases ended; of kills how many were while something was written."""
    if kind == "kills":
        return f"{writing(totals):,} while something was written"
    grouped: Counter[str] = Counter()
    for name, count in totals.items():
        grouped[name.partition(", ")[2] if kind == "operations" else name] += count
    return "; ".join(f"{name} {count:,}" for name, count in grouped.most_common())


def writing(totals: Counter[str]) -> int:
    return sum(count for name, count in totals.items() if any(work in name for work in kills.WORK[1:]))


def histogram(totals: Counter[str]) -> Iterator[str]:
    lost = sum(count for name, count in totals.items() if name.endswith(kills.LOST))
    yield f"{lost:,} times the run's own folder was lost too, and it resumed from where it is kept. Killed in:"
    yield from ("", f"| | nothing else | {' | '.join(kills.WORK[1:])} |", f"| ---{' | ---:' * len(kills.WORK)} |")
    for phase in kills.PHASES:
        cells = [
            sum(count for name, count in totals.items() if name.removesuffix(kills.LOST) == f"{phase}: {work}")
            for work in kills.WORK
        ]
        yield f"| {phase} | {' | '.join(f'{cell:,}' for cell in cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="break things on purpose, and count what comes of it")
    parser.add_argument("parts", nargs="*", help=f"beginnings of: {', '.join(COUNTS)}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which it stops, to be continued")
    parser.add_argument("--processes", type=int, default=cores(), help="at once")
    parser.add_argument("--anew", action="store_true", help="do all at this commit, whatever others have done")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    png.draw = lambda *_: b"\x89PNG"
    parts = [part for part in COUNTS if not asked.parts or part.startswith(tuple(asked.parts))]
    lines, any_wrong = run(parts, asked.minutes, asked.processes, asked.anew)
    disk.write_atomic(PAGE, page(lines))
    print(PAGE.read_text())
    return any_wrong


if __name__ == "__main__":
    sys.exit(main())
