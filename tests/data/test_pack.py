"""Packs: every sample or a line that says why not; whole or absent; never decoded twice. And the cache they lie in."""

import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import toy
from acting import refused
from archives import forked, put, tar_bytes, tree
from jupyters import until
from packs import pack_of

import nbtools as nb
from nbtools import disk
from nbtools.__main__ import main
from nbtools.data import Entry, Pack, Survey, build, build_pack, cache, open_feed, progress
from nbtools.data.stage import lock
from nbtools.errors import DiskError, NbtoolsError, PackError, StageError


@pytest.fixture(autouse=True)
def place(place, monkeypatch) -> Path:
    monkeypatch.setenv("READS", str(place / "reads"))
    monkeypatch.setenv("HOME", str(place))
    return place


def vectors(folder: Path, count: int = 40) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        np.save(folder / f"{i}.npy", np.full(3, i, np.float32))
    return folder


def read(path: Path, options) -> dict[str, np.ndarray]:
    """Leaves a mark a call, across threads and processes."""
    with open(os.environ["READS"], "a", errors="surrogateescape") as file:
        file.write(f"{path.name}\n")
    return {"x": np.load(path) * options.get("scale", 1)}


def failing(name: str, error: BaseException, path: Path, options) -> dict[str, np.ndarray]:
    if path.name == name:
        raise error
    return read(path, options)


def reads(place: Path) -> int:
    return len((place / "reads").read_text().split())


def pack(source, options=None, *, task="plain", read=read, **more) -> Pack:
    def survey(folder, _) -> Survey:
        return Survey([Entry(path.name) for path in sorted(folder.rglob("*.npy"))], options=options or {}, exact=True)

    return build_pack(source, task, options or {}, survey, read, **{"progress": False, **more})


def contents(made: Pack) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in made.verify().manifest["files"].items()}


def test_fixed_and_ragged_columns_come_back_as_they_went_in_but_in_the_machines_byte_order(place, monkeypatch):
    rng = np.random.default_rng(0)
    samples = [
        {
            "image": rng.integers(0, 255, (5, 4, 1), np.uint8),
            "scalar": np.int64(length),
            "line": rng.normal(size=(length, 6)).astype(np.float32),
            "text": rng.integers(0, 9, length),
            "empty": np.zeros(0),
            "swapped": rng.normal(size=3).astype(">f4"),
            **{np.dtype(kind).name: rng.normal(size=2).astype(kind) for kind in (np.bool_, np.float32, np.float64)},
        }
        for length in (3, 0, 1, 700, 0)  # an empty sample within and at the end
    ]
    made = pack_of(samples, place, ragged={"line", "text", "empty"})
    assert {name for name, column in made.columns.items() if column.kind == "ragged"} == {"line", "text", "empty"}
    for i, sample in enumerate(samples):
        assert made.sample(i).keys() == sample.keys()
        for name, array in made.sample(i).items():
            native = sample[name].astype(sample[name].dtype.newbyteorder("="))
            np.testing.assert_array_equal(array, native, strict=True)
    assert made.lengths("line", np.arange(5)).tolist() == [3, 0, 1, 700, 0]
    made.arrays["image"][:] = 7  # memory can be written, and the file stays
    np.testing.assert_array_equal(np.load(made.verify().folder / "image.npy")[0], samples[0]["image"])
    assert "line float32 (·, 6)" in str(made)
    load, large = np.load, MagicMock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr(np, "load", lambda *of, mmap_mode=None: (large if mmap_mode == "c" else load)(*of))
    np.testing.assert_array_equal((large_pack := Pack.open(made.folder)).arrays["image"][0], samples[0]["image"])
    assert open_feed(large_pack, nb.Plan(feed="resident"), torch.device("cpu")), "without a warning"


UNLIKE = {  # what is said of a second sample → its arrays
    r"second: its columns are x float64 \(3\); the first sample's are x float32 \(3\)": {"x": np.zeros(3)},
    "second: its columns are ; the first": {},
    "x: a pack can hold numbers and booleans only, got <U1; store class indices": {"x": np.array(["a"])},
    r"column 'id': nbtools reserves id, split, x\.offsets, x_length; rename": {"x": np.zeros(3), "id": np.zeros(1)},
}


@pytest.mark.parametrize("words", UNLIKE)
@pytest.mark.parametrize("block", [1, 32])
def test_a_sample_unlike_the_first_is_refused_and_nothing_published(place, monkeypatch, words, block):
    monkeypatch.setattr(build, "BLOCK", block)
    first = UNLIKE[words] if "id" in UNLIKE[words] else {"x": np.zeros(3, np.float32)}
    with pytest.raises(PackError, match=words):
        pack_of({"first": first, "second": UNLIKE[words]}, place, ragged=["x"] if "id" in first else [])
    assert sorted(os.listdir(place)) == ["cache", "drive", "raw"]


@pytest.mark.usefixtures("blocks")
def test_a_disk_that_is_full_while_arrays_are_joined_is_an_error_and_no_value_is_lost(place):
    source, limits = vectors(place / "raw", 250), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # more than a block has, and less than an array
    try:
        refused(DiskError, "packing", pack, source, into=place / "packed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (place / "packed").exists()
    assert {pack(source, into=place / "packed").sample(i)["x"][0] for i in range(250)} == {*range(250)}


def test_bad_samples_are_listed_and_where_none_can_be_used_the_first_is_named(place):
    source = vectors(place / "raw", 6)
    for i, content in enumerate((b"<html>quota", b"", (source / "0.npy").read_bytes()[:-5]), 1):  # each another error
        (source / f"{i}.npy").write_bytes(content)
    (source / "4.npy").unlink()
    (source / "4.npy").symlink_to(place / "gone")
    picky = partial(failing, "5.npy", PackError("5, five", "the number is below 5", "rename the file"))
    made = pack(source, read=picky)
    bad = made.bad.to_dict("list")
    assert (made.names, bad["file"]) == (["0.npy"], [f"{i}.npy" for i in range(1, 6)])
    assert bad["rule"] == ["the file must be readable"] * 4 + ["the number is below 5"]
    assert bad["value"][3:] == ["No such file or directory", "5, five"]
    assert all(bad["fix"])
    assert "5 left out, see pack.bad" in str(made)
    assert "the number is below 5" in str(made.bad), "in a terminal, too"
    (source / "0.npy").unlink()
    words = r"0 of 5 files can be used. The first: 1.npy: the file must be readable, got .*; "
    refused(PackError, words, pack, source, read=picky, into=place / "mine")
    with pytest.raises(AttributeError):  # a fault of the task itself is no bad file
        pack(vectors(place / "other"), read=lambda path, options: path.nonsense)
    with pytest.raises(DiskError, match=r"7\.npy: Input/output error"):  # nor is a disk that stops responding
        pack(place / "other", read=partial(failing, "7.npy", OSError(errno.EIO, "Input/output error")))
    assert len(pack(place / "other")) == 40


def test_the_second_call_opens_and_another_source_or_option_is_another_pack(place):
    source = vectors(place / "raw")
    first = pack(source)
    assert (pack(source).folder, reads(place)) == (first.folder, 40)
    os.utime(source / "3.npy", ns=(1, 1))
    others = [pack(source), pack(source, {"scale": 2}), pack(source, val=0.2), pack(source, seed=1)]
    assert len({made.folder for made in (first, *others)}) == 5
    assert first.raw[7]["x"].tolist() == first.sample(7)["x"].tolist()


def test_a_folder_of_the_packs_own_is_not_given_to_other_options_or_tasks(place):
    source = vectors(place / "raw")
    assert pack(source, into="~/mine").folder == place / "mine"
    put(place / "full" / "thesis.tex", b"mine")
    mine = {"into": place / "mine"}
    wrong = {
        "mine holds other files, or a pack of other data or options; choose a new": ((source, {"scale": 2}), mine),
        "full holds other files": ((source,), {"into": place / "full"}),
        "Choose another folder or disk": ((source,), {"into": source / "0.npy" / "pack"}),
        "is a pack of the task 'plain', not of 'other'": ((place / "mine",), {"task": "other"}),
        "a source must be a path, drive:… or an address, got NoneType": ((None,), {}),
    }
    for words, (given, options) in wrong.items():
        refused(NbtoolsError, words, pack, *given, **options)


def test_eight_processes_at_once_stage_and_pack_once(place):
    put(place / "drive" / "raw.tar", tar_bytes(tree(vectors(place / "raw"))))
    barrier = multiprocessing.get_context("fork").Barrier(8)
    for process in [forked(lambda: barrier.wait() < 8 and pack("drive:raw.tar")) for _ in range(8)]:
        process.join()
        assert process.exitcode == 0
    assert reads(place) == 40
    assert [len(list(folder.iterdir())) for folder in (*cache().glob("raw-*/raw"), cache() / "packs")] == [40, 1]


def test_who_waits_for_another_process_that_packs_the_same_is_told(place, capfd):
    into = place / "mine"
    with ThreadPoolExecutor(1) as pool:
        with lock(into):  # as another process holds it
            made = pool.submit(pack, vectors(place / "raw"), into=into)
            until(lambda: f"Waiting for another process that makes {into}" in capfd.readouterr().err, "a line")
        assert len(made.result()) == 40


@pytest.fixture
def blocks(monkeypatch):
    """Of five samples, each of which a packing that is interrupted leaves."""
    monkeypatch.setattr(build, "BLOCK", 5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("change", ["nothing", "a file", "an option", "a power cut"])
def test_what_was_decoded_before_an_interrupt_is_not_read_again_unless_it_is_of_something_else(place, change):
    source, into = vectors(place / "raw"), place / "mine"
    (source / "3.npy").write_bytes(b"no")
    with pytest.raises(KeyboardInterrupt):
        pack(source, read=partial(failing, "38.npy", KeyboardInterrupt()), into=into)  # the 33rd by name
    if change == "a file":
        np.save(source / "1.npy", np.full(3, -1, np.float32))
    for path in place.glob("*.part/*/*.npz") if change == "a power cut" else ():
        path.write_bytes(bytes(path.stat().st_size))
    before, options = reads(place), {"scale": 2} if change == "an option" else {}
    made = pack(source, options, into=into)
    assert (reads(place) - before < 16) == (change == "nothing")
    assert contents(made) == contents(pack(source, options, into=place / "anew"))


@pytest.fixture
def long(monkeypatch):
    for name, value in {"LOOK": 0.0, "SHORT": 0.0, "cores": lambda: 2}.items():
        monkeypatch.setattr(progress, name, value)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing else forks")
def test_a_long_source_of_small_samples_is_read_by_a_process_for_each_core_into_the_same_pack(place, request):
    def late(path, options):
        assert path.name != "99.npy" or [*place.glob("*.part/*/new/x.npy")], "arrays are written while files are read"
        return read(path, options)

    source = vectors(place / "raw", 200)
    (source / "5.npy").write_bytes(b"no array")
    alone = pack(source, read=late, into=place / "alone")
    with patch.object(progress, "Path", lambda _: put(place / "cpu.max", b"150000 100000")):
        assert progress.cores() == 1, "a container's share of them"
    request.getfixturevalue("long")
    processes = pack(source, read=late, into=place / "processes")
    assert (contents(processes), processes.bad["file"].tolist()) == (contents(alone), ["5.npy"])
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("long", "blocks")
def test_a_file_that_all_samples_are_read_from_is_not_shared_by_processes(place):
    source, data = vectors(place / "raw", 200), np.repeat(np.arange(200, dtype=np.float32), 3).tobytes()
    with open(put(place / "numbers", data), "rb", buffering=0) as file:

        def reader(path, options):
            file.seek(12 * int(path.stem))
            time.sleep(1e-3)
            return {"x": np.frombuffer(file.read(12), np.float32)}

        assert contents(pack(source, read=reader, into=place / "one")) == contents(pack(source))


@pytest.mark.skipif(sys.platform != "linux", reason="nothing else forks")
@pytest.mark.usefixtures("long", "blocks")
def test_a_killed_worker_is_an_error_with_a_sentence_and_what_was_packed_stays(place):
    source, parent = vectors(place / "raw", 250), os.getpid()

    def deadly(path, options):
        if path.name == "99.npy" and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(path, options)

    with pytest.raises(NbtoolsError, match="a worker process was killed, probably because memory ran out; free"):
        pack(source, read=deadly)
    before, made = reads(place), pack(source)
    assert (len(made), reads(place) - before < 245) == (250, True)


def test_what_is_no_whole_pack_of_this_format_is_refused_in_a_sentence(place):
    made = pack(vectors(place / "raw")).verify()
    path, manifest = made.folder / "x.npy", made.folder / "pack.json"
    data = path.read_bytes()
    for damage, words in (
        (lambda: path.write_bytes(data[:-1] + b"!"), r"x.npy: its SHA-256 differs"),
        (lambda: path.write_bytes(data + b"!"), r"x.npy: has \d+ bytes, but had \d+ when packed; delete the folder"),
        (path.unlink, r"x.npy: has no bytes"),
        (lambda: manifest.write_text('{"version": 2, "nbtools": "0.2"}'), r"nbtools 0\.2 made this pack in format 2"),
        (manifest.unlink, "this is not a pack; make one"),
    ):
        damage()
        refused(PackError, words, lambda: Pack.open(made.folder).verify())


@pytest.mark.parametrize("where", ["drive:packs/plain", "kept", "~/kept"])
def test_a_kept_pack_is_a_tar_that_opens_without_decoding_and_is_made_anew_where_damaged(place, monkeypatch, where):
    monkeypatch.chdir(place)
    made = pack(vectors(place / "raw"))
    kept = made.keep(where)
    assert kept is not None
    assert nb.kept(f"{where}.tar") == kept
    again = pack(f"{where}.tar")
    assert (again.card, again.names, contents(again), reads(place)) == (made.card, made.names, contents(made), 40)
    before, data = kept.stat(), kept.read_bytes()
    made.keep(where)
    assert kept.stat().st_ino == before.st_ino
    for words, damage in {
        "truncated or damaged": data[:9000],
        "not an archive": b"",
        "pack in it cannot be used: .*its SHA-256 differs": data.replace(np.full(3, 9, "f4").tobytes(), bytes(12)),
    }.items():
        kept.write_bytes(damage)
        refused(NbtoolsError, words, pack, f"{where}.tar")
        made.keep(where)
        assert kept.read_bytes() == data


def staged(place: Path, *names: str) -> None:
    """Staged, the first of them the longest ago: a day each."""
    for age, name in enumerate(reversed(names), 1):
        put(place / "drive" / f"{name}.tar", tar_bytes({"a": bytes(1_000_000), name: b""}))
        nb.stage(f"drive:{name}.tar", progress=False)
        [folder] = cache().glob(f"{name}-*")
        os.utime(folder, (0, time.time() - age * 86_400))


def test_what_was_staged_and_packed_is_listed_the_least_recently_used_first(place, capsys):
    staged(place, "old", "new")
    os.utime(toy.pack(toy.demo(place / "raw", 20)).folder, (0, time.time() - 60))
    put(cache() / "torn-0.part" / "x", b"1")
    table = nb.cached()
    assert names(table) == ["old", "new", "toy", "torn"]
    assert list(table["deleted"]) == [False] * 4
    assert list(table["bytes"]) == [sum(map(len, tree(cache() / folder).values())) for folder in table["folder"]]
    nb.stage("drive:old.tar", progress=False)
    assert names(nb.cached()) == ["new", "toy", "torn", "old"], "used again"
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.strip() == nb.cached().to_string(index=False).strip()


def test_the_least_recently_used_is_deleted_until_enough_is_free_and_staged_again(place, monkeypatch):
    staged(place, "old", "middle", "new")
    os.utime(put(cache() / "begun-0.part" / "x").parent, (0, 0))
    free = iter([10**6, 10**6, 2 * 10**6, 3 * 10**6, 3 * 10**6])
    with monkeypatch.context() as patch, lock(cache() / "begun-0"):  # as another process, or a thread, packs it
        patch.setattr(disk, "free_bytes", lambda _: next(free))
        table = nb.cached(free="2.5 MB")
    assert list(table["deleted"]) == [False, True, True, False]
    assert names(nb.cached()) == ["begun", "new"]
    refused(StageError, "a size such as 20 GB, got '20 apples'", nb.cached, free="20 apples")
    assert tree(nb.stage("drive:old.tar", progress=False)) == {"a": bytes(1_000_000), "old": b""}


def names(table) -> list[str]:
    return [folder.rpartition("/")[2].rpartition("-")[0] for folder in table["folder"]]
