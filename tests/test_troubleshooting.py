"""docs/troubleshooting.md: every entry that an error names is a heading of it, with something to do."""

import re
from pathlib import Path

import nbtools as nb
from nbtools.errors import NbtoolsError, TrainError
from nbtools.tasks import captcha, hwdb, segment, sign

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", TEXT, re.M))


def test_every_entry_that_the_code_names_is_a_heading():
    named = set()
    for path in (ROOT / "nbtools").rglob("*.py"):
        named |= set(re.findall(r'\bentry ?= ?"([^"]+)"', path.read_text()))
    assert len(named) > 6
    assert named <= SECTIONS.keys()


def test_a_message_ends_with_its_entry():
    assert str(TrainError("stop; go on")) == "stop; go on"
    for text in ("Done", "Done."):
        assert str(TrainError(text, entry="NaN")) == "Done. See “NaN” in docs/troubleshooting.md"


def test_every_option_and_preset_of_the_page_is_one():
    plans = [task.PLAN for task in (captcha, hwdb, segment, sign)]
    for name, value in re.findall(r"(?<=[` ])--([a-z][\w-]*) ?([\w.-]*)", TEXT):
        field = name.replace("-", "_")
        fitting = [plan for plan in plans if hasattr(plan, field)]
        others = {"data", "why", "keep", "processes", "label", "kp_key", "feature_key", "smoke_test", "measured"}
        assert fitting or field in others, name
        assert not value or not fitting or any(takes(plan, field, value) for plan in fitting), name
    presets = {name for task in (captcha, hwdb, segment, sign) for name in task.PRESETS}
    assert set(re.findall(r'\["([\w.-]+)"\]', TEXT)) <= presets


def takes(plan: nb.Plan, field: str, value: str) -> bool:
    try:
        return bool(plan.turn(**{field: plan.parse(field, value)}))
    except NbtoolsError:
        return False
