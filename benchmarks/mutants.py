"""What the tests notice: small faults put into the package one at a time, each run against the tests that reach it.

    python -m benchmarks.mutants [--tree FOLDER] [--count 200] [--seed 0] [--jobs 2]

Needs pytest-cov, and the coverage of a run of the tests in FOLDER with `--cov=nbtools --cov-branch --cov-context=test`.
A mutant is a comparison turned round, another operator, `and` for `or`, a condition negated, a number or flag changed,
a result replaced by None, or a call left out; which ones is a function of the seed. It survives if none of at most
MOST tests that execute its line fails. Survivors are listed, since each is either a claim that nobody tests or code
that nobody needs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paired import Figure, Receipt

MOST = 25  # tests a mutant; the same ones whenever it is tried again
PATIENCE = 300  # seconds: a mutant that takes longer is noticed
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*"}


@dataclass(frozen=True)
class Mutant:
    """An expression, at bytes begin to end of a file, and what takes its place."""

    file: str
    line: int
    begin: int
    end: int
    was: str
    becomes: str

    def written(self, tree: Path) -> bytes:
        """The whole file with it. Raises SyntaxError or ValueError where that is no Python."""
        data = (tree / self.file).read_bytes()
        text = data[: self.begin] + self.becomes.encode() + data[self.end :]
        compile(text, self.file, "exec")
        return text

    def __str__(self) -> str:
        was, becomes = (" ".join(text.split())[:70] for text in (self.was, self.becomes))
        return f"{self.file}:{self.line}: {was} → {becomes}"


def mutants(path: Path, tree: Path) -> Iterator[Mutant]:
    """All mutants of a file. Annotations and texts of errors are left as they are."""
    data = path.read_bytes()
    parsed = ast.parse(data)
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or node.col_offset)

    def source(node: ast.expr) -> str:
        begin, end = span(node)
        return data[begin:end].decode()

    left_out = set(map(id, texts(parsed)))
    for node in ast.walk(parsed):
        if id(node) not in left_out:
            for expression, new in changes(node, source):
                name = path.relative_to(tree).as_posix()
                yield Mutant(name, expression.lineno, *span(expression), source(expression), new)


def drawn(tree: Path, count: int, seed: int) -> tuple[list[Mutant], int]:
    """(so many mutants that are Python, of how many)."""
    every = [mutant for path in sorted((tree / "nbtools").rglob("*.py")) for mutant in mutants(path, tree)]
    random.Random(seed).shuffle(every)
    found = []
    for mutant in every:
        with contextlib.suppress(SyntaxError, ValueError):
            mutant.written(tree)
            found.append(mutant)
        if len(found) == count:
            break
    return found, len(every)


def texts(parsed: ast.AST) -> Iterator[ast.AST]:
    """What no test should notice: annotations, and what a raise or an f-string says."""
    for node in ast.walk(parsed):
        match node:
            case ast.AnnAssign(annotation=found) | ast.arg(annotation=ast.expr() as found):
                yield from ast.walk(found)
            case ast.FunctionDef(returns=ast.expr() as found):
                yield from ast.walk(found)
            case ast.JoinedStr() | ast.Raise():
                yield from ast.walk(node)


def changes(node: ast.AST, source: Callable[[ast.expr], str]) -> Iterator[tuple[ast.expr, str]]:
    """[(an expression, what takes its place)] at this node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield node, f"({source(left)} {COMPARISONS[type(op)]} {source(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and not text(left):
            yield node, f"({source(left)} {OPERATORS[type(op)]} {source(right)})"
        case ast.BoolOp(op=op, values=values):
            yield node, "(" + (" or " if isinstance(op, ast.And) else " and ").join(map(source, values)) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, source(operand)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({source(test)}))"
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, f"({value!r} + 1)"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"
        case ast.Expr(value=ast.Call() as call):
            yield call, "None"


def text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def tests_of(mutant: Mutant, data: Any, files: dict[str, str]) -> list[str]:
    """The tests that execute its line; those of the whole file for a line that runs on import."""
    if mutant.file not in files:
        return []
    by_line = data.contexts_by_lineno(files[mutant.file])
    contexts = set(by_line.get(mutant.line, ()))
    if contexts == {""}:
        contexts = set().union(*by_line.values())
    return sorted({context.rsplit("|", 1)[0] for context in contexts if context})


def survives(mutant: Mutant, tests: list[str], tree: Path) -> bool:
    """Whether no test fails, in a copy of the package next to the tree's own tests."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for item in tree.iterdir():
            if item.name not in ("nbtools", ".git", ".pytest_cache"):
                (copy / item.name).symlink_to(item)
        shutil.copytree(tree / "nbtools", copy / "nbtools", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / mutant.file).write_bytes(mutant.written(tree))
        place = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        few = tests if len(tests) <= MOST else random.Random(mutant.line).sample(tests, MOST)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={copy}"]
        command = [sys.executable, "-m", "pytest", *options, *few]
        try:
            return not subprocess.run(command, cwd=copy, env=place, capture_output=True, timeout=PATIENCE).returncode
        except subprocess.TimeoutExpired:
            return False


def main() -> None:
    coverage = importlib.import_module("coverage")  # which make bench installs
    parser = argparse.ArgumentParser(description="seeded faults that no test notices")
    parser.add_argument("--tree", type=Path, default=Path(), help="a checkout, with its coverage in .coverage")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    tree = asked.tree.resolve()
    if not (tree / ".coverage").is_file():
        print(__doc__)
        return
    data = coverage.CoverageData(str(tree / ".coverage"))
    data.read()
    files = {file[file.rindex("/nbtools/") + 1 :]: file for file in data.measured_files()}
    chosen, possible = drawn(tree, asked.count, asked.seed)
    reached = {mutant: tests for mutant in chosen if (tests := tests_of(mutant, data, files))}

    def tried(mutant: Mutant) -> bool:
        return survives(mutant, reached[mutant], tree)

    with ThreadPoolExecutor(asked.jobs) as pool:
        survivors = [mutant for mutant, survived in zip(reached, pool.map(tried, reached), strict=True) if survived]
    missed = [mutant for mutant in chosen if mutant not in reached]
    for kind, found in (("survived", survivors), ("no test reaches", missed)):
        for mutant in found:
            print(f"{kind}: {mutant}")
    count = collections.Counter(survived=len(survivors), not_reached=len(missed))
    share = Figure("mutants", "survivors", count.total(), len(chosen), count["survived"], count.total())
    conditions = {"seed": asked.seed, "possible": possible, "tests_a_mutant": MOST, **count}
    receipt = Receipt(share, (), {**conditions, "survivors": [str(mutant) for mutant in [*survivors, *missed]]})
    if tree == Path().resolve():
        receipt.write()
    print(receipt)


if __name__ == "__main__":
    main()
