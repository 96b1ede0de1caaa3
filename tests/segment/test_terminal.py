"""From demo images to class maps on disk, in a terminal; demo images are the same from the same seed."""

import json

import numpy as np
import pytest
from PIL import Image

from nbtools.__main__ import main
from nbtools.tasks import segment

OPTIONS = ["--size", "64"]
pytestmark = pytest.mark.usefixtures("own_cache")


def test_demo_validate_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "run"
    assert main(["demo", "segment", str(raw), "--count", "21", "--size", "96,72"]) == 0
    assert main(["validate", "segment", str(raw), *OPTIONS]) == 0
    assert "0 errors and 0 warnings" in capsys.readouterr().out
    data = ["--data", str(raw), "--run", str(run), *OPTIONS]
    train = ["--epochs", "1", "--batch-size", "5", "--no-receipt", "--eval-scales", "0.5,1", "--eval-samples", "2"]
    assert main(["train", "segment", *data, *train]) == 0
    assert json.loads((run / "plan.json").read_text())["eval_scales"] == [0.5, 1.0]
    capsys.readouterr()
    values = []
    for more in ([], ["--eval-flip"], ["--eval-scales", "1"]):
        assert main(["evaluate", "segment", *data, "--split", "val", *more]) == 0
        values.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert len({each["loss"] for each in values}) == 3
    files = sorted(map(str, (raw / "images" / "test").glob("*.jpg")))[:2]
    assert main(["predict", str(run), *files, "--into", str(tmp_path / "masks")]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [file for file, _ in lines] == files
    for _, path in lines:
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((72, 96), "P")
            assert set(np.unique(np.asarray(image))) <= {0, 1, 2}


def test_names_and_ids_of_classes_are_options(tmp_path, capsys):
    raw = str(segment.demo(tmp_path / "raw", 7, size=(48, 48)))
    assert main(["pack", "segment", raw, "--classes", "a,b,c", "--ignore", "1"]) == 0
    assert "2: a, c" in capsys.readouterr().out
    for wrong in (["--classes", "sky"], ["--ignore", "void"]):
        assert main(["pack", "segment", raw, *wrong]) == 1
        assert capsys.readouterr().err.startswith(f"nbtools: {wrong[0][2:]}")


def test_the_same_seed_gives_the_same_bytes_and_few_images_are_the_first_of_many(tmp_path):
    few, again, most, other = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("0*.*")}
        for folder in (
            segment.demo(tmp_path / name, count, size=(64, 48), seed=seed)
            for name, count, seed in (("a", 9, 0), ("b", 9, 0), ("c", 14, 0), ("d", 9, 1))
        )
    )
    assert few == again
    assert len(few) == 18
    assert all(most[name] == few[name] != other[name] for name in few)
