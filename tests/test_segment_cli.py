"""Segmentation from the terminal: data to class maps on disk, with the options that are its own."""

import json

import numpy as np
import pytest
from PIL import Image

import nbtools as nb
from nbtools.__main__ import main
from nbtools.errors import PackError
from nbtools.tasks import segment

OPTIONS = ["--size", "64"]
pytestmark = pytest.mark.usefixtures("own_cache")


def test_demo_validate_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "run"
    assert main(["demo", "segment", str(raw), "--count", "21", "--size", "96,72"]) == 0
    assert main(["validate", "segment", str(raw), *OPTIONS]) == 0
    assert "0 errors" in capsys.readouterr().out
    assert nb.validate(segment, raw, size=64).ok
    data = ["--data", str(raw), "--run", str(run), *OPTIONS]
    train = ["--epochs", "1", "--batch-size", "5", "--no-receipt", "--eval-scales", "0.5,1", "--eval-samples", "2"]
    assert main(["train", "segment", *data, *train]) == 0
    assert json.loads((run / "plan.json").read_text())["eval_scales"] == [0.5, 1.0]
    capsys.readouterr()
    found = {}
    for name, more in {"as planned": [], "flipped": ["--eval-flip"], "one": ["--eval-scales", "1"]}.items():
        assert main(["evaluate", "segment", *data, "--split", "val", *more]) == 0
        found[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len({values["loss"] for values in found.values()}) == 3
    assert {"miou", "pixel_accuracy", "boundary_f"} <= found["one"].keys()
    files = sorted(map(str, (raw / "images" / "test").glob("*.jpg")))[:2]
    assert main(["predict", str(run), *files, "--into", str(tmp_path / "masks")]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [file for file, _ in lines] == files
    for _, path in lines:
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((72, 96), "P")
            assert set(np.unique(np.asarray(image))) <= {0, 1, 2}


def test_ids_and_names_from_the_terminal_are_those_of_the_class_table(tmp_path, capsys):
    raw = segment.demo(tmp_path / "raw", 7, size=(48, 48))
    (raw / "classes.txt").unlink()
    (raw / "names.txt").write_text("ground\nstripes\ndots\n")
    one = ["pack", "segment", str(raw)]
    for options, table in (
        (["--ignore", "1"], "2: class 0, class 2"),
        (["--classes", "a,b,c", "--ignore", "b"], "2: a, c"),
        (["--classes", str(raw / "names.txt"), "--ignore", "dots"], "2: ground, stripes"),
    ):
        assert main([*one, *options]) == 0
        assert table in capsys.readouterr().out
    for wrong in (["--classes", "sky"], ["--classes", "7"], ["--ignore", "1.5"], ["--ignore", "void"]):
        assert main([*one, *wrong]) == 1
        assert capsys.readouterr().err.startswith(f"nbtools: {wrong[0][2:]}")


def test_predictions_for_padded_images_are_cropped_back_to_them_and_overwrite_no_other_file(tmp_path):
    wide = segment.pack(segment.demo(tmp_path / "raw", 7, size=(48, 96)), size=40, progress=False)
    answer = np.zeros((40, 40), np.uint8)
    answer[10:30, :20] = 1  # the left half of where the image lies
    for name in ("a/1.png", "b/1.jpg"):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (200, 100)).save(tmp_path / name)
    made = segment.save(answer + 1, tmp_path / "a/1.png", tmp_path / "masks", wide)
    assert segment.save(answer, tmp_path / "a/1.png", tmp_path / "masks", wide) == made
    with Image.open(made) as found:
        np.testing.assert_array_equal(np.asarray(found), (np.arange(200) < 100)[None].repeat(100, 0))
        assert (found.getpalette() or [])[3:6] == wide.options["colours"][1]
    for picture, folder in (("b/1.jpg", "masks"), ("a/1.png", "a"), ("b/1.jpg", "a")):
        before = (tmp_path / folder / "1.png").read_bytes()
        with pytest.raises(PackError, match=r"1\.png is not a prediction for .*choose another folder"):
            segment.save(answer, tmp_path / picture, tmp_path / folder, wide)
        assert (tmp_path / folder / "1.png").read_bytes() == before
    (tmp_path / "empty.jpg").write_bytes(b"")
    with pytest.raises(PackError, match="got no image"):
        segment.save(answer, tmp_path / "empty.jpg", tmp_path, wide)
