"""The cache: listed, and deleted until enough is free."""

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


def staged(place: Path, *names: str) -> None:
    """Staged, the first of them the longest ago: a day each."""
    for age, name in enumerate(reversed(names), 1):
        put(place / "drive" / f"{name}.tar", tar_bytes({"a": bytes(1_000_000), name: b""}))
        nb.stage(f"drive:{name}.tar", progress=False)
        [folder] = cache().glob(f"{name}-*")
        os.utime(folder, (0, time.time() - age * 86_400))


def test_what_was_staged_and_packed_is_listed_the_least_recently_used_first(place, capsys):
    staged(place, "old", "new")
    pack = toy.pack(toy.demo(place / "raw", 20))
    os.utime(pack.folder, (0, time.time() - 60))
    table = nb.cached()
    assert names(table) == ["old", "new", "toy"]
    assert list(table["deleted"]) == [False, False, False]
    assert list(table["bytes"]) == [sum(map(len, tree(cache() / folder).values())) for folder in table["folder"]]
    nb.stage("drive:old.tar", progress=False)
    assert names(nb.cached()) == ["new", "toy", "old"], "used again"
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.strip() == nb.cached().to_string(index=False).strip()


def test_the_least_recently_used_is_deleted_until_enough_is_free_and_staged_again(place, monkeypatch):
    staged(place, "old", "middle", "new")
    free = iter([10**6, 2 * 10**6, 3 * 10**6, 3 * 10**6])
    with monkeypatch.context() as patch:
        patch.setattr(disk, "free_bytes", lambda _: next(free))
        table = nb.cached(free="2.5 MB")
    assert list(table["deleted"]) == [True, True, False]
    assert names(nb.cached()) == ["new"]
    with pytest.raises(errors.StageError, match="a size such as 20 GB, got '20 apples'"):
        nb.cached(free="20 apples")
    assert tree(nb.stage("drive:old.tar", progress=False)) == {"a": bytes(1_000_000), "old": b""}


def names(table) -> list[str]:
    return [folder.rpartition("/")[2].rpartition("-")[0] for folder in table["folder"]]
