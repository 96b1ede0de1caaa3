"""Who imports whom: doors → live → measure → train → data → ground, and nobody a task. Read with ast, so an import
inside a function counts too. A room is imported by its face, `from nbtools.train import Plan`, not by its files."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nbtools"
ROOMS = ["ground", "data", "train", "measure", "live", "doors"]  # a room imports those before it
GROUND = {"errors", "show", "disk", "figures"}
ONLY = {"ipywidgets": {"live"}, "google": {"data"}, "pynvml": {"measure"}, "torchvision": {"tasks"}, "cv2": set()}
"""Outside packages that only these rooms import."""


def room_of(module: str) -> str:
    """`nbtools.train.loop` → train, `nbtools.disk` → ground, `nbtools.fit` → doors, `nbtools.tasks.sign.task` → sign"""
    _, first, *rest = [*module.split("."), "doors"]
    if first == "tasks":
        return rest[0] if rest[0] != "doors" else "tasks"
    return first if first in ROOMS else "ground" if first in GROUND else "doors"


def listed(room: str) -> set[str]:
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def faults(module: str, source: str) -> list[str]:
    mine, found = room_of(module), []
    level = ROOMS.index(mine) if mine in ROOMS else ROOMS.index("measure")  # a task: ground, data and train
    open_to = {"tasks", *((mine, "common") if module.startswith("nbtools.tasks") else ())}
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            into = "." * node.level + (node.module or "")
            names = [f"{into}.{name}" for name in names] if into in ("nbtools", "nbtools.tasks") else [into]
        for name in names:
            top, other = name.partition(".")[0], room_of(name) if name.startswith("nbtools.") else ""
            inside = "tasks" if module.startswith("nbtools.tasks") else mine
            if top in ONLY and inside not in ONLY[top]:
                found.append(f"{module}: only {', '.join(ONLY[top]) or 'nobody'} may import {top}")
            elif (name == "nbtools" and module != "nbtools.__main__") or top == "":
                found.append(f"{module}: import the room, absolutely, not {name}")
            elif other in ROOMS and other != mine and ROOMS.index(other) > level - (mine not in ROOMS):
                found.append(f"{module}: {name} is above {inside}")
            elif other in ROOMS[1:-1] and other != mine and name.count(".") > 1:
                found.append(f"{module}: import nbtools.{other}, not its file {name}")
            elif other in ROOMS[1:-1] and other != mine and isinstance(node, ast.ImportFrom) and node.module == name:
                hidden = {alias.name for alias in node.names} - listed(other)
                found += [f"{module}: nbtools.{other} does not list {one}" for one in sorted(hidden)]
            elif other and other not in ROOMS and other not in open_to:
                found.append(f"{module}: nobody imports a task; {name} is reached by name")
    return found


def test_arrows_point_down():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found += faults(module.removesuffix(".__init__"), path.read_text())
    assert found == []
