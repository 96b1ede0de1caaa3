"""Archives: what is whole comes out whole, what is hostile or damaged is refused by name, nothing lands outside."""

import gzip
import os
import struct
import tarfile
import tempfile
import unicodedata
import zipfile
from pathlib import Path

import pytest
from archives import FORMS, archived, put, tar_bytes, tree, zip_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

import nbtools as nb
from nbtools import errors
from nbtools.data import archive

pytestmark = pytest.mark.usefixtures("one_cache")
FILES = {"data/labels.csv": b"file,label\n", "data/images/a.png": bytes(range(256)) * 20, "data/empty": b""}
WHOLE = {form: archived(FILES, form) for form in FORMS}


def extracted(place: Path, data: bytes) -> dict[str, bytes]:
    path = put(place / "some.archive", data)
    nb.stage(path, place / "inside", progress=False)
    [root] = [found for found in (place / "inside").iterdir() if found.suffix != ".part"]
    return {name.partition("/")[2]: content for name, content in tree(root).items() if not name.startswith(".stage")}


def assert_refused(data: bytes, match: str | None = None) -> None:
    """With an nbtools error, and no file or link lands anywhere."""
    with tempfile.TemporaryDirectory() as name:
        with pytest.raises(errors.ArchiveError, match=match):
            extracted(Path(name), data)
        assert_nothing_outside(Path(name))


def assert_nothing_outside(place: Path) -> None:
    assert set(os.listdir(place)) <= {"inside", "some.archive"}
    assert not any(path.is_symlink() for path in place.rglob("*"))


@pytest.mark.parametrize("form", FORMS)
def test_every_format_comes_out_as_it_went_in(tmp_path, form):
    assert extracted(tmp_path, WHOLE[form]) == FILES


NAMES = st.lists(st.text(st.sampled_from("aB.é-_ 1字"), min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@settings(max_examples=25)
@given(
    st.dictionaries(NAMES, st.binary(max_size=600), min_size=1, max_size=6), st.sampled_from(["tar", "zip", "tar.gz"])
)
def test_safe_names_come_out_as_they_went_in_and_others_are_refused(files, form):
    """Safe: none leads upwards, and no two are one file, or a file and a folder, on a disk that ignores case."""
    parts = {name: [part for part in name.split("/") if part != "."] for name in files}
    kept = {name: p for name, p in parts.items() if p and not any(part.startswith("._") for part in p)}
    wanted = {"/".join(p): files[name] for name, p in kept.items()}
    spelled = {tuple(p[: i + 1]) for p in kept.values() for i in range(len(p))}
    folded = {unicodedata.normalize("NFC", "/".join(p)).casefold() for p in spelled}
    folders = {"/".join(p[:i]) for p in kept.values() for i in range(len(p))}
    unique = len(wanted) == len(kept) and len(folded) == len(spelled) and not folders & wanted.keys()
    safe = unique and wanted and not any(".." in name.split("/") for name in files)
    data = archived(files, form)
    if not safe:
        return assert_refused(data)
    with tempfile.TemporaryDirectory() as name:
        assert extracted(Path(name), data) == wanted
        assert_nothing_outside(Path(name))


def test_litter_of_macos_is_left_out_and_empty_folders_are_not(tmp_path):
    members = [("a/b.png", b"1"), ("a/._b.png", b"2"), ("__MACOSX/a/b.png", b"3"), ("a/.DS_Store", b"4")]
    assert extracted(tmp_path, tar_bytes([*members, special("empty", tarfile.DIRTYPE)])) == {"a/b.png": b"1"}
    assert any(path.is_dir() for path in (tmp_path / "inside").rglob("empty"))


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE_TARS = {
    "link then a file through it": [special("x", tarfile.SYMTYPE, "../.."), ("x/evil", b"")],
    "link alone": [special("x", tarfile.SYMTYPE, "/etc/passwd")],
    "hard link": [special("x", tarfile.LNKTYPE, "../../evil")],
    "dangling link and hard link to it": [
        special("x", tarfile.SYMTYPE, "../../evil"),
        special("y", tarfile.LNKTYPE, "x"),
        ("y", b"evil"),
    ],
    "character device": [special("x", tarfile.CHRTYPE)],
    "block device": [special("x", tarfile.BLKTYPE)],
    "pipe": [special("x", tarfile.FIFOTYPE)],
    "sparse": [special("x", tarfile.GNUTYPE_SPARSE)],
    "unknown type": [special("x", b"Q", "y")],
    "parent": [("../evil", b"")],
    "parent within": [("a/b/../../../evil", b"")],
    "absolute": [("/tmp/evil-of-nbtools", b"")],
    "backslash": [("..\\evil", b"")],
    "drive letter": [("C:evil", b"")],
    "duplicate": [("a", b"1"), ("a", b"2")],
    "case collision": [("a/B", b"1"), ("a/b", b"2")],
    "folder case collision": [("A/x", b"1"), ("a/y", b"2")],
    "Unicode form collision": [("caf\u00e9", b"1"), ("cafe\u0301", b"2")],
    "sharp s": [("stra\u00dfe", b"1"), ("STRASSE", b"2")],
    "file then folder": [("a", b"1"), ("a/b", b"2")],
    "folder then file": [("a/b", b"1"), ("a", b"2")],
}


def zip_link() -> bytes:
    info = zipfile.ZipInfo("x")
    info.external_attr = 0o120777 << 16
    return zip_bytes((info, b"/etc/passwd"))


def stored(name: str = "abcd", content: bytes = b"content") -> bytes:
    return zip_bytes((name, content), method=zipfile.ZIP_STORED)


def hidden_entry() -> bytes:
    """A second entry before the directory that the directory does not list."""
    one = stored()
    split = one.index(b"PK\1\2")
    extra = stored("evil")[: stored("evil").index(b"PK\1\2")]
    end = bytearray(one[split:])
    end[-6:-2] = struct.pack("<I", split + len(extra))
    return one[:split] + extra + bytes(end)


HOSTILE_ZIPS = {
    "parent": zip_bytes(("../evil", b"")),
    "absolute": zip_bytes(("/evil", b"")),
    "backslashes": stored("abcd").replace(b"abcd", b"..\\x"),
    "drive letter": stored("abcd").replace(b"abcd", b"C:/x"),
    "NUL": stored("abcd").replace(b"abcd", b"a\0cd"),
    "link": zip_link(),
    "case collision": zip_bytes(("a", b"1"), ("A", b"2")),
    "names differ": stored().replace(b"abcd", b"evil", 1),
    "sizes differ": stored().replace(struct.pack("<II", 7, 7), struct.pack("<II", 7, 6), 1),
    "more bytes than both directories say": zip_bytes(("a", bytes(1000))).replace(struct.pack("<I", 1000), b"\n\0\0\0"),
    "some bytes, of which both say that there are none": zip_bytes(("a", bytes(1000))).replace(
        struct.pack("<I", 1000), bytes(4)
    ),
    "fewer": zip_bytes(("a", bytes(1000))).replace(struct.pack("<I", 1000), struct.pack("<I", 90_000)),
    "checksum wrong": stored().replace(b"content", b"CONTENT"),
    "hidden entry": hidden_entry(),
    "prefix": b"PK\3\4" + bytes(60) + stored(),
    "encrypted": stored().replace(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"),
    "a compression that nothing bounds": zip_bytes(("a", b"1" * 1000), method=zipfile.ZIP_BZIP2),
    "another one": zip_bytes(("a", b"1" * 1000), method=zipfile.ZIP_LZMA),
}
HOSTILE = {f"tar {k}": tar_bytes([special("some-dir", tarfile.DIRTYPE), *v]) for k, v in HOSTILE_TARS.items()}
HOSTILE |= {f"zip {k}": data for k, data in HOSTILE_ZIPS.items()}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused_by_its_entry_and_nothing_lands_outside(data):
    assert_refused(data, r"some\.archive: entry '")


def negative_size() -> bytes:
    block = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfe\0"  # base 256: -512
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return tar_bytes({"b": b""}).rstrip(b"\0").ljust(512, b"\0") + bytes(block) + bytes(1024)


def pax(**headers: str) -> bytes:
    info = tarfile.TarInfo("a")
    info.pax_headers = headers
    return info.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


def huge_header() -> bytes:
    info = special("x", tarfile.XHDTYPE)
    info.size = 1 << 40
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pax(path="a\0b"), "NUL"),
        (huge_header(), r"header of 1\.1 TB"),
        (negative_size(), None),
        *((data, None) for data in (b"", bytes(10240), zip_bytes(), gzip.compress(b""), b"BZh9")),
    ],
    ids=["NUL in a PAX name", "huge extended header", "negative size", *(f"empty {i}" for i in range(5))],
)
def test_odd_headers_and_empty_archives_are_refused(data, words):
    assert_refused(data, words)


@pytest.mark.parametrize("form", FORMS)
def test_every_truncation_is_refused(form):
    data = WHOLE[form]
    end = len(data.rstrip(b"\0")) + 1024 if form == "tar" else len(data) - 1  # a tar ends with two blocks, and padding
    for cut in range(0, end, max(1, end // 20)):
        assert_refused(data[:cut])


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "tar.bz2"])
def test_a_wrong_checksum_behind_the_last_file_is_noticed(tmp_path, form):
    data = bytearray(WHOLE[form])
    data[{"tar.gz": -8, "tar.xz": -30, "tar.bz2": -3}[form]] ^= 0x10
    with pytest.raises(errors.ArchiveError, match="damaged"):
        extracted(tmp_path, bytes(data))


def test_bombs_stop_at_the_budget(tmp_path, monkeypatch):
    for name, value in {"ENTRIES": 3, "RATIO": 2, "FLOOR": 1000}.items():
        monkeypatch.setattr(archive, name, value)
    bombs = [
        gzip.compress(tar_bytes({"a": bytes(1_000_000)})),
        zip_bytes(("a", bytes(1_000_000))),
        tar_bytes({f"{number}": b"" for number in range(4)}),
    ]
    for number, data in enumerate(bombs):
        with pytest.raises(errors.ArchiveError, match=r"bomb|more than 3 entries"):
            extracted(tmp_path / str(number), data)
        assert sum(map(len, tree(tmp_path / str(number) / "inside").values())) <= 100_000
