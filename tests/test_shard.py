"""Shards: the same tars for the same files, whole or not there, and the folder back from them."""

import errno
import hashlib
import json
import os
import random
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from archives import ended_at, full, kill, put, tree
from faults.forks import done
from faults.operations import Fault, Layer

import nbtools as nb
from nbtools import errors
from nbtools.__main__ import main
from nbtools.data import archive, cache, sources, transfer

shards = sys.modules[nb.shard.__module__]


@pytest.fixture(autouse=True)
def small(place, monkeypatch):
    monkeypatch.setattr(shards, "LEAST", 1)


@pytest.fixture
def raw(place) -> Path:
    """30 files of up to 8 kB, in folders; one has no byte."""
    drawn = random.Random(0)
    for number in range(30):
        put(place / "raw" / f"{number % 3}" / f"{number:02d}.bin", drawn.randbytes(drawn.randrange(8000)))
    put(place / "raw" / "empty")
    return place / "raw"


def shard(folder: Path, to="drive:sets/raw", size: int = 20_000) -> Path:
    found = nb.shard(folder, to, size, progress=False)
    assert found is not None
    return found


def stage(source, into=None) -> Path:
    return nb.stage(source, into, progress=False)


def test_a_folder_comes_back_from_its_shards_which_have_their_size_and_their_hashes(place, raw):
    folder = shard(raw)
    manifest = json.loads((folder / "shards.json").read_text())["shards"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["shards.json", *(one["file"] for one in manifest)])
    assert len(manifest) > 4
    assert sum(one["files"] for one in manifest) == 31
    for one in manifest:
        data = (folder / one["file"]).read_bytes()
        assert (one["size"], one["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert len(data) <= 20_000 + 2 * 512
    for source in ("drive:sets/raw", folder, "drive:sets/raw/shards.json"):
        assert tree(stage(source)) == tree(raw)
    assert not list(cache().glob("*.part"))


def test_the_same_names_and_contents_give_the_same_tars_and_a_second_call_writes_none(place, raw, monkeypatch):
    before = tree(shard(raw))
    for path in raw.rglob("*.bin"):
        os.utime(path, (0, 0))
    other = tree(shard(raw, place / "other"))
    assert {name: data for name, data in other.items() if name.endswith("tar")} == {
        name: data for name, data in before.items() if name.endswith("tar")
    }
    monkeypatch.setattr(shards.archive, "write", lambda *_: pytest.fail("written again"))
    assert tree(shard(raw, place / "other")) == other


def test_where_files_changed_only_their_tars_are_written_and_the_others_go(place, raw, monkeypatch):
    before = {path.name for path in shard(raw).glob("*.tar")}
    put(raw / "2" / "29.bin", b"new")
    folder = shard(raw)
    after = {path.name for path in folder.glob("*.tar")}
    assert len(before - after) == 1
    assert after == {one["file"] for one in json.loads((folder / "shards.json").read_text())["shards"]}
    assert tree(stage("drive:sets/raw")) == tree(raw)


def test_files_that_are_not_ours_stay_whatever_their_names_and_what_an_earlier_call_left_goes(place, raw):
    folder = place / "drive" / "sets" / "raw"
    theirs = ["shard-00000.tar", "shard-00001-of-00004.tfrecord", "shard-00002-notes.json", "shards.json.old.part"]
    ours = ["shard-00099-0123456789ab.tar", "shard-00099-0123456789ab.json", "shard-00099.new", "shard-00099.new.part"]
    ours += ["shards.json.7-7.part", "shard-00099-0123456789ab.json.7-7.part"]
    for name in (*theirs, *ours):
        put(folder / name, b'{"text": "mine"}')
    names = {path.name for path in shard(raw).iterdir()}
    assert names.issuperset(theirs)
    assert names.isdisjoint(ours)


@pytest.fixture
def few(raw) -> Path:
    for path in list(raw.rglob("*.bin"))[4:]:
        path.unlink()
    return raw


@pytest.mark.parametrize("fault", [kill, full])
def test_sharding_cut_short_at_any_operation_resumes(place, few, fault):
    whole = {name: data for name, data in tree(shard(few, place / "whole", 9000)).items() if name.endswith("tar")}
    assert len(whole) > 1
    for nth in range(fault is full, 200, 5):
        to = place / f"to-{nth}"
        ended = ended_at(nth, fault, partial(shard, size=9000), few, to)
        if (to / "shards.json").exists():
            assert tree(stage(to)) == tree(few)
        assert {name: data for name, data in tree(shard(few, to, 9000)).items() if name != "shards.json"} == whole
        if ended == 0:
            break
        assert ended == {full: 1, kill: -9}[fault]
    assert 15 < nth < 199


@pytest.mark.parametrize("fault", [kill, full])
def test_staging_shards_cut_short_at_any_operation_publishes_all_or_nothing_and_resumes(place, few, fault):
    shard(few, size=9000)
    for nth in range(fault is full, 300, 8):
        into = place / f"into-{nth}"
        ended = ended_at(nth, fault, stage, "drive:sets/raw", into)
        assert all(tree(path / "raw") == tree(few) for path in into.glob("*") if path.suffix != ".part")
        assert tree(stage("drive:sets/raw", into)) == tree(few)
        if ended == 0:
            break
    assert 15 < nth < 299


def test_a_flipped_bit_and_a_missing_shard_are_found_and_nothing_is_published(place, raw, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.001)
    folder = shard(raw)
    first = sorted(folder.glob("*.tar"))[0]
    data = first.read_bytes()
    first.write_bytes(data[:1500] + bytes([data[1500] ^ 1]) + data[1501:])
    with pytest.raises(errors.ArchiveError, match=r"shard-00000-.*its SHA-256 is not the one that was noted"):
        stage("drive:sets/raw")
    first.unlink()
    with pytest.raises(errors.StageError, match=r"shard-00000-"):
        stage("drive:sets/raw")
    assert not [path for path in cache().glob("raw-*") if path.suffix != ".part"]
    first.write_bytes(data)
    assert tree(stage("drive:sets/raw")) == tree(raw)
    put(folder / "shards.json", b"{}")
    with pytest.raises(errors.StageError, match=r"shards\.json: cannot be read .*Write the shards again"):
        stage("drive:sets/raw")


@pytest.mark.parametrize("damage", ["zeros", "another JSON", "a flipped bit", "no bytes at all", "a missing shard"])
def test_writing_the_shards_again_mends_what_staging_refuses(place, raw, monkeypatch, damage):
    monkeypatch.setattr(transfer, "PAUSE", 0.001)
    before = tree(shard(raw))
    folder = place / "drive" / "sets" / "raw"
    manifest, first = folder / "shards.json", min(folder.glob("*.tar"))
    data = first.read_bytes()
    if damage == "a missing shard":
        first.unlink()
    elif damage == "a flipped bit":
        first.write_bytes(data[:1500] + bytes([data[1500] ^ 1]) + data[1501:])
    else:
        manifest.write_bytes({"zeros": bytes(50), "another JSON": b"{}"}.get(damage, b""))
    with pytest.raises(errors.StageError, match=rf"{first.name}|Write the shards again"):
        stage("drive:sets/raw")
    assert tree(shard(raw)) == before
    assert tree(stage("drive:sets/raw")) == tree(raw)


def test_an_unreadable_note_of_an_interrupted_call_is_written_anew(place, few):
    before = tree(shard(few))
    folder = place / "drive" / "sets" / "raw"
    (folder / "shards.json").unlink()
    for name, data in {"a": bytes(9), "b": b"[]", "c": b"7", "d": b'{"file": 7, "size": 1}'}.items():
        put(folder / f"shard-00000-{name * 12}.json", data)
    assert tree(shard(few)) == before


def test_one_error_of_the_mount_at_any_operation_does_not_end_sharding(place, few, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.001)

    def broken(nth: int) -> int:
        layer = Layer(place / "drive", nth, Fault(code=(errno.EIO, errno.ENOTCONN)[nth % 2]))
        shard(few)
        return len(layer.kinds) if layer.struck else 0

    whole, count = tree(shard(few, place / "whole")), 0
    while int(done(partial(broken, count))):
        assert tree(place / "drive" / "sets" / "raw") == whole
        shutil.rmtree(place / "drive" / "sets")
        count += 1
    assert count > 30


@pytest.mark.parametrize("harm", ["on Drive", "in its copy"])
def test_of_shards_only_the_damaged_one_is_copied_again(place, raw, monkeypatch, harm):
    path = max(shard(raw).glob("*.tar"))
    data, copied, copy, extract = path.read_bytes(), [], transfer.copy, archive.extract

    def damaged(copy, *rest, **options):
        if copy.name.startswith(path.name) and harm == "in its copy":
            raise errors.ArchiveError(f"{copy}: damaged")
        extract(copy, *rest, **options)

    if harm == "on Drive":
        path.write_bytes(data[:1500] + bytes([data[1500] ^ 1]) + data[1501:])
    monkeypatch.setattr(sources, "AT_ONCE", 1)  # the others are done by then
    monkeypatch.setattr(archive, "extract", damaged)
    with pytest.raises(errors.ArchiveError, match=path.name):
        stage("drive:sets/raw")
    path.write_bytes(data)
    monkeypatch.setattr(archive, "extract", extract)
    monkeypatch.setattr(transfer, "copy", lambda source, *rest: copied.append(source) or copy(source, *rest))
    assert tree(stage("drive:sets/raw")) == tree(raw)
    assert copied == [path]


def test_shards_are_unpacked_while_others_are(place, raw, monkeypatch):
    shard(raw)
    two, extract = threading.Barrier(2, timeout=30), archive.extract
    first = iter(range(2))

    def together(*arguments, **options):
        if next(first, None) is not None:
            two.wait()
        extract(*arguments, **options)

    monkeypatch.setattr(archive, "extract", together)
    assert tree(stage("drive:sets/raw")) == tree(raw)


def test_a_mount_that_is_lost_while_shards_are_copied_is_mounted_anew(place, raw, monkeypatch):
    """By the main thread: those that copy cannot."""
    folder, mounted, copy = shard(raw), [], transfer.copy
    monkeypatch.setattr(sources.drive, "remount", mounted.append)

    def lost(source, *rest):
        if not mounted:
            raise transfer.Away(f"{source}: stopped responding")
        return copy(source, *rest)

    monkeypatch.setattr(transfer, "copy", lost)
    assert tree(stage("drive:sets/raw")) == tree(raw)
    assert mounted == [folder]


def test_stop_ends_the_copying_of_the_other_shards(place, raw, monkeypatch):
    shard(raw)
    left = []

    def bring(source, target, size, unfinished, progress, digest):
        if "00000" in source.name:
            raise KeyboardInterrupt
        for _ in range(500):
            progress(0)
            time.sleep(0.01)
        left.append(source)

    monkeypatch.setattr(sources, "bring", bring)
    with pytest.raises(KeyboardInterrupt):
        stage("drive:sets/raw")
    assert left == []


def test_a_manifest_that_leads_out_of_its_folder_is_refused(place, raw):
    folder = shard(raw)
    manifest = json.loads((folder / "shards.json").read_text())
    manifest["shards"][0]["file"] = "../x.tar"
    put(folder / "shards.json", json.dumps(manifest).encode())
    with pytest.raises(errors.StageError, match=r"shards\.json: cannot be read"):
        stage("drive:sets/raw")


def test_a_size_out_of_range_is_refused(place, raw, monkeypatch):
    monkeypatch.setattr(shards, "LEAST", 500_000_000)
    with pytest.raises(errors.StageError, match=r"size must be from 500,000,000 to 2,000,000,000 bytes, got 1,000"):
        shard(raw, size=1000)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("A.png", "a.png"), r"raw: entry 'a\.png' has the same name as 'A\.png' .*Rename one\."),
        (("1/x.png", "x\\y.png"), r"raw: entry 'x\\\\y\.png' has a name that .* a backslash, .*Rename it\."),
        (("C:1.png",), r"raw: entry 'C:1\.png' has a name that .* a drive letter .*Rename it\."),
    ],
)
def test_names_that_staging_refuses_are_refused_before_a_shard_is_written(place, names, words):
    for name in names:
        put(place / "raw" / name, b"1")
    with pytest.raises(errors.ArchiveError, match=words):
        shard(place / "raw", "drive:raw")
    assert not (place / "drive" / "raw").exists()


def test_what_staging_drops_is_in_no_shard_and_not_counted(place):
    for name in ("a.png", "._a.png", ".DS_Store", "__MACOSX/a.png"):
        put(place / "raw" / name, b"1")
    folder = shard(place / "raw")
    assert [one["files"] for one in json.loads((folder / "shards.json").read_text())["shards"]] == [1]
    assert list(tree(stage(folder))) == ["a.png"]


@pytest.mark.parametrize("to", ["drive:raw", "drive:raw/shards"])
@pytest.mark.parametrize("by", ["drive:raw", "a path", "a link"])
def test_shards_in_the_folder_that_they_are_made_of_are_refused(place, to, by):
    put(place / "drive" / "raw" / "1", b"1")
    (place / "link").symlink_to(place / "drive" / "raw")
    folder = {"a path": place / "drive" / "raw", "a link": place / "link"}.get(by, Path(by))
    with pytest.raises(errors.StageError, match=rf"{to}: is in .*(raw|link) itself: .* Choose a folder outside it"):
        shard(folder, to)
    assert tree(place / "drive") == {"raw/1": b"1"}


def test_the_terminal_shards_and_prints_the_folder(place, raw, capsys):
    assert main(["shard", str(raw), "drive:sets/raw"]) == 0
    assert capsys.readouterr().out.strip() == str(place / "drive" / "sets" / "raw")
    assert tree(stage("drive:sets/raw")) == tree(raw)
