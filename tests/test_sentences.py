"""What holds for every sentence that a person may read: see sentences.py, which lists them."""

import re
from functools import cache
from pathlib import Path

import pytest
from sentences import PACKAGE, Sentence, sentences

RULES = {
    "two blanks": re.compile(r"\w  \w+ \w+ \w+ \w+(?!.*\n)"),
    "three dots for …": re.compile(r"\w\.\.\.(?!\))"),
    "a blank before punctuation": re.compile(r"\w [,;.!?](\s|$)"),
    "a percentage without its blank": re.compile(r"[\d}]%(?!\w)"),
    "a word for a rule that is a sign": re.compile(r"must be [<>≤≥]"),
    "a word of ours for what has a usual one": re.compile(r"\b(heed\w*|wish(es)?|gone on with|letters are drawn)\b"),
    "British and American English mixed": re.compile(r"\b(color|normalization|gray|optimiz(?!er)\w+)\b"),
    "a contraction": re.compile(r"\b(don't|isn't|won't|doesn't|aren't|you're|it'll)\b"),
}


@cache
def every() -> list[Sentence]:
    return list(sentences())


def test_the_list_has_the_sentences_of_every_kind():
    texts = {sentence.text for sentence in every()}
    assert len(texts) > 1000
    assert "stopped by {…} after step {…}; run it again to continue" in texts, "a message"
    assert "peak learning rate" in texts, "a setting's help"
    assert "train needs --data SOURCE; only --smoke-test needs none" in texts, "an error"
    assert "Pause after this step; the run stays in memory until Resume" in texts, "a tooltip"


@pytest.mark.parametrize("rule", RULES)
def test_every_sentence_keeps_the_rules_of_writing(rule):
    found = [sentence for sentence in every() if RULES[rule].search(sentence.text)]
    assert not found, "\n".join(f"{one.place}: {one.text}" for one in found)


def test_every_share_is_written_by_one_function():
    """`{share:.0%}` has no blank before its sign; a width in CSS has none."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if re.search(r"\{[^{}]+:\.\d%\}", line) and "width:" not in line:
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    assert not found, "use nbtools.table.percent:\n" + "\n".join(found)


def test_a_string_in_several_pieces_is_one_sentence(tmp_path, monkeypatch):
    lines = (
        '"""A docstring is none."""',
        'x = ("the {} of " "a row" + name)',
        'raise E(f"got {n!r:>3} of {k}, not more")',
    )
    Path(tmp_path, "nbtools").mkdir()
    Path(tmp_path, "nbtools", "a.py").write_text("\n".join(lines))
    monkeypatch.setattr("sentences.PACKAGE", tmp_path / "nbtools")
    assert list(sentences()) == [
        Sentence("nbtools/a.py:2", "the {} of a row{…}"),
        Sentence("nbtools/a.py:3", "got {…} of {…}, not more"),
    ]
