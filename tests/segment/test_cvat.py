"""What was drawn in CVAT becomes the label that its annotators saw."""

import numpy as np
import pytest
from masks import H, W, checked, ids, only, packed, photo, polygon, saved, sole, tree, xml
from matplotlib.path import Path as Outline

from nbtools.errors import PackError
from nbtools.tasks.common.rules import ERROR, WARNING

pytestmark = pytest.mark.usefixtures("own_cache")
TRIANGLE = polygon("1,1;30,1;30,30")
SQUARE = np.zeros((H, W), np.uint8)
SQUARE[10:20, 10:20] = 1


def test_a_polygon_is_filled_where_it_covers_the_centre_of_a_pixel(tmp_path):
    corners = [(5.3, 3.1), (40.2, 8.7), (30.9, 30.4), (12.0, 20.5)]
    source = xml(tmp_path / "raw", polygon(";".join(f"{x},{y}" for x, y in corners)))
    y, x = np.mgrid[:H, :W] + 0.5
    centres, outline = np.stack([x.ravel(), y.ravel()], 1), Outline([*corners, corners[0]], closed=True)
    inside, wide, narrow = (outline.contains_points(centres, radius=r).reshape(H, W) for r in (0, 0.3, -0.3))
    sure = wide == narrow
    assert sure.mean() > 0.95
    np.testing.assert_array_equal((sole(source)["label"] == 1)[sure], inside[sure])


def test_a_higher_z_order_covers_so_holes_can_be_drawn(tmp_path):
    shapes = polygon("10,10;20,10;20,20;10,20", "background", 2) + polygon("0,0;48,0;48,36;0,36", "shirt", 1)
    source = xml(tmp_path / "raw", shapes, "background shirt shoe")
    made = packed(source, val=0, test=0)
    np.testing.assert_array_equal(made.sample(0)["label"], 1 - SQUARE)
    assert made.classes == ["background", "shirt", "shoe"], "the background is the first class, named or not"
    assert packed(xml(tmp_path / "more", TRIANGLE)).classes == made.classes
    np.testing.assert_array_equal(sole(source, ignore=["shirt"])["label"], np.where(SQUARE, 0, 255))


def test_the_class_that_no_shape_covers_must_be_named_and_may_be_left_out(tmp_path):
    source = xml(tmp_path / "raw", TRIANGLE)
    with pytest.raises(PackError, match=r"add 'background', got shirt, shoe; ignore='background' leaves it out"):
        packed(source, classes=["shirt", "shoe"])
    made = packed(source, classes=["background", "shirt", "shoe"], ignore="background", val=0, test=0)
    assert (made.classes, {*made.sample(0)["label"].flat}) == (["shirt", "shoe"], {0, 255})


POINTS = "a polygon must have at least 3 points, x and y of each in pixels"
UNDRAWN = {  # a shape → its rule, and part of what came
    polygon("1,1;20,20"): (POINTS, "shirt: 2"),
    polygon("1,1;20,nan;3,3"): (POINTS, "nan"),
    polygon("1,1;20,20;3,3", "hat"): ("a shape's label must be in the class table", "hat"),
    '<box label="shoe" xtl="1" ytl="1" xbr="9" ybr="9"></box>': ("a shape must be a polygon", "shoe: box"),
    "": ("an image without a shape is all background", "1 image, as a.png"),
}


@pytest.mark.parametrize("shape", UNDRAWN)
def test_a_shape_that_cannot_be_drawn_leaves_its_image_out_and_one_without_is_a_warning(tmp_path, shape):
    [row] = [row for row in checked(xml(tmp_path, shape)).rows if not row.file.startswith("class ")]
    rule, value = UNDRAWN[shape]
    where = ("a.png", ERROR) if shape else ("annotations.xml", WARNING)
    assert (row.file, row.severity, row.rule, value in row.value) == (*where, rule, True)


@pytest.mark.parametrize(
    ("place", "name", "split"),
    [
        ('name="a.png" subset="Validation"', "images/Validation/a.png", "val"),
        ('name="sub\\a.png"', "images/sub/a.png", "train"),
        ('name="frame_000007"', "images/frame_000007.PNG", "train"),  # of a video
    ],
)
def test_an_image_is_found_where_cvat_puts_it_and_its_subset_is_its_split(tmp_path, place, name, split):
    source = xml(tmp_path / "raw", TRIANGLE, place=place)
    saved(source / name, (source / "a.png").read_bytes())
    (source / "a.png").unlink()
    made = packed(source, val=0, test=0)
    assert (made.names, made.splits[split]) == ([name], 1)


def test_the_file_of_one_task_has_its_subset_above_the_images_and_skeletons_are_no_classes(tmp_path):
    source = xml(tmp_path / "raw", TRIANGLE)
    parts = "<label><name>body</name><type>skeleton</type></label><label><name>1</name><parent>body</parent></label>"
    text = (source / "annotations.xml").read_text().replace("<labels>", f"<subset>Validation</subset><labels>{parts}")
    made = packed(tree(source, {"annotations.xml": text}))
    assert (made.splits["val"], made.classes) == (1, ["background", "shirt", "shoe"])


@pytest.mark.parametrize(
    ("name", "rule"),
    [("../../secret.png", "an annotated image must exist"), ("a.png", "an image must have one label and one split")],
)
def test_names_lead_to_no_file_outside_the_source_and_an_image_is_annotated_once(tmp_path, name, rule):
    saved(tmp_path / "secret.png", photo())
    source = xml(tmp_path / "raw", TRIANGLE + f'</image><image id="1" name="{name}" width="{W}" height="{H}">')
    [row] = [row for row in checked(source).rows if row.severity == ERROR]
    assert (row.file, row.rule) == ("annotations.xml", rule)
    assert packed(source, val=0, test=0).names == ["a.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotations><image>", "must be whole XML.*; export it .*CVAT for images 1.1"),
        ("<annotations></annotations>", "must name images, got no <image>; export it again as CVAT"),
    ],
)
def test_annotations_that_cannot_be_used_are_a_row_next_to_good_labels_and_else_refused(tmp_path, text, message):
    source = tree(tmp_path / "raw", {"a.png": photo(), "annotations.xml": text})
    with pytest.raises(PackError, match=rf"annotations\.xml: annotations {message}"):
        packed(source)
    saved(source / "labels" / "a.png", ids())
    assert only(checked(source)).file == "annotations.xml"
