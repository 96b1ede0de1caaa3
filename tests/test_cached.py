"""The cache: listed, deleted by age and size, never what a process uses."""

import contextlib
import errno
import os
import shutil
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import toy
from archives import forked, put, tar_bytes, tree

import nbtools as nb
from nbtools import disk, errors
from nbtools.__main__ import main
from nbtools.data import cache

pytestmark = pytest.mark.usefixtures("place")

DAY = 86_400


def stage_one(name: str) -> None:
    nb.stage(f"drive:{name}.tar", progress=False)


def staged(place: Path, *names: str) -> None:
    """Staged by processes that have ended, the first of them the longest ago: a day each."""
    for age, name in enumerate(reversed(names), 1):
        put(place / "drive" / f"{name}.tar", tar_bytes({"a": bytes(1_000_000), name: b""}))
        process = forked(stage_one, name)
        process.join()
        assert process.exitcode == 0
        newest = max((cache() / "locks").glob("use-*"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (0, time.time() - age * DAY))


def names(entries) -> list[str]:
    return [entry.path.name.rpartition("-")[0] for entry in entries]


def test_what_was_staged_and_packed_is_listed_the_least_recently_used_first(place, capsys):
    staged(place, "old", "new")
    pack = toy.pack(toy.demo(place / "raw", 20))
    found = nb.cached()
    assert names(found.entries) == ["old", "new", "toy"]
    assert [entry.busy for entry in found.entries] == [False, False, True]
    assert found.deleted == ()
    sizes = [sum(map(len, tree(entry.path).values())) for entry in found.entries]
    assert [entry.bytes for entry in found.entries] == sizes
    assert found.entries[-1].path == pack.folder
    assert "1.0 MB" in str(found)
    assert "in use" in found._repr_html_()
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.strip() == str(nb.cached()).strip()


def test_the_least_recently_used_is_deleted_until_enough_is_free_and_it_says_what(place, monkeypatch, capsys):
    staged(place, "oldest", "older", "new")
    full = sum(map(len, tree(cache()).values()))
    monkeypatch.setattr(disk, "free_bytes", lambda _: 5_000_000 + full - sum(map(len, tree(cache()).values())))
    assert main(["cache", "--free", "6.5 MB"]) == 0
    out = capsys.readouterr().out
    assert out.count("deleted") == 3, "two rows and the caption"
    assert "2.0 MB deleted; 7.0 MB free" in out
    assert names(nb.cached().entries) == ["new"]
    assert not list(cache().glob("*.part"))
    assert nb.cached(free=100_000_000).deleted, "all that can go"
    with pytest.raises(errors.StageError, match="such as 20 GB, got 'much'"):
        nb.cached(free="much")


def test_what_was_not_used_for_so_long_is_deleted_unfinished_copies_too(place):
    staged(place, "old", "new")
    half = put(cache() / "half-12345678.part" / "1" / "archive", bytes(1000)).parents[1]
    os.utime(half, (0, 0))
    put(cache() / "advice.json", b"{}")
    put(cache() / "mine" / "thesis.txt", b"not of nbtools")
    assert {entry.path.name.partition("-")[0] for entry in nb.cached(days=1.5).deleted} == {"old", "half"}
    assert names(nb.cached().entries) == ["new"]
    assert (cache() / "advice.json").exists()
    assert (cache() / "mine" / "thesis.txt").exists()


def test_what_was_never_leased_keeps_its_age_however_often_it_is_listed(place):
    half = put(cache() / "half-12345678.part" / "1" / "archive", bytes(1000)).parents[1]
    os.utime(half, (0, 0))
    assert [nb.cached().entries[0].used for _ in range(2)] == [0, 0]
    assert [entry.path for entry in nb.cached(days=30).deleted] == [half]


@pytest.mark.parametrize("gone", ["while it is listed", "before it is deleted"])
def test_what_another_process_removes_meanwhile_is_passed_over(place, monkeypatch, gone):
    staged(place, "gone", "there")
    module = sys.modules[nb.cached.__module__]
    listing = module.listing

    def removed(path):
        sizes = listing(path)
        if path.name.startswith("gone"):
            shutil.rmtree(path)
            if gone == "while it is listed":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return sizes

    monkeypatch.setattr(module, "listing", removed)
    assert names(nb.cached(days=0).deleted) == ["there"]


@contextlib.contextmanager
def used(source):
    """Within, a process has staged a source; it is killed at the end."""
    context = get_context("fork")
    ready, release = context.Event(), context.Event()

    def use() -> None:
        nb.stage(source, progress=False)
        ready.set()
        release.wait()

    process = forked(use)
    try:
        assert ready.wait(30)
        yield
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("by_path", [False, True])
def test_what_a_process_uses_stays_until_it_ends_however_it_ends(place, by_path):
    """Also where it was given the path in the cache that an earlier process printed."""
    staged(place, "used", "unused")
    [folder] = cache().glob("used-*")
    with used(folder if by_path else "drive:used.tar"):
        assert names(nb.cached(free=10**15, days=0).deleted) == ["unused"]
        assert names(nb.cached().entries) == ["used"]
    assert names(nb.cached(days=0).deleted) == ["used"]


def test_who_waits_for_a_newer_version_does_not_count_as_using_the_older_one(place):
    staged(place, "digits")
    put(place / "drive" / "digits.tar", tar_bytes({"newer": b"22"}))
    [older], context, module = cache().glob("digits-*"), get_context("fork"), sys.modules[nb.stage.__module__]
    waits, release = context.Event(), context.Event()

    def wait() -> None:
        real = module.lock_of
        patch = pytest.MonkeyPatch()
        patch.setattr(module, "lock_of", lambda target: waits.set() or (release.wait() and real(target)))
        stage_one("digits")

    process = forked(wait)
    assert waits.wait(30)
    assert nb.stage("drive:digits.tar", progress=False).parent == older
    release.set()
    process.join()
    assert process.exitcode == 0
    assert names(nb.cached().entries) == ["digits"]


def test_what_is_deleted_in_the_moment_before_it_is_leased_is_staged_again(place, monkeypatch):
    staged(place, "digits")
    [folder], module = cache().glob("digits-*"), sys.modules[nb.cached.__module__]
    lease = module.lease
    monkeypatch.setattr(module, "lease", lambda path: (path == folder and disk.remove(path)) or lease(path))
    assert tree(nb.stage("drive:digits.tar", progress=False)) == {"a": bytes(1_000_000), "digits": b""}


def test_a_newer_version_leaves_the_older_one_to_the_process_that_uses_it(place):
    source = put(place / "drive" / "digits.tar", tar_bytes({"older": b"1"}))
    with used("drive:digits.tar"):
        older = nb.stage("drive:digits.tar", progress=False).parent
        put(source, tar_bytes({"newer": b"22", "more": b""}))
        newer = nb.stage("drive:digits.tar", progress=False)
        assert (older / "digits" / "older").exists()
        assert tree(newer) == {"newer": b"22", "more": b""}
        assert nb.stage("drive:digits.tar", progress=False) == newer
        put(source, tar_bytes({"newest": b"333"}))
        assert nb.stage("drive:digits.tar", progress=False) == newer, "which only this process used"
        assert tree(newer) == {"newest": b"333"}
    assert [entry.busy for entry in nb.cached().entries] == [True, True], "this process has used both"
    assert nb.stage("drive:digits.tar", progress=False) == newer, "which is whole"
    assert tree(newer) == {"newest": b"333"}


def test_a_pack_that_this_process_has_open_stays(place):
    pack = toy.pack(toy.demo(place / "raw", 20))
    assert nb.cached(days=0).deleted == ()
    assert len(nb.Pack.open(pack.folder)) == 20


def test_what_was_deleted_is_staged_again_and_a_deletion_cut_short_leaves_no_half(place, monkeypatch):
    staged(place, "digits")

    def failing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        remove = disk.remove
        patch.setattr(disk, "remove", lambda path: failing(path) if path.exists() else remove(path))
        with pytest.raises(errors.DiskError, match="deleting from the cache"):
            nb.cached(days=0)
    assert not [path for path in cache().glob("digits-*") if path.suffix != ".part"]
    assert tree(nb.stage("drive:digits.tar", progress=False)) == {"a": bytes(1_000_000), "digits": b""}
    nb.cached(days=0)
    assert names(nb.cached().entries) == ["digits"], "what was left of the deletion is gone too"


def test_too_little_space_names_what_the_cache_could_give(place, monkeypatch):
    staged(place, "old")
    put(place / "drive" / "big.tar", tar_bytes({"a": bytes(3_000_000)}))
    monkeypatch.setattr(disk, "free_bytes", lambda _: 500_000)
    with pytest.raises(errors.DiskError, match=r"needs 6\.\d MB.*`python -m nbtools cache --free 6\.\dMB` deletes of"):
        nb.stage("drive:big.tar", progress=False)


def test_a_pack_that_will_not_fit_stops_after_its_first_samples_and_resumes(place, monkeypatch):
    raw, first = toy.demo(place / "raw", 400), {"free": 128 * 32}
    with monkeypatch.context() as patch:
        patch.setattr(disk, "free_bytes", lambda _: first["free"])
        with pytest.raises(errors.DiskError, match=r"needs 11\.\d kB, .* The first 128 of 400 samples"):
            toy.pack(raw)
    assert [path.suffix for path in (cache() / "packs").iterdir()] == [".part"]
    assert len(toy.pack(raw)) == 400
