"""Packs: every sample of the source or a line that says why not; whole or absent; opened and never decoded twice."""

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from torch.utils.data import DataLoader

from nbtools import disk
from nbtools.data import MANIFEST, SPLITS, Entry, Pack, Writer, build, cache, split_of, writer
from nbtools.data.journal import JOURNAL
from nbtools.data.writer import header
from nbtools.errors import DiskError, PackError, StageError


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path / "drive"))
    return tmp_path


def vectors(folder: Path, count: int = 40, start: int = 0) -> Path:
    """Files of (3,) float32 that hold their own number."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(start, start + count):
        np.save(folder / f"{i}.npy", np.full(3, i, np.float32))
    return folder


def read(path: Path, options) -> dict[str, np.ndarray]:
    return {"x": np.load(path) * options.get("scale", 1)}


def counted(path: Path, options) -> dict[str, np.ndarray]:
    """`read` that leaves a mark a call, across threads and processes."""
    with open(os.environ["READS"], "a") as file:
        file.write(f"{path.name}\n")
    return read(path, options)


def pack(source, options=None, *, task="plain", read=read, split=lambda name: None, **more) -> Pack:
    def fill(writer: Writer, folder: Path) -> None:
        writer.classes = ["even", "odd"]
        entries = [Entry(p.relative_to(folder).as_posix(), p, split(p)) for p in sorted(folder.rglob("*.npy"))]
        for entry, arrays in writer.decode(entries, read, options or {}):
            writer.add(entry.name, entry.split, **arrays)

    return build(source, task, options or {}, fill, read=read, progress=False, **more)


def filled(source: Path, fill, **more) -> Pack:
    return build(source, "plain", {}, fill, read=read, progress=False, **more)


def published() -> list[str]:
    return [path.name for path in (cache() / "packs").glob("*") if path.suffix != ".part"]


def test_fixed_and_ragged_columns_come_back_as_they_went_in(place):
    rng = np.random.default_rng(0)
    kinds = [np.uint8, np.bool_, np.int64, np.float32, np.float64]
    lengths = [3, 0, 1, 700, 0]  # an empty sample within and at the end
    samples = [
        {
            "image": rng.integers(0, 255, (5, 4, 1), np.uint8),
            "scalar": np.int64(i),
            "line": rng.normal(size=(length, 6)).astype(np.float32),
            "text": rng.integers(0, 9, length),
            **{np.dtype(k).name: rng.normal(size=2).astype(k) for k in kinds},
        }
        for i, length in enumerate(lengths)
    ]

    def fill(writer, folder):
        for i, sample in enumerate(samples):
            writer.add(str(i), None, **sample)

    made = filled(vectors(place / "raw"), fill, ragged={"line", "text"})
    assert [made.columns[c].kind for c in ("image", "line")] == ["fixed", "ragged"]
    for i, sample in enumerate(samples):
        found = made.sample(i)
        assert found.keys() == sample.keys()
        for name in sample:
            assert found[name].dtype == np.asarray(sample[name]).dtype
            np.testing.assert_array_equal(found[name], sample[name])
    assert made.lengths("line", np.arange(5)).tolist() == lengths


def test_a_column_that_is_empty_in_every_sample_can_be_opened(place):
    made = filled(place_files(place), lambda w, f: w.add("a", None, text=np.zeros(0, np.int64)), ragged={"text"})
    assert made.sample(0)["text"].shape == (0,)


def place_files(place: Path) -> Path:
    return vectors(place / "raw", 2)


def test_the_second_call_opens_without_decoding(place, monkeypatch):
    monkeypatch.setenv("READS", str(place / "reads"))
    source = vectors(place / "raw")
    first = pack(source, read=counted)
    assert len((place / "reads").read_text().split()) == 40
    second = pack(source, read=counted)
    assert len((place / "reads").read_text().split()) == 40
    assert second.folder == first.folder
    np.testing.assert_array_equal(second.arrays["x"], first.arrays["x"])


def test_a_changed_source_or_option_is_another_pack(place):
    source = vectors(place / "raw")
    folders = [pack(source).folder, pack(source, {"scale": 2}).folder, pack(source, val=0.2).folder]
    np.save(source / "3.npy", np.zeros(3, np.float32))
    os.utime(source / "3.npy", ns=(1, 1))
    changed = pack(source)
    assert len({*folders, changed.folder}) == 4
    assert changed.sample(changed.names.index("3.npy"))["x"].tolist() == [0, 0, 0]
    vectors(source, 1, 99)
    assert len(pack(source)) == 41


def test_a_folder_of_the_packs_own_is_not_given_to_other_options(place):
    source = vectors(place / "raw")
    assert pack(source, into=place / "mine").folder == place / "mine"
    with pytest.raises(PackError, match="mine holds a pack of other files or options; delete it"):
        pack(source, {"scale": 2}, into=place / "mine")
    (place / "full").mkdir()
    (place / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(PackError, match="full is no pack and not empty; choose a new folder"):
        pack(source, into=place / "full")
    assert os.listdir(place / "full") == ["thesis.tex"]


def test_bad_samples_are_listed_with_file_value_rule_and_fix(place):
    source = vectors(place / "raw", 6)
    whole = (source / "0.npy").read_bytes()
    (source / "1.npy").write_bytes(b"<html>quota")  # ValueError
    (source / "2.npy").write_bytes(b"")  # EOFError
    (source / "3.npy").write_bytes(whole[:-5])  # truncated
    (source / "4.npy").unlink()
    (source / "4.npy").symlink_to(place / "gone")

    def picky(path, options):
        if path.name == "5.npy":
            raise PackError("=5", "the number is below 5", "rename the file")
        return read(path, options)

    made = pack(source, read=picky)
    assert made.names == ["0.npy"]
    assert list(made.bad.columns) == ["file", "value", "rule", "fix"]
    bad = made.bad.to_dict("list")
    assert bad["file"] == ["1.npy", "2.npy", "3.npy", "4.npy", "5.npy"]
    assert bad["rule"] == ["the file can be read"] * 4 + ["the number is below 5"]
    assert bad["value"][3:] == ["No such file or directory", "'=5"]  # no formula in a spreadsheet
    assert all(bad["fix"])
    assert "5 (see .bad)" in str(made)


def test_a_fault_of_the_task_itself_is_not_taken_for_a_bad_file(place):
    with pytest.raises(AttributeError):
        pack(vectors(place / "raw"), read=lambda path, options: path.nonsense)
    assert published() == []


def test_nothing_usable_says_what_the_first_file_lacks(place):
    source = vectors(place / "raw", 2)
    for path in source.iterdir():
        path.write_bytes(b"no")
    with pytest.raises(PackError, match=r"0 of 2 files can be used. The first: 0.npy: the file can be read, got .*; "):
        pack(source)
    assert published() == []


def test_an_empty_folder_is_refused(place):
    (place / "raw").mkdir()
    with pytest.raises((PackError, StageError), match=r"raw: .*"):
        pack(place / "raw")
    assert published() == []


def test_one_sample_is_packed_and_no_error_hides_it(place):
    made = pack(vectors(place / "raw", 1))
    assert sum(made.splits.values()) == len(made) == 1


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros(3)}, r"second: its columns are x fixed float64 \(3,\); the first sample's are x fixed float32"),
        ({"x": np.zeros(4, np.float32)}, r"x fixed float32 \(4,\)"),
        ({}, "second: its columns are ; the first"),
        ({"x": np.zeros(3, np.float32), "y": np.zeros(1)}, "y fixed float64"),
        ({"x": np.array(["a", None, 3])}, "x: a pack holds numbers and truth values, got object"),
        ({"x": np.array(["a"])}, "got <U1; store class indices"),
    ],
)
def test_a_sample_unlike_the_first_is_refused_and_nothing_published(place, arrays, words):
    def fill(writer, folder):
        writer.add("first", None, x=np.zeros(3, np.float32))
        writer.add("second", None, **arrays)

    with pytest.raises(PackError, match=words):
        filled(vectors(place / "raw", 2), fill)
    assert published() == []


def test_a_task_may_reject_what_add_refuses_and_the_pack_stays_whole(place):
    def fill(writer, folder):
        for i, y in enumerate([np.zeros(2), np.zeros(3), np.ones(2)]):
            try:
                writer.add(str(i), None, x=np.full(4, i, np.uint8), y=y)
            except PackError as error:
                writer.reject(str(i), y.shape, str(error), "cut it")

    made = filled(vectors(place / "raw", 2), fill)
    assert made.names == ["0", "2"]
    assert made.sample(1)["x"].tolist() == [2, 2, 2, 2]


def test_a_full_disk_at_any_operation_publishes_nothing_and_says_so(place, monkeypatch):
    source = vectors(place / "raw", 5)
    real = {name: getattr(disk, name) for name in disk.OPERATIONS}
    calls: list[str] = []
    refusals: list[str] = []

    def failing(name, nth):
        def operation(*args, **more):
            calls.append(name)
            if len(calls) > nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*args, **more)

        return operation

    for nth in range(200):
        calls.clear()
        with monkeypatch.context() as patch:
            for name in disk.OPERATIONS:
                patch.setattr(disk, name, failing(name, nth))
            try:
                pack(source)
                break
            except DiskError as error:
                refusals.append(str(error))
        if "rename" not in calls[:nth]:
            assert published() == [], (nth, calls)
        made = pack(source).verify()
        assert len(made) == 5
        disk.remove(made.folder)
    assert {"create", "write", "rename", "make_folder", "sync_folder"} <= set(calls)
    assert len(refusals) == len(calls) > 20
    assert all("the disk is full" in words for words in refusals)


def test_an_unwritable_target_is_refused_in_words(place, monkeypatch):
    source = vectors(place / "raw")
    (place / "file").write_text("")
    with pytest.raises(DiskError, match="a file is where a folder should be"):
        pack(source, into=place / "file" / "pack")

    def denied(path, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(disk, "make_folder", denied)
    with pytest.raises(DiskError, match="not writable"):
        pack(source)


def test_an_interrupt_while_packing_leaves_nothing(place):
    with pytest.raises(KeyboardInterrupt):
        pack(vectors(place / "raw"), read=interrupted_at("30.npy"))
    assert [path.name for path in (cache() / "packs").iterdir()] == []


# -- a packing that was killed goes on


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(writer, "CHUNK", 8)


def reads(place: Path) -> list[str]:
    return (place / "reads").read_text().split()


@pytest.mark.usefixtures("small_chunks")
def test_a_killed_packing_goes_on_and_reads_nothing_twice(place, monkeypatch):
    monkeypatch.setenv("READS", str(place / "reads"))
    source = vectors(place / "raw")
    (source / "3.npy").write_bytes(b"no")
    whole = pack(source, resume=True, into=place / "whole")

    def deadly(path, options):
        if path.name == "30.npy":
            os.kill(os.getpid(), signal.SIGKILL)
        return counted(path, options)

    assert in_process(pack, source, read=deadly, resume=True, into=place / "mine") == -signal.SIGKILL
    before = reads(place)
    assert not (place / "mine").exists()
    made = pack(source, read=counted, resume=True, into=place / "mine")
    after = reads(place)[len(before) :]
    assert 0 < len(after) <= 40 - len(before) + writer.CHUNK  # but for the chunk that it died in
    assert {*before, *after} == {path.name for path in source.iterdir()}
    assert contents(made) == contents(whole)
    assert made.bad["file"].tolist() == ["3.npy"]
    assert sorted(path.name for path in made.folder.iterdir()) == sorted([*made.manifest["files"], MANIFEST])


@pytest.mark.usefixtures("small_chunks")
def test_a_kill_at_any_operation_on_the_disk_changes_nothing_in_the_pack(place):
    """A write is cut in its midst: half of the bytes are there."""
    source = vectors(place / "raw", 12)
    (source / "3.npy").write_bytes(b"no")
    whole = contents(pack(source, resume=True, into=place / "whole"))
    for nth in range(200):
        made = place / f"made {nth}"
        if in_process(killed_at, nth, source, made) == 0:
            break
        assert not made.exists() or contents(Pack.open(made)) == whole
        assert contents(pack(source, resume=True, into=made)) == whole
    assert nth > 30


def killed_at(nth: int, source: Path, into: Path) -> None:
    """Pack in a process that is killed at its nth operation."""
    count = 0

    def deadly(name, real):
        def operation(*args, **more):
            nonlocal count
            count += 1
            if count > nth:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return operation

    for name in ("create", "append", "write", "sync", "rename", "remove", "make_folder"):
        setattr(disk, name, deadly(name, getattr(disk, name)))
    pack(source, resume=True, into=into)


def in_process(job, *args, **more) -> int | None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=job, args=args, kwargs=more)
        process.start()
    process.join()
    return process.exitcode


def contents(made: Pack) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in made.verify().manifest["files"].items()}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("change", ["a file", "an option", "a shorter array"])
def test_what_was_decoded_of_something_else_is_not_used(place, change):
    source, into = vectors(place / "raw"), place / "mine"
    with pytest.raises(KeyboardInterrupt):
        pack(source, read=interrupted_at("30.npy"), resume=True, into=into)
    part = into.with_name("mine.part")
    assert (part / "x.npy").exists()
    options = {"scale": 2} if change == "an option" else {}
    if change == "a file":
        np.save(source / "1.npy", np.full(3, -1, np.float32))
        os.utime(source / "1.npy", ns=(1, 1))
    if change == "a shorter array":
        os.truncate(part / "x.npy", 200)
    made = pack(source, options, resume=True, into=into)
    assert contents(made) == contents(pack(source, options, into=place / "anew"))
    assert not part.exists()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("torn", [b'{"done": 2', b"\0\n\0"])
def test_a_torn_last_note_is_cut_off_and_a_second_kill_costs_no_more_than_the_first(place, monkeypatch, torn):
    monkeypatch.setenv("READS", str(place / "reads"))
    source, into = vectors(place / "raw"), place / "mine"
    order = sorted(path.name for path in source.iterdir())
    for at in (order[20], order[36]):
        with pytest.raises(KeyboardInterrupt):
            pack(source, read=interrupted_at(at), resume=True, into=into)
        with open(into.with_name("mine.part") / JOURNAL, "ab") as file:
            file.write(torn)
    made = pack(source, read=counted, resume=True, into=into)
    assert len(reads(place)) == 8
    assert contents(made) == contents(pack(source, into=place / "anew"))


@pytest.mark.usefixtures("small_chunks")
def test_a_full_disk_ends_a_resumable_packing_and_space_lets_it_go_on(place, monkeypatch):
    monkeypatch.setenv("READS", str(place / "reads"))
    source, real, calls = vectors(place / "raw"), disk.write, []

    def filling(file, data):
        calls.append(data)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, data)

    monkeypatch.setattr(disk, "write", filling)
    with pytest.raises(DiskError, match="the disk is full"):
        pack(source, read=counted, resume=True)
    assert published() == []
    before = len(reads(place))
    monkeypatch.setattr(disk, "write", real)
    assert len(pack(source, read=counted, resume=True)) == 40
    assert len(reads(place)) - before < 20


def test_data_that_cannot_be_packed_leaves_no_part_behind(place):
    source = vectors(place / "raw", 2)
    for path in source.iterdir():
        path.write_bytes(b"no")
    with pytest.raises(PackError, match="0 of 2 files can be used"):
        pack(source, resume=True, into=place / "mine")
    assert sorted(path.name for path in place.iterdir()) == ["cache", "raw"]


def interrupted_at(name: str):
    def interrupted(path, options):
        if path.name == name:
            raise KeyboardInterrupt
        return read(path, options)

    return interrupted


def test_a_file_of_another_size_is_noticed_at_open(place):
    made = pack(vectors(place / "raw"))
    with open(made.folder / "x.npy", "ab") as file:
        file.write(b"!")
    with pytest.raises(PackError, match=r"x.npy: has \d+ bytes, the manifest says \d+ bytes; delete the folder"):
        Pack.open(made.folder)
    (made.folder / "x.npy").unlink()
    with pytest.raises(PackError, match=r"x.npy: is missing"):
        Pack.open(made.folder)


def test_verify_finds_a_flipped_bit_that_open_cannot_see(place):
    made = pack(vectors(place / "raw")).verify()
    data = bytearray((made.folder / "x.npy").read_bytes())
    data[-1] ^= 1
    (made.folder / "x.npy").write_bytes(data)
    with pytest.raises(PackError, match=r"x.npy: SHA-256 \w+…, the manifest says"):
        Pack.open(made.folder).verify()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "unreadable"),
        ("[]", "unreadable"),
        ("{}", "unreadable"),
        ('{"version": 0}', "pack version 0, this nbtools"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(place, text, words):
    made = pack(vectors(place / "raw"))
    (made.folder / MANIFEST).write_text(text)
    with pytest.raises(PackError, match=words):
        Pack.open(made.folder)
    with pytest.raises(PackError, match="this is no pack; make one"):
        Pack.open(place / "raw")


def test_memory_of_a_pack_can_be_written_and_the_file_stays(place):
    made = pack(vectors(place / "raw"))
    made.arrays["x"][:] = 7
    assert made.verify() is made
    assert not (Pack.open(made.folder).arrays["x"] == 7).all()


@pytest.mark.parametrize("where", ["drive:packs/plain", "file"])
def test_a_kept_pack_is_one_tar_that_build_opens(place, where, monkeypatch):
    monkeypatch.setenv("READS", str(place / "reads"))
    made = pack(vectors(place / "raw"), read=counted)
    kept = made.keep(where if where.startswith("drive:") else place / "kept")
    assert kept
    assert kept.suffix == ".tar"
    assert kept.is_file()
    decoded = (place / "reads").read_text()
    again = pack(f"{where}.tar" if where.startswith("drive:") else kept, read=counted)
    assert (place / "reads").read_text() == decoded
    assert again.card == made.card
    assert again.names == made.names
    np.testing.assert_array_equal(again.arrays["x"], made.arrays["x"])
    again.verify()


def test_a_kept_pack_has_its_raw_files_where_they_still_are(place):
    source = vectors(place / "raw")
    kept = pack(source).keep(place / "kept")
    assert kept
    raw = pack(kept).raw
    assert raw is not None
    np.testing.assert_array_equal(raw[3]["x"], pack(source).sample(3)["x"])
    next(source.glob("*.npy")).touch()
    assert pack(kept).raw is None, "the source changed, so it is no longer what was packed"
    shutil.rmtree(source)
    assert pack(kept).raw is None


def test_a_kept_pack_opens_where_its_source_cannot_be_looked_at(place, monkeypatch):
    source = vectors(place / "raw")
    kept = pack(source).keep(place / "kept")
    assert kept
    exists = Path.exists

    def forbidden(path: Path, **options: bool) -> bool:
        if path == source:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", forbidden)
    assert pack(kept).raw is None


def test_a_pack_of_another_task_is_refused(place):
    made = pack(vectors(place / "raw"))
    with pytest.raises(PackError, match="is a pack of the task 'plain', not of 'other'"):
        pack(made.folder, task="other")


def test_a_data_set_may_have_a_manifest_of_its_own(place):
    source = vectors(place / "raw")
    (source / "manifest.json").write_text('{"license": "CC0"}')
    assert len(pack(source)) == 40


def test_file_names_need_not_be_utf8(place):
    source = vectors(place / "raw", 3)
    os.rename(source / "1.npy", os.path.join(os.fsencode(source), b"caf\xe9.npy"))
    with open(os.path.join(os.fsencode(source), b"na\xefve.npy"), "wb") as file:
        file.write(b"bad")
    made = pack(source)
    assert os.fsencode(made.names[-1]) == b"caf\xe9.npy"
    assert made.raw is not None
    assert made.raw[2]["x"].tolist() == [1, 1, 1]
    assert made.bad["file"].tolist() == ["na\\udcefve.npy"]


def test_split_of_is_stable_and_close_to_the_shares():
    names = [f"{i:04d}_x.png" for i in range(20_000)]
    found = [split_of(name, 0.1, 0.2) for name in names]
    assert [found.count(s) / 20_000 for s in SPLITS] == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    assert [split_of(name) for name in GOLDEN] == list(GOLDEN.values())
    test = {name for name in names if split_of(name, 0.1, 0.2) == "test"}
    assert test == {name for name in names if split_of(name, 0.5, 0.2) == "test"}  # whatever val is


GOLDEN = {"0.png": "train", "1.png": "test", "3.png": "val", "6.png": "test", "句.png": "train"}


def test_a_sample_keeps_its_split_when_others_come(place):
    source = vectors(place / "raw", 200)
    before = pack(source)
    vectors(source, 200, 200)
    after = pack(source)
    ids = [after.names.index(name) for name in before.names]
    np.testing.assert_array_equal(after.split[ids], before.split)
    assert before.splits == {s: len(before.ids(s)) for s in SPLITS}


def test_whole_numbers_are_exact_counts(place):
    made = pack(vectors(place / "raw", 50), val=7, test=11)
    assert made.splits == {"train": 32, "val": 7, "test": 11}
    assert pack(place / "raw", val=5, test=0.1).splits == {"train": 40, "val": 5, "test": 5}
    with pytest.raises(PackError, match="val=30 and test=20 leave none of 50 samples to train on; lower them"):
        pack(place / "raw", val=30, test=20)


@pytest.mark.parametrize(("val", "test"), [(-0.1, 0.1), (0.5, 0.5), (0.1, 1.5), ("x", 0.1), (0.1, float("nan"))])
def test_shares_that_leave_no_training_data_are_refused(place, val, test):
    with pytest.raises(PackError, match=r"val and test must be whole numbers of samples, or shares ≥ 0 and below 1"):
        pack(vectors(place / "raw"), val=val, test=test)


def of_folder(path: Path) -> str:
    return path.parent.name


def test_the_sources_own_splits_are_kept(place):
    for split, count in (("train", 30), ("val", 7), ("test", 5)):
        vectors(place / "raw" / split, count)
    made = pack(place / "raw", split=of_folder)
    assert made.splits == {"train": 30, "val": 7, "test": 5}
    assert all(made.names[i].startswith("val/") for i in made.ids("val"))


@pytest.mark.parametrize(("val", "least", "most"), [(0.2, 20, 60), (25, 25, 25)])
def test_val_is_taken_from_train_where_only_train_and_test_exist(place, val, least, most):
    vectors(place / "raw" / "train", 200)
    vectors(place / "raw" / "test", 20)
    made = pack(place / "raw", split=of_folder, val=val)
    assert made.splits["test"] == 20
    assert least <= made.splits["val"] <= most
    assert all(made.names[i].startswith("train/") for i in made.ids("val"))


def test_an_unknown_split_is_refused(place):
    with pytest.raises(PackError, match="split must be one of train, val, test, or None, got 'raw'"):
        pack(vectors(place / "raw"), split=of_folder)
    with pytest.raises(PackError, match="split must be one of train, val, test, got 'dev'"):
        pack(place / "raw").ids("dev")


@pytest.mark.parametrize("ragged", [False, True])
def test_raw_files_equal_the_pack_sample_for_sample(place, ragged):
    made = toy.make_pack(place / "toy", 60, ragged)
    assert made.raw is not None
    assert len(made.raw) == len(made)
    for i in range(len(made)):
        raw = made.raw[i]
        assert raw.pop("id") == i
        assert raw.keys() == made.sample(i).keys()
        for name, array in made.sample(i).items():
            np.testing.assert_array_equal(raw[name], array)


def test_raw_files_read_the_source_again(place):
    made = pack(vectors(place / "raw"))
    np.save(place / "raw" / "0.npy", np.full(3, -1, np.float32))
    assert made.raw is not None
    assert made.raw[0]["x"].tolist() == [-1, -1, -1]
    assert made.sample(0)["x"].tolist() == [0, 0, 0]


def test_raw_files_travel_to_workers_of_any_start_method_without_the_arrays(place):
    made = toy.make_pack(place / "toy", 60)
    assert made.raw is not None
    made.raw[0]  # arrays are open now
    assert len(pickle.dumps(made.raw)) < 1000
    loader = DataLoader(made.raw, 6, num_workers=1, multiprocessing_context="spawn", collate_fn=list)
    for i, sample in enumerate(s for batch in loader for s in batch):
        np.testing.assert_array_equal(sample["x"], made.sample(i)["x"])


def pack_in_process(source: Path) -> None:
    torch.set_num_threads(1)
    assert len(pack(source, read=counted)) == 40


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_eight_processes_at_once_make_one_pack(place, monkeypatch):
    monkeypatch.setenv("READS", str(place / "reads"))
    source = vectors(place / "raw")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=pack_in_process, args=(source,)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len((place / "reads").read_text().split()) == 40
    assert len(published()) == 1


def test_the_header_of_a_column_keeps_its_length_however_many_rows_follow(place):
    spec = toy.make_pack(place / "toy", 10).columns["x"]
    assert len({len(header(spec, rows)) for rows in (0, 1, 10**6, 10**15)}) == 1


def test_numpy_itself_reads_the_files_of_a_pack(place):
    made = pack(vectors(place / "raw"))
    np.testing.assert_array_equal(np.load(made.folder / "x.npy"), made.arrays["x"])
    assert json.loads((made.folder / MANIFEST).read_text())["card"]["classes"] == ["even", "odd"]


def test_a_pack_shows_what_it_holds(place):
    text = str(toy.make_pack(place / "toy", 60, ragged=True))
    for words in ("toy", "x <f4 (·, 8)", "4: a b c d", "none"):
        assert words in text
