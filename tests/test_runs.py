"""What a trained run shows in tables: its epochs, its evaluation, and the folder of runs that it lies in."""

import re
from html import unescape

import pandas as pd
import pytest
import toy
from acting import QUIET
from IPython.lib.pretty import pretty

import nbtools as nb
from nbtools.frame import Frame
from nbtools.table import number


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def run(pack, tmp_path_factory):
    """Four epochs, of which every second one is evaluated."""
    plan = toy.PLAN.replace(epochs=4, eval_every=2)
    return nb.fit(toy, pack, plan, tmp_path_factory.mktemp("runs") / "every second", **QUIET)


def test_a_summary_shows_units_and_dashes_and_no_column_that_holds_nothing(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summary = run.summary()
    assert summary["val_loss"].isna().tolist() == [True, False, True, False]
    shown = Frame(summary.assign(gpu_power=float("nan")))
    headers, rows = shown.shown()
    assert headers[:2] == ["epoch", "train loss"]
    assert "gpu power" not in headers
    cells = dict(zip(headers, zip(*rows, strict=True), strict=True))
    assert cells["val loss"] == (None, number(summary["val_loss"][2]), None, number(summary["val_loss"][4]))
    assert all(re.fullmatch(r"\d+ %", cell) for cell in cells["waiting for data"])
    assert all(re.fullmatch(r"[\d.]+ [MG]B", cell) for cell in cells["memory"])
    assert "nan" not in f"{shown}{shown._repr_html_()}".lower()
    assert type(summary.round(2)) is pd.DataFrame, "what is computed from it shows as pandas does"


def test_a_long_summary_shows_its_first_and_last_rows():
    frame = Frame({"train_loss": [0.5] * 1000}, index=pd.Index(range(1, 1001), name="epoch"))
    rows = [row[0] for row in frame.shown()[1]]
    assert [*rows[:2], rows[10], rows[-1], len(rows)] == ["1", "2", "…", "1,000", 41]


def test_the_headers_of_a_summary_explain_columns_and_metrics(run):
    explained = toy.with_(MEANINGS={"accuracy": 'right "as a whole" & <b>'})
    page = str(nb.Run.open(run.folder, explained).summary()._repr_html_())
    titles = {header: unescape(title) for title, header in re.findall(r'title="([^"]*)">([^<]*)</th>', page)}
    assert titles["val accuracy"] == 'right "as a whole" & <b>'
    assert "next batch" in titles["waiting for data"]


def test_an_evaluation_is_a_dict_that_shows_as_a_table_with_its_metrics_explained(run, pack):
    scores = nb.evaluate(run, pack)
    assert dict(scores) == scores
    assert isinstance(scores, dict)
    assert set(scores) == {"loss", "accuracy"}
    for shown in (pretty(scores), scores._repr_html_()):
        for part in (f"{pack.splits['test']} samples of the test split", number(scores["loss"]), "training minimises"):
            assert part in shown
