"""The disk module: whole or absent, never half; and a full disk is a sentence."""

import errno
import itertools
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from nbtools import disk, errors


def fail(code):
    def operation(*_):
        raise OSError(code, os.strerror(code))

    return operation


def test_write_atomic_replaces_the_whole_content_and_leaves_no_part(tmp_path):
    path = tmp_path / "new" / "run.json"
    disk.write_atomic(path, "a longer first text")
    disk.write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["run.json"]


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_write_atomic_keeps_the_old_content_when_an_operation_fails(tmp_path, monkeypatch, operation):
    path = disk.write_atomic(tmp_path / "run.json", "old")
    monkeypatch.setattr(disk, operation, fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        disk.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_write_goes_on_after_a_short_write():
    class Short:
        taken = b""

        def write(self, data):
            self.taken += bytes(data[:3])
            return min(3, len(data))

    file = Short()
    disk.write(file, b"0123456789")
    assert file.taken == b"0123456789"


def test_create_refuses_a_taken_name_and_a_dangling_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic link"):
        disk.append(tmp_path / "link")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("count", [3, disk.MANY + 1])
def test_publish_folder_moves_the_tree_at_once(tmp_path, count):
    part = tmp_path / "data.part"
    disk.make_folder(part / "sub")
    for number in range(count):
        (part / "sub" / str(number)).write_text(str(number))
    disk.publish_folder(part, tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
    assert len(os.listdir(tmp_path / "data" / "sub")) == count


def test_publish_folder_never_overwrites_a_filled_folder(tmp_path):
    for name in ("data", "data.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError, match="not empty"):
        disk.publish_folder(tmp_path / "data.part", tmp_path / "data")
    assert (tmp_path / "data" / "file").read_text() == "data"


def test_require_space_names_need_and_what_is_free(tmp_path):
    disk.require_space(tmp_path, 1)
    with pytest.raises(errors.DiskError, match=r"needs 9\.0 TB, only .* are free"):
        disk.require_space(tmp_path / "not" / "there" / "yet", 9 * 10**12)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "not writable"), (errno.EIO, "Input/output error")],
)
def test_explained_says_what_failed_and_what_to_do(tmp_path, code, words):
    with pytest.raises(errors.DiskError, match=words) as caught, disk.explained("staging x.tar", tmp_path):
        raise OSError(code, os.strerror(code))
    assert str(caught.value).startswith(f"staging x.tar: {tmp_path}")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_600, "1.0 MB"), (123_456_789, "123 MB"), (2.5e12, "2.5 TB")],
)
def test_human_uses_decimal_units(count, text):
    assert disk.human(count) == text


MOUNTS = r"""21 1 0:19 / / rw,relatime shared:1 - overlay overlay rw
30 21 0:25 / /content/drive rw,nosuid - fuse.drive drive rw
31 21 0:26 / /data/my\040share rw - nfs4 server:/x rw
32 21 0:27 / /data/my\040share/tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/tmp/x", "overlay"),
        ("/content/drive/MyDrive/x.tar", "fuse.drive"),
        ("/content/driven", "overlay"),
        ("/data/my share/x", "nfs4"),
        ("/data/my share/tmp/x", "tmpfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_mount_point(path, form):
    assert disk.file_system(Path(path), MOUNTS) == form


def test_a_local_folder_is_not_slow(tmp_path):
    assert not disk.is_slow(tmp_path)


def hold(path, marks):
    with disk.Lock(path):
        (marks / f"{os.getpid()}-in").write_text(str(time.monotonic_ns()))
        time.sleep(0.05)
        (marks / f"{os.getpid()}-out").write_text(str(time.monotonic_ns()))


def test_only_one_process_is_inside_a_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=hold, args=(tmp_path / "locks" / "x", tmp_path)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    spans = sorted(
        (int(path.read_text()), int(path.with_name(path.name[:-2] + "out").read_text()))
        for path in tmp_path.glob("*-in")
    )
    assert len(spans) == 4
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
