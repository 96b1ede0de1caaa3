"""Captchas: both layouts of a pack, its bad files, ink, and the losses."""

import shutil

import numpy as np
import pytest
import torch
from acting import refused
from packs import raw_batch, validated
from PIL import Image, ImageDraw
from torch.nn import functional as F

from nbtools.data import IMAGES
from nbtools.errors import PackError
from nbtools.tasks import captcha

BLANK = Image.new("L", (64, 24), 255)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory, one_cache):
    return captcha.pack(captcha.demo(tmp_path_factory.mktemp("fixed"), 20, size=(24, 64)), progress=False)


@pytest.fixture(scope="module")
def lines(tmp_path_factory, one_cache):
    return captcha.pack(captcha.demo(tmp_path_factory.mktemp("lines"), 30, length=(4, 8)), progress=False)


def test_a_fixed_pack_holds_the_grey_image_and_the_text_of_the_name(fixed):
    assert fixed.options["layout"] == "fixed"
    for i in (0, 7, 19):
        with Image.open(fixed.raw.source / fixed.names[i]) as image:
            assert np.array_equal(fixed.sample(i)["image"], np.asarray(image.convert("L")))
        assert captcha.text_of(fixed, i) == fixed.names[i].split("_")[0]


def test_lines_keep_their_own_width_and_length(lines):
    assert (lines.options["layout"], lines.card.bucket_by) == ("lines", "image")
    samples = [lines.sample(i) for i in range(len(lines))]
    assert {len(s["label"]) for s in samples} == {4, 5, 6, 7, 8}
    assert len({len(s["image"]) for s in samples}) > 5
    assert {s["image"].shape[1] for s in samples} == {32}


NAMED = {  # file → options, classes
    "Ab3_17_x.png": ({}, "3Ab"),
    "Ab3-0.png": ({"label": "-"}, "3Ab"),
    "Ab3.png": ({"label": ""}, "3Ab"),
    "xAb37.png": ({"label": r"^x(.+)\d$"}, "3Ab"),
    "img-Ab3.png": ({"label": "-(.+)"}, "3Ab"),
    "Ab3_1.png": ({"case": "lower"}, "3ab"),
    "\u1102\u1161\u1103\u1161\u1100\u1161_1.png": ({}, "가나다"),  # 나다가, as a Mac names it
}


@pytest.mark.parametrize("name", NAMED)
def test_where_the_text_ends_and_its_case_are_the_callers(own_cache, tmp_path, name):
    options, classes = NAMED[name]
    BLANK.save(tmp_path / name)
    pack = captcha.pack(tmp_path, layout="fixed", progress=False, **options)
    assert ("".join(pack.classes), pack.sample(0)["label"].tolist()) == (classes, [1, 2, 0])


def test_every_bad_file_is_in_the_table_with_its_rule_as_validated_and_the_rest_is_packed(own_cache, fixed, tmp_path):
    source = shutil.copytree(fixed.raw.source, tmp_path / "source")
    (source / "1111_t.png").write_bytes((source / fixed.names[0]).read_bytes()[:-300])
    for name in ("notes.txt", ".hidden.png"):
        (source / name).write_text("no image")
    BLANK.resize((65, 24)).save(source / "3333_s.png")
    for name in ("44O4_u.png", "5555.png", "66666_l.png"):
        BLANK.save(source / name)
    pack = captcha.pack(source, classes="0123456789", progress=False)
    assert len(pack) == 20
    assert dict(zip(pack.bad["file"], pack.bad["rule"], strict=True)) == {
        "1111_t.png": "the file must be a whole image",
        "notes.txt": f"images must end in {', '.join(IMAGES)}",
        "3333_s.png": "images must be 24 × 64 pixels (height × width)",
        "44O4_u.png": "characters must be in classes",
        "5555.png": "the name must be the text, as label='_' says",
        "66666_l.png": "labels must have 4 characters",
    }
    assert {".txt", "24 × 65 pixels (height × width)", "O", "5555", "66666"} < set(pack.bad["value"])
    assert "name images by their texts: lists are not read" in set(pack.bad["fix"])
    assert validated(captcha, pack, classes="0123456789")


def test_one_text_for_all_names_is_none_unless_they_test(own_cache, tmp_path):
    for name in ("captcha_12", "captcha_34"):
        BLANK.save(tmp_path / f"{name}.png")
    refused(PackError, r"every name begins with 'captcha', .* such as \"captcha_\(\.\+\?\)", captcha.pack, tmp_path)
    refused(PackError, 'set label= to what ends it, "" if nothing', captcha.pack, tmp_path, label="=")
    assert captcha.pack(tmp_path, test=1.0, progress=False).splits["test"] == 2


def test_a_line_too_narrow_for_its_text_is_left_out(own_cache, lines, tmp_path):
    source = shutil.copytree(lines.raw.source, tmp_path / "source")
    BLANK.resize((30, 32)).save(source / "112233445566_x.png")
    pack = captcha.pack(source, layout="lines", progress=False)
    rule = "the text needs 18 time steps of 4 pixels"
    assert pack.bad.to_numpy()[:, [0, 2]].tolist() == [["112233445566_x.png", rule]]
    assert validated(captcha, pack, layout="lines")


def test_black_hairlines_go_and_black_text_stays(tmp_path):
    def ink_of(draw):
        image = Image.new("RGB", (200, 60), "white")
        draw(ImageDraw.Draw(image))
        image.save(tmp_path / "drawn.png")
        return captcha.read(tmp_path / "drawn.png", {"layout": "lines", "height": 32})["image"]

    box = (50, 20, 70, 40)
    clean = ink_of(lambda pen: pen.rectangle(box, fill=(200, 80, 80)))
    crossed = ink_of(lambda pen: (pen.rectangle(box, fill=(200, 80, 80)), pen.line((0, 5, 199, 50), fill=0)))
    assert crossed.shape == clean.shape
    assert np.abs(crossed.astype(int) - clean).mean() < 3  # a pixel or two at the glyph's edge
    assert ink_of(lambda pen: pen.rectangle(box, fill=0)).max() == 255


def test_the_losses_are_sums_of_torchs_own():
    logits, labels = torch.randn(5, 4, 10), torch.randint(10, (5, 4))
    one_hot = F.one_hot(labels, 10).float().view(5, 40)
    expected = {
        "soft_margin": torch.nn.MultiLabelSoftMarginLoss()(logits.view(5, 40), one_hot),
        "cross_entropy": F.cross_entropy(logits.view(20, 10), labels.view(20)),
    }
    for name, mean in expected.items():
        total, count = captcha.loss(lambda _: logits, {"label": labels}, captcha.Plan(loss=name))
        assert torch.isclose(total / count, mean)


def test_a_line_reads_the_same_in_any_batch(lines):
    torch.manual_seed(0)
    model = captcha.model(lines, captcha.PLAN).eval()
    with torch.no_grad():
        logits, steps = model(captcha.batch(raw_batch(lines, range(5)), captcha.PLAN, None))
        alone, [own] = model(captcha.batch(raw_batch(lines, [2]), captcha.PLAN, None))
    assert steps[2] == own == len(alone)
    assert torch.allclose(logits[: own - 16, 2], alone[: own - 16, 0], atol=1e-4)
