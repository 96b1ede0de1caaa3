"""What was drawn in CVAT becomes the label that its annotators saw."""

import tracemalloc

import numpy as np
import pytest
from masks import NAMES, H, W, checked, faults, ids, label_of, only, packed, photo, polygon, saved, xml

from nbtools.data import ERROR, WARNING
from nbtools.errors import PackError

BOMB = '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


def test_polygons_are_filled_where_the_centre_of_a_pixel_is_inside(tmp_path):
    from matplotlib.path import Path as Outline

    corners = [(5.3, 3.1), (40.2, 8.7), (30.9, 30.4), (12.0, 20.5)]
    source = xml(tmp_path / "raw", polygon(";".join(f"{x},{y}" for x, y in corners)))
    label = label_of(source)
    y, x = np.mgrid[:H, :W] + 0.5
    centres = np.stack([x.ravel(), y.ravel()], 1)
    inside = {
        r: Outline([*corners, corners[0]], closed=True).contains_points(centres, radius=r) for r in (0.0, 0.3, -0.3)
    }
    sure = (inside[0.3] == inside[-0.3]).reshape(H, W)
    assert sure.mean() > 0.95
    np.testing.assert_array_equal((label == 1)[sure], inside[0.0].reshape(H, W)[sure])
    assert packed(source, val=0, test=0).classes == ["background", "shirt", "shoe"]


def test_a_box_covers_its_pixels_and_no_more(tmp_path):
    source = xml(tmp_path / "raw", '<box label="shoe" xtl="10" ytl="4" xbr="20" ybr="9" z_order="0"></box>')
    expected = np.zeros((H, W), np.uint8)
    expected[4:9, 10:20] = 2
    np.testing.assert_array_equal(label_of(source), expected)
    half = label_of(source, size=(72, 96))
    np.testing.assert_array_equal(half, expected.repeat(2, 0).repeat(2, 1))


def test_what_has_a_higher_z_order_covers_and_so_holes_are_drawn(tmp_path):
    hole = polygon("10,10;20,10;20,20;10,20", "background", 2)
    over = polygon("0,0;48,0;48,36;0,36", "shirt", 1)
    label = label_of(xml(tmp_path / "raw", hole + over, "background shirt shoe"))
    expected = np.ones((H, W), np.uint8)
    expected[10:20, 10:20] = 0
    np.testing.assert_array_equal(label, expected)


def test_ellipses_and_turned_boxes_have_their_areas(tmp_path):
    ellipse = '<ellipse label="shirt" cx="24" cy="18" rx="16" ry="8" rotation="90" z_order="0"></ellipse>'
    label = label_of(xml(tmp_path / "a", ellipse))
    assert (label == 1).sum() == pytest.approx(np.pi * 16 * 8, rel=0.03)
    assert (label[:, 24].sum(), label[18].sum()) == (32, 16)
    box = '<box label="shirt" xtl="14" ytl="8" xbr="34" ybr="28" rotation="45" z_order="0"></box>'
    label = label_of(xml(tmp_path / "b", box))
    assert (label == 1).sum() == pytest.approx(400, rel=0.05)
    assert (label[18, 11:37].all(), label[9, 15]) == (True, 0)


def test_a_mask_is_read_as_cvats_documentation_gives_it(tmp_path):
    rle = "3,5,7,7,5,9,3,11,2,11,2,12,1,12,1,26,1,12,1,12,2,11,3,9,5,7,7,5,3".replace(",", ", ")
    shape = f'<mask label="shoe" rle="{rle}" left="7" top="8" width="13" height="15" z_order="0"></mask>'
    label = label_of(xml(tmp_path / "raw", shape))
    expected = np.zeros((H, W), np.uint8)
    for y, line in enumerate(label[8:23]):
        expected[8 + y, 7:20] = line[7:20]
    np.testing.assert_array_equal(label, expected)
    lengths = [int(n) for n in rle.split(",")]
    assert (label == 2).sum() == sum(lengths[1::2])
    assert label[8, 7:20].tolist() == [0] * 3 + [2] * 5 + [0] * 5
    assert label[9, 7:20].tolist() == [0] * 2 + [2] * 7 + [0] * 4


def test_names_and_colours_are_those_of_the_file(tmp_path):
    made = packed(xml(tmp_path / "raw", polygon("1,1;30,1;30,30")), val=0, test=0)
    assert (made.classes, made.options["colours"]) == (
        ["background", "shirt", "shoe"],
        [[0, 0, 0], [0, 0, 1], [0, 0, 2]],
    )


def test_images_of_a_project_are_found_in_their_subset_which_is_their_split(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    text = (source / "annotations.xml").read_text().replace('name="a.png"', 'name="a.png" subset="Validation"')
    (source / "annotations.xml").write_text(text)
    (source / "images" / "Validation").mkdir(parents=True)
    (source / "a.png").rename(source / "images" / "Validation" / "a.png")
    made = packed(source)
    assert (made.names, made.splits["val"]) == (["images/Validation/a.png"], 1)


@pytest.mark.parametrize(("subset", "split"), [("Train", "train"), ("val_images", "val"), ("Test", "test")])
def test_a_subset_is_a_split_wherever_its_images_lie(tmp_path, subset, split):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    path = source / "annotations.xml"
    path.write_text(path.read_text().replace('name="a.png"', f'name="a.png" subset="{subset}"'))
    assert packed(source).splits == {**dict.fromkeys(("train", "val", "test"), 0), split: 1}


def test_a_shape_far_larger_than_a_tiny_image_covers_it(tmp_path):
    far = polygon("-900000,-900000;900000,-900000;900000,900000;-900000,900000")
    source = xml(tmp_path / "raw", far, size=(1, 1))
    saved(source / "a.png", photo(0, 1, 1))
    assert (label_of(source, size=2048) == 1).all()


def test_label_images_come_before_shapes_unless_these_are_asked_for(tmp_path):
    source = xml(tmp_path / "raw", '<box label="shirt" xtl="0" ytl="0" xbr="48" ybr="36"></box>', "background shirt")
    saved(source / "labels" / "a.png", ids())
    np.testing.assert_array_equal(label_of(source, classes=NAMES), ids())
    assert 'labels="cvat"' in only(checked(source, classes=NAMES)).fix
    assert (label_of(source, labels="cvat") == 1).all()


@pytest.mark.parametrize(
    ("shapes", "key", "rule", "value"),
    [
        (polygon("50,1;60,1;60,9"), "polygon", "a shape lies inside of the image", "x 50 to 60"),
        (polygon("1,-9;20,-9;20,-1"), "polygon", "a shape lies inside of the image", "y -9 to -1 in 36 × 48"),
        (polygon("1,1;20,20"), "polygon", "3 points at least", "shirt: 2"),
        (polygon("1,1;20,x;3,3"), "polygon", "finite numbers", "could not convert"),
        (polygon("1,1;20,nan;3,3"), "polygon", "finite numbers", "not finite"),
        (polygon("1,1;20,20;3,3", "hat"), "label", "in the class table", "hat"),
        ('<box label="shirt" xtl="1" ytl="1" xbr="9"></box>', "box", "finite numbers", "shirt"),
        ('<box label="shirt" xtl="1" ytl="nan" xbr="9" ybr="9"></box>', "box", "finite numbers", "ytl=nan"),
        ('<ellipse label="shirt" cx="1" cy="1" rx="1e308" ry="9"></ellipse>', "ellipse", "finite numbers", "rx=1e+308"),
        ('<mask label="shirt" rle="3,4" left="0" top="0" width="9" height="9"></mask>', "mask", "finite", "7 pixels"),
        ('<mask label="shirt" rle="81" left="0" top="0" width="1e99" height="9"></mask>', "mask", "finite", "width"),
        (
            '<mask label="shirt" rle="810000000000" left="0" top="0" width="900000" height="900000"></mask>',
            *("mask", "finite", "810000000000 pixels"),
        ),
    ],
)
def test_a_shape_that_cannot_be_drawn_leaves_its_image_out(tmp_path, shapes, key, rule, value):
    source = xml(tmp_path / "raw", shapes)
    [row] = faults(checked(source))
    assert (row.file, row.key) == ("a.png", key)
    assert rule in row.rule
    assert value in row.value
    with pytest.raises(PackError, match="0 of 1 file can be used"):
        packed(source)


def test_what_is_partly_outside_is_cut_off_with_a_warning(tmp_path):
    source = xml(tmp_path / "raw", polygon("-10,-10;24,-10;24,18;-10,18"))
    rows = [row for row in checked(source).rows if row.key == "polygon"]
    assert [(row.severity, row.fix) for row in rows] == [(WARNING, "nothing: what is outside is cut off")]
    expected = np.zeros((H, W), np.uint8)
    expected[:18, :24] = 1
    np.testing.assert_array_equal(label_of(source), expected)


@pytest.mark.parametrize("points", ["-9,2;24,2;24,18", "2,-9;24,2;24,18", "2,2;57,2;24,18", "2,2;24,2;24,45"])
def test_what_crosses_one_border_is_told_and_what_rounding_put_there_is_not(tmp_path, points):
    rows = [row for row in checked(xml(tmp_path / "far", polygon(points))).rows if row.key == "polygon"]
    assert [(row.severity, row.rule) for row in rows] == [(WARNING, "a shape lies inside of the image")]
    near = points.replace("-9", "-0.9").replace("57", "48.9").replace("45", "36.9")
    assert not [row for row in checked(xml(tmp_path / "near", polygon(near))).rows if row.key == "polygon"]


def test_labels_of_one_colour_get_others_and_an_image_in_the_head_is_none(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    path = source / "annotations.xml"
    path.write_text(path.read_text().replace("#000002", "#000001").replace("</meta>", '<image name="b.png"/></meta>'))
    made = packed(source, val=0, test=0)
    assert len({tuple(colour) for colour in made.options["colours"]}) == 3
    assert not faults(checked(source))


def test_an_image_without_shapes_is_background_with_a_warning(tmp_path):
    source = xml(tmp_path / "raw", "")
    assert [row.severity for row in checked(source).rows if row.key == "shapes"] == [WARNING]
    assert (label_of(source) == 0).all()


def test_what_has_no_area_is_told_and_not_drawn(tmp_path):
    source = xml(tmp_path / "raw", '<polyline label="shirt" points="1,1;9,9"></polyline>' + polygon("1,1;30,1;30,30"))
    assert [row.severity for row in checked(source).rows if row.key == "polyline"] == [WARNING]


def test_without_a_background_among_given_classes_what_is_not_drawn_is_ignored(tmp_path):
    source = xml(tmp_path / "raw", polygon("0,0;24,0;24,36;0,36") + polygon("24,0;40,0;40,36;24,36", "shoe"))
    label = label_of(source, classes=["shirt", "shoe"])
    assert (label[:, :24] == 0).all()
    assert (label[:, 40:] == 255).all()
    assert only(checked(source, classes=["shirt", "shoe"])).value == "it is ignored"


def test_an_annotated_size_that_is_not_the_images_is_told(tmp_path):
    [row] = faults(checked(xml(tmp_path / "raw", polygon("1,1;9,1;9,9"), size=(100, 200))))
    assert row.value == "100 × 200 pixels (height × width), the image has 36 × 48 pixels (height × width)"


@pytest.mark.parametrize(
    ("head", "cut", "said"),
    [(BOMB, 0, "no document type.*<!DOCTYPE a>?"), ("", 40, "whole XML"), ("<a>", 0, "whole XML")],
)
def test_xml_with_entities_or_cut_off_is_refused(tmp_path, head, cut, said):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"), head=head)
    path = source / "annotations.xml"
    path.write_text(path.read_text()[: len(path.read_text()) - cut])
    with pytest.raises(PackError, match=f"annotations.xml: annotations (have|are) {said}"):
        packed(source)


def test_an_annotated_image_that_is_not_there_is_told(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    (source / "a.png").rename(source / "b.png")
    with pytest.raises(PackError, match=r"annotations\.xml: an annotated image is there, got a\.png"):
        packed(source)


@pytest.mark.parametrize("name", ["../../secret.png", "/etc/passwd", "", "../raw/b.png", "A.png"])
def test_names_lead_to_no_file_but_those_of_the_source(tmp_path, name):
    saved(tmp_path / "secret.png", photo())
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    path = source / "annotations.xml"
    image = f'<image id="1" name="{name}" width="{W}" height="{H}">{polygon("1,1;30,1;30,30")}</image></annotations>'
    path.write_text(path.read_text().replace("</annotations>", image))
    [row] = faults(checked(source))
    assert (row.file, row.key, row.rule, row.value) == (
        *("annotations.xml", "image", "an annotated image is there", name or "nothing"),
    )
    assert packed(source, val=0, test=0).names == ["a.png"]


def test_names_with_the_strokes_of_windows_are_found(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    path = source / "annotations.xml"
    path.write_text(path.read_text().replace('name="a.png"', 'name="sub\\a.png"'))
    (source / "images" / "sub").mkdir(parents=True)
    (source / "a.png").rename(source / "images" / "sub" / "a.png")
    assert packed(source, val=0, test=0).names == ["images/sub/a.png"]


def test_an_image_that_was_annotated_twice_is_told(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    path = source / "annotations.xml"
    other = f'<image id="1" name="a.png" width="{W}" height="{H}"></image></annotations>'
    path.write_text(path.read_text().replace("</annotations>", other))
    [row] = faults(checked(source))
    assert (row.rule, row.value) == ("an image has one label and one split", "a.png: other shapes, before")


@pytest.mark.parametrize("text", ["", "<annotations></annotations>", "<annotations><track id='0'/></annotations>"])
def test_an_empty_annotation_is_told(tmp_path, text):
    source = xml(tmp_path / "raw", "")
    (source / "annotations.xml").write_text(text)
    said = {"": "are whole XML, got no element found"}.get(text, "name images, got no")
    with pytest.raises(PackError, match=rf"annotations\.xml: annotations {said}.*; export it .*CVAT for images 1\.1"):
        packed(source)
    saved(source / "labels" / "a.png", ids())
    row = only(checked(source))
    assert (row.severity, row.file) == (ERROR, "annotations.xml")
    assert ("1 track of a video" in row.value) == ("track" in text)


def test_annotations_in_utf_16_are_read(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    text = (source / "annotations.xml").read_text().replace("utf-8", "utf-16")
    (source / "annotations.xml").unlink()
    (source / "export.xml").write_text(text, encoding="utf-16")
    assert packed(source, val=0, test=0).names == ["a.png"]


def test_a_mask_of_few_runs_and_many_pixels_costs_no_more_than_its_image(tmp_path):
    wide = f'<mask label="shirt" rle="0,{2**26}" left="-8000" top="0" width="{2**19}" height="128" z_order="0"></mask>'
    source = xml(tmp_path / "raw", wide)
    tracemalloc.start()
    label = label_of(source, size=256)
    assert tracemalloc.get_traced_memory()[1] < 6 * 2**26
    tracemalloc.stop()
    assert set(np.unique(label)) == {1, 255}, "all of the image, which stands between what is ignored"


@pytest.mark.parametrize("size", [(H, W), (2 * H, 2 * W), (3 * H, 5 * W)])
def test_masks_and_boxes_of_whole_pixels_are_one_at_every_size(tmp_path, size):
    box = '<box label="shoe" xtl="10" ytl="4" xbr="20" ybr="10" z_order="0"></box>'
    mask = '<mask label="shoe" rle="0,60" left="10" top="4" width="10" height="6" z_order="0"></mask>'
    drawn = [
        label_of(xml(tmp_path / name, shape), size=size, fit="stretch")
        for name, shape in (("box", box), ("mask", mask))
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    over = '<mask label="shoe" rle="0,60" left="-4" top="-2" width="10" height="6" z_order="0"></mask>'
    expected = np.zeros((H, W), np.uint8)
    expected[:4, :6] = 2
    np.testing.assert_array_equal(label_of(xml(tmp_path / "over", over)), expected)
