"""The folders of the guide for signs open as they are, and the options of its script do here what they say.

data/processed/{transformer_only,iv3_gru_only,test_15fps}/CLIP.npz, each with a labels.csv
"""

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.tasks import sign
from tests.sign.test_clips_become_a_pack import clip, listed, packed

pytestmark = pytest.mark.usefixtures("one_cache")
KEYPOINTS, FEATURES, VALIDATION = "transformer_only", "iv3_gru_only", "test_15fps"


@pytest.fixture(scope="module")
def processed(tmp_path_factory):
    """30 train clips: 10 in both folders, 10 with keypoints alone, 10 with features alone; 10 to validate."""
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("guide") / "data" / "processed"
    sign.demo(made, 40, glosses=6, categories=2, frames=(10, 16), features=True)
    rows: dict[str, list[str]] = {KEYPOINTS: [], FEATURES: [], VALIDATION: []}
    for split in ("train", "val"):
        for n, row in enumerate(csv.DictReader((made / split / "labels.csv").read_text().splitlines())):
            with np.load(made / split / f"{row['file']}.npz") as file:
                arrays = dict(file)
            both = (KEYPOINTS, FEATURES)
            for place in [VALIDATION] if split == "val" else both if n < 10 else [both[n % 2]]:
                without = {KEYPOINTS: ("X2048",), FEATURES: ("X", "mask"), VALIDATION: ()}[place]
                path = clip(folder / place / f"{row['file']}_how are you.npz", without=without, **arrays)
                rows[place].append(f"{path.stem},{row['gloss']},{row['cat']}")
    for place, lines in rows.items():
        listed(folder / place / "labels.csv", *lines)
    return folder


def fitted(pack: Pack, network: str, folder: Path) -> nb.Run:
    plan = sign.BASELINE.replace(network=network, epochs=1, batch_size=4, feed="auto")
    return nb.fit(sign, pack, plan, folder, receipt=False, progress=False)


def test_the_three_folders_are_one_pack_whose_third_validates(processed):
    report = nb.validate(sign, processed, progress=False)
    assert (report.about, report.errors) == ("50 clips, 50 with a label", 0)
    made = packed(processed)
    assert (made.splits, len(made.bad), len(made.classes)) == ({"train": 40, "val": 10, "test": 0}, 0, 6)
    assert {Path(made.names[i]).parent.name for i in made.ids("val")} == {VALIDATION}


@pytest.mark.parametrize(("network", "key", "column"), [("transformer", "X", "x"), ("gru", "X2048", "features")])
def test_each_network_trains_on_what_it_can_read_and_says_what_it_cannot(processed, network, key, column, tmp_path):
    made = packed(processed)
    run = fitted(made, network, tmp_path / "run")
    assert "this network reads 20 of 40 train, 10 of 10 val samples" in run.events
    assert [row["samples"] for row in run.history.of("epoch")] == [20]
    columns = {"epoch", "train_loss", "val_loss", "val_gloss_accuracy", "val_cat_accuracy", "lr", "epoch_time"}
    assert {*pd.read_csv(run.folder / "history.csv")} >= columns, "the script's, which calls an accuracy acc"
    part = run.readable(made)
    lengths = part.lengths(column, part.ids("train"))
    assert (len(lengths), lengths.min() > 0, part.card.bucket_by) == (20, True, column)
    assert part.raw[part.ids("train")[0]].keys() == {*part.columns, "id"}, "and decodes nothing else"
    assert run.card == part.card
    assert len(run.predict_pack(made, part.ids("train"))) == 20
    missing = sorted(set(made.ids("train")) - set(part.ids("train")))[0]
    with pytest.raises(PackError, match=rf"sample {missing} has nothing .*take ids from run\.readable\(pack\)"):
        run.predict_pack(made, [missing])
    with pytest.raises(PackError, match=f"must have {key}"):
        run.predict(processed / made.names[missing])


def test_the_advice_is_for_the_clips_that_are_read(processed):
    packs = packed(processed), packed(processed, kp_key=None)
    assert nb.advise(sign, packs[0], measure=False).plan.given() == {}, "its recipe is advice: a GPU has another"
    advice, other = (nb.advise(sign, pack, measure=False).plan.to_dict() for pack in packs)
    assert (advice["network"], advice["batch_size"]) == ("transformer", 16)
    assert (other["network"], other["batch_size"]) == ("gru", 20), "all that there are"
    assert sign.with_network(sign.Plan(**advice), packs[0], "gru").batch_size == 20


@pytest.mark.parametrize(("folder", "other"), [(KEYPOINTS, FEATURES), (FEATURES, KEYPOINTS)])
def test_a_folder_alone_validates_packs_and_trains_its_network(processed, folder, other, tmp_path, capsys):
    assert main(["validate", "sign", str(processed / folder)]) == 0
    assert "20 clips, 20 with a label: 0 errors" in capsys.readouterr().out
    assert main(["validate", "sign", "--require-x2048", str(processed / folder)]) == (folder == KEYPOINTS)
    made = packed(processed / folder, val=5, test=0)
    assert made.splits == {"train": 15, "val": 5, "test": 0}
    run = fitted(made, "auto", tmp_path / "run")
    assert [row["samples"] for row in run.history.of("epoch")] == [15]
    new = run.pack(processed / VALIDATION, test=1.0, progress=False)
    assert nb.evaluate(run, new).keys() == {"loss", "gloss_accuracy", "cat_accuracy", "top5"}
    with pytest.raises(PackError, match="a clip must have X"):
        nb.evaluate(run, run.pack(processed / other, test=1.0, progress=False))
