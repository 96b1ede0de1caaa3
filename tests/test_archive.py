"""Archives: what is whole comes out whole, what is hostile or damaged is refused by name, nothing lands outside."""

import bz2
import gzip
import io
import lzma
import os
import random
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from nbtools import disk, errors
from nbtools.data import archive

FILES = {"data/labels.csv": b"file,label\n", "data/images/a.png": bytes(range(256)) * 20, "data/empty": b""}
PACKERS = {"tar": bytes, "tar.gz": gzip.compress, "tar.xz": lzma.compress, "tar.bz2": bz2.compress}


def tar_bytes(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member, io.BytesIO(bytes(member.size)))
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return buffer.getvalue()


def zip_bytes(*members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def whole(form: str) -> bytes:
    return zip_bytes(*FILES.items()) if form == "zip" else PACKERS[form](tar_bytes(*FILES.items()))


def extract(tmp_path: Path, data: bytes) -> Path:
    path, folder = tmp_path / "some.archive", tmp_path / "inside" / "out"
    path.write_bytes(data)
    folder.parent.mkdir(exist_ok=True)
    archive.extract(path, folder)
    return folder


def in_place(tmp_path: Path, data: bytes) -> dict[str, bytes]:
    """All files of an archive, read where they lie."""
    path = tmp_path / "some.archive"
    path.write_bytes(data)
    return {name: archive.read_member(path, name) for name in archive.archive_index(path).files}


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", [*PACKERS, "zip"])
def test_every_format_comes_out_as_it_went_in(tmp_path, form):
    assert tree(extract(tmp_path, whole(form))) == FILES
    assert archive.kind(tmp_path / "some.archive") == form


def test_old_tars_without_magic_are_tars(tmp_path):
    info = tarfile.TarInfo("a")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    assert tree(extract(tmp_path, bytes(block) + bytes(1024))) == {"a": b""}


def test_litter_of_macos_is_left_out(tmp_path):
    members = [("a/b.png", b"1"), ("a/._b.png", b"2"), ("__MACOSX/a/b.png", b"3"), ("a/.DS_Store", b"4")]
    assert tree(extract(tmp_path, tar_bytes(*members))) == {"a/b.png": b"1"}


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


@pytest.mark.parametrize("members", HOSTILE_TARS.values(), ids=HOSTILE_TARS)
def test_hostile_tar_is_refused_by_entry_and_nothing_lands_outside(tmp_path, members):
    members = [special("some-dir", tarfile.DIRTYPE), *members]
    with pytest.raises(errors.ArchiveError, match=r"some\.archive: entry '"):
        extract(tmp_path, tar_bytes(*members))
    assert sorted(os.listdir(tmp_path)) == ["inside", "some.archive"]
    assert os.listdir(tmp_path / "inside") == ["out"]
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_a_pax_name_with_nul_is_refused(tmp_path):
    info = tarfile.TarInfo("a")
    info.pax_headers = {"path": "a\0b"}
    with pytest.raises(errors.ArchiveError, match="NUL"):
        extract(tmp_path, info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


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
    "checksum wrong": stored().replace(b"content", b"CONTENT"),
    "hidden entry": hidden_entry(),
    "prefix": b"PK\3\4" + bytes(60) + stored(),
    "encrypted": stored().replace(b"PK\1\2\x14\x03\x14\0\0\0", b"PK\1\2\x14\x03\x14\0\1\0"),
}


@pytest.mark.parametrize("data", HOSTILE_ZIPS.values(), ids=HOSTILE_ZIPS)
def test_hostile_zip_is_refused_and_nothing_lands_outside(tmp_path, data):
    with pytest.raises(errors.ArchiveError, match=r"some\.archive: entry '"):
        extract(tmp_path, data)
    assert sorted(os.listdir(tmp_path)) == ["inside", "some.archive"]
    assert set(os.listdir(tmp_path / "inside")) <= {"out"}


def test_streamed_zip_with_data_descriptors_is_fine(tmp_path):
    class Unseekable(io.BytesIO):
        def seekable(self):
            return False

        def tell(self):
            raise OSError

    buffer = Unseekable()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in FILES.items():
            file.writestr(name, content)
    assert tree(extract(tmp_path, buffer.getvalue())) == FILES


@pytest.mark.parametrize("form", [*PACKERS, "zip"])
def test_every_truncation_is_refused(tmp_path, form):
    data = whole(form)
    cuts = range(0, len(data) - 1, max(1, len(data) // 60))
    if form == "tar":  # what follows the two zero blocks of the end mark is padding
        cuts = [cut for cut in cuts if cut < len(tar_bytes(*FILES.items()).rstrip(b"\0")) + 1024]
    for cut in cuts:
        place = tmp_path / str(cut)
        place.mkdir()
        with pytest.raises(errors.ArchiveError):
            extract(place, data[:cut])


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "tar.bz2"])
def test_a_wrong_checksum_behind_the_last_file_is_noticed(tmp_path, form):
    data = bytearray(whole(form))
    data[{"tar.gz": -8, "tar.xz": -30, "tar.bz2": -3}[form]] ^= 0x10
    with pytest.raises(errors.ArchiveError, match="damaged"):
        extract(tmp_path, bytes(data))


@pytest.mark.parametrize("data", [b"", bytes(10240), zip_bytes(), gzip.compress(b""), b"BZh9"], ids=range(5))
def test_empty_archives_are_refused(tmp_path, data):
    with pytest.raises(errors.ArchiveError):
        extract(tmp_path, data)


def test_bombs_stop_at_the_budget(tmp_path, monkeypatch):
    for name, value in {"ENTRIES": 3, "RATIO": 2, "FLOOR": 1000}.items():
        monkeypatch.setattr(archive, name, value)
    for number, data in enumerate(
        [
            gzip.compress(tar_bytes(("a", bytes(1_000_000)))),
            zip_bytes(("a", bytes(1_000_000))),
            tar_bytes(*((f"{number}", b"") for number in range(4))),
        ]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(errors.ArchiveError, match=r"bomb|more than 3 entries"):
            extract(place, data)
        assert sum(map(len, tree(place / "inside").values())) <= 100_000


def test_a_huge_extended_header_is_refused_before_it_fills_memory(tmp_path):
    info = special("x", tarfile.XHDTYPE)
    info.size = 1 << 40
    with pytest.raises(errors.ArchiveError, match=r"header of 1\.1 TB"):
        extract(tmp_path, info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def test_a_header_of_negative_size_does_not_loop(tmp_path):
    block = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfe\0"  # base 256: -512
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(errors.ArchiveError):
        extract(tmp_path, tar_bytes(("b", b"")).rstrip(b"\0").ljust(512, b"\0") + bytes(block) + bytes(1024))


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, or a piece cut out, doubled or zeroed."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at, length = chance.randrange(len(changed)), chance.choice([1, 1, 4, 100, 512])
        piece = changed[at : at + length]
        match chance.randrange(4):
            case 0:
                changed[at : at + length] = b""
            case 1:
                changed[at:at] = piece
            case 2:
                changed[at : at + length] = bytes(len(piece))
            case _:
                changed[at] ^= 1 << chance.randrange(8)
        changed = changed or bytearray(1)
    return bytes(changed)


@pytest.mark.parametrize("form", [*PACKERS, "zip"])
def test_mutated_archives_give_files_or_an_nbtools_error_and_nothing_outside(tmp_path, form):
    chance, data, refused = random.Random(form), whole(form), 0
    for number in range(120):
        place = tmp_path / str(number)
        place.mkdir()
        try:
            extract(place, mutated(data, chance))
        except errors.NbtoolsError:
            refused += 1
        assert set(os.listdir(place)) <= {"inside", "some.archive"}
        assert set(os.listdir(place / "inside")) <= {"out"}
    assert refused > 60


def test_write_gives_the_same_bytes_whatever_the_times_and_reads_back(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    first = archive.write(tmp_path / "pack", tmp_path / "kept" / "pack.tar").read_bytes()
    os.utime(tmp_path / "pack" / "data" / "labels.csv", (0, 0))
    second = archive.write(tmp_path / "pack", tmp_path / "kept" / "pack.tar").read_bytes()
    assert first == second
    assert os.listdir(tmp_path / "kept") == ["pack.tar"]
    assert tree(extract(tmp_path, first)) == FILES
    with tarfile.open(tmp_path / "kept" / "pack.tar") as tar:
        assert sorted(tar.getnames()) == sorted(FILES)


def test_write_refuses_links_and_leaves_the_old_archive(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "a").write_text("a")
    before = archive.write(tmp_path / "pack", tmp_path / "pack.tar").read_bytes()
    (tmp_path / "pack" / "link").symlink_to("a")
    with pytest.raises(errors.ArchiveError, match="link"):
        archive.write(tmp_path / "pack", tmp_path / "pack.tar")
    assert (tmp_path / "pack.tar").read_bytes() == before


def test_a_full_disk_passes_as_the_disks_own_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(OSError, match="No space left"):
        extract(tmp_path, whole("tar"))


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_files_read_in_place_are_those_that_come_out_and_nothing_is_written(tmp_path, form):
    assert in_place(tmp_path, whole(form)) == FILES
    assert archive.archive_index(tmp_path / "some.archive").top == "data"
    assert archive.first(tmp_path / "some.archive", 2) == list(FILES)[:2]
    assert os.listdir(tmp_path) == ["some.archive"]


def test_the_first_names_of_a_tar_are_told_without_reading_on(tmp_path):
    (tmp_path / "some.archive").write_bytes(whole("tar")[: 512 * 4])
    assert archive.first(tmp_path / "some.archive", 1) == ["data/labels.csv"]
    with pytest.raises(errors.ArchiveError):
        archive.archive_index(tmp_path / "some.archive")


@pytest.mark.parametrize("form", ["tar.gz", "tar.xz", "tar.bz2"])
def test_a_compressed_tar_has_no_places_until_it_is_a_plain_one(tmp_path, form):
    with pytest.raises(errors.ArchiveError, match="no plain tar, and no zip"):
        in_place(tmp_path, whole(form))
    archive.plain(tmp_path / "some.archive", tmp_path / "plain.tar")
    assert (tmp_path / "plain.tar").read_bytes() == whole("tar")


HOSTILE = {f"tar {name}": tar_bytes(*found) for name, found in HOSTILE_TARS.items()}
HOSTILE |= {f"zip {name}": data for name, data in HOSTILE_ZIPS.items()}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_unpacked_is_not_read_in_place_either(tmp_path, data):
    with pytest.raises(errors.ArchiveError, match=r"some\.archive: entry '"):
        in_place(tmp_path, data)


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_every_truncation_is_refused_in_place(tmp_path, form):
    data = whole(form)
    end = len(data) - 1 if form == "zip" else len(data.rstrip(b"\0")) + 1024
    for cut in range(0, end, max(1, end // 200)):
        with pytest.raises(errors.ArchiveError):
            in_place(tmp_path, data[:cut])


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_mutated_archives_read_in_place_give_files_or_an_nbtools_error(tmp_path, form):
    chance, data, refused = random.Random(form), whole(form), 0
    for _ in range(200):
        try:
            in_place(tmp_path, mutated(data, chance))
        except errors.NbtoolsError:
            refused += 1
    assert refused > 60


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_an_archive_that_changed_is_looked_at_again(tmp_path, form):
    in_place(tmp_path, whole(form))
    other = {"data/other.png": b"other"}
    assert in_place(tmp_path, tar_bytes(*other.items()) if form == "tar" else zip_bytes(*other.items())) == other
    with pytest.raises(errors.ArchiveError, match=r"some\.archive: entry 'data/empty' is not in it"):
        archive.read_member(tmp_path / "some.archive", "data/empty")


def lying(size: int) -> bytes:
    """A zip of a MB of zeros that says, in both its directories, that they are `size` bytes."""
    return zip_bytes(("a", bytes(1_000_000))).replace(struct.pack("<I", 1_000_000), struct.pack("<I", size))


@pytest.mark.parametrize("size", [10, 90_000_000])
def test_a_size_that_lies_is_refused_in_the_memory_that_it_says_or_that_there_is(tmp_path, size):
    tracemalloc.start()
    with pytest.raises(errors.ArchiveError, match="entry 'a' "):
        in_place(tmp_path, lying(size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000 + min(size, 3_000_000)


def test_an_entry_that_its_archive_does_not_justify_is_not_read(tmp_path, monkeypatch):
    data = zip_bytes(("a", bytes(1_000_000)), ("b", os.urandom(100_000)))
    monkeypatch.setattr(archive, "FLOOR", 1000)
    assert len(in_place(tmp_path, zip_bytes(("b", os.urandom(100_000))))["b"]) == 100_000
    with pytest.raises(errors.ArchiveError, match=r"entry 'a' has 1\.0 MB, and at most .* are read at once"):
        in_place(tmp_path, data)
    monkeypatch.setattr(archive, "LARGEST", 50_000)
    with pytest.raises(errors.ArchiveError, match=r"entry 'b' has 100 kB, and at most 50\.0 kB"):
        in_place(tmp_path, zip_bytes(("b", os.urandom(100_000))))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_with_another_compression_is_refused_since_nothing_bounds_it(tmp_path, method):
    with pytest.raises(errors.ArchiveError, match=rf"entry 'a' is compressed by method {method}"):
        extract(tmp_path, zip_bytes(("a", b"1" * 1000), method=method))


MANY = {f"many/{number:03}.png": random.Random(number).randbytes(2000 + number) for number in range(120)}


def read_many(path: Path, seed: int) -> bool:
    names = sorted(MANY, key=lambda name: hash((seed, name)))
    return all(archive.read_member(path, name) == MANY[name] for name in names)


def read_or_die(path: Path, seed: int) -> None:
    if not read_many(path, seed):
        os._exit(1)


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_threads_and_forked_processes_read_at_once_without_disturbing_each_other(tmp_path, form):
    path = tmp_path / "some.archive"
    path.write_bytes(tar_bytes(*MANY.items()) if form == "tar" else zip_bytes(*MANY.items()))
    archive.archive_index(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        forked = [get_context("fork").Process(target=read_or_die, args=(path, seed)) for seed in range(4)]
        for process in forked:
            process.start()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda seed: read_many(path, seed), range(16)))
    for process in forked:
        process.join()
    assert [process.exitcode for process in forked] == [0] * 4
