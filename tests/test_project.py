"""The files around the package agree with each other and with what they say."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
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


def stacks() -> list[str]:
    return sorted(f"tests/stacks/{path.name}" for path in (ROOT / "tests" / "stacks").iterdir())


def test_installing_takes_its_requirements_from_the_one_list():
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    assert "dependencies" in PROJECT["dynamic"]
    assert dynamic["dependencies"] == {"file": ["requirements.txt"]}


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


def test_every_python_that_is_promised_has_a_stack():
    named = {Path(name).stem: (ROOT / name).read_text().partition("\n")[0] for name in stacks()}
    own = {stem: found[1] for stem, first in named.items() if (found := re.match(r"# Python (3\.\d+): ", first))}
    assert {f"Programming Language :: Python :: {version}" for version in own.values()} == {
        one for one in PROJECT["classifiers"] if re.search(r":: 3\.\d", one)
    }
    assert own["colab"] == "3.13"
    said = (ROOT / "Makefile").read_text()
    [offered] = re.findall(r"^test-%: .*of its own: (.+)$", said, re.M)
    assert set(re.split(r", | or ", offered)) == own.keys()


def test_every_package_that_tests_use_has_an_exact_version_in_its_range():
    optional = [Requirement(line) for extra in PROJECT["optional-dependencies"].values() for line in extra]
    unpinned = {"nbtools", "torchvision"}  # PyPI's torchvision does not import next to the CPU build of torch
    for requirement in required() + [r for r in optional if r.name not in unpinned]:
        assert pins()[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_every_extra_that_a_message_names_is_one():
    named = [set(re.findall(r"nbtools\[([\w,]+)\]", path.read_text())) for path in texts() if path.suffix == ".py"]
    extras = {extra for found in named for group in found for extra in group.split(",")}
    assert extras
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_conda_gets_the_same_pythons_and_packages():
    text = (ROOT / "environment.yml").read_text()
    [versions] = re.findall(r"- python(\S+)", text)
    assert PROJECT["requires-python"] in versions
    for classifier in PROJECT["classifiers"]:
        if version := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier):
            assert version[1] in SpecifierSet(versions)
    assert "-r requirements.txt" in text


def texts() -> list[Path]:
    """Files of the project that people wrote, or that were generated from those."""
    endings = {".md", ".py", ".toml", ".yml", ".yaml", ".txt", ".ipynb"}
    folders = ("nbtools", "tests", "benchmarks", "notebooks", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.iterdir())
    return [path for path in found if path.is_file() and (path.suffix in endings or path.name in ("run", "Makefile"))]


def test_the_repositorys_address_is_written_once_and_generated_elsewhere():
    address = PROJECT["urls"]["Repository"]
    places = []
    for path in texts():
        found = set(re.findall(r"github(?:\.com)?/[\w.-]+/nbtools\b", path.read_text()))
        assert all(address.endswith(place.partition("/")[2]) for place in found), (path, found)
        places += [path.relative_to(ROOT).as_posix()] if found else []
    by_hand = {name for name in places if not name.endswith(".ipynb")}
    assert by_hand <= {"pyproject.toml", "README.md"}


def test_the_readmes_tree_is_true_and_names_each_folder_of_the_package():
    [block] = re.findall(r"```text\nnbtools/ .*?```", (ROOT / "README.md").read_text(), re.S)
    named, folders = [], []
    for line in block.splitlines()[2:-1]:
        depth = (len(line) - len(line.lstrip(" "))) // 2 - 1
        name, _, comment = line.strip().partition("  ")
        folders[depth:] = [name]
        named.append("".join(folders))
        assert comment.strip(), f"README's tree says nothing of {named[-1]}"
    assert [path for path in named if not (ROOT / path).exists()] == []
    package = [path for path in (ROOT / "nbtools").iterdir() if (path / "__init__.py").exists()]
    assert {f"nbtools/{path.name}/" for path in package} <= {*named}


def test_make_alone_explains_every_target():
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""})
    assert said.returncode == 0
    [targets] = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    for target in [*targets.split(), "quick-STACK", "test-STACK"]:
        assert re.search(rf"^  make {target}\s+\S", said.stdout, re.M), target


def test_an_old_python_is_refused_in_a_sentence(tmp_path):
    old = tmp_path / "python3"
    pretend = "import sys; sys.version_info = (3, 10, 4); sys.version = '3.10.4'"
    old.write_text(f'#!/bin/sh\nexec python3 -c "{pretend}\n$2"\n')
    old.chmod(0o755)
    for name in ("Makefile", "requirements.txt", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    said = subprocess.run(["make", "test", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode != 0
    assert "needs Python 3.11 or newer" in said.stderr
    assert "3.10.4" in said.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_stops_at_the_first_fault_and_runs_the_tests():
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert {"set -euo pipefail", "make test", "make quick-colab"} <= set(lines(".ci/run"))
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


def test_importing_nbtools_loads_torch_and_nothing_else_that_is_slow():
    """pandas alone took as long as a fifth of torch."""
    slow = {"pandas", "PIL", "matplotlib", "scipy", "ipywidgets", "IPython", "gdown", "torchvision"}
    code = f"import sys, nbtools; print(*({slow} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []
