"""The files around the package agree with each other and with what they say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST_OF = ("text", "segment", "captcha", "onnx", "notebooks")  # options that the oldest stack has too


def lines(name: str) -> list[str]:
    text = (line.strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in text if line and not line.startswith("#")]


def required() -> list[Requirement]:
    return [Requirement(line) for line in lines("requirements.txt")]


def pins(name: str = "constraints.txt") -> dict[str, str]:
    pairs = (line.split("==") for line in lines(name))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_nothing_of_colabs_is_reinstalled(requirement):
    assert pins("tests/stacks/colab.txt")[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_oldest_stack_has_the_lower_end_of_each_range():
    optional = [Requirement(line) for extra in OLDEST_OF for line in PROJECT["optional-dependencies"][extra]]
    for requirement in required() + optional:
        [lower] = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
        pinned = Version(pins("tests/stacks/oldest.txt")[canonicalize_name(requirement.name)])
        assert pinned.release[: len(lower.release)] == lower.release, requirement
        assert pinned in requirement.specifier


def test_every_package_that_tests_use_has_an_exact_version_in_its_range():
    optional = [Requirement(line) for extra in PROJECT["optional-dependencies"].values() for line in extra]
    unpinned = {"nbtools", "torchvision"}  # PyPI's torchvision does not import next to the CPU build of torch
    for requirement in required() + [r for r in optional if r.name not in unpinned]:
        assert pins()[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_readmes_tree_is_true_and_names_each_folder_of_the_package():
    [block] = re.findall(r"```text\nnbtools/ .*?```", (ROOT / "README.md").read_text(), re.S)
    named, folders = [], []
    for line in block.splitlines()[2:-1]:
        depth = (len(line) - len(line.lstrip(" "))) // 2 - 1
        folders[depth:] = [line.split()[0]]
        named.append("".join(folders))
    assert [path for path in named if not (ROOT / path).exists()] == []
    package = [path for path in (ROOT / "nbtools").iterdir() if (path / "__init__.py").exists()]
    assert {f"nbtools/{path.name}/" for path in package} <= {*named}


def test_importing_nbtools_loads_torch_and_nothing_else_that_is_slow():
    slow = {"pandas", "PIL", "matplotlib", "scipy", "ipywidgets", "IPython", "gdown", "torchvision"}
    code = f"import sys, nbtools; print(*({slow} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []
