"""The arrows of the design: who may import whom. Read with ast, so an import inside a function counts too."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nbtools"

ORDER = [
    {"__main__"},
    {"arguments"},
    {"launch"},
    {"fit", "watch", "compare", "lr_sweep", "validate", "smoke"},
    {"rollback"},
    {"findings"},
    {"surface", "folder"},
    {"view"},
    {"panel", "kernel", "preview"},
    {"plot", "run"},
    {"summary"},
    {"advise"},
    {"measure"},
    {"loop"},
    {"step", "checkpoint", "scoring", "bounds"},
    {"state"},
    {"feed"},
    {"schedule", "device"},
    {"packing"},
    {"writer"},
    {"journal"},
    {"pack"},
    {"stage"},
    {"bring"},
    {"source"},
    {"archive", "members", "fetch"},
    {"entries"},
]
"""From top to bottom. A layer imports layers below it; siblings do not import each other."""

GROUND = [
    {"sampler", "control"},
    {"plan", "history", "gpu", "metrics", "ctc", "recompute", "sheet", "letters", "report"},
    {"draws"},
    {"disk", "splits"},
    {"table", "progress"},
    {"errors"},
]
"""Imported by all, importing only ground below itself."""

DATA = {"pack", "packing", "stage", "archive", "members", "splits", "disk"}
TASKS = DATA | {
    "metrics",
    "ctc",
    "device",
    "recompute",
    "sheet",
    "letters",
    "report",
    "plan",
    "draws",
    "table",
    "progress",
    "errors",
}
"""What a task may import (stage: to look at a source before it chooses how to read it; device: for its `autocast`).
Nobody imports a task: it is reached by name."""

ONLY = {
    "ipywidgets": {"panel", "plot", "view"},
    "matplotlib": {"letters", "plot", "sheet", "tasks"},
    "google": {"stage"},  # google.colab
    "pynvml": {"gpu"},
    "torchvision": {"tasks"},
    "cv2": set(),
}
"""Outside packages that only these modules import."""

STANDARD = {"plan", "archive", "members", "entries", "disk", "errors", "splits", "table"}
"""These import nothing that does not come with Python."""

ROOMS = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.py")}

LAYER = {module: level for level, layer in enumerate(ORDER + GROUND) for module in layer}


def imports(source: str, name: str = "?") -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports; `from nbtools import plan` counts as nbtools.plan, so
    does it for the rooms below."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.append((node.lineno, "." * node.level + (node.module or "")))
            elif node.module in ROOMS:
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, node.module or ""))
    return found


def faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module, given by its name under nbtools: `loop`, `tasks.captcha`."""
    top = module.split(".")[0]
    found = []
    for line, target in imports(source):
        first, *rest = target.split(".")
        wrong = None
        if target.startswith("."):
            wrong = "relative import; name it absolutely"
        elif first == "nbtools" and not rest:
            wrong = None if top == "__main__" else "the package's face is for its users; import the module"
        elif first == "nbtools":
            wrong = arrow(top, module, rest)
        elif first in ONLY and top not in ONLY[first]:
            wrong = f"only {', '.join(sorted(ONLY[first])) or 'nobody'} may import {first}"
        elif top in STANDARD and first not in sys.stdlib_module_names:
            wrong = f"{top} imports the standard library only"
        if wrong:
            found.append(f"nbtools/{module.replace('.', '/')}.py:{line}: {target}: {wrong}")
    return found


def arrow(top: str, module: str, target: list[str]) -> str | None:
    """What is wrong with an arrow inside the package, or None."""
    to = target[0]
    if top == "__init__":
        return None if to in LAYER else "nothing imports a task; it is reached by name"
    if to == "tasks":
        if top == "arguments" and len(target) == 1:
            return None  # the folder, to list what there is
        same = top == "tasks" and target[:2] == module.split(".")[:2]
        return None if same else "nothing imports a task; it is reached by name"
    if to not in LAYER:
        return "not in the order of layers; give it a place here and in the README's tree"
    if top == "tasks":
        return None if to in TASKS else f"a task imports only {', '.join(sorted(TASKS))}"
    if top == to or LAYER[to] > LAYER[top]:
        return None
    return "sideways: siblings do not import each other" if LAYER[to] == LAYER[top] else "up"


def modules() -> list[tuple[str, Path]]:
    return [
        (".".join(path.relative_to(PACKAGE).with_suffix("").parts), path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parts[-2:] != ("tasks", "__init__.py")
    ]


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_arrows_point_down(module, path):
    assert module.split(".")[0] in {*LAYER, "tasks", "__init__"}, f"{module} has no layer: give it one here"
    assert faults(module, path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "planted", "said"),
    [
        ("stage", "from nbtools import loop", "up"),
        ("plan", "from nbtools import pack", "up"),
        ("errors", "import nbtools.disk", "up"),
        ("step", "from nbtools import checkpoint", "sideways"),
        ("plan", "from nbtools.history import History", "sideways"),
        ("loop", "def f():\n    from nbtools.panel import Panel", "up"),
        ("loop", "from nbtools.tasks import captcha", "reached by name"),
        ("__init__", "from nbtools.tasks import captcha", "reached by name"),
        ("tasks.hwdb", "from nbtools.tasks.captcha import ctc", "reached by name"),
        ("tasks.captcha", "from nbtools import loop", "a task imports only"),
        ("loop", "from .feed import batches", "relative"),
        ("loop", "import nbtools", "face"),
        ("loop", "from nbtools import magic", "not in the order"),
        ("loop", "import matplotlib.pyplot as plt", "only letters, plot, sheet, tasks"),
        ("fit", "import ipywidgets as widgets", "only panel, plot, view"),
        ("fit", "from google.colab import files", "only stage"),
        ("loop", "import torchvision", "only tasks"),
        ("tasks.captcha", "import cv2", "nobody"),
        ("plan", "import numpy as np", "standard library only"),
    ],
)
def test_a_planted_bad_arrow_is_caught(module, planted, said):
    [fault] = faults(module, f"import json\n{planted}\n")
    assert said in fault
    assert f"nbtools/{module.replace('.', '/')}.py:" in fault


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("loop", "from nbtools import feed, checkpoint, plan, state"),
        ("tasks.captcha", "from nbtools.pack import Pack\nfrom matplotlib.figure import Figure"),
        ("tasks.hwdb.lines", "from nbtools.tasks.hwdb import reader"),
        ("__main__", "import nbtools"),
    ],
)
def test_an_arrow_down_is_not_caught(module, allowed):
    assert faults(module, allowed) == []


@pytest.mark.parametrize("room", sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}), ids=str)
def test_within_a_room_no_arrows_make_a_circle(room):
    name = f"nbtools.{'.'.join(room.relative_to(PACKAGE).parts)}"
    below = {path.stem: within(name, path) for path in room.glob("*.py")}
    while free := [module for module, targets in below.items() if not targets]:
        below = {module: targets - set(free) for module, targets in below.items() if module not in free}
    assert not below, f"{name}: these import each other: {', '.join(below)}"


def within(room: str, path: Path) -> set[str]:
    """The modules of its own folder that a module imports."""
    below = (target.removeprefix(f"{room}.").split(".")[0] for _, target in imports(path.read_text()))
    return {name for name in below if (path.parent / f"{name}.py").exists()}


def test_every_module_of_the_order_stands_once():
    listed = [module for layer in ORDER + GROUND for module in layer]
    assert len(listed) == len(set(listed))
