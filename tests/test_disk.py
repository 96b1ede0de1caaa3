"""The disk module: whole or absent, never half; and a full disk is a sentence."""

import errno
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from serving import until

from nbtools import disk, errors


def test_write_atomic_replaces_the_whole_content_and_leaves_no_part(tmp_path):
    path = tmp_path / "new" / "run.json"
    disk.write_atomic(path, "a longer first text")
    disk.write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["run.json"]


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_write_atomic_keeps_the_old_content_when_an_operation_fails(tmp_path, monkeypatch, operation):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = disk.write_atomic(tmp_path / "run.json", "old")
    monkeypatch.setattr(disk, operation, failing)
    with pytest.raises(OSError, match="Input/output error"):
        disk.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_short_write_is_completed():
    class Short:
        taken = b""

        def write(self, data):
            self.taken += bytes(data[:3])
            return min(3, len(data))

    file = Short()
    disk.write(file, b"0123456789")
    assert file.taken == b"0123456789"


def test_a_new_file_is_refused_where_the_name_is_taken_even_by_a_dangling_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic link"):
        disk.append(tmp_path / "link")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("count", [3, disk.MANY + 1])
def test_a_folder_is_published_at_once_and_never_over_a_filled_one(tmp_path, count):
    part = tmp_path / "data.part"
    disk.make_folder(part / "sub")
    for number in range(count):
        (part / "sub" / str(number)).write_text(str(number))
    disk.publish_folder(part, tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
    assert len(os.listdir(tmp_path / "data" / "sub")) == count
    disk.make_folder(part)
    with pytest.raises(OSError, match="not empty"):
        disk.publish_folder(part, tmp_path / "data")
    assert len(os.listdir(tmp_path / "data" / "sub")) == count


EXPLAINED = {errno.ENOSPC: "the disk is full", errno.EROFS: "Read-only file system", errno.EIO: "Input/output error"}


@pytest.mark.parametrize(("code", "words"), EXPLAINED.items())
def test_an_error_of_the_disk_says_what_failed_and_what_to_do(tmp_path, code, words):
    with pytest.raises(errors.DiskError, match=words) as caught, disk.explained("staging x.tar", tmp_path):
        raise OSError(code, os.strerror(code))
    assert str(caught.value).startswith(f"staging x.tar: {tmp_path}")


MOUNTS = r"""21 1 0:19 / / rw,relatime shared:1 - overlay overlay rw
30 21 0:25 / /content/drive rw,nosuid - fuse.drive drive rw
31 21 0:26 / /data/my\040share rw - nfs4 server:/x rw
32 21 0:27 / /data/my\040share/tmp rw - tmpfs tmpfs rw
"""
PLACES = {
    "/tmp/x": "overlay",
    "/content/drive/MyDrive/x.tar": "fuse.drive",
    "/content/driven": "overlay",
    "/data/my share/x": "nfs4",
    "/data/my share/tmp/x": "tmpfs",
}


def test_the_file_system_of_a_path_is_that_of_its_longest_mount_point(tmp_path):
    assert [disk.file_system(Path(path), MOUNTS) for path in PLACES] == list(PLACES.values())
    assert not disk.is_slow(tmp_path)


def hold(path, marks):
    with disk.Lock(path):
        (marks / f"{os.getpid()}-in").write_text(str(time.monotonic_ns()))
        time.sleep(0.05)
        (marks / f"{os.getpid()}-out").write_text(str(time.monotonic_ns()))


def own_and_be_killed(path, shared, left):
    """Take a lock, leave a fork that lives on, and be killed."""
    with disk.Lock(path, shared=shared):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        left.send(process.pid)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_of_its_owner_does_not_hold_a_lock_and_one_that_is_shared_is_held_to_its_last_fork(tmp_path, shared):
    """The workers of a run that is killed live on for a moment, in which it can be started again."""
    context, path = multiprocessing.get_context("fork"), tmp_path / "x"
    told, tell = context.Pipe(duplex=False)
    owner = context.Process(target=own_and_be_killed, args=(path, shared, tell))
    owner.start()
    left = told.recv()
    owner.join()
    assert disk.Lock(path, wait=False).held() == shared
    os.kill(left, signal.SIGKILL)
    until(lambda: not disk.Lock(path, wait=False).held(), "the end of the last fork")


def test_a_lock_that_cannot_be_looked_at_is_an_error_that_says_why(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(errors.DiskError, match=r"looking whether a lock is held: .*: the disk is full"):
        disk.Lock(tmp_path / "x", wait=False).held()


def test_only_one_process_is_inside_a_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=hold, args=(tmp_path / "locks" / "x", tmp_path)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ends = sorted(tmp_path.glob("*-in")), sorted(tmp_path.glob("*-out"))
    spans = sorted((int(one.read_text()), int(other.read_text())) for one, other in zip(*ends, strict=True))
    assert len(spans) == 4
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
