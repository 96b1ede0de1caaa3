"""Lines of handwriting become a pack: pages, their archives, the prepared layout, and what cannot be used of them."""

import os
import pickle
import re
import shutil
import signal
import tarfile
import threading
import time
import unicodedata
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nbtools import disk
from nbtools.data import Pack, collate, in_order, open_feed, packing, writer
from nbtools.errors import ArchiveError, PackError
from nbtools.tasks import hwdb
from nbtools.tasks.common import ctc
from nbtools.tasks.hwdb.formats import dgr
from nbtools.tasks.hwdb.formats.dgrl import Line, Page, write_page
from nbtools.tasks.hwdb.lines import charset, data, holdout, sources, ways
from nbtools.tasks.hwdb.lines.charset import UNKNOWN
from nbtools.tasks.hwdb.lines.data import pack, read
from nbtools.tasks.hwdb.lines.report import STRIDES, report
from nbtools.tasks.hwdb.lines.sources import Found
from nbtools.train import Plan

HEIGHT = 16
TEXTS = ("一二三，四", "五六", "七八九十", "一,一")
DATA = os.environ.get("NBTOOLS_REAL_DATA", "")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


def grey(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width), np.uint8)


def line(text: str, height: int = 40, width: int = 100, seed: int = 0, top: int = 6, left: int = 30) -> Line:
    return Line(text, top, left, height, width, grey(height, width, seed))


def page(path: Path, *texts: str, **more) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = tuple(line(text, seed=seed, **more) for seed, text in enumerate(texts))
    path.write_bytes(write_page(Page(900, 700, lines)))
    return path


def corpus(folder: Path) -> Path:
    """Six folders as they are published, three pages each, a writer's number beginning the name."""
    for n, part in enumerate(("0Train", "1Train", "2Train", "0Test", "1Test", "2Test")):
        for writer_ in range(3):
            page(folder / f"HWDB2.{part}" / f"{n}0{writer_}-P16.dgrl", *TEXTS[: 2 + writer_])
    return folder


def packed(source: str | Path, height: int = HEIGHT, **more) -> Pack:
    return pack(source, height=height, progress=False, **more)


def text_of(made: Pack, i: int) -> str:
    return "".join(made.classes[place] for place in made.sample(i)["label"])


def texts(made: Pack) -> dict[str, str]:
    return {name: text_of(made, i) for i, name in enumerate(made.names)}


def slowly(image: np.ndarray, height: int = HEIGHT) -> np.ndarray:
    """Ink (W, height) by Pillow, the obvious way."""
    width = round(image.shape[1] * height / image.shape[0])
    way = Image.Resampling.BOX if height < image.shape[0] else Image.Resampling.BILINEAR
    return 255 - np.array(Image.fromarray(image).resize((width, height), way)).T


def prepared(folder: Path, rows: dict[str, dict[str, str]], suffix: str = ".png") -> Path:
    """The prepared layout: {split: {name: text}}."""
    for split, texts_ in rows.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for seed, name in enumerate(texts_):
            Image.fromarray(grey(24, 60 + 10 * seed, seed)).save(folder / split / f"{name}{suffix}")
        listed = "".join(f"{name}{suffix},{text}\n" for name, text in texts_.items())
        (folder / f"{split}_img_id_gt.txt").write_text(listed)
    return folder


# -- pages


def test_every_line_of_every_page_is_packed_with_its_text_and_its_splits(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    assert len(made) == 6 * (2 + 3 + 4)
    assert made.splits["test"] == 3 * (2 + 3 + 4)
    assert texts(made)["HWDB2.1Train/101-P16.dgrl#3"] == TEXTS[2]
    for i, name in enumerate(made.names):
        assert text_of(made, i) == TEXTS[int(name.split("#")[1]) - 1]
        assert (made.split[i] == 2) == ("Test/" in name)
    assert made.classes == [*sorted(set("".join(TEXTS))), UNKNOWN]
    assert len(made.bad) == 0


@pytest.mark.parametrize(("height", "width"), [(40, 100), (9, 33), (16, 50), (64, 20)])
def test_a_line_keeps_its_proportions_and_becomes_ink_on_its_side(tmp_path, height, width):
    """The guide's reader took top and left for height and width: slivers 6 to 30 pixels high."""
    made = packed(page(tmp_path / "raw" / "1-P1.dgrl", "一", height=height, width=width).parent)
    image = made.sample(0)["image"]
    assert image.shape == (round(width * HEIGHT / height), HEIGHT)
    np.testing.assert_array_equal(image, slowly(grey(height, width)))


def test_neither_image_nor_label_is_ever_cropped(tmp_path):
    """The guide cut both to the same share, which made wrong labels of right ones."""
    long = "一二三四五六七八九十" * 30
    page(tmp_path / "raw" / "1-P1.dgrl", long, "一", width=64)
    made = packed(tmp_path / "raw")
    assert text_of(made, 0) == long
    assert made.lengths("image", np.arange(2)).tolist() == [26, 26]
    raw = collate([made.sample(0), made.sample(1)], made.columns)
    assert raw["label_length"].tolist() == [300, 1]
    assert (raw["label"].shape, raw["image"].shape) == ((2, 300), (2, 26, HEIGHT))


def test_padding_is_blank_paper(tmp_path):
    """The guide repeated the last column, and called it part of the line."""
    (tmp_path / "raw").mkdir()
    dark = Line("一", 0, 0, 16, 40, np.zeros((16, 40), np.uint8))
    blank = Line("二", 0, 0, 16, 10, np.full((16, 10), 255, np.uint8))
    (tmp_path / "raw" / "1-P1.dgrl").write_bytes(write_page(Page(90, 90, (dark, blank))))
    made = packed(tmp_path / "raw")
    raw = collate([made.sample(0), made.sample(1)], made.columns)
    assert raw["image_length"].tolist() == [40, 10]
    assert raw["image"][0].min() == 255
    assert raw["image"][1].max() == 0


def test_bad_pages_and_lines_are_listed_and_the_others_stay(tmp_path):
    folder = corpus(tmp_path / "raw") / "HWDB2.0Train"
    whole = page(folder / "900-P1.dgrl", "一二", "三").read_bytes()
    (folder / "901-P1.dgrl").write_bytes(whole[: len(whole) - 100])
    (folder / "902-P1.dgrl").write_bytes(b"")
    (folder / "903-P1.dgrl").write_bytes(b"PK\x03\x04" + bytes(200))
    (folder / "904-P1.dgrl").write_bytes(whole.replace("一".encode("gb18030"), b"\xc4\x01"))
    page(folder / "905-P1.dgrl", "", "二")
    page(folder / "906-P1.dgrl", "二", height=1, width=101)
    made = packed(tmp_path / "raw")
    bad = {Path(row["file"]).name: row for row in made.bad.to_dict("records")}
    assert sorted(bad) == [
        *("901-P1.dgrl", "902-P1.dgrl", "903-P1.dgrl", "904-P1.dgrl#1"),
        *("905-P1.dgrl#1", "906-P1.dgrl#1"),
    ]
    assert all(all(row.values()) for row in bad.values())
    assert bad["902-P1.dgrl"]["value"] == "no bytes"
    assert "0xc401" in bad["904-P1.dgrl#1"]["value"]
    assert bad["906-P1.dgrl#1"]["rule"] == "a line is at most 100 times as wide as high"
    here = {Path(name).name for name in made.names if "/90" in name}
    assert here == {"900-P1.dgrl#1", "900-P1.dgrl#2", "901-P1.dgrl#1", "904-P1.dgrl#2", "905-P1.dgrl#2"}


def test_the_older_format_is_read_where_a_page_has_no_other(tmp_path):
    words = tuple(line(text, seed=seed, left=seed * 110) for seed, text in enumerate("一二三"))
    old = dgr.write_words(dgr.WordPage(900, 900, (words, words[:1])))
    page(tmp_path / "raw" / "1-P1.dgrl", "四")
    (tmp_path / "raw" / "1-P1.dgr").write_bytes(old)
    (tmp_path / "raw" / "2-P1.dgr").write_bytes(old)
    made = packed(tmp_path / "raw")
    assert texts(made) == {"1-P1.dgrl#1": "四", "2-P1.dgr#1": "一二三", "2-P1.dgr#2": "一"}
    np.testing.assert_array_equal(made.sample(1)["image"], slowly(dgr.read_page(old).lines[0].image))
    assert made.bad["file"].tolist() == ["1-P1.dgr"]


# -- archives


def zipped(folder: Path, path: Path, inside: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{inside}{file.relative_to(folder).as_posix()}")
    return path


def tarred(folder: Path, path: Path, inside: str = "", mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        archive.add(folder, inside or ".")
    return path


@pytest.fixture
def archives(tmp_path) -> Path:
    """The corpus in the archives that it comes in: flat, with a folder in it, compressed, one within another."""
    raw, target = corpus(tmp_path / "raw"), tmp_path / "archives"
    target.mkdir()
    (target / "._HWDB2.0Train.zip").write_bytes(b"left behind by macOS")
    zipped(raw / "HWDB2.0Train", target / "HWDB2.0Train.zip")
    zipped(raw / "HWDB2.0Test", target / "HWDB2.0Test.zip", "HWDB2.0Test/")
    tarred(raw / "HWDB2.1Train", target / "HWDB2.1Train.tar.gz", "HWDB2.1Train", "w:gz")
    tarred(raw / "HWDB2.1Test", target / "HWDB2.1Test.tgz", mode="w:gz")
    both = tmp_path / "both"
    zipped(raw / "HWDB2.2Test", both / "a" / "HWDB2.2Test.ZIP")
    shutil.copytree(raw / "HWDB2.2Train", both / "a" / "HWDB2.2Train")
    tarred(both / "a", target / "rest.tar")
    return target


def lines_by_page(made: Pack) -> dict[str, tuple[str, int, bytes]]:
    return {
        Path(name).name: (text_of(made, i), int(made.split[i] == 2), made.sample(i)["image"].tobytes())
        for i, name in enumerate(made.names)
    }


def test_archives_within_the_folder_give_the_lines_that_their_folders_give(tmp_path, archives):
    plain, made = packed(tmp_path / "raw"), packed(archives)
    assert len(made) == len(plain) > 0
    assert lines_by_page(made) == lines_by_page(plain)
    assert "HWDB2.0Test.zip/HWDB2.0Test/300-P16.dgrl#1" in made.names
    assert "rest.tar/HWDB2.2Test.ZIP/500-P16.dgrl#2" in made.names
    one = packed(tarred(archives, tmp_path / "all.tar"))
    assert lines_by_page(one) == lines_by_page(plain)


def test_lines_in_archives_are_read_again_by_workers_and_to_predict(archives):
    made = packed(archives)
    raw = pickle.loads(pickle.dumps(made.raw))
    for i in (0, len(made) - 1):
        np.testing.assert_array_equal(raw[i]["image"], made.sample(i)["image"])
        np.testing.assert_array_equal(read(archives / made.names[i], made.options)["image"], made.sample(i)["image"])


def test_an_archive_beside_its_own_folder_is_not_read_twice(tmp_path):
    raw = corpus(tmp_path / "raw")
    alone = packed(raw)
    zipped(raw / "HWDB2.0Train", raw / "HWDB2.0Train.zip")
    made = packed(raw)
    assert lines_by_page(made) == lines_by_page(alone)
    assert made.bad["file"].tolist() == ["HWDB2.0Train.zip"]


def test_images_of_the_prepared_layout_may_be_in_archives_beside_their_lists(tmp_path):
    raw = prepared(tmp_path / "raw", ROWS)
    plain = packed(raw)
    for split in ROWS:
        zipped(raw / split, raw / f"{split}.zip", f"{split}/" if split == "val" else "")
        shutil.rmtree(raw / split)
    made = packed(raw)
    assert lines_by_page(made) == lines_by_page(plain)
    assert "val.zip/val/003-P16_1.png" in made.names


def test_an_archive_that_holds_itself_ends(tmp_path):
    inner = zipped(corpus(tmp_path / "raw"), tmp_path / "deep" / "0.zip")
    for depth in range(1, 6):
        inner = zipped(inner.parent, tmp_path / f"deep{depth}" / f"{depth}.zip")
    with pytest.raises(PackError, match="no page"):
        packed(inner.parent)
    page(inner.parent / "1-P1.dgrl", "一")
    assert packed(inner.parent).bad["file"].tolist() == ["5.zip/4.zip/3.zip/2.zip"]


def made_from(folder: Path, form: str, target: Path) -> Path:
    """The one archive of a folder, which is the only one in it."""
    if form == "zip":
        return zipped(folder, target / "all.zip", "hwdb/")
    return tarred(folder, target / f"all.{form}", "hwdb", f"w:{form.partition('.')[2]}")


@pytest.mark.parametrize("form", ["tar", "zip", "tar.gz", "tar.xz"])
@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("layout", ["pages", "lines"])
def test_a_folder_and_its_archive_make_the_same_pack(tmp_path, monkeypatch, form, far, layout):
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path / "drive"))
    raw = corpus(tmp_path / "raw") if layout == "pages" else prepared(tmp_path / "raw", ROWS)
    first = next(raw.rglob("*.dgrl" if layout == "pages" else "*.png"))
    first.write_bytes(first.read_bytes()[:50])
    plain = packed(raw)
    archive = made_from(raw, form, tmp_path / ("drive" if far else "near"))
    made = packed(f"drive:{archive.name}" if far else archive)
    assert made.card == plain.card
    assert made.raw is not None
    raw_ = pickle.loads(pickle.dumps(made.raw))
    for i in (0, len(made) - 1):
        np.testing.assert_array_equal(raw_[i]["image"], made.sample(i)["image"])
    again = packed(f"drive:{archive.name}" if far else archive)
    assert (again.folder, again.raw and again.raw.source) == (made.folder, made.raw.source)


def files_below(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*") if path.is_file() and "locks" not in path.parts]


@pytest.fixture
def most_files(tmp_path, monkeypatch):
    """The most files that lay below cache and pack, part folders too, at any time a file was made."""
    most, create = [0], disk.create

    def counting(path):
        made = create(path)
        most[0] = max(most[0], len(files_below(tmp_path / "cache", *tmp_path.glob("pack*"))))
        return made

    monkeypatch.setattr(disk, "create", counting)
    return most


@pytest.mark.parametrize("form", ["tar", "zip", "tar.gz"])
def test_more_lines_than_are_read_at_once_are_packed_from_an_archive_without_a_file_for_each(
    tmp_path, monkeypatch, most_files, form
):
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path / "drive"))
    raw = tmp_path / "raw"
    (raw / "train").mkdir(parents=True)
    for n in range(600):
        Image.fromarray(grey(16, 20, n)).save(raw / "train" / f"{n:04}.png", compress_level=0)
    (raw / "train_img_id_gt.txt").write_text("".join(f"{n:04},一\n" for n in range(600)))
    assert writer.CHUNK < 600
    made_from(raw, form, tmp_path / "drive")
    shutil.rmtree(raw)
    made = packed(f"drive:all.{form}", into=tmp_path / "pack")
    assert len(made) == 600
    assert 0 < most_files[0] <= 12
    assert len(files_below(tmp_path / "cache")) == 2  # the archive and its receipt
    np.testing.assert_array_equal(made.sample(599)["image"], slowly(grey(16, 20, int(made.names[599][6:10]))))


def test_archives_in_a_folder_are_not_unpacked_but_those_within_another_taken_out(archives, tmp_path):
    made = packed(archives, into=tmp_path / "pack")
    assert len(made) == 6 * (2 + 3 + 4)
    kept = [path for path in files_below(tmp_path / "cache") if path.name != ".stage.json"]
    assert sorted(path.suffix for path in kept) == [".ZIP", ".tar", ".tar"]  # the last two were compressed


def test_a_page_in_a_zip_is_inflated_once_for_all_its_lines(tmp_path, monkeypatch):
    page(tmp_path / "raw" / "1-P1.dgrl", *"一二三四五六七八九十")
    page(tmp_path / "raw" / "2-P1.dgrl", *"一二三四五六七八九十")
    read_ = ways.read_member
    seen = []
    monkeypatch.setattr(ways, "read_member", lambda path, name: seen.append(name) or read_(path, name))
    monkeypatch.setattr(writer, "cores", lambda: 8)
    assert len(packed(zipped(tmp_path / "raw", tmp_path / "raw.zip"))) == 20
    assert sorted(seen) == ["1-P1.dgrl", "2-P1.dgrl"]


def test_a_content_that_cannot_be_made_is_an_error_for_all_that_wait_and_made_anew_for_the_next():
    recent, calls, entered = ways.Recent(2), [], threading.Barrier(2)

    def fails() -> bytes:
        entered.wait(10)
        calls.append(1)
        raise PackError("value", "rule", "fix")

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(recent.get, "a", fails)]
        while not recent.kept:
            time.sleep(0.001)
        asked.append(pool.submit(recent.get, "a", fails))
        time.sleep(0.05)
        entered.wait(10)
        assert [type(one.exception()) for one in asked] == [PackError, PackError]
    assert len(calls) == 1
    assert [recent.get(key, key.encode) for key in "aabc"] == [b"a", b"a", b"b", b"c"]
    assert list(recent.kept) == ["b", "c"]


def test_a_forked_process_waits_for_no_thread_of_its_parent():
    recent, begun, go = ways.Recent(2), threading.Event(), threading.Event()

    def slow() -> bytes:
        begun.set()
        go.wait(60)
        return b"a"

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        asked = pool.submit(recent.get, "a", slow)
        begun.wait(10)
        process = get_context("fork").Process(target=recent.get, args=("a", lambda: b"a"))
        with recent.lock:
            process.start()
        process.join(20)
        ended = process.exitcode
        process.kill()
        go.set()
        assert asked.result() == b"a"
    assert ended == 0


def test_a_bad_file_in_an_archive_is_listed_with_both_names_and_the_others_stay(tmp_path):
    raw = prepared(tmp_path / "raw", {"train": dict.fromkeys("abc", "一")})
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(raw.rglob("*.*")):
            file.write(path, path.relative_to(raw))
    image = (raw / "train" / "b.png").read_bytes()
    archive.write_bytes(archive.read_bytes().replace(image, image[:-20] + bytes(20)))
    made = packed(archive, val=0, test=0)
    assert made.names == ["train/a.png", "train/c.png"]
    [row] = made.bad.to_dict("records")
    assert row["file"] == "train/b.png"
    assert re.match(r"all\.zip: entry 'train/b\.png' is damaged: .*CRC", row["value"])


def test_a_damaged_or_hostile_archive_is_refused_by_its_name_and_the_entrys(tmp_path):
    raw = corpus(tmp_path / "raw")
    whole = tarred(raw, tmp_path / "all.tar").read_bytes()
    (tmp_path / "all.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArchiveError, match=r"all\.tar: entry '\./HWDB2.*' is damaged"):
        packed(tmp_path / "all.tar")
    (raw / "link.dgrl").symlink_to("/etc/passwd")
    with pytest.raises(ArchiveError, match=r"in\.tar: entry './link\.dgrl' is a link"):
        packed(tarred(raw, tmp_path / "folder" / "in.tar").parent)
    assert not files_below(tmp_path / "cache")


def test_lines_of_an_archive_feed_forked_workers(tmp_path):
    made = packed(zipped(corpus(tmp_path / "raw"), tmp_path / "all.zip"))
    ids = [np.array([0, 5, 9]), np.array([1, 2]), np.array([7])]
    feeds = [open_feed(made, Plan(feed=f, workers=2), torch.device("cpu")) for f in ("resident", "workers")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        for one, two in zip(*(feed(ids) for feed in feeds), strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


# -- splits


def writers(made: Pack, split: str) -> set[str]:
    return {Path(made.names[i]).name.split("-")[0] for i in made.ids(split)}


def test_no_writer_is_in_two_splits_and_val_comes_from_train(tmp_path):
    for n in range(30):
        for p in (16, 17):
            page(tmp_path / "raw" / ("HWDB2.0Test" if n > 24 else "HWDB2.0Train") / f"{n:03}-P{p}.dgrl", "一", "二")
    made = packed(tmp_path / "raw", val=0.2)
    hands = [writers(made, split) for split in ("train", "val", "test")]
    assert hands[2] == {f"{n:03}" for n in range(25, 30)}
    assert 2 <= len(hands[1]) <= 10
    assert sum(map(len, hands)) == len(set.union(*hands)) == 30
    exact = packed(tmp_path / "raw", val=10)
    assert exact.splits["val"] == 12  # three writers of four lines


def found(names, split=None) -> list[Found]:
    return [Found(name, "一", split, sources.group_of(name.split("#")[0])) for name in names]


def test_a_writer_stays_in_its_split_when_others_come():
    few = found(f"{n:03}-P16.dgrl#{k}" for n in range(60) for k in (1, 2))
    more = found(f"{n:03}-P16.dgrl#{k}" for n in range(90) for k in (1, 2))
    assert holdout.drawn(more, 0.1, 0.1)[: len(few)] == holdout.drawn(few, 0.1, 0.1)


@pytest.mark.parametrize("hands", [2, 3, 5])
def test_each_split_that_was_asked_for_gets_lines_however_few_hands_there_are(hands):
    for start in range(40):
        names = [f"{start + n:03}-P{p}.dgrl#{k}" for n in range(hands) for p in range(3) for k in (1, 2)]
        splits = holdout.drawn(found(names), 0.1, 0.1)
        assert set(splits) == {"train", "val", "test"}
        groups = {(name.split("-" if hands > 2 else "#")[0], s) for name, s in zip(names, splits, strict=True)}
        assert len(groups) == len({group for group, _ in groups})


def test_one_page_trains():
    assert set(holdout.drawn(found(["1-P1.dgrl#1", "1-P1.dgrl#2"]), 0.1, 0.1)) == {"train"}


def test_only_train_folders_give_all_three_and_only_test_ones_are_to_test_on():
    names = [f"{n:03}-P1.dgrl#1" for n in range(50)]
    assert set(holdout.drawn(found(names, "train"), 0.2, 0.2)) == {"train", "val", "test"}
    assert set(holdout.drawn(found(names, "test"), 0.2, 0.2)) == {"test"}


def test_shares_that_leave_nothing_to_train_on_are_refused(tmp_path):
    with pytest.raises(PackError, match="leave none of 27 lines to train on; lower them"):
        packed(corpus(tmp_path / "raw"), val=40)
    with pytest.raises(PackError, match="val and test must be"):
        packed(tmp_path / "raw", val=0.5, test=0.6)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("HWDB2.0Train/1.dgrl", "train"),
        ("HWDB2.0Train_images.zip/HWDB2.0Train_images/1.dgrl", "train"),
        ("Test_Dgrl/1.dgrl", "test"),
        ("validation/1.dgrl", "val"),
        ("test/HWDB2.1Train/1.dgrl", "train"),  # the nearest folder says it
        ("latest/contest/trainer/1.dgrl", None),
        ("train.dgrl", None),
    ],
)
def test_a_folder_called_train_val_or_test_is_its_lines_split(name, split):
    assert sources.split_of_way(name) == split


# -- the prepared layout


ROWS = {
    "train": {"001-P16_1": "一二", "001-P16_2": "三", "002-P16_1": "四，五,六"},
    "val": {"003-P16_1": "二"},
    "test": {"004-P16_1": "一"},
}


def test_the_prepared_layout_is_read_and_only_its_first_comma_ends_a_name(tmp_path):
    made = packed(prepared(tmp_path / "raw", ROWS))
    assert texts(made) == {f"{s}/{name}.png": text for s, rows in ROWS.items() for name, text in rows.items()}
    assert made.splits == {"train": 3, "val": 1, "test": 1}
    assert all(made.names[i].startswith("test/") for i in made.ids("test"))
    np.testing.assert_array_equal(
        made.sample(made.names.index("train/001-P16_2.png"))["image"], slowly(grey(24, 70, 1))
    )


def test_pages_and_their_prepared_lines_have_one_preparation(tmp_path):
    """A run of the one may be evaluated on the other."""
    one, two = packed(corpus(tmp_path / "pages")), packed(prepared(tmp_path / "lines", ROWS))
    assert (one.options, one.columns, one.card.task) == (two.options, two.columns, "hwdb")
    assert one.manifest["layout"] == "pages"
    assert two.manifest["layout"] == "lines"


def test_the_one_tar_of_the_prepared_layout_is_read(tmp_path):
    folder = prepared(tmp_path / "raw" / "hwdb2.x", ROWS)
    (folder / "chars_list.txt").write_text("".join(f"{c}\n" for c in "六五四三二一，,零"))
    made = packed(tarred(tmp_path / "raw", tmp_path / "hwdb_full.tar"))
    assert len(made) == 5
    assert made.classes == [*"六五四三二一，,零", UNKNOWN]  # the source's own list, in its order
    assert texts(made)["train/002-P16_1.png"] == "四，五,六"
    assert made.raw is not None
    np.testing.assert_array_equal(made.raw[2]["image"], made.sample(2)["image"])


def test_lists_with_marks_blanks_quotes_and_no_suffixes_mean_what_they_say(tmp_path):
    raw = prepared(tmp_path / "raw", {"train": {"a": "", "b": "", "c": "", "d": ""}}, ".jpg")
    said = 'a, 一\u2028二 \r\nb.jpg,"三",\r\n\r\n ./c ,四\ntrain/d.jpg,五'
    (raw / "train_img_id_gt.txt").write_bytes(said.encode("utf-8-sig"))
    made = packed(raw, val=0, test=0)
    said = {"a": " 一\u2028二 ", "b": '"三",', "c": "四", "d": "五"}
    assert texts(made) == {f"train/{name}.jpg": text for name, text in said.items()}


def test_lines_beside_their_list_are_found(tmp_path):
    raw = prepared(tmp_path / "raw", {"test": {"000": "一", "001": "二"}})
    for path in (raw / "test").iterdir():
        path.rename(raw / path.name)
    (raw / "test").rmdir()
    assert texts(packed(raw)) == {"000.png": "一", "001.png": "二"}


def test_bad_rows_and_images_are_listed_with_their_place(tmp_path):
    raw = prepared(tmp_path / "raw", {"train": dict.fromkeys("abcdefgh", "一"), "test": {"t": "一"}})
    Image.new("L", (20, 20)).save(raw / "train" / "a.jpg")
    (raw / "train" / "c.png").write_bytes((raw / "train" / "c.png").read_bytes()[:60])
    Image.fromarray(np.zeros((20, 30), np.uint16)).save(raw / "train" / "e.png")
    Image.new("L", (5000, 2)).save(raw / "train" / "f.png")
    rows = [
        *(b"a,\xe4\xb8\x80", b"b.png,", b"b.png,\xe4\xba\x8c", b"c.png,\xe4\xb8\x80", b"gone.png,\xe4\xb8\x80"),
        b"x",
    ]
    rows += [b"d.png,\xe4\xb8\x80\xff", b"d.png,\xe4\xb8\x80", b"e.png,\xe4\xb8\x80", b"f.png,\xe4\xb8\x80", b",y"]
    (raw / "train_img_id_gt.txt").write_bytes(b"\n".join(rows))
    made = packed(raw)
    rules = dict(zip(made.bad["file"], made.bad["rule"], strict=True))
    said = "train_img_id_gt.txt"
    assert rules == {
        f"{said}:1": "a name means one image, and there are two",
        "train/b.png": "a line has a text",
        f"{said}:3": f"an image stands once in the lists, and this one is in {said}:2 already",
        "train/c.png": "the file is a whole image",
        f"{said}:5": "the image of a row is there",
        f"{said}:6": "a row is name,text",
        f"{said}:7": "a list is UTF-8",
        "train/e.png": "an image has 8 bits a channel",
        "train/f.png": "a line is at most 100 times as wide as high",
        f"{said}:11": "a row is name,text",
        **dict.fromkeys((f"train/{n}" for n in ("a.jpg", "a.png", "g.png", "h.png")), "an image stands in a list"),
    }
    assert made.names == ["test/t.png", "train/d.png"]
    assert all(made.bad["fix"])
    assert all(made.bad["value"])
    assert str(raw) not in "".join(made.bad["value"])


def test_an_image_of_two_lists_is_in_one_split(tmp_path):
    raw = prepared(tmp_path / "raw", {"train": {"a": "一", "b": "二"}})
    for path in (raw / "train").iterdir():
        path.rename(raw / path.name)
    (raw / "train").rmdir()
    (raw / "test_img_id_gt.txt").write_text("a.png,一\n")
    made = packed(raw)
    assert [made.names[i] for i in made.ids("test")] == ["a.png"]
    assert made.bad["file"].tolist() == ["train_img_id_gt.txt:1"]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_paper_whatever_colour_they_hide(tmp_path, mode):
    image = Image.new("RGBA", (40, 20), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (10, 5, 20, 15))
    if mode == "P":
        image = Image.new("P", (40, 20), 0)
        image.paste(1, (10, 5, 20, 15))
        image.putpalette([0, 0, 0, 0, 0, 0])
        image.save(tmp_path / "a.png", transparency=0)
    else:
        image.convert(mode).save(tmp_path / "a.png")
    ink = read(tmp_path / "a.png", {"height": 20})["image"]
    expected = np.zeros((40, 20), np.uint8)
    expected[10:20, 5:15] = 255
    np.testing.assert_array_equal(ink, expected)


# -- characters


class Counted(str):
    """A character that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


def test_encoding_looks_a_character_up_and_does_not_search_for_it():
    """`char in list` compares up to 7,373 times a character."""
    characters = charset.Charset((*map(chr, range(0x4E00, 0x4E00 + 7373)), UNKNOWN))
    text = [Counted(chr(0x4E00 + n)) for n in range(7000, 7300)]
    assert characters.encode(text).tolist() == list(range(7000, 7300))  # pyright: ignore[reportArgumentType]
    assert Counted.compared <= 2 * len(text)


def test_unknown_characters_have_the_last_class_and_are_counted(tmp_path):
    page(tmp_path / "raw" / "HWDB2.0Train" / "1-P1.dgrl", f"一{UNKNOWN}二", "三三一")
    page(tmp_path / "raw" / "HWDB2.0Test" / "2-P1.dgrl", "一二九")
    made = packed(tmp_path / "raw", classes="二一")
    assert made.classes == ["二", "一", UNKNOWN]
    assert texts(made)["HWDB2.0Train/1-P1.dgrl#2"] == f"{UNKNOWN}{UNKNOWN}一"
    counted = report(made)
    assert counted.outside == {"三": 2, "九": 1}
    assert [(tally.split, tally.unknown) for tally in counted.splits] == [("train", 3), ("test", 1), ("all", 4)]


def test_a_class_list_of_other_data_is_warned_of_at_once_and_one_that_lacks_little_is_not(tmp_path, capsys):
    page(tmp_path / "raw" / "1-P1.dgrl", "一二" * 15, "一二三三一")
    packed(tmp_path / "raw", classes="一二")  # progress=False is silent
    pack(tmp_path / "raw", height=HEIGHT, classes="一三")
    assert re.search(
        r"16 of 35 characters are in no class, '二' above all, .* is it the right chars_list", capsys.readouterr().out
    )
    pack(tmp_path / "raw", height=HEIGHT, classes="一二三")
    page(tmp_path / "raw" / "2-P1.dgrl", *["一二" * 15] * 3)
    pack(tmp_path / "raw", height=HEIGHT, classes="一二")
    assert "no class" not in capsys.readouterr().out


def test_classes_from_the_data_hold_what_only_a_test_line_has(tmp_path):
    """As UNKNOWN it could be called right; as itself it is an error, which it is."""
    page(tmp_path / "raw" / "HWDB2.0Train" / "1-P1.dgrl", "二一")
    page(tmp_path / "raw" / "HWDB2.0Test" / "2-P1.dgrl", "一九")
    made = packed(tmp_path / "raw")
    assert made.classes == ["一", "九", "二", UNKNOWN]
    counted = report(made)
    assert (counted.untrained, counted.outside, counted.splits[-1].unknown) == ("九", {}, 0)


def test_full_width_forms_become_ascii_on_request_in_texts_and_classes(tmp_path):
    page(tmp_path / "raw" / "1-P1.dgrl", "Ａ１，。", "A1,")
    assert texts(packed(tmp_path / "raw"))["1-P1.dgrl#1"] == "Ａ１，。"
    assert texts(packed(tmp_path / "raw", normalise=True)) == {"1-P1.dgrl#1": "A1,。", "1-P1.dgrl#2": "A1,"}
    made = packed(tmp_path / "raw", normalise=True, classes="Ａ，,。1")
    assert made.classes == ["A", ",", "。", "1", UNKNOWN]
    assert texts(made)["1-P1.dgrl#1"] == "A1,。"


def test_normalising_is_nfkc_of_the_width_forms_and_nothing_else():
    for code in range(0x110000):
        one = chr(code)
        wide = 0xFF01 <= code <= 0xFF5E or code == 0x3000
        assert charset.normalised(one) == (unicodedata.normalize("NFKC", one) if wide else one)


@pytest.mark.parametrize("kind", ["str", "list", "file", "path"])
def test_classes_are_a_string_a_list_or_a_file(tmp_path, kind):
    (tmp_path / "chars.txt").write_bytes("\ufeff一\r\n二\n \n三".encode())
    given = {
        "str": "一二 三",
        "list": [*"一二 三", UNKNOWN],
        "file": str(tmp_path / "chars.txt"),
        "path": tmp_path / "chars.txt",
    }[kind]
    assert charset.given(given).classes == ("一", "二", " ", "三", UNKNOWN)


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ("一一", "single characters, each once, got '一'"),
        (["一二"], "got '一二'"),
        ("", "got none"),
        ("gone.txt", "gone.txt: No such file"),
    ],
)
def test_classes_that_are_none_are_refused(tmp_path, classes, said):
    with pytest.raises(PackError, match=said):
        packed(tmp_path, classes=classes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff\n", "byte 0 is not UTF-8"),
        ("一\n二三\n".encode(), ":2: a line holds"),
        ("一\n二\n一\n".encode(), ":3: a character stands there once, and '一' is in line 1"),
        (b"\n", "it must have a character on each line, got none"),
    ],
)
def test_a_list_of_characters_that_is_none_names_the_place(tmp_path, text, said):
    (tmp_path / "chars.txt").write_bytes(text)
    with pytest.raises(PackError, match=rf"chars\.txt:? ?{said}|chars\.txt{said}"):
        charset.given(tmp_path / "chars.txt")


# -- the report


def test_the_report_counts_as_a_loop_over_the_lines_does(tmp_path):
    rng = np.random.default_rng(1)
    for n in range(12):
        lines = ["".join(rng.choice(list("一二三"), rng.integers(1, 9))) for _ in range(3)]
        page(tmp_path / "raw" / f"{n:03}-P1.dgrl", *lines, width=int(rng.integers(20, 200)))
    made = packed(tmp_path / "raw")
    counted = report(made)
    for stride in STRIDES:
        slow = [
            name
            for i, name in enumerate(made.names)
            if -(-len(made.sample(i)["image"]) // stride) < ctc.needed_steps(made.sample(i)["label"].tolist())
        ]
        assert counted.narrow[stride] == slow
    assert len(counted.narrow[32]) > len(counted.narrow[4])
    assert len(made) == 36  # they are counted and not dropped: another network has another stride
    for tally in counted.splits:
        ids = range(len(made)) if tally.split == "all" else made.ids(tally.split)
        all_text, widths = "".join(text_of(made, i) for i in ids), [len(made.sample(i)["image"]) for i in ids]
        assert (tally.lines, tally.characters, tally.classes) == (len(widths), len(all_text), len(set(all_text)))
        assert (tally.widths[0], tally.widths[1], tally.widths[3]) == (
            min(widths),
            round(np.median(widths)),
            max(widths),
        )
    assert sum(counted.histogram) == 36
    for (low, high), n in zip(pairwise(counted.edges), counted.histogram, strict=True):
        assert n == sum(low <= len(made.sample(i)["image"]) < high for i in range(36))
    shown, html = str(counted), counted._repr_html_()
    assert all(words in shown for words in ("narrow /32", "too narrow at stride 32", "classes", "columns"))
    assert html.count("<table") == 3


def test_a_pack_of_one_line_has_a_report(tmp_path):
    counted = report(packed(page(tmp_path / "raw" / "1-P1.dgrl", "一").parent))
    assert (counted.splits[0].lines, counted.histogram) == (1, (1,))


# -- packing


def test_preparing_writes_no_small_files(tmp_path):
    """The guide wrote 20,000 images, and to Drive."""
    for n in range(20):
        page(tmp_path / "raw" / f"{n:03}-P1.dgrl", *"一二三四五六七八九十", height=8, width=16)
    before = set(tmp_path.rglob("*"))
    made = packed(tmp_path / "raw")
    after = [path for path in set(tmp_path.rglob("*")) - before if path.is_file()]
    assert len(made) == 200
    assert len(after) <= 10
    assert len([path for path in after if made.folder not in path.parents]) == 1  # a lock


def test_a_second_call_looks_at_no_page(tmp_path, monkeypatch):
    first = packed(corpus(tmp_path / "raw"))
    monkeypatch.setattr(data, "survey", lambda *_: pytest.fail("it looked"))
    monkeypatch.setattr(packing, "Writer", lambda *_: pytest.fail("it wrote"))
    assert packed(tmp_path / "raw").card == first.card


@pytest.mark.parametrize("where", ["drive:kept", "near"])
def test_a_kept_pack_opens_in_the_next_session(tmp_path, monkeypatch, where):
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path / "drive"))
    made = packed(corpus(tmp_path / "raw"))
    kept = made.keep(where if where.startswith("drive:") else tmp_path / where)
    assert kept
    again = pack("drive:kept.tar" if where.startswith("drive:") else kept, progress=False)
    assert again.card == made.card
    assert lines_by_page(again) == lines_by_page(made)


@pytest.mark.parametrize(
    "other", [{"height": 20}, {"normalise": True}, {"classes": "一"}, {"val": 0.3}, {"layout": "pages"}]
)
def test_another_choice_is_another_pack(tmp_path, other):
    made = packed(corpus(tmp_path / "raw"))
    assert packed(tmp_path / "raw", **other).folder != made.folder


@pytest.mark.parametrize("form", ["folder", "tar", "zip", "tar.gz"])
def test_a_killed_packing_goes_on_where_it_was(tmp_path, monkeypatch, form):
    monkeypatch.setattr(writer, "CHUNK", 4)
    source = corpus(tmp_path / "raw")
    source = source if form == "folder" else made_from(source, form, tmp_path)
    whole = packed(source, into=tmp_path / "whole")

    def dying():
        def deadly(path, options):
            if path.name == "200-P16.dgrl#2":
                os.kill(os.getpid(), signal.SIGKILL)
            return read(path, options)

        data.read = deadly
        packed(source, into=tmp_path / "mine")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        process = get_context("fork").Process(target=dying)
        process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    seen = []
    monkeypatch.setattr(data, "read", lambda path, options: seen.append(path) or read(path, options))
    made = packed(source, into=tmp_path / "mine")
    assert 0 < len(seen) < len(made) - writer.CHUNK
    assert made.card == whole.card


def test_every_line_comes_in_evaluation_the_last_partial_batch_too(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    ids = made.ids("test")
    batches = in_order(ids, made.lengths("image", ids), 4)
    assert len(ids) % 4 != 0
    assert sorted(np.concatenate(batches).tolist()) == ids.tolist()


def test_workers_and_the_pack_feed_the_same_batches(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    ids = [np.array([0, 5, 9]), np.array([1])]
    feeds = [open_feed(made, Plan(feed=feed, workers=0), torch.device("cpu")) for feed in ("resident", "workers")]
    for one, two in zip(*(feed(ids) for feed in feeds), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1-P1.dgrl", ("a line is read, and not a whole page", "name a line of it: 1-P1.dgrl#1")),
        ("1-P1.dgrl#3", ("1-P1.dgrl has lines 1 to 2", "name one that is there")),
        ("1-P1.dgrl#0", ("1-P1.dgrl has lines 1 to 2", "name one that is there")),
        ("2-P1.dgrl#1", ("the file can be read", "copy it again, or delete it")),
        ("a.png", ("the file can be read", "copy it again, or delete it")),
    ],
)
def test_what_is_no_line_is_refused_with_value_rule_and_fix(tmp_path, name, said):
    page(tmp_path / "1-P1.dgrl", "一", "二")
    with pytest.raises(PackError) as error:
        read(tmp_path / name, {"height": HEIGHT})
    assert error.value.args[1:] == said


def test_a_line_of_a_page_without_lines_is_refused(tmp_path):
    page(tmp_path / "1-P1.dgrl")
    with pytest.raises(PackError, match=r"1-P1\.dgrl has no lines"):
        read(tmp_path / "1-P1.dgrl#1", {"height": HEIGHT})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layout": "grid"}, "layout must be one of auto, pages, lines, got 'grid'"),
        ({"height": 8}, "height must be a whole number of pixels from 16 to 512, got 8"),
        ({"height": 1_000_000}, "from 16 to 512, got 1000000"),
        ({"height": "abc"}, "got 'abc'"),
        ({"height": 32.0}, "got 32.0"),
        ({"normalise": "yes"}, "normalise must be true or false, got 'yes'"),
        ({"classes": 12}, "classes must be a string, a list, or a file of characters, got 12"),
        ({"val": "all"}, "shares ≥ 0 and below 1, got all, 0.1"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, wrong, said):
    with pytest.raises(PackError, match=said):
        packed(corpus(tmp_path / "raw"), **wrong)


def test_a_source_without_lines_says_what_was_looked_for(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "readme.txt").write_text("nothing")
    with pytest.raises(PackError, match=r"raw: no page \(\.dgrl\) and no list of lines \(train_img_id_gt\.txt\)"):
        packed(tmp_path / "raw")
    page(tmp_path / "raw" / "1-P1.dgrl", "一")
    with pytest.raises(PackError, match="no list of lines"):
        packed(tmp_path / "raw", layout="lines")
    prepared(tmp_path / "raw", ROWS)
    with pytest.raises(PackError, match=r'holds pages \(1-P1\.dgrl\) and lists .*; choose layout="pages" or "lines"'):
        packed(tmp_path / "raw")
    assert len(packed(tmp_path / "raw", layout="pages")) == 1
    assert len(packed(tmp_path / "raw", layout="lines")) == 5


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_real_lines_of_the_prepared_layout_are_read_and_go_through_a_network():
    made = pack(Path(DATA) / "scut-lines.tar", progress=False)
    assert (len(made), made.splits["test"], len(made.bad)) == (5, 5, 0)
    found_ = texts(made)
    assert found_["000002.jpg"].startswith("④自己独自漂泊的孤独之感。“人语朱离")
    assert made.lengths("image", np.arange(5)).tolist() == [3515, 908, 2376, 1913, 488]
    counted = report(made)
    assert counted.splits[0].characters == sum(map(len, found_.values())) == 99
    assert not any(counted.narrow.values())
    torch.manual_seed(0)
    plan = hwdb.Plan(network="slim")
    batch = hwdb.batch(collate([made.sample(i) for i in range(5)], made.columns), plan, None)
    with torch.no_grad():
        logits, steps = hwdb.model(made, plan).eval()(batch)
    assert logits.isfinite().all()
    assert steps.tolist() == [879, 227, 594, 479, 122]
    assert len(hwdb.decode((logits, steps), made)) == 5
