"""From demo images to class maps on disk, in a terminal; demo images are the same from the same seed."""

import json

import numpy as np
import pytest
from PIL import Image

from nbtools.__main__ import main

pytestmark = pytest.mark.usefixtures("own_cache")


def test_demo_validate_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "run"
    assert main(["demo", "segment", str(raw), "--count", "21", "--size", "96,72"]) == 0
    assert main(["validate", "segment", str(raw), "--size", "64"]) == 0
    assert "0 errors and 0 warnings" in capsys.readouterr().out
    data = ["--data", str(raw), "--run", str(run), "--size", "64"]
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
