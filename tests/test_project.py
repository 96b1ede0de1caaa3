"""The files around the package agree: links lead somewhere, figures have receipts, names exist, and options parse."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import nbtools as nb
from nbtools.__main__ import parser

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNPINNED = ("nbtools", "torchvision")  # PyPI's torchvision does not import next to the CPU build of torch
OLDEST = "tests/stacks/oldest.txt"
OLDEST_OF = ("text", "segment", "captcha", "onnx", "notebooks")  # options that the oldest stack has too
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS = ROOT / "docs"
COMMAND = re.compile(r"(?:python -m|-m --) nbtools ((?:[^`\n\\#]|\\\n)+)")
GUIDES = {"In": "captcha", "Handwritten": "hwdb", "Captchas": "captcha", "Sign": "sign", "Segmentation": "segment"}
CPP = "torch.utils.cpp_extension"
NUMBER = r"[−-]?[\d,]+(?:\.\d+)?"


def lines(name: str) -> list[str]:
    text = (line.strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in text if line and not line.startswith("#")]


def required(*extras: str) -> list[Requirement]:
    optional = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in lines("requirements.txt") + optional if not line.startswith(UNPINNED)]


def pins(name: str) -> dict[str, str]:
    pairs = (line.split("==") for line in lines(name))
    return {canonicalize_name(name): version for name, version in pairs}


def test_each_stack_is_within_the_ranges_so_that_nothing_of_colabs_is_reinstalled_and_the_oldest_at_their_lower_ends():
    stacks = {"tests/stacks/colab.txt": (), "constraints.txt": PROJECT["optional-dependencies"], OLDEST: OLDEST_OF}
    for stack, extras in stacks.items():
        for requirement in required(*extras):
            pinned = Version(pins(stack)[canonicalize_name(requirement.name)])
            assert pinned in requirement.specifier, (stack, requirement)
            [lower] = [Version(each.version).release for each in requirement.specifier if each.operator == ">="]
            assert stack != OLDEST or pinned.release[: len(lower)] == lower, requirement


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


def test_importing_nbtools_loads_torch_and_nothing_else_that_is_slow_and_nothing_starts_cuda_before_training():
    slow = {"pandas", "PIL", "matplotlib", "scipy", "ipywidgets", "IPython", "gdown", "torchvision", CPP}
    code = f"""
import sys, torch
def started(*_): raise SystemExit("CUDA is started")
torch.cuda._lazy_init = started
import nbtools
print(*({slow} & sys.modules.keys()))
from nbtools.__main__ import parser
from nbtools.tasks import captcha, hwdb, sign
given = ["train", "sign", "--data", "x", "--run", "y", "--amp", "bf16"]
parser(given).parse_args(given)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (found.returncode, found.stderr, found.stdout.split()) == (0, "", [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_its_heading_and_every_public_name_that_a_page_calls_exists(page):
    text = page.read_text()
    for target in re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', text):
        path, _, anchor = "".join(target).partition("#")
        if not re.match(r"https?:", path):
            other = (page.parent / path) if path else page
            assert other.exists(), path
            headings = re.findall(r"^#+ (.+)$", other.read_text().lower(), re.M) if anchor else [""]
            assert anchor in [re.sub(r"[^\w -]", "", each).replace(" ", "-") for each in headings], target  # GitHub's
    if page.name != "CHANGELOG.md":  # which also names what is gone
        assert [name for name in re.findall(r"\bnb\.(\w+)", text) if not hasattr(nb, name)] == []


def figures() -> list[tuple[str, str, str, str]]:
    """(page, figure, spread and n, receipt) of each row of a table that names one."""
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "measured.md"):
        for row in re.findall(r"^\| (.*results/\w+\.json\).*) \|$", page.read_text(), re.M):
            _, figure, *rest = row.split(" | ")
            found.append((page.name, figure, " ".join(rest), re.findall(r"results/(\w+\.json)", row)[0]))
    return found


def near(written: str, value: float) -> bool:
    text = written.replace(",", "").replace("−", "-")
    return abs(float(text) - value) <= 0.5001 * 10.0 ** -len(text.partition(".")[2])


def test_every_figure_is_that_of_its_receipt():
    assert {page for page, *_ in figures()} == {"README.md", "measured.md"}
    for page, figure, rest, name in figures():
        receipt = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        known: list[dict[str, Any]] = [receipt["headline"], *receipt["figures"]]
        value, *spread = re.findall(NUMBER, figure.partition("n = ")[0])
        if page == "README.md":
            count = int(figure.partition("n = ")[2].partition(")")[0])
        else:
            least, n, machine = rest.split(" ")[0], *re.findall(r" (\d+) (EPYC|Xeon) ", rest)[0]
            assert machine in receipt["machine"]["device"]
            spread, count = [] if least == "–" else re.findall(NUMBER, rest.partition(f" {n} {machine}")[0]), int(n)
        same = [one for one in known if near(value, one["value"]) and one["n"] == count]
        if spread:
            same = [one for one in same if near(spread[0], one["least"]) and near(spread[1], one["most"])]
        assert same, (page, figure, rest, name)
        assert spread or count == 1, "a figure of several runs has its spread"


def test_cpu_minutes_that_a_row_names_are_those_of_its_receipt():
    rows = re.findall(r"(\d+) CPU minutes.*results/(\w+\.json)", (ROOT / "README.md").read_text())
    assert rows
    for minutes, name in rows:
        found = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["figures"]
        assert any(near(minutes, each["value"]) for each in found if each["unit"] == "min")


def commands() -> list[str]:
    """What follows `python -m nbtools`, each once; not where a part is left out (`…`) or where one is only named."""
    texts = [found for page in PAGES if page.stem != "CHANGELOG" for found in COMMAND.findall(page.read_text())]
    joined = dict.fromkeys(" ".join(text.replace("\\\n", " ").split()) for text in texts)
    named = re.compile(r"…|\b(TASK|COMMAND)\b|--help|^(?!gpus|cache)\w+$")
    return [text for text in joined if not named.search(text)]


def options() -> list[tuple[str, str]]:
    found = []
    for part in (DOCS / "guides.md").read_text().split("\n## ")[1:]:
        for line in re.findall(r"^\| `?.*? \| (.*) \|$", part, re.M):
            found += [(GUIDES[part.split()[0].strip(",")], typed) for typed in re.findall(r"`(--[^`]+)`", line)]
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documentation_parses(command):
    words = shlex.split(command)
    assert parser(words).parse_args(words).act


def test_the_tables_of_the_five_guides_have_their_programs_and_options_that_parse():
    text = (DOCS / "guides.md").read_text()
    for program in (
        *("preprocess_all_hwdb.py", "train_optimized.py", "main.py -m hctr", "check_gpu.py", "captcha_train.py"),
        *("captcha_train_a100_optimized.py", "captcha_train_a100_ultra_optimized.py", "captcha_test.py"),
        *("training/train.py", "preprocessing.validate_npz", "tools/train_amp.py", "ims_per_gpu"),
    ):
        assert f"| `{program}" in text or f"`python -m {program}" in text, program
    assert len(options()) > 80
    for task, typed in options():
        words = ["train", task, "--data", "D", *shlex.split(typed)]
        assert parser(words).parse_args(words).act, typed


def test_every_entry_that_the_code_names_is_a_heading():
    named = set()
    for path in (ROOT / "nbtools").rglob("*.py"):
        named |= set(re.findall(r'\bentry ?= ?"([^"]+)"', path.read_text()))
    assert len(named) > 6
    assert named <= {*re.findall(r"^## (.+)$", (DOCS / "troubleshooting.md").read_text(), re.M)}
