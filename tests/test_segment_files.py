"""Folders, lists and files of segmentation: what belongs together, and one row for each that cannot be used."""

import numpy as np
import pytest
from masks import NAMES, H, W, checked, corpus, faults, ids, labelled, only, packed, photo, sample, saved
from PIL import Image

from nbtools.data import ERROR, WARNING
from nbtools.errors import PackError
from nbtools.tasks import segment


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/train/a.jpg", "labels/train/a.png"),
        ("train/images/a.jpg", "train/masks/a.png"),
        ("x/images/sub/a.bmp", "x/masks/sub/a.png"),
        ("train/a.png", "trainannot/a.png"),
        ("a.jpg", "labels/a_mask.png"),
        ("JPEGImages/a.jpg", "SegmentationClass/a.png"),
        ("train_images/a.jpg", "train_masks/a.gif"),
        ("train/a.jpg", "train/a_mask.png"),
        ("a.jpg", "a-label.png"),
        ("train/a.png", "train_labels/a_L.png"),
        ("image/a.jpg", "segmentation/a.png"),
        ("Images/a.jpg", "GroundTruth/a.png"),
        ("JPEGImages/a.jpg", "SegmentationClassPNG/a.png"),
    ],
)
def test_layouts_pair_images_with_labels(tmp_path, image, label):
    saved(tmp_path / "raw" / image, photo())
    saved(tmp_path / "raw" / label, ids())
    made = packed(tmp_path / "raw", val=0, test=0)
    assert (made.names, made.splits["train"]) == ([image], 1)
    np.testing.assert_array_equal(made.sample(0)["label"], ids())


@pytest.mark.parametrize(
    "way", ["val/{}/a.png", "{}/val/a.png", "{}/validation/x/a.png", "val_{}/a.png", "{}_val/a.png"]
)
def test_a_folder_above_below_or_beside_says_the_split(tmp_path, way):
    saved(tmp_path / "raw" / way.format("images"), photo())
    saved(tmp_path / "raw" / way.format("masks"), ids())
    assert packed(tmp_path / "raw").splits == {"train": 0, "val": 1, "test": 0}


OTHER_SIZE = "40 × 50 pixels (height × width), the image has 36 × 48 pixels (height × width)"


def test_a_marked_name_without_its_image_is_an_image(tmp_path):
    source = corpus(tmp_path / "raw")
    saved(source / "images/train/9_mask.png", photo())
    row = only(checked(source))
    assert (row.file, row.rule) == ("images/train/9_mask.png", "an image has a label")


@pytest.mark.parametrize(
    "lines",
    [
        "p/a.png,q/a.png\n",
        "\ufeffimage,label\r\np/a.png , q/a.png\r\n",
        '"p/a.png", "q/a.png"\n',
        "p/a.png q/a.png\n",
        "/SegNet/CamVid/p/a.png /SegNet/CamVid/q/a.png\n",
    ],
)
def test_lists_of_images_and_labels_are_read(tmp_path, lines):
    folder = tmp_path / "raw"
    saved(folder / "p" / "a.png", photo())
    saved(folder / "q" / "a.png", ids())
    (folder / "val.txt").write_text(lines, encoding="utf-8", newline="")
    made = packed(folder)
    assert (made.names, made.splits["val"]) == (["p/a.png"], 1)
    assert checked(folder).rows == ()


def test_lists_of_stems_give_the_splits_of_images_whose_labels_have_their_names(tmp_path):
    folder = tmp_path / "raw"
    for name in "abc":
        saved(folder / "JPEGImages" / f"{name}.jpg", photo())
        saved(folder / "SegmentationClass" / f"{name}.png", ids())
    for split, lines in (("train", "a\nb.jpg\n"), ("val", "c\n"), ("trainval", "nothing\n")):
        path = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    assert packed(folder).splits == {"train": 2, "val": 1, "test": 0}
    assert checked(folder).rows == ()
    path.with_name("val.txt").write_text("c\nd\na\n")
    found = {row.file.rpartition("/")[2]: row.value for row in faults(checked(folder))}
    assert found == {"val.txt:2": "d", "val.txt:3": "JPEGImages/a.jpg: val, before: train"}


def test_a_list_of_pairs_gives_the_splits_also_where_labels_are_found_by_their_names(tmp_path):
    folder = tmp_path / "raw"
    for k, name in enumerate(("a", "b")):
        saved(folder / "images" / f"{name}.png", photo(k))
        saved(folder / "labels" / f"{name}.png", ids(k))
        saved(folder / "better" / f"{name}.png", ids(k + 5))
    (folder / "train.txt").write_text("images/a.png,better/a.png\n")
    (folder / "val.txt").write_text("images/b.png,better/b.png\n")
    listed, named = packed(folder), packed(folder, labels="images")
    for made, first in ((listed, 5), (named, 0)):
        assert made.splits == {"train": 1, "val": 1, "test": 0}
        for k, name in enumerate(("a", "b")):
            np.testing.assert_array_equal(sample(made, f"images/{name}.png")["label"], ids(k + first))
    assert not faults(checked(folder))


def test_an_image_whose_name_could_be_a_heading_is_read_below_the_first_line(tmp_path):
    folder = tmp_path / "raw"
    for name in ("image", "file"):
        saved(folder / "images" / f"{name}.png", photo())
        saved(folder / "labels" / f"{name}.png", ids())
    (folder / "test.txt").write_text("image\nfile\nimage\n")
    assert packed(folder, val=0, test=0).splits == {"train": 0, "val": 0, "test": 2}


def test_ways_of_a_list_lead_from_any_folder_above_it(tmp_path):
    voc = tmp_path / "raw" / "VOC2012"
    saved(voc / "JPEGImages" / "a.jpg", photo())
    saved(voc / "SegmentationClassAug" / "a.png", ids())
    (voc / "ImageSets" / "Segmentation").mkdir(parents=True)
    (voc / "ImageSets" / "Segmentation" / "val.txt").write_text("/JPEGImages/a.jpg /SegmentationClassAug/a.png\n")
    made = packed(voc.parent)
    assert (made.names, made.splits["val"]) == (["VOC2012/JPEGImages/a.jpg"], 1)


def test_a_way_out_of_the_source_is_not_followed(tmp_path):
    saved(tmp_path / "secret.png", ids())
    saved(tmp_path / "raw" / "a.png", photo())
    (tmp_path / "raw" / "train.txt").write_text("a.png,../secret.png\n")
    with pytest.raises(PackError, match=r"the label of a line is there, got \.\./secret\.png"):
        packed(tmp_path / "raw")


def test_without_splits_of_its_own_a_source_is_split_by_names(tmp_path):
    for k in range(20):
        saved(tmp_path / "raw" / "images" / f"{k}.png", photo(k, 32, 32))
        saved(tmp_path / "raw" / "labels" / f"{k}.png", ids(k, 32, 32))
    assert packed(tmp_path / "raw", val=4, test=2).splits == {"train": 14, "val": 4, "test": 2}


def test_a_label_of_another_size_is_told_with_both(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", ids(0, 40, 50))))
    assert (row.file, row.value) == ("labels/a.png", OTHER_SIZE)


def test_a_label_without_a_class_anywhere_is_left_out(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", np.full((H, W), 255, np.uint8))))
    assert (row.severity, row.rule) == (ERROR, "some pixel has a class")


def test_an_empty_label_file_is_told(tmp_path):
    source = labelled(tmp_path / "raw", ids())
    (source / "labels/a.png").write_bytes(b"")
    row = only(checked(source))
    assert (row.severity, row.file, row.value) == (ERROR, "labels/a.png", "an empty file")


def test_a_truncated_jpeg_is_told_and_the_others_are_packed(tmp_path):
    source = corpus(tmp_path / "raw")
    whole = saved(source / "images/train/9.jpg", photo())
    saved(source / "labels/train/9.png", ids())
    whole.write_bytes(whole.read_bytes()[:-400])
    row = only(checked(source))
    assert (row.severity, row.file, row.key) == (ERROR, "images/train/9.jpg", "image")
    assert "truncated" in row.value
    made = packed(source)
    assert (len(made), made.bad.file.tolist()) == (4, ["images/train/9.jpg"])


def test_an_image_of_16_bits_is_told(tmp_path):
    source = labelled(tmp_path / "raw", ids())
    saved(source / "images/a.png", np.zeros((H, W), np.uint16))
    assert only(checked(source)).rule == "an image has 8 bits a channel"


def test_images_without_labels_labels_without_images_and_double_names_are_told(tmp_path):
    source = corpus(tmp_path / "raw")
    saved(source / "images/train/alone.png", photo())
    saved(source / "labels/train/lone.png", ids())
    saved(source / "images/train/0.jpg", photo())
    report = checked(source)
    assert {(row.severity, row.file, row.key) for row in report.rows} == {
        (ERROR, "images/train/alone.png", "label"),
        (ERROR, "labels/train/lone.png", "image"),
        (ERROR, "images/train/0.png", "image"),  # beside 0.jpg
    }
    assert (report.ok, report.errors) == (False, 3)
    assert packed(source).manifest["bad"] == 3


def test_lines_of_a_list_that_cannot_be_used_are_told_with_their_numbers(tmp_path):
    folder = tmp_path / "raw"
    for name in ("a", "b"):
        saved(folder / "p" / f"{name}.png", photo())
        saved(folder / "q" / f"{name}.png", ids())
    (folder / "train.txt").write_text(
        "p/a.png,q/a.png\np/b.png\np/b.png,q/none.png\np/a.png,q/b.png\np/a.png,q/a.png\n"
    )
    found = {row.file: (row.severity, row.rule) for row in checked(folder).rows}
    assert found == {
        "train.txt:2": (ERROR, "a line is image,label, or names an image whose label has its name"),
        "train.txt:3": (ERROR, "the label of a line is there"),
        "train.txt:4": (ERROR, "an image has one label and one split"),
        "train.txt:5": (WARNING, "an image is named once"),
        "p/b.png": (ERROR, "an image has a label"),
        "q/b.png": (ERROR, "an image has a label"),
    }
    assert set(packed(folder).bad.file) == {file for file, (severity, _) in found.items() if severity == ERROR}


def test_a_folder_without_images_or_without_labels_is_refused(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.doc").write_text("x")
    with pytest.raises(PackError, match=r"no images .*a\.doc"):
        packed(tmp_path / "none")
    saved(tmp_path / "raw" / "a.png", photo())
    with pytest.raises(PackError, match=r"1 image and no label: .*train\.txt"):
        packed(tmp_path / "raw")


def test_a_size_is_height_first_as_it_was_given_and_says_so(tmp_path):
    raw = segment.demo(tmp_path / "raw", count=7, size=(48, 64))
    report = segment.validate(raw, size=(40, 56), progress=False)
    assert "packed at 40 × 56 pixels (height × width)" in report.summary
    assert segment.pack(raw, size=(40, 56), progress=False).arrays["image"].shape[1:3] == (40, 56)


def test_the_summary_says_the_balance_and_the_ids(tmp_path):
    report = checked(corpus(tmp_path / "raw"))
    every = np.concatenate([ids(k).ravel() for k in range(4)])
    assert report.ids == {k: int((every == k).sum()) for k in range(3)}
    assert report.balance["class 1"] == pytest.approx((every == 1).mean())
    assert f"class 1 {(every == 1).mean():.1%}" in report.summary
    assert (report.ok, report.images, report.labelled) == (True, 4, 4)
    without = checked(corpus(tmp_path / "raw"), ignore=[2])
    assert without.balance["class 1"] == pytest.approx((every == 1).sum() / (every != 2).sum())
    assert f"ignored {(every == 2).mean():.1%}" in without.summary


def test_pascal_vocs_lists_split_its_classes_and_what_is_of_other_tasks_is_left_alone(tmp_path):
    voc = tmp_path / "raw" / "VOC2012"
    for name in "abcd":
        saved(voc / "JPEGImages" / f"{name}.jpg", photo())
    for name in "abc":
        saved(voc / "SegmentationClass" / f"{name}.png", ids())
        saved(voc / "SegmentationObject" / f"{name}.png", ids())
    for name, lines in {"Segmentation/train": "a\nb\n", "Segmentation/val": "c\n", "Main/train": "a\nd\n"}.items():
        path = voc / "ImageSets" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    (voc / "Annotations").mkdir()
    (voc / "Annotations" / "a.xml").write_text("<annotation><object/></annotation>")
    assert packed(voc.parent).splits == {"train": 2, "val": 1, "test": 0}
    row = only(checked(voc.parent))
    assert (row.file, row.rule) == ("VOC2012/JPEGImages/d.jpg", "an image has a label")


@pytest.mark.parametrize("trained", [False, True])
def test_cityscapes_labels_are_its_train_ids_where_it_has_them(tmp_path, trained):
    folder = tmp_path / "raw"
    for split, city in (("train", "bonn"), ("val", "ulm")):
        way, stem = f"{split}/{city}", f"{city}_000001_000019"
        saved(folder / "leftImg8bit" / way / f"{stem}_leftImg8bit.png", photo())
        saved(folder / "gtFine" / way / f"{stem}_gtFine_labelIds.png", ids() + 3)
        saved(folder / "gtFine" / way / f"{stem}_gtFine_color.png", photo())
        saved(folder / "gtFine" / way / f"{stem}_gtFine_instanceIds.png", ids().astype(np.uint16) * 1000)
        if trained:
            saved(folder / "gtFine" / way / f"{stem}_gtFine_labelTrainIds.png", ids())
    made = packed(folder)
    assert (made.splits, made.options["ids"]) == (
        {"train": 1, "val": 1, "test": 0},
        [0, 1, 2] if trained else [3, 4, 5],
    )
    assert checked(folder).rows == ()


def test_two_files_of_one_name_beside_each_other_are_told_where_labels_belong(tmp_path):
    saved(tmp_path / "raw/a.jpg", photo())
    saved(tmp_path / "raw/a.png", ids())
    with pytest.raises(PackError, match=r"a\.png: images differ .*got a\.jpg beside it; .*labels lie in labels/"):
        packed(tmp_path / "raw")


def test_a_list_as_a_powershell_writes_it_is_told_and_not_passed_over(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "val.txt").write_text("images/train/0.png,labels/train/0.png\r\n", encoding="utf-16")
    [row] = checked(source).rows
    assert (row.severity, row.file, row.rule, row.fix) == (
        *(ERROR, "val.txt", "a list is text in UTF-8", "save it as UTF-8"),
    )


def test_folders_are_seen_through_links_and_hidden_ones_are_not(tmp_path):
    corpus(tmp_path / "real")
    source = tmp_path / "raw"
    source.mkdir()
    for name in ("images", "labels"):
        (source / name).symlink_to(tmp_path / "real" / name)
    (tmp_path / "real" / "images" / "round").symlink_to(source)
    saved(source / "__MACOSX" / "images" / "train" / "._0.png", ids())
    saved(source / "images" / ".thumbs" / "0.png", photo())
    assert len(packed(source)) == 4
    (tmp_path / "real" / "images" / "train" / "gone.png").symlink_to(tmp_path / "nowhere")
    [row] = checked(source).rows
    assert (row.file, row.value) == ("images/train/gone.png", "none")


def test_names_with_line_breaks_and_of_two_cases_are_names_like_others(tmp_path):
    source = corpus(tmp_path / "raw")
    for k, name in enumerate(("A\nb", "a\nb", "ünï", " ")):
        saved(source / "images" / f"{name}.png", photo(k))
        saved(source / "labels" / f"{name}.png", ids(10 + k))
    made = packed(source)
    assert len(made) == 8
    np.testing.assert_array_equal(sample(made, "images/A\nb.png")["label"], ids(10))
    assert "A\\nb.png" in str(checked(saved(source / "labels/A\nb.png", ids(0, 9, 9)).parents[1]))


def test_a_tiff_is_turned_once(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    saved(tmp_path / "raw/images/a.tif", Image.fromarray(np.rot90(photo(0, 48, 32))), exif=exif)
    saved(tmp_path / "raw/labels/a.png", ids(0, 48, 32))
    np.testing.assert_array_equal(packed(tmp_path / "raw", val=0, test=0).sample(0)["image"], photo(0, 48, 32))


def test_an_image_of_too_many_pixels_is_told_what_to_do(tmp_path, monkeypatch):
    source = labelled(tmp_path / "raw", ids())
    saved(source / "images/a.png", photo(0, 60, 80))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    row = only(checked(source))
    assert (row.file, row.rule, row.fix) == (
        *("images/a.png", "the image has at most 4,000 pixels", "cut it into pieces, or make it smaller"),
    )


EMPTY = "copy it again, or delete it"
AGAIN = "export it as PNG of one channel, whose values are the ids"
COPY = "copy it again from its origin"


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (
            {"labels/a.png": b""},
            ("labels/a.png", "label", "the label is an image", "an empty file", EMPTY),
        ),
        (
            {"images/a.png": b""},
            ("images/a.png", "image", "the image is an image", "an empty file", EMPTY),
        ),
        (
            {"images/a.png": b"<html>"},
            ("images/a.png", "image", "the image is a whole image", "cannot identify image file 'a.png'", COPY),
        ),
        (
            {"labels/a.png": ids(0, 40, 50)},
            (
                *("labels/a.png", "label", "a label is as large as its image"),
                *(OTHER_SIZE, "export it again from the image as it is"),
            ),
        ),
        (
            {"labels/a.png": ids() + 1},
            (
                *("labels/a.png", "label", "ids are in the class table", "3 ("),
                "add them to classes=, or to ignore=; or correct the label",
            ),
        ),
        (
            {"labels/a.png": ids().astype(np.uint16) * 300},
            (
                *("labels/a.png", "label", "ids are in the class table", "300 ("),
                "add them to classes=, or to ignore=; or correct the label",
            ),
        ),
        (
            {"labels/a.png": np.dstack([ids()] * 3 + [ids()])},
            ("labels/a.png", "label", "a label has no transparency", "RGBA, with transparent pixels", AGAIN),
        ),
        (
            {"labels/a.png": photo()},
            (
                *("labels/a.png", "label", "colours are in the class table", "RGB, and the table has no colours"),
                "give classes= a file of names and colours",
            ),
        ),
        (
            {"labels/a.png": np.full((H, W), 255, np.uint8)},
            ("labels/a.png", "label", "some pixel has a class", "all are ignored", "annotate it, or delete it"),
        ),
        (
            {"images/a.png": np.zeros((H, W), np.uint16)},
            ("images/a.png", "image", "an image has 8 bits a channel", "mode I;16", "convert it to 8 bits"),
        ),
    ],
)
def test_what_leaves_a_sample_out_is_one_row_that_says_what_to_do(tmp_path, broken, expected):
    source = labelled(tmp_path / "raw", ids())
    for name, content in broken.items():
        if isinstance(content, bytes):
            (source / name).write_bytes(content)
        else:
            saved(source / name, content)
    row = only(checked(source, classes=NAMES))
    assert row.severity == ERROR
    assert all(
        got.startswith(said)
        for got, said in zip((row.file, row.key, row.rule, row.value, row.fix), expected, strict=True)
    )
    made = packed(source, classes=NAMES)
    assert made.names == ["images/b.png"]
    assert made.bad.loc[0, "file"] == "images/a.png"
    assert made.bad.loc[0, "value"] == (f"{row.file}: {row.value}" if row.key == "label" else row.value)
    assert (made.bad.loc[0, "rule"].endswith(row.rule), made.bad.loc[0, "fix"]) == (True, row.fix)
