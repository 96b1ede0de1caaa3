"""Every sentence of the package that a person may read, in one list: messages, reasons, helps, labels. `python -m
sentences` in this folder prints it with its places, for reading aloud.

A sentence is a string of at least three words in the code, docstrings aside, as it stands there: what an f-string
fills in is `{…}`. Strings that are added up or stand side by side are one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nbtools"
WORDS = re.compile(r"[A-Za-z]{2,}|\ba\b|{…}")
MARKUP = re.compile(
    r"</?\w|\w+:[^ ]+;|\w=\"|%;|[\\^$]\w|\.\*|^--|^\$|==|\(\?|^import |^from nbtools|^[\w-]+(, [\w-]+)*$"
)
"""HTML, CSS, patterns, code and lists of names: no sentences."""


@dataclass(frozen=True)
class Sentence:
    place: str
    text: str


def sentences() -> Iterator[Sentence]:
    """In the order of files and lines."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node, text in strings(tree, skipped(tree)):
            if len(WORDS.findall(text)) >= 3 and not MARKUP.search(text):
                yield Sentence(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", text)


def skipped(tree: ast.Module) -> set[ast.AST]:
    """Docstrings, and strings that stand alone like them."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def strings(node: ast.AST, without: set[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """The outermost strings; those inside the braces of an f-string are sentences of their own."""
    if isinstance(node, ast.expr) and node not in without and (text := text_of(node)) is not None:
        yield node, text
        inner = [part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue)]
    else:
        inner = list(ast.iter_child_nodes(node))
    for child in inner:
        yield from strings(child, without)


def text_of(node: ast.AST) -> str | None:
    """A string's text; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = text_of(node.left), text_of(node.right)
        return "".join(part or "{…}" for part in parts) if any(parts) else None
    return None


if __name__ == "__main__":
    for one in sentences():
        sys.stdout.write(f"{one.place}: {one.text}\n")
