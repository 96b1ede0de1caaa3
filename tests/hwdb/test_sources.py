"""Lines of handwriting become a pack: pages, the prepared layout, and what cannot be used of them."""

from functools import partial
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from PIL import Image

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.measure import Machine, decide
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb.data import UNKNOWN
from nbtools.train import device
from tests.archives import archived, put, tree
from tests.hwdb.test_pages import coded, line, word, words
from tests.hwdb.test_pages import page as page_of
from tests.packs import validated

HEIGHT = 16
TEXTS = ("一二三，四", "五六", "七八九十", "一,一")
packed = partial(hwdb.pack, height=HEIGHT, progress=False)
pytestmark = pytest.mark.usefixtures("own_cache")


def grey(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width), np.uint8)


def page(path: Path, *texts: str, height: int = 40, width: int = 100) -> Path:
    lines = [line(coded(text), 6, 30, height, width, grey(height, width, n).tobytes()) for n, text in enumerate(texts)]
    return put(path, page_of(*lines))


def texts(made: Pack) -> dict[str, str]:
    return {name: hwdb.text_of(made, i) for i, name in enumerate(made.names)}


def slowly(image: np.ndarray, height: int = HEIGHT) -> np.ndarray:
    width = round(image.shape[1] * height / image.shape[0])
    scaling = Image.Resampling.BOX if height < image.shape[0] else Image.Resampling.BILINEAR
    return 255 - np.array(Image.fromarray(image).resize((width, height), scaling)).T


def prepared(folder: Path, rows: dict[str, dict[str, str]]) -> Path:
    """The prepared layout: {split: {name: text}}; the list of val has the accents as a Mac writes them."""
    for split, texts_ in rows.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for seed, name in enumerate(texts_):
            Image.fromarray(grey(24, 60 + 10 * seed, seed)).save(folder / split / f"{name}.png")
        rows_ = "".join(f"{name}.png,{text}\n" for name, text in texts_.items())
        (folder / f"{split}_img_id_gt.txt").write_text(normalize("NFD" if split == "val" else "NFC", rows_))
    return folder


ROWS = {
    "train": {"001-P16_1": "一二", "001-P16_2": "三", "002-P16_1": "四，五,六"},
    "val": {"003-P16_\u00e9": "二"},
    "test": {"004-P16_e\u0301": "一"},
}


def test_every_line_of_every_page_is_packed_with_its_text_and_its_split_and_no_small_file(tmp_path):
    for n, part in enumerate(("0Train", "1Train", "0Test", "1Test")):  # as they are published, and three pages each
        for writer in range(3):
            page(tmp_path / "raw" / f"HWDB2.{part}" / f"{n}0{writer}-P16.dgrl", *TEXTS[: 2 + writer])
    before = set(tmp_path.rglob("*"))
    made = packed(tmp_path / "raw")
    assert len(made) == 4 * (2 + 3 + 4)
    for i, name in enumerate(made.names):
        assert hwdb.text_of(made, i) == TEXTS[int(name.split("#")[1]) - 1]
        assert (made.split[i] == 2) == ("Test/" in name)
    assert made.classes == [*sorted(set("".join(TEXTS))), UNKNOWN]
    assert len([path for path in set(tmp_path.rglob("*")) - before if path.is_file()]) <= 10


@pytest.mark.parametrize(("height", "width"), [(40, 100), (9, 33)])
def test_a_line_keeps_its_proportions_and_becomes_ink_on_its_side(tmp_path, height, width):
    made = page(tmp_path / "1-P1.dgrl", "一", "二", height=height, width=width)
    image = hwdb.read(made.with_name("1-P1.dgrl#2"), {"height": HEIGHT})["image"]
    assert image.shape == (round(width * HEIGHT / height), HEIGHT)
    np.testing.assert_array_equal(image, slowly(grey(height, width, 1)))


def test_bad_pages_and_lines_are_listed_and_the_others_stay(tmp_path):
    folder = tmp_path / "raw"
    whole = page(folder / "900-P1.dgrl", "一二", "三").read_bytes()
    unknown = whole.replace("一".encode("gb18030"), b"\xc4\x01")
    for n, content in enumerate((whole[:-100], b"", b"PK\x03\x04" + bytes(200), unknown), 901):
        put(folder / f"{n}-P1.dgrl", content)
    page(folder / "905-P1.dgrl", "", "二")
    page(folder / "906-P1.dgrl", "二", height=1, width=101)
    made = packed(folder)
    lines = ["904-P1.dgrl#1", "905-P1.dgrl#1", "906-P1.dgrl#1"]
    assert sorted(made.bad["file"]) == ["901-P1.dgrl", "902-P1.dgrl", "903-P1.dgrl", *lines]
    assert all(all(row.values()) for row in made.bad.to_dict("records"))
    assert made.names == ["900-P1.dgrl#1", "900-P1.dgrl#2", "901-P1.dgrl#1", "904-P1.dgrl#2", "905-P1.dgrl#2"]
    assert validated(hwdb, made, height=HEIGHT)


def test_the_older_format_is_read(tmp_path):
    row = [word(c.encode("gbk"), 5, 9 * n, 9, 8, bytes(72)) for n, c in enumerate("一二三")]
    page(tmp_path / "raw" / "1-P1.dgrl", "四")
    put(tmp_path / "raw" / "2-P1.dgr", page_of(words(*row), words(), words(*row[:1]), kind=b"DGR"))
    made = packed(tmp_path / "raw")
    assert texts(made) == {"1-P1.dgrl#1": "四", "2-P1.dgr#1": "一二三", "2-P1.dgr#3": "一"}
    assert made.bad["file"].tolist() == ["2-P1.dgr#2"]


def pages(folder: Path, writers, part: str = "") -> Path:
    for n in writers:
        for p in (16, 17):
            page(folder / part / f"{n:03}-P{p}.dgrl", "一", "二", height=4, width=4)
    return folder


@pytest.mark.parametrize("layout", ["pages", "images of lines"])
def test_no_writer_is_in_two_splits_and_val_comes_from_train(tmp_path, layout):
    for split, writers in (("Train", range(25)), ("Test", range(25, 30))):
        if layout == "pages":
            pages(tmp_path / "raw", writers, f"HWDB2.0{split}")
        else:
            prepared(tmp_path / "raw", {split.lower(): {f"{n:03}-P16_{k}": "一" for n in writers for k in range(3)}})
    made = packed(tmp_path / "raw", val=0.2)
    train, val, test = ({Path(made.names[i]).name[:3] for i in made.ids(split)} for split in made.splits)
    assert sorted([*train, *val, *test]) == [f"{n:03}" for n in range(30)]
    assert (test, 2 <= len(val) <= 10) == ({f"{n:03}" for n in range(25, 30)}, True)


def test_the_one_tar_of_the_prepared_layout_is_read_and_only_its_first_comma_ends_a_name(tmp_path):
    """The guide leaves the list of before it divided the images in train/; those that it wrote then win."""
    folder = prepared(tmp_path / "raw" / "hwdb2.x", ROWS)
    Image.fromarray(grey(24, 60)).save(folder / "train" / "new.png")
    before = (*ROWS["train"], *ROWS["val"], "new")
    (folder / "train" / "img_gt.txt").write_text("".join(f"{name}.png,零\n" for name in before))
    (folder / "chars_list.txt").write_text("".join(f"{c}\n" for c in "六五四三二一，,零"))
    made = packed(put(tmp_path / "hwdb_full.tar", archived(tree(tmp_path / "raw"), "tar")))
    listed = {f"{s}/{name}.png": text for s, rows in ROWS.items() for name, text in rows.items()}
    assert texts(made) == {**listed, "train/new.png": "零"}
    assert (made.splits, len(made.bad)) == ({"train": 4, "val": 1, "test": 1}, 0)
    assert made.classes == [*"六五四三二一，,零", UNKNOWN]  # the source's own list, in its order


def test_bad_rows_and_images_are_listed_with_their_place(tmp_path):
    raw = prepared(tmp_path / "raw", {"train": dict.fromkeys("abcdf", "一"), "test": {"t": "一"}})
    (raw / "train" / "c.png").write_bytes((raw / "train" / "c.png").read_bytes()[:60])
    Image.new("L", (5000, 2)).save(raw / "train" / "f.png")
    rows = "b.png,\nb.png,二\nc.png,一\ngone.png,一\nx\nd.png,一\nf,一\n,y"
    (raw / "train_img_id_gt.txt").write_text(rows)
    made, where = packed(raw), "train_img_id_gt.txt"
    assert dict(zip(made.bad["file"], made.bad["rule"], strict=True)) == {
        "train/b.png": "a line must have a text",
        f"{where}:2": f"an image must be listed only once, and this one is in {where}:1 already",
        "train/c.png": "the file must be a whole image",
        "train/f.png": "a line must be at most 100 times as wide as high",
        **{f"{where}:{n}": "a row must be name,text of an image that exists" for n in (4, 5, 8)},
        "train/a.png": "an image must be in a list",
    }
    assert made.names == ["test/t.png", "train/d.png"]
    assert validated(hwdb, made, height=HEIGHT)


def test_what_no_given_class_has_is_unknown_and_what_only_a_test_line_has_is_a_class_of_its_own(tmp_path):
    """As UNKNOWN it could be called right; as itself it is an error, which it is."""
    page(tmp_path / "raw" / "HWDB2.0Train" / "1-P1.dgrl", f"一{UNKNOWN}二", "三三一")
    page(tmp_path / "raw" / "HWDB2.0Test" / "2-P1.dgrl", "一二九")
    made = packed(tmp_path / "raw", classes="二一")
    assert made.classes == ["二", "一", UNKNOWN]
    assert texts(made)["HWDB2.0Train/1-P1.dgrl#2"] == f"{UNKNOWN}{UNKNOWN}一"
    assert packed(tmp_path / "raw").classes == ["一", "三", "九", "二", UNKNOWN]
    (tmp_path / "chars.txt").write_bytes("\ufeff一\r\n二\n \n三".encode())
    assert packed(tmp_path / "raw", classes=str(tmp_path / "chars.txt")).classes == ["一", "二", " ", "三", UNKNOWN]


def test_a_source_without_lines_or_with_both_kinds_is_refused(tmp_path):
    put(tmp_path / "raw" / "HWDB2.0Train.zip", b"PK")
    with pytest.raises(PackError, match=r"no page \(\.dgrl\) and no list .* give the folder that holds HWDB2\.0Train"):
        packed(tmp_path / "raw")
    prepared(page(tmp_path / "raw" / "1-P1.dgrl", "一").parent, ROWS)
    with pytest.raises(PackError, match=r"holds pages \(1-P1\.dgrl\) and lists .*; choose one of them"):
        packed(tmp_path / "raw")


@pytest.mark.parametrize(("gigabytes", "height", "network"), [(0, 32, "slim"), (15.8, 64, "slim"), (42.3, 128, "hctr")])
def test_the_height_follows_the_gpu_and_the_network_the_height(tmp_path, monkeypatch, gigabytes, height, network):
    monkeypatch.setattr(device, "gigabytes", lambda _: gigabytes)
    made = hwdb.pack(pages(tmp_path / "raw", range(3)))
    assert made.options["height"] == height
    machine = Machine("cuda" if gigabytes else "cpu", "x", gigabytes, 2, (8, 0))
    assert decide(hwdb, made.card, machine).plan.to_dict()["network"] == network
    assert hwdb.pack(made.folder).options == made.options, "a kept pack carries its height"
