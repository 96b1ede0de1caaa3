"""Label images in all their forms become places in the class table, or a row that says why not."""

import numpy as np
import pytest
from masks import NAMES, H, W, checked, faults, ids, labelled, only, packed, photo, sample, saved
from PIL import Image

from nbtools.data import ERROR, WARNING
from nbtools.errors import PackError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


def palette_image(label: np.ndarray) -> Image.Image:
    image = Image.frombytes("P", label.shape[::-1], label.tobytes())
    image.putpalette([9, 9, 9, 200, 0, 0, 9, 9, 9])  # two ids of one colour: the index counts
    return image


@pytest.mark.parametrize(
    "label",
    [
        palette_image(ids()),
        Image.fromarray(ids().astype(np.uint16)),
        Image.fromarray(ids().astype(np.int32)),
        Image.fromarray(ids()).convert("L"),
    ],
    ids=["palette", "16 bits", "32 bits", "8 bits"],
)
def test_a_labels_value_is_its_id(tmp_path, label):
    name = "a.tif" if label.mode == "I" else "a.png"
    source = labelled(tmp_path / "raw", label, name)
    assert checked(source).rows == ()
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], ids())


@pytest.mark.parametrize("bits", [8, 16])
def test_unknown_ids_are_named_with_their_pixels_and_left_out(tmp_path, bits):
    label = ids().astype(np.uint8 if bits == 8 else np.uint16)
    label[0, :3], label[1, 0] = 7, 9 if bits == 8 else 1000
    source = labelled(tmp_path / "raw", label)
    row = only(checked(source, classes=NAMES))
    assert (row.severity, row.file, row.key) == (ERROR, "labels/a.png", "label")
    assert row.value == f"7 (3 pixels), {9 if bits == 8 else 1000} (1 pixel)"
    assert "classes=" in row.fix
    assert "ignore=" in row.fix
    made = packed(source, classes=NAMES)
    assert (made.names, made.bad.loc[0, "file"]) == (["images/b.png"], "images/a.png")
    assert made.bad.loc[0, "value"] == f"labels/a.png: {row.value}"
    assert packed(source, classes=NAMES, ignore=[7, 9, 1000]).manifest["bad"] == 0


def test_a_stray_16_bit_label_does_not_choose_the_classes(tmp_path):
    depth = np.arange(H * W, dtype=np.uint16).reshape(H, W)
    report = checked(labelled(tmp_path / "raw", depth))
    assert list(report.balance) == ["class 0", "class 1", "class 2"]
    assert "and 1718 more" in only(report).value


def test_coloured_labels_are_read_where_the_class_table_has_their_colours(tmp_path):
    table = np.array([(0, 0, 0), (250, 50, 83), (9, 200, 9)], np.uint8)
    folder = tmp_path / "raw"
    saved(folder / "images/a.png", photo())
    saved(folder / "labels/a.png", table[ids()])
    with pytest.raises(PackError, match="0 different ids"):
        packed(folder)
    [row] = faults(checked(folder, classes=NAMES))
    assert (row.rule, row.value) == ("colours are in the class table", "RGB, and the table has no colours")
    (folder / "labelmap.txt").write_text("ground:0,0,0::\nshirt:250,50,83::\nshoe:9,200,9::\n")
    made = packed(folder, val=0, test=0)
    np.testing.assert_array_equal(made.sample(0)["label"], ids())
    smooth = table[ids()]
    smooth[0, 0] = 8, 190, 9
    saved(folder / "labels/a.png", smooth)
    assert faults(checked(folder))[0].value == "(8, 190, 9) (1 pixel)"


def test_a_label_of_three_equal_channels_is_read_as_one(tmp_path):
    source = labelled(tmp_path / "raw", ids()[..., None].repeat(3, 2))
    assert only(checked(source)).severity == WARNING
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], ids())


@pytest.mark.parametrize("alpha", [255, 100])
def test_an_alpha_channel_of_a_label_gets_a_row_and_a_transparent_one_is_left_out(tmp_path, alpha):
    image = Image.merge("LA", [Image.fromarray(ids()), Image.new("L", (W, H), alpha)])
    row = only(checked(labelled(tmp_path / "raw", image)))
    assert (row.severity, row.file, "LA" in row.value) == (WARNING if alpha == 255 else ERROR, "labels/a.png", True)


def test_a_jpeg_is_no_label(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", ids(), "a.jpg")))
    assert (row.severity, row.value) == (ERROR, "JPEG")


def test_a_palette_of_the_classes_colours_is_read_by_them_however_it_is_numbered(tmp_path):
    source = labelled(tmp_path / "raw", ids())
    (source / "classes.txt").write_text("0,ground,0,0,0\n1,shirt,250,50,83\n2,shoe,9,200,9\n")
    image = palette_image(np.array([2, 0, 1], np.uint8)[ids()])
    image.putpalette([250, 50, 83, 9, 200, 9, 0, 0, 0])
    saved(source / "labels/a.png", image)
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], ids())
    image.putpalette([250, 50, 83, 9, 200, 9, 0, 0, 1])  # one colour is no class's: the index counts
    saved(source / "labels/a.png", image)
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], np.array([2, 0, 1], np.uint8)[ids()])


def test_a_label_with_one_transparent_pixel_is_left_out(tmp_path):
    alpha = np.full((H, W), 255, np.uint8)
    alpha[3, 4] = 254
    row = only(checked(labelled(tmp_path / "raw", np.dstack([ids()] * 3 + [alpha]))))
    assert (row.severity, row.rule) == (ERROR, "a label has no transparency")


def test_ids_below_0_are_told(tmp_path):
    label = ids().astype(np.int32)
    label[0, 0] = -1
    row = only(checked(labelled(tmp_path / "raw", label, "a.tif"), classes=NAMES))
    assert (row.rule, row.value) == ("ids are from 0 to 65535", "-1 to 2")


def test_a_label_of_three_channels_of_which_the_last_differs_is_no_grey_one(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", np.dstack([ids(), ids(), ids() + 1])), classes=NAMES))
    assert (row.severity, row.value) == (ERROR, "RGB, and the table has no colours")
