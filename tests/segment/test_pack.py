"""Images with labels become a pack of one size with distances to the boundary; a prediction becomes a file again."""

import json
import sys

import numpy as np
import pytest
from acting import refused
from masks import NAMES, H, W, checked, corpus, ids, labelled, only, packed, pair, photo, sample, saved, sole
from PIL import Image

from nbtools.__main__ import main
from nbtools.errors import MissingExtra, PackError
from nbtools.tasks import segment
from nbtools.tasks.common.rules import ERROR

pytestmark = pytest.mark.usefixtures("own_cache")


def test_images_and_labels_of_one_size_are_packed_unchanged(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    columns = {name: (column.dtype, column.shape) for name, column in made.columns.items()}
    assert columns == {"image": ("|u1", (H, W, 3)), "label": ("|u1", (H, W)), "distance": ("|u1", (H, W))}
    assert (made.splits, made.classes) == ({"train": 2, "val": 1, "test": 1}, ["class 0", "class 1", "class 2"])
    for k, split in enumerate(("train", "train", "val", "test")):
        one = sample(made, f"images/{split}/{k}.png")
        np.testing.assert_array_equal(one["image"], photo(k))
        np.testing.assert_array_equal(one["label"], ids(k))


def test_distances_are_those_to_the_nearest_pixel_next_to_another_class(monkeypatch):
    label = ids(3)
    label[:, -9:] = 255
    edge = np.zeros((H, W), bool)
    for y, x in np.ndindex(H, W):
        for v, u in ((y + 1, x), (y, x + 1)):
            if v < H and u < W and 255 not in (label[y, x], label[v, u]) and label[y, x] != label[v, u]:
                edge[y, x] = edge[v, u] = True
    marked = np.argwhere(edge)
    expected = np.array([[np.hypot(*(marked - (y, x)).T).min() for x in range(W)] for y in range(H)])
    np.testing.assert_array_equal(segment.distance_map(label), np.minimum(np.rint(8 * expected), 255))
    assert (segment.distance_map(np.zeros((H, W), np.uint8)) == 255).all(), "no boundary"
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    refused(MissingExtra, "need scipy: pip install scipy, or the extra segment", segment.distance_map, label)


def test_images_of_many_sizes_or_a_tiny_one_are_scaled_to_fit_as_is_said_and_the_rest_is_ignored(tmp_path, capsys):
    for name, height, width in (("a", 60, 120), ("b", 120, 60)):
        saved(tmp_path / "raw/images" / f"{name}.png", np.full((height, width, 3), 200, np.uint8))
        halves = np.arange(height * width, dtype=np.uint8).reshape(height, width) % 2
        saved(tmp_path / "raw/labels" / f"{name}.png", halves)
    for source in (tmp_path / "raw", pair(tmp_path / "tiny", photo(0, 20, 24), ids(0, 20, 24))):
        assert packed(source, progress=True, val=0, test=0).options["size"] == [384, 384]
        assert "images are scaled to 384 × 384 pixels" in capsys.readouterr().err
    made = packed(tmp_path / "raw", size=40)
    inside = np.zeros((40, 40), bool)
    inside[10:30] = True
    for name, mask in (("a", inside), ("b", inside.T)):
        one = sample(made, f"images/{name}.png")
        np.testing.assert_array_equal(one["image"], np.where(mask[..., None], 200, 0).repeat(3, 2))
        np.testing.assert_array_equal(one["label"] == 255, ~mask)


def test_images_are_reduced_by_area_and_labels_by_their_nearest_pixel(tmp_path):
    one = sole(pair(tmp_path / "raw", photo(0, 64, 96), ids(0, 64, 96)), size=(32, 48))
    mean = photo(0, 64, 96).reshape(32, 2, 48, 2, 3).mean((1, 3))
    assert np.abs(one["image"] - mean).max() <= 1
    np.testing.assert_array_equal(one["label"], ids(0, 64, 96)[1::2, 1::2])
    smooth = Image.fromarray(photo(0, 12, 16)).resize((1600, 1200), Image.Resampling.BICUBIC)
    large = pair(tmp_path / "large", smooth, ids(0, 1200, 1600), "a.jpg", quality=95)  # decoded small
    exact = np.asarray(smooth.resize((100, 75), Image.Resampling.BOX))
    assert np.abs(sole(large, size=(75, 100))["image"].astype(int) - exact).mean() < 2


def test_four_channels_keep_transparency_and_three_lie_on_white(tmp_path):
    clear = photo(0, channels=4)
    clear[..., 3] = np.where(np.arange(W) < W // 2, 0, 255)
    source = pair(tmp_path / "raw", clear, ids())
    np.testing.assert_array_equal(sole(source, channels=4)["image"], clear)
    np.testing.assert_array_equal(sole(source, channels=3)["image"], np.where(clear[..., 3:] == 0, 255, clear[..., :3]))


NO_IDS = "a mask must have one channel of ids, stored without loss"
DAMAGED = {  # a file of the pair → its rule
    "empty label": ("labels/a.png", b"", "the file must be a whole image"),
    "empty image": ("images/a.png", b"", "the file must be a whole image"),
    "16 bits": ("images/a.png", np.zeros((H, W), np.uint16), "an image must have 8 bits per channel"),
    "another size": ("labels/a.png", ids(0, 40, 50), "a label must have the size of its image"),
    "colours": ("labels/a.png", np.dstack([ids(), ids(), ids() + 1]), NO_IDS),
    "transparent": ("labels/a.png", np.dstack([ids(), np.full((H, W), 100, np.uint8)]), NO_IDS),
    "JPEG": ("labels/a.jpg", ids(), NO_IDS),
    "floats": ("labels/a.tif", ids().astype(np.float32), NO_IDS),
}


@pytest.mark.parametrize(("name", "content", "rule"), DAMAGED.values(), ids=DAMAGED)
def test_what_leaves_a_sample_out_is_one_row_with_what_to_do_and_alone_the_error(tmp_path, name, content, rule):
    source = labelled(tmp_path / "raw", ids())
    (source / name).with_suffix(".png").unlink()
    saved(source / name, content)
    row = only(checked(source, classes=NAMES))
    assert (row.severity, row.file, row.rule, bool(row.fix)) == (ERROR, "images/a.png", rule, True)
    assert row.value.startswith(name) == name.startswith("labels")
    made = packed(source, classes=NAMES)
    assert made.names == ["images/b.png"]
    assert list(made.bad.iloc[0]) == list(row[:4])
    for good in source.glob("*/b.png"):
        good.unlink()
    refused(PackError, rf"a\.\w+: {rule}, got .*; ", packed, source)


def test_predictions_for_padded_images_are_cropped_back_to_them_and_overwrite_no_file(tmp_path):
    wide = packed(segment.demo(tmp_path / "raw", 7, size=(48, 96)), size=40)
    answer = np.zeros((40, 40), np.uint8)
    answer[10:30, :20] = 1  # the left half of where the image lies
    saved(tmp_path / "1.png", Image.new("RGB", (200, 100)))
    with Image.open(segment.save(answer, tmp_path / "1.png", tmp_path / "masks", wide)) as image:
        np.testing.assert_array_equal(np.asarray(image), (np.arange(200) < 100)[None].repeat(100, 0))
        assert (image.getpalette() or [])[:6] == [0, 0, 0, 86, 180, 233]
    with pytest.raises(PackError, match=r"1\.png is there already; choose another folder"):
        segment.save(answer, tmp_path / "1.png", tmp_path, wide)
    wide.options["ids"] = [3, 200, 9]  # of the masks that it learned from
    with Image.open(segment.save(answer, tmp_path / "1.png", tmp_path / "ids", wide)) as image:
        assert ({*np.asarray(image).flat}, (image.getpalette() or [])[600:]) == ({3, 200}, [86, 180, 233])


def test_demo_train_evaluate_predict_in_a_row(tmp_path, capsys):
    raw, run = tmp_path / "raw", tmp_path / "run"
    assert main(["demo", "segment", str(raw), "--count", "21", "--size", "96,72"]) == 0
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
    assert main(["predict", str(run), str(raw / "images"), "--into", str(made := tmp_path / "made")]) == 0
    assert len([*made.glob("*/*.png")]) == len([*raw.glob("images/*/*.jpg")]) == 21, "in the subfolders of the images"
