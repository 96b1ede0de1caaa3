"""How large each room is, beside the size it has now and its budget, [tool.nbtools.budget] of pyproject.toml: lines of
Python with docstrings, of JavaScript, or words of prose. It ends with 1 where a room has grown beyond `now`."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "doors": "nbtools/*.py",
    "data": "nbtools/data/*.py",
    "train": "nbtools/train/*.py",
    "measure": "nbtools/measure/*.py",
    "live": "nbtools/live/*.py",
    "javascript": "nbtools/live/*.js",
    "tasks": "nbtools/tasks/**/*.py",
    "package": "nbtools/**/*.py",
    "files": "nbtools/**/*.py",
    "tests": "tests/**/*.py",
    "benchmarks": "benchmarks/**/*.py",
    "readme": "README.md",
    "changelog": "CHANGELOG.md",
    "prose": "**/*.md",
}


def files(room: str) -> Iterator[Path]:
    for path in sorted(ROOT.glob(ROOMS[room])):
        if not any(part.startswith(".") or part in ("demo", "build") for part in path.relative_to(ROOT).parts):
            yield path


def size(room: str) -> int:
    if room == "files":
        return len([*files(room)])
    texts = [path.read_text("utf-8") for path in files(room)]
    return sum(len(text.split()) if room in ("readme", "changelog", "prose") else text.count("\n") for text in texts)


def main() -> int:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["nbtools"]["budget"]
    wrong = []
    for room in ROOMS:
        found, limit = size(room), limits[room]
        print(f"{room:<12}{found:>8,}  now {limit['now']:>8,}  budget {limit['budget']:>8,}")
        if found > limit["now"]:
            wrong.append(f"{room} has {found:,}, above {limit['now']:,} in [tool.nbtools.budget] of pyproject.toml")
    print(*(f"error: {each}" for each in wrong), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
