"""Archives: what is whole comes out whole, what is hostile or damaged is refused by name, nothing lands outside."""

import gzip
import os
import struct
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
from acting import refused
from archives import FORMS, archived, put, tar_bytes, tree, zip_bytes

import nbtools as nb
from nbtools import errors
from nbtools.data import archive

pytestmark = pytest.mark.usefixtures("one_cache")
FILES = {"data/labels.csv": b"file,label\n", "data/images/a.png": bytes(range(256)) * 20, "data/empty": b""}
ALIKE = dict.fromkeys(("aBcD.png", "AbCd.png", "A/x", "a/x", "caf\u00e9", "cafe\u0301"), b"1")
LITTER = dict.fromkeys(("data/._b.png", "__MACOSX/a/b.png", "a/@eaDir/b.png/S.jpg", ".DS_Store"), b"2")
WHOLE = {form: archived(FILES, form) for form in FORMS}


def extracted(place: Path, data: bytes) -> dict[str, bytes]:
    assert nb.stage(put(place / "some.archive", data), place / "inside", progress=False).is_dir()
    [root] = [found for found in (place / "inside").iterdir() if found.suffix != ".part"]
    return {name.partition("/")[2]: content for name, content in tree(root).items() if not name.startswith(".stage")}


def assert_refused(data: bytes, match: str | None = None) -> None:
    """With an nbtools error, and no file or link lands anywhere."""
    with tempfile.TemporaryDirectory() as name:
        refused(errors.ArchiveError, match, extracted, Path(name), data)
        assert set(os.listdir(name)) <= {"inside", "some.archive"}
        assert not any(path.is_symlink() for path in Path(name).rglob("*"))


@pytest.mark.parametrize("form", FORMS)
def test_every_format_comes_out_as_it_went_in_also_names_that_differ_by_case_alone_but_no_litter(tmp_path, form):
    assert extracted(tmp_path, archived(FILES | ALIKE | LITTER, form)) == FILES | ALIKE


ENCODED = {
    "Chinese, common": ("gbk", ["猫/1.png", "狗/2.png"]),  # the bytes of the first are also UTF-8
    "Japanese kana": ("cp932", ["ねこ/1.png", "カメラ/2.png"]),
    "Japanese with a backslash in its bytes": ("cp932", ["表/ソ.png", "日本語テキスト.png"]),
    "German": ("cp437", ["Größe/müller.png", "köln.png"]),
    "UTF-8 without a mark": ("utf-8", ["猫/1.png", "Größe/2.png"]),
}


class Raw(zipfile.ZipInfo):
    """An entry whose name is these bytes, without a mark of their encoding."""

    def __init__(self, name: bytes, extra: bytes = b"") -> None:
        super().__init__(name.hex())
        self.raw, self.extra = name, extra

    def _encodeFilenameFlags(self) -> tuple[bytes, int]:
        return self.raw, 0


def unmarked(names: list[str], encoding: str, form: str = "zip") -> bytes:
    raw = [name.encode(encoding) for name in names]
    if form == "zip":
        return zip_bytes(*((Raw(name), b"x") for name in raw))
    return tar_bytes(dict.fromkeys([name.decode("utf-8", "surrogateescape") for name in raw], b"x"))


@pytest.mark.parametrize(("encoding", "names"), ENCODED.values(), ids=ENCODED)
def test_unmarked_names_are_read_in_the_encoding_of_their_bytes_and_that_is_said(tmp_path, capsys, encoding, names):
    for form in ("zip", "tar"):
        assert extracted(tmp_path / form, unmarked(names, encoding, form)) == dict.fromkeys(names, b"x")
        said = f"the encoding {encoding} was guessed from their bytes, as in '{names[0]}'" in capsys.readouterr().err
        assert said == (encoding != "utf-8")


def test_the_unicode_name_of_info_zip_comes_first_where_it_belongs_to_the_name(tmp_path, capsys):
    raw, text = "cafÚ.png".encode("cp850"), "café.png".encode()
    fields = [struct.pack("<BI", 1, zlib.crc32(of)) + text for of in (raw, b"another")]
    first, second = (struct.pack("<HHB", 0x5455, 1, 0) + struct.pack("<HH", 0x7075, len(f)) + f for f in fields)
    assert extracted(tmp_path / "1", zip_bytes((Raw(raw, first), b"x"))) == {"café.png": b"x"}
    assert capsys.readouterr().err == ""
    assert extracted(tmp_path / "2", zip_bytes((Raw(raw, second), b"x"))) == {"cafΘ.png": b"x"}


def test_backslashes_of_windows_are_separators_where_no_name_has_a_slash(tmp_path):
    names = ["set\\cat\\", "set\\cat\\1.png", "list.txt"]
    assert set(extracted(tmp_path, unmarked(names, "ascii"))) == {"set/cat/1.png", "list.txt"}
    for names in (["cat\\1.png", "dog/2.png"], ["..\\1.png"], ["\\1.png"]):
        assert_refused(unmarked(names, "ascii"), r"some\.archive: entry '")


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


ZIP_LINK = zipfile.ZipInfo("x")
ZIP_LINK.external_attr = 0o120777 << 16
LINK, STORED = special("x", tarfile.SYMTYPE, "../.."), zip_bytes(("abcd", b"content"), method=0)
LONG = zip_bytes(("a", bytes(1000)))
LENGTH = (1000).to_bytes(4, "little")
TARS = {
    "link then a file through it": [LINK, ("x/evil", b"")],
    "hard link": [special("x", tarfile.LNKTYPE, "../../evil")],
    **{f"type {kind!r}": [special("x", kind)] for kind in (tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE)},
    **{f"name {name}": [(name, b"")] for name in ("../evil", "a/b/../../../evil", "/tmp/evil", "..\\evil", "C:evil")},
    "duplicate": [("a", b"1"), ("a", b"2")],
    "file then folder": [("a", b"1"), ("a/b", b"2")],
    "folder then file": [("a/b", b"1"), ("a", b"2")],
}
HOSTILE = {name: tar_bytes([special("some-dir", tarfile.DIRTYPE), *members]) for name, members in TARS.items()} | {
    "zip parent": zip_bytes(("../evil", b"")),
    "zip drive letter": STORED.replace(b"abcd", b"C:/x"),
    "zip NUL": STORED.replace(b"abcd", b"a\0cd"),
    "zip link": zip_bytes((ZIP_LINK, b"/etc/passwd")),
    **{f"zip that announces {size}": LONG.replace(LENGTH, size.to_bytes(4, "little")) for size in (10, 0, 90_000)},
    "zip checksum": STORED.replace(b"content", b"CONTENT"),
    "zip of a method that nothing bounds": zip_bytes(("a", bytes(1000)), method=zipfile.ZIP_BZIP2),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused_by_its_entry_and_nothing_lands_outside(data):
    assert_refused(data, r"some\.archive: entry '")


def test_a_huge_header_an_empty_or_encrypted_archive_and_a_wrong_checksum_behind_the_last_file_are_refused():
    header = special("x", tarfile.XHDTYPE)
    header.size = 1 << 40
    for data in (header.tobuf(tarfile.GNU_FORMAT) + bytes(1024), zip_bytes(), gzip.compress(b"")):
        assert_refused(data)
    assert_refused(STORED.replace(b"\x14\3\x14\0\0", b"\x14\3\x14\0\1"), "'abcd' is encrypted. Unpack the zip with")
    for form, place in (("tar.gz", -8), ("tar.xz", -30)):
        data = bytearray(WHOLE[form])
        data[place] ^= 0x10
        assert_refused(bytes(data), "damaged")


@pytest.mark.parametrize("form", FORMS)
def test_every_truncation_is_refused(form):
    data = WHOLE[form]
    end = len(data.rstrip(b"\0")) + 1024 if form == "tar" else len(data) - 1  # a tar ends with two blocks, and padding
    for cut in range(0, end, max(1, end // 20)):
        assert_refused(data[:cut])


def test_bombs_stop_at_the_budget(tmp_path, monkeypatch):
    for name, value in {"RATIO": 2, "FLOOR": 1000}.items():
        monkeypatch.setattr(archive, name, value)
    large = {"a": bytes(1_000_000)}
    many = {f"{number}": b"" for number in range(99)}
    for number, (files, form) in enumerate(((large, "tar.gz"), (large, "zip"), (many, "tar.gz"))):
        refused(errors.ArchiveError, "bomb", extracted, tmp_path / str(number), archived(files, form))
        assert sum(map(len, tree(tmp_path / str(number) / "inside").values())) <= 100_000
