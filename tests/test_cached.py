"""The cache: listed, deleted by age and by size."""

import os
import time
from pathlib import Path

import pytest
import toy
from archives import put, tar_bytes, tree

import nbtools as nb
from nbtools import disk, errors
from nbtools.__main__ import main
from nbtools.data import cache

DAY = 86_400


def staged(place: Path, *names: str) -> None:
    """Staged, the first of them the longest ago: a day each."""
    for age, name in enumerate(reversed(names), 1):
        put(place / "drive" / f"{name}.tar", tar_bytes({"a": bytes(1_000_000), name: b""}))
        nb.stage(f"drive:{name}.tar", progress=False)
        [folder] = cache().glob(f"{name}-*")
        os.utime(folder, (0, time.time() - age * DAY))


def names(entries) -> list[str]:
    return [entry.path.name.rpartition("-")[0] for entry in entries]


def test_what_was_staged_and_packed_is_listed_the_least_recently_used_first(place, capsys):
    staged(place, "old", "new")
    pack = toy.pack(toy.demo(place / "raw", 20))
    os.utime(pack.folder, (0, time.time() - 60))
    found = nb.cached()
    assert names(found.entries) == ["old", "new", "toy"]
    assert found.deleted == ()
    assert [entry.bytes for entry in found.entries] == [sum(map(len, tree(e.path).values())) for e in found.entries]
    nb.stage("drive:old.tar", progress=False)
    assert names(nb.cached().entries) == ["new", "toy", "old"], "used again"
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.strip() == str(nb.cached()).strip()


def test_the_least_recently_used_is_deleted_until_enough_is_free_or_by_age_and_staged_again(place, monkeypatch):
    staged(place, "old", "middle", "new")
    free = iter([10**6, 2 * 10**6, 3 * 10**6])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "free_bytes", lambda _: next(free))
        found = nb.cached(free="2.5 MB")
    assert (names(found.deleted), names(found.entries)) == (["old", "middle"], ["new"])
    with pytest.raises(errors.StageError, match="a size such as 20 GB, got '20 apples'"):
        nb.cached(free="20 apples")
    assert tree(nb.stage("drive:old.tar", progress=False)) == {"a": bytes(1_000_000), "old": b""}
    assert names(nb.cached(days=0.5).deleted) == ["new"]


def test_too_little_space_names_what_the_cache_could_give(place, monkeypatch):
    staged(place, "old")
    put(place / "drive" / "big.tar", tar_bytes({"a": bytes(3_000_000)}))
    monkeypatch.setattr(disk, "free_bytes", lambda _: 500_000)
    with pytest.raises(errors.DiskError, match=r"needs 6\.\d MB.*`python -m nbtools cache --free 6\.\dMB` deletes of"):
        nb.stage("drive:big.tar", progress=False)
