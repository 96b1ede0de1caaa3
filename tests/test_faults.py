"""Break things on purpose: kill a run, let operations on the disk fail, damage archives. Nothing half-written is ever
read, and the same line goes on exactly. What is broken happens in a forked child, by an audit hook of Python, which
sees each file opened, renamed, removed. A tenth of all cases is in `make test`, all of them in `make full`."""

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

import archives
import numpy as np
import pytest
import toy
from acting import QUIET, refused
from archives import FORMS, PACKERS, archived, put, tree
from packs import DEMOS, PACKED
from tqdm import tqdm

import nbtools as nb
from nbtools import disk, errors
from nbtools.train import checkpoint

# A source file that cannot be read is a bad sample, not an error: those of `vectors` are left alone.
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate")
WATCHED: list[Path] = []  # whose files a hook acts on, which cannot be removed
KILLS, FAILURES, ARCHIVES = 100, 200, 2000  # of each of the four tasks as many kills again
FULL = pytest.mark.full
DONE, FAILED, REFUSED = range(3)  # how a job ends: it returned; an error of any kind; one of nbtools
LIMIT = 60.0  # seconds after which a job hangs, which is a failure
for name in ("torch._dynamo", "torch.nn.parallel", "torch.distributed.optim"):
    importlib.import_module(name)  # as a run does


def forked(job: Callable[[], Any]) -> tuple[int, str]:
    """(how a job ended, negative for a signal; its result or error in words). Whatever else it started is killed."""
    with tempfile.TemporaryFile() as answer, warnings.catch_warnings():  # a pipe would wait for workers that live on
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        if (pid := os.fork()) == 0:
            work(job, answer)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        answer.seek(0)
        return os.waitstatus_to_exitcode(status), answer.read().decode()


def work(job: Callable[[], Any], answer: IO[bytes]) -> None:
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        tqdm.set_lock(threading.RLock())  # its own is shared by processes, and stays with one that is killed
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=answer)  # which ends it with 1, FAILED
        code, text = DONE, repr(job())
    except errors.NbtoolsError as error:
        code, text = REFUSED, f"{type(error).__name__}: {error}"
    except BaseException:
        code, text = FAILED, traceback.format_exc()
    os.write(answer.fileno(), text.encode())
    os._exit(code)


def seeds(count: int) -> list[Any]:
    return [each if each < count // 10 else pytest.param(each, marks=FULL) for each in range(count)]


def disturbed(name: str, root: Path, act: Callable[[int], object]) -> Any:
    """What comes of a job where act(number) is called before each operation on files below `root`."""
    numbers = count(1)
    WATCHED.append(root)

    def hook(event: str, args: tuple) -> None:
        named = event in EVENTS and isinstance(args[0], (str, bytes, os.PathLike))
        if WATCHED and named and os.fsdecode(args[0]).startswith(str(root)) and "vectors" not in os.fsdecode(args[0]):
            act(next(numbers))

    fsync = os.fsync

    def synced(file: int) -> None:
        if WATCHED:
            act(next(numbers))
        fsync(file)

    os.fsync = synced
    sys.addaudithook(hook)
    made = JOBS[name](root)
    WATCHED.clear()
    return come_of(made)


@pytest.fixture
def root(tmp_path, monkeypatch, own_cache) -> Path:
    monkeypatch.setattr("nbtools.folder.SAVE_EVERY", 0.0)  # a checkpoint at each log step, if it is cheap
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", 1.0)
    monkeypatch.setattr("nbtools.data.fetch.PAUSE", 0.01)  # before a read that failed is tried again
    return tmp_path


FILES = {"data/labels.csv": b"file,label\n", "data/images/a.bin": bytes(range(256)) * 3, "data/é": b"x" * 40}


def trained(root: Path, **settings: Any) -> nb.Run:
    plan = toy.PLAN.replace(epochs=3, batch_size=16, **settings)
    return nb.fit(toy, nb.Pack.open(root / "pack"), plan, root / "run", keep=root / "kept", **QUIET)


def taught(name: str, root: Path) -> nb.Run:
    task: Any = importlib.import_module(f"nbtools.tasks.{name}")
    pack = nb.Pack.open(root / "pack")
    plan = nb.advise(task, pack, measure=False).plan.replace(epochs=2, batch_size=4, warmup_epochs=0)
    return nb.fit(task, pack, plan, root / "run", keep=root / "kept", **QUIET)


JOBS: dict[str, Callable[[Path], Any]] = {
    "stage a folder": lambda root: nb.stage(root / "source", root / "here", progress=False),
    "train, resident": partial(trained, feed="resident"),
    "stage an archive": lambda root: nb.stage(root / "source.tar.gz", root / "here", progress=False),
    "train, streamed": partial(trained, feed="streamed", weight_decay=0.1),
    "pack": lambda root: toy.pack(root / "vectors", into=root / "made"),
    "train, averaged in two passes": partial(trained, ema=0.9, micro_batch_size=8),
    "keep a pack, and open it": lambda root: toy.pack(nb.Pack.open(root / "pack").keep(root / "kept.tar")),
}
KINDS = [*JOBS]
JOBS |= {f"train {name}": partial(taught, name) for name in DEMOS if name != "lines"}
CASES = [(KINDS[k % len(KINDS)], k, k < 30) for k in range(KILLS + FAILURES)]  # job, seed, whether in `make test`
CASES += [(job, 3 * k, job == "train captcha" and not k) for job in [*JOBS][len(KINDS) :] for k in range(KILLS)]


def come_of(made: Any) -> Any:
    if isinstance(made, Path):
        return tree(made)
    if isinstance(made, nb.Pack):
        return len(made), float(np.sum(made.arrays["x"])), made.names
    rows = [(row["kind"], row["step"], row.get("loss"), row.get("val_loss")) for row in made.history.rows]
    return sorted((n, t.numpy().tobytes()) for n, t in checkpoint.newest(made.folder).tensors.items()), rows


def prepared(root: Path, job: str) -> Path:
    if (task := job.removeprefix("train ")) in DEMOS:
        kind = importlib.import_module(f"nbtools.tasks.{task}")
        raw = kind.demo(root / "raw", 16, **DEMOS[task])
        kind.pack(raw, into=root / "pack", progress=False, **PACKED.get(task, {}))
        return root
    for name, content in FILES.items():
        put(root / "source" / name, content)
    put(root / "source.tar.gz", archived(FILES, "tar.gz"))
    toy.demo(root / "vectors", 20)
    toy.pack(toy.demo(root / "raw", 80), into=root / "pack")
    return root


@cache
def usual(name: str) -> tuple[str, int]:
    """(what comes of a job that nobody disturbs, its operations on files)."""
    numbers: list[int] = []
    with tempfile.TemporaryDirectory() as place:
        root = prepared(Path(place), name)
        code, text = forked(lambda: (disturbed(name, root, numbers.append), len(numbers)))
        assert code == DONE, text
    made, _, number = text[1:-1].rpartition(", ")
    return made, int(number)


@pytest.mark.parametrize(("name", "seed"), [pytest.param(*each, marks=[FULL] * (not first)) for *each, first in CASES])
def test_what_is_killed_or_fails_on_the_disk_leaves_nothing_half_written_and_goes_on_exactly(root, name, seed):
    rng = random.Random(seed)
    expected, total = usual(name)
    code = rng.choice((errno.ENOSPC, errno.EIO, errno.EACCES)) if seed % 3 else None  # None: killed
    prepared(root, name)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, often = rng.randrange(1, total + 1), rng.choice((1, 1, 10**9))  # once, or from there on

        def act(number: int, at: int = at, often: int = often) -> None:
            if at <= number < at + often:
                if code is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(code, os.strerror(code or 0))

        ended, text = forked(partial(disturbed, name, root, act))
        refused = ended == REFUSED or (code is None and ended == -signal.SIGKILL)
        assert refused or (ended == DONE and text == expected), f"{name}, operation {at}: {text}"
        if rng.random() < 0.25:  # the session is lost with its disk
            shutil.rmtree(root / "run", ignore_errors=True)
    again, text = forked(lambda: come_of(JOBS[name](root)))
    assert (again, text) == (DONE, expected), f"{name} does not go on"
    if name.startswith("train"):
        assert nb.Run.open(root / "kept").model() is not None
        assert not [*root.glob("run/*.part")]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few bits flipped, pieces cut out, doubled or zeroed; or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(changed) or 1), rng.choice((1, 2, 4, 8, 100, 512))
        piece = bytes(changed[at : at + length])
        flipped = bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:] if piece else b"\0"
        changed[at : at + length] = rng.choice((flipped, flipped, b"", 2 * piece, bytes(len(piece))))
    return bytes(changed[: rng.randrange(len(changed) or 1)] if rng.random() < 0.1 else changed) or b"\0"


def names(folder: Path) -> set[str]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return {name for name in found if not name.startswith("cache/")}


@pytest.mark.parametrize("block", seeds(20))
def test_a_damaged_archive_is_refused_or_stays_in_its_folder(tmp_path, monkeypatch, own_cache, block):
    monkeypatch.setattr("os.fsync", lambda file: None)  # a power cut does not follow
    rng = random.Random(block)
    for number in range(ARCHIVES // 20):
        form = rng.choice(FORMS)
        if form == "zip":
            data = mutated(rng, archived(FILES, "zip"))
        else:
            tar = archived(FILES, "tar")
            data = PACKERS[form](mutated(rng, tar)) if rng.random() < 0.7 else mutated(rng, PACKERS[form](tar))
        place = tmp_path / f"{number}"
        source = put(place / "in" / f"a.{form}", data)
        before = names(tmp_path)
        try:
            found = nb.stage(source, place / "out", progress=False)
            assert found.is_relative_to(place / "out")
            assert all(path.is_file() or path.is_dir() for path in found.rglob("*"))
            assert not any(path.is_symlink() for path in found.rglob("*"))
            if form == "zip":  # which has a checksum of each file
                assert set(tree(found).values()) <= {*FILES.values(), b""}
        except errors.NbtoolsError:
            assert not [path for path in (place / "out").rglob("*") if path.name == ".stage.json"]
        assert {name for name in names(tmp_path) if not name.startswith(f"{number}/out")} == before
        shutil.rmtree(place)


@pytest.mark.parametrize("operation", ["", "pathlib.Path.write_bytes", "os.fsync", "os.replace"])
def test_write_atomic_replaces_the_whole_content_or_keeps_the_old_and_leaves_no_part(tmp_path, monkeypatch, operation):
    path = disk.write_atomic(tmp_path / "new" / "run.json", "a longer first text")
    if operation:
        monkeypatch.setattr(operation, lambda *_, **more: archives.away(errno.EIO))
        refused(OSError, "Input/output error", disk.write_atomic, path, "new")
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
    refused(OSError, "not empty", disk.publish_folder, part, tmp_path / "data")
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
    with disk.lock(path):
        left.send(archives.forked(time.sleep, 60).pid)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_fork_of_its_owner_does_not_hold_a_lock(tmp_path):
    """The workers of a run that is killed live on for seconds, in which it can be started again."""
    here, there = Pipe(duplex=False)
    owner = archives.forked(own_and_be_killed, tmp_path / "x", there)
    left = here.recv()
    owner.join()
    with disk.lock(tmp_path / "x", busy=errors.TrainError("held")):
        pass
    os.kill(left, signal.SIGKILL)
