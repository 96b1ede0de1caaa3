"""The disk module: whole or absent, never half; and a full disk is a sentence."""

import errno
import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from archives import forked, put

from nbtools import disk, errors


@pytest.mark.parametrize("operation", ["", "pathlib.Path.write_bytes", "os.fsync", "os.replace"])
def test_write_atomic_replaces_the_whole_content_or_keeps_the_old_and_leaves_no_part(tmp_path, monkeypatch, operation):
    def failing(*_, **more):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = disk.write_atomic(tmp_path / "new" / "run.json", "a longer first text")
    if operation:
        monkeypatch.setattr(operation, failing)
        with pytest.raises(OSError, match="Input/output error"):
            disk.write_atomic(path, "new")
    else:
        disk.write_atomic(path, b"new")
    assert path.read_text() == ("a longer first text" if operation else "new")
    assert os.listdir(path.parent) == ["run.json"]


def test_a_folder_is_published_at_once_and_never_over_a_filled_one(tmp_path):
    part = tmp_path / "data.part"
    put(part / "sub" / "file", b"data")
    disk.publish_folder(part, tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
    part.mkdir()
    with pytest.raises(OSError, match="not empty"):
        disk.publish_folder(part, tmp_path / "data")
    assert (tmp_path / "data" / "sub" / "file").read_text() == "data"


def test_an_error_of_the_disk_says_what_failed_and_what_to_do(tmp_path):
    with pytest.raises(errors.DiskError, match="the disk is full") as caught, disk.explained("staging x.tar", tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(caught.value).startswith(f"staging x.tar: {tmp_path}")


MOUNTS = "overlay / overlay rw 0 0\ndrive /content/drive fuse.drive rw 0 0\nhost:/x /data/my\\040share nfs4 rw 0 0\n"
SLOW = {"/tmp/x": False, "/content/drive/MyDrive/x.tar": True, "/content/driven": False, "/data/my share/x": True}


def test_a_path_is_slow_by_its_longest_mount_point(tmp_path, monkeypatch):
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(disk, "MOUNTS", tmp_path / "mounts")
    assert {path: disk.is_slow(Path(path)) for path in SLOW} == SLOW


def own_and_be_killed(path, left):
    """Take a lock, leave a fork that lives on, and be killed."""
    with disk.lock(path):
        left.send(forked(time.sleep, 60).pid)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_fork_of_its_owner_does_not_hold_a_lock(tmp_path):
    """The workers of a run that is killed live on for seconds, in which it can be started again."""
    here, there = Pipe(duplex=False)
    owner = forked(own_and_be_killed, tmp_path / "x", there)
    left = here.recv()
    owner.join()
    with disk.lock(tmp_path / "x", busy=errors.TrainError("held")):
        pass
    os.kill(left, signal.SIGKILL)
