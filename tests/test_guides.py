"""Every command of nbtools in the documentation parses, and so does every option that docs/guides.md gives for one of a
guide's."""

import re
import shlex
from pathlib import Path

import pytest

from nbtools.__main__ import parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = {"Handwritten": "hwdb", "Captchas": "captcha", "Sign": "sign", "Segmentation": "segment"}
COMMAND = re.compile(r"(?:python -m|-m --) nbtools ((?:[^`\n\\#]|\\\n)+)")


def commands() -> list[str]:
    """What follows `python -m nbtools`, each once; not where a part is left out (`…`) or where one is only named."""
    texts = [found for page in PAGES for found in COMMAND.findall(page.read_text())]
    joined = dict.fromkeys(" ".join(text.replace("\\\n", " ").split()) for text in texts)
    named = re.compile(r"…|\b(TASK|COMMAND)\b|--help|^(?!gpus|cache)\w+$")
    return [text for text in joined if not named.search(text)]


def options() -> list[tuple[str, str]]:
    """(task, options) in the right column of each table of docs/guides.md."""
    found = []
    for part in (ROOT / "docs" / "guides.md").read_text().split("\n## ")[1:]:
        for line in re.findall(r"^\| `?.*? \| (.*) \|$", part, re.M):
            found += [(SECTIONS[part.split()[0].strip(",")], typed) for typed in re.findall(r"`(--[^`]+)`", line)]
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documentation_parses(command):
    words = shlex.split(command)
    assert parser(words).parse_args(words).act


def test_the_options_of_the_guides_tables_parse():
    assert len(options()) > 80
    for task, typed in options():
        words = ["train", task, "--data", "D", *shlex.split(typed)]
        assert parser(words).parse_args(words).act, typed


def test_each_of_the_five_guides_has_its_programs_in_the_tables():
    text = (ROOT / "docs" / "guides.md").read_text()
    for program in (
        *("preprocess_all_hwdb.py", "train_optimized.py", "main.py -m hctr", "check_gpu.py", "captcha_train.py"),
        *("captcha_train_a100_optimized.py", "captcha_train_a100_ultra_optimized.py", "captcha_test.py"),
        *("training/train.py", "preprocessing.validate_npz", "tools/train_amp.py", "ims_per_gpu"),
    ):
        assert f"| `{program}" in text or f"`python -m {program}" in text, program
