"""A run kept on a second disk: whole under names that are never written again, there to be read back, and no reason for
training to stop."""

import ast
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import toy
from acting import QUIET, acting, interrupted, same
from archives import ended_at, kill, put, tree
from faults.forks import DONE, Child, done
from faults.operations import MS_REMOUNT, apart, mount

import nbtools as nb
from nbtools import disk
from nbtools.data import manifests, newest, snapshots
from nbtools.errors import ArchiveError, CheckpointError, DiskError, StageError
from nbtools.folder import restore
from nbtools.live import Surface
from nbtools.train import Keeper, checkpoint, keep

ONE = toy.PLAN.replace(epochs=1)
LARGE = ONE.replace(hidden=20_000)  # 1.4 MB of weights


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory, pack):
    return nb.fit(toy, pack, toy.PLAN, tmp_path_factory.mktemp("runs") / "run", **QUIET)


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """Its folder, to be changed."""
    return shutil.copytree(run.folder, tmp_path / "copy")


def kept(folder: Path, target: Path) -> list[str]:
    """Copy a run once; the complaints."""
    keeper = Keeper(folder, target)
    keeper.keep()
    keeper.close()
    return keeper.complaints


def contents(files: dict[str, bytes]) -> dict[str, bytes]:
    """Of a run's folder, without what is never kept."""
    return {name: data for name, data in files.items() if name not in ("kept.json", "control.json")}


def away(code: int = errno.ENOTCONN) -> None:
    raise OSError(code, os.strerror(code))


# -- names


def test_what_is_kept_comes_back_and_nothing_is_written_twice_under_one_name(pack, tmp_path, monkeypatch):
    target, real, written = tmp_path / "drive", disk.write_atomic, []

    def write_atomic(path, *data):
        if path.is_relative_to(target):
            assert not path.exists(), f"{path.name} is written again"
            written.append(path.name)
        return real(path, *data)

    monkeypatch.setattr(disk, "write_atomic", write_atomic)
    run = nb.fit(toy, pack, toy.PLAN, tmp_path / "run", keep=target, **QUIET)
    again = nb.fit(toy, pack, toy.PLAN.replace(epochs=5), tmp_path / "run", keep=target, **QUIET)
    assert len(written) == len(set(written)) > 10
    assert all(re.search(r"[.-][0-9a-f]{12}(\.|$)", name) for name in written)
    found = nb.Run.open(target, toy)
    assert same(found, again)
    assert found.best == again.best
    there, here = contents(tree(nb.stage(target, progress=False))), contents(tree(run.folder))
    assert there.items() <= here.items()
    named = checkpoint.named(checkpoint.read_index(run.folder))
    assert all(name in there or name.partition(".")[0] not in named for name in here), "older ones stay here alone"


def test_the_history_is_kept_in_closed_parts_that_are_few(tmp_path):
    source, target = put(tmp_path / "run" / "run.json", b'{"last": "0001-00000001", "id": "1"}').parent, tmp_path / "d"
    for suffix in ("json", "safetensors"):
        put(source / f"0001-00000001.{suffix}", b"{}")
    history, sizes, keeper = source / "history.csv", [], Keeper(source, target)
    there: set[str] = set()
    written = 0
    for number in range(60):
        with history.open("a") as file:
            file.write(f"step,{number}\n" * 20)
        keeper.copy((source / "run.json").read_bytes())
        parts = newest(target)["files"]["history.csv"]
        assert b"".join((target / name).read_bytes() for name, _, _ in parts) == history.read_bytes()
        sizes.append(len(parts))
        written += sum(size for name, size, _ in parts if name not in there)
        there |= {name for name, _, _ in parts}
    assert max(sizes) <= 7, "log2 of 60, and one"
    assert written <= 7 * history.stat().st_size, "each row as often as its part was joined with others"
    assert len(list(target.glob("history.*"))) <= 3 * 7, "those of older snapshots have gone"
    history.write_text("cut\n")
    keeper.copy((source / "run.json").read_bytes())
    assert [size for _, size, _ in newest(target)["files"]["history.csv"]] == [4]


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "of the manifest"])
def test_a_snapshot_that_is_damaged_gives_way_to_the_one_before_it(copy, tmp_path, harm, capsys):
    target = tmp_path / "drive"
    put(copy / "notes.json", b'{"notes": "first"}')
    assert kept(copy, target) == []
    put(copy / "notes.json", b'{"notes": "second"}')
    assert kept(copy, target) == []
    files = [target / one["files"]["notes.json"][0][0] for one in [newest(target)]]
    path = manifests(target)[0] if harm == "of the manifest" else files[0]
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if harm == "cut" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    assert nb.Run.open(target, toy).notes == "first"
    assert "An older copy is used instead." in capsys.readouterr().err
    shutil.rmtree(copy)
    restored = nb.fit(toy, toy_pack(copy, target), toy.PLAN, copy, keep=target, **QUIET)
    assert restored.notes == "first"
    assert nb.Run.open(target, toy).notes == "first", "a whole snapshot follows"


def toy_pack(folder: Path, target: Path) -> nb.Pack:
    return nb.Pack.open(json.loads((nb.Run.open(target, toy).folder / "run.json").read_text())["pack"])


def test_where_every_copy_is_damaged_nothing_is_started_over(copy, pack, tmp_path):
    target = tmp_path / "drive"
    kept(copy, target)
    for path in target.glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(StageError, match="none of the copies that were kept there is intact"):
        nb.Run.open(target, toy)
    with pytest.raises(StageError, match="none of the copies"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "other", keep=target, **QUIET)
    assert not (tmp_path / "other").exists()
    for path in manifests(target):
        path.write_bytes(b"{}")
    with pytest.raises(ArchiveError, match="its SHA-256 differs from its name"):
        nb.fit(toy, pack, toy.PLAN, tmp_path / "other", keep=target, **QUIET)
    assert kept(copy, target) == [], "what is still here makes a new beginning"
    assert nb.Run.open(target, toy).best


def test_a_run_that_an_older_nbtools_kept_opens_resumes_and_is_kept_anew(run, pack, tmp_path):
    target = shutil.copytree(run.folder, tmp_path / "drive")
    assert nb.Run.open(target, toy).best == run.best
    more = nb.fit(toy, pack, toy.PLAN.replace(epochs=4), tmp_path / "vm", keep=target, **QUIET)
    assert len(more.summary()) == 4
    assert not (target / "run.json").exists(), "an older nbtools would take it for the newest"
    assert same(nb.Run.open(target, toy), more)


def test_what_another_run_left_of_an_older_nbtools_stays(run, copy, tmp_path):
    for name, index in (("other", b'{"id": "of another run"}'), ("no run", b"a text")):
        target = shutil.copytree(run.folder, tmp_path / name)
        put(target / "run.json", index)
        assert kept(copy, target) == []
        assert tree(run.folder).keys() <= tree(target).keys()
        assert same(nb.Run.open(target, toy), run), "what is kept there all the same"


# -- opened where it is kept


def bytes_read(below: Path, act: Callable[[], object]) -> int:
    """Bytes of the files below a folder that a process opens to do something, each as often as it is opened."""

    def counted() -> int:
        sizes = []

        def opened(event, args):
            if event == "open" and isinstance(args[0], (str, os.PathLike)) and Path(args[0]).is_relative_to(below):
                sizes.append(os.path.getsize(args[0]))

        sys.addaudithook(opened)
        act()
        return sum(sizes)

    return int(done(counted))


def test_runs_are_listed_compared_and_watched_without_a_copy_of_their_weights(pack, tmp_path, monkeypatch):
    drive = tmp_path / "drive"
    monkeypatch.setenv("NBTOOLS_DRIVE", str(drive))
    drive.mkdir()
    for name in ("a", "b"):
        nb.fit(toy, pack, LARGE, tmp_path / "vm" / name, keep=f"drive:{name}", **QUIET)
    assert sum(path.stat().st_size for path in drive.rglob("*.safetensors")) > 10e6
    assert bytes_read(drive, lambda: nb.runs(drive).frame) < 5e5
    assert bytes_read(drive, lambda: repr(nb.compare(drive))) < 5e5
    assert bytes_read(drive, lambda: nb.watch(drive / "a", wait=0)) < 5e5
    run, own = nb.runs(drive)["a"], nb.Run.open(tmp_path / "vm" / "a")
    assert (run.state, run.best, len(run.summary())) == ("done", own.best, 1)
    [best] = own.folder.glob("*.best.safetensors")
    assert bytes_read(drive, lambda: run.model("cpu")) < best.stat().st_size + 1e5, "of all weights the best alone"
    assert nb.evaluate(run, pack) == nb.evaluate(own, pack)
    assert same(run, own)


def test_one_error_of_a_mount_ends_no_restore_and_no_list_of_runs(pack, tmp_path, monkeypatch):
    """Drive's errno 5, once at each file and folder that is read below it."""
    drive = tmp_path / "drive"
    monkeypatch.setattr("nbtools.data.transfer.PAUSE", 0.001)
    for name in ("a", "b"):
        nb.fit(toy, pack, ONE, tmp_path / "vm" / name, keep=drive / name, **QUIET)
    run = nb.Run.open(shutil.copytree(tmp_path / "vm" / "b", tmp_path / "own"), toy)

    def restored() -> bool:
        shutil.rmtree(tmp_path / "vm" / "b", ignore_errors=True)
        restore(tmp_path / "vm" / "b", drive / "b")
        return same(nb.Run.open(tmp_path / "vm" / "b", toy), run)

    def swept() -> list[int]:
        left, counts = [0], []

        def fails(event, args):
            if event in ("open", "os.scandir", "os.listdir") and str(args[0]).startswith(str(drive)):
                left[0] -= 1
                if left[0] == 0:
                    away(errno.EIO)

        sys.addaudithook(fails)
        for act in (lambda: set(nb.runs(drive, toy).names) == {"a", "b"}, restored):
            for nth in range(1, 200):
                shutil.rmtree(tmp_path / "cache", ignore_errors=True)
                left[0] = nth
                assert act(), nth
                if left[0] > 0:
                    break
            counts.append(nth)
        return counts

    assert all(5 < count < 199 for count in ast.literal_eval(done(swept)))


def test_a_kept_run_that_cannot_be_read_is_listed_with_its_trouble_and_the_others_are_there(
    pack, tmp_path, monkeypatch
):
    monkeypatch.setattr("nbtools.data.transfer.PAUSE", 0.001)
    for name in ("a", "b"):
        nb.fit(toy, pack, ONE, tmp_path / "vm" / name, keep=tmp_path / "drive" / name, **QUIET)
    real, bad = snapshots.manifests, tmp_path / "drive" / "a"
    monkeypatch.setattr("nbtools.run.manifests", lambda folder: away() if folder == bad else real(folder))
    found = nb.runs(tmp_path / "drive", toy)
    assert found.names == ["b"]
    assert "Transport endpoint is not connected" in found.left_out["a"]
    with pytest.raises(DiskError, match=r"opening a run: .*a: Transport endpoint is not connected\. Try again"):
        nb.Run.open(bad, toy)


def test_weights_that_are_damaged_or_gone_where_they_are_kept_are_named_with_the_way_out(copy, tmp_path):
    target = tmp_path / "drive"
    kept(copy, target)
    [best] = target.glob("*.best.*.safetensors")
    data, run = best.read_bytes(), nb.Run.open(target, toy)
    best.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    [whole] = target.glob(f"{best.name.partition('.')[0]}.[!b]*.safetensors")
    with whole.open("ab") as file:
        file.write(b"1")
    with pytest.raises(
        CheckpointError, match=r"best.*is damaged\. nb\.Run\.open\(nb\.stage\('.*drive'\)\) opens an older"
    ):
        run.model()
    best.unlink()
    with pytest.raises(StageError, match=r"has gone: the run has been trained on\. Open it again\."):
        run.model()
    target.rename(tmp_path / "unmounted")
    with pytest.raises(
        StageError, match=r"drive is not there: mount Drive, or the disk that it is on, and run it again"
    ):
        run.model()
    (tmp_path / "unmounted").rename(target)
    best.write_bytes(data)
    assert run.model("cpu") is not None, "what was damaged then does not stay so"


def test_an_interrupted_fetch_of_weights_is_made_up_for(copy, tmp_path, monkeypatch):
    def interrupted(_: Any, target: Path) -> None:
        target.write_bytes(b"half of it")
        raise KeyboardInterrupt

    kept(copy, tmp_path / "drive")
    run = nb.Run.open(tmp_path / "drive", toy)
    with monkeypatch.context() as patch:
        patch.setattr("nbtools.data.snapshots.join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.model("cpu")
    assert same(run, nb.Run.open(copy, toy))


# -- what is safe


def states(run: nb.Run) -> list[str]:
    return list(run.kept.values())


def test_a_checkpoint_is_local_then_copied_then_confirmed_by_a_later_start(pack, tmp_path):
    target, folder = tmp_path / "drive", tmp_path / "run"
    run = nb.fit(toy, pack, ONE, folder, **QUIET)
    assert run.kept == {}, "no second folder was named"
    run = nb.fit(toy, pack, ONE, folder, keep=target, **QUIET)
    last = checkpoint.read_index(folder)["last"]
    assert run.kept[last] == "copied"
    assert set(states(run)) <= {"copied", "local"}
    assert keep.kept_until(folder) == f"step {checkpoint.place(last)[1]:,} copied"
    more = nb.fit(toy, pack, ONE.replace(epochs=2), folder, keep=target, **QUIET)
    assert more.kept[last] == "confirmed"
    assert states(more)[0] == "copied"
    assert nb.runs(tmp_path).frame.to_dict()["kept"] == {"run": "copied"}
    shutil.rmtree(folder)
    again = nb.fit(toy, pack, ONE.replace(epochs=2), folder, keep=target, **QUIET)
    assert states(again)[0] == "confirmed", "it came from there"


def test_what_reads_back_damaged_is_not_confirmed_but_written_again(copy, tmp_path):
    target = tmp_path / "drive"
    kept(copy, target)
    [path] = target.glob(f"{checkpoint.read_index(copy)['last']}.*.safetensors")
    path.write_bytes(b"\0" * path.stat().st_size)
    kept(copy, target)
    assert nb.Run.open(copy, toy).kept[checkpoint.read_index(copy)["last"]] == "copied"
    assert len(checkpoint.weights(nb.Run.open(target, toy).folder)) > 0


def test_on_a_network_disk_a_later_start_is_one_of_the_machine(copy, tmp_path, monkeypatch):
    """What this machine reads back may never have left it."""
    monkeypatch.setattr(disk, "is_slow", lambda path: True)
    monkeypatch.setattr(disk, "boot", lambda: "one")
    for _ in range(2):
        kept(copy, tmp_path / "drive")
        assert "confirmed" not in nb.Run.open(copy, toy).kept.values()
    monkeypatch.setattr(disk, "boot", lambda: "two")
    kept(copy, tmp_path / "drive")
    assert nb.Run.open(copy, toy).kept[checkpoint.read_index(copy)["last"]] == "confirmed"


# -- a disk that is away


def failing(patch: pytest.MonkeyPatch, target: Path, fails) -> None:
    """Writing below the target raises what `fails()` raises, if it does."""
    for name in ("create", "make_folder"):
        real = getattr(disk, name)

        def operation(path, *rest, real=real, **more):
            if path.is_relative_to(target):
                fails()
            return real(path, *rest, **more)

        patch.setattr(disk, name, operation)


def leaving(gone: threading.Event, target: Path):
    """An action: the target goes away, once something is kept there."""

    def act() -> None:
        end = time.monotonic() + 30
        while not manifests(target):
            assert time.monotonic() < end
            time.sleep(0.01)
        gone.set()

    return act


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.ENOSPC])
def test_training_goes_on_while_drive_is_away_which_is_said_once_and_made_up_for(pack, tmp_path, monkeypatch, code):
    target, gone = tmp_path / "drive", threading.Event()
    monkeypatch.setattr(keep, "PAUSE", 0.02)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    failing(monkeypatch, target, lambda: gone.is_set() and away(code))
    steps = len(range(0, pack.splits["train"], toy.PLAN.batch_size))
    task = acting(
        {
            steps + 2: leaving(gone, target),
            4 * steps + 2: gone.clear,
            4 * steps + 4: lambda: threading.Event().wait(0.5),
        }
    )
    run = nb.fit(task, pack, toy.PLAN.replace(epochs=6), tmp_path / "run", keep=target, **QUIET)
    whole = nb.fit(toy, pack, toy.PLAN.replace(epochs=6), tmp_path / "whole", **QUIET)
    assert same(run, whole)
    said = [text for text in run.events if str(target) in text]
    assert len(said) == 2, said
    assert re.search(
        rf"not kept \(.*Errno {code}.*is complete in .*run\. .*ends at step \d+; the rest follows", said[0]
    )
    assert re.search(r"kept again. What is kept there ends at step \d+", said[1])
    assert same(nb.Run.open(target, toy), whole)


@pytest.fixture
def small(tmp_path) -> Callable[..., Path]:
    """Mounts a real disk of so many MB as the folder that is returned, for the process that calls it; again: makes it
    larger."""
    folder = tmp_path / "drive"
    folder.mkdir()

    def mounted(megabytes: int, again: bool = False) -> Path:
        if not again:
            apart()
        mount("tmpfs", folder, f"size={megabytes}m", MS_REMOUNT if again else 0)
        return folder

    code, text = Child(lambda: mounted(1)).end()
    if code != DONE:
        pytest.skip(f"this machine lets nobody mount: {text.strip().splitlines()[-1]}")
    return mounted


def test_a_drive_that_is_full_keeps_what_it_has_and_the_rest_once_it_has_room(pack, tmp_path, small):
    """One epoch's checkpoint fits, and of later ones, each of them the best, the weights alone."""
    plan, steps = LARGE.replace(epochs=3), len(range(0, pack.splits["train"], LARGE.batch_size))
    task = acting(
        {2 * steps + 2: lambda: threading.Event().wait(0.5)},
        metrics=lambda outputs, batch: {"accuracy": (time.monotonic_ns() // 1000, 10**12)},
    )

    def trained() -> tuple[list[str], str, list[str], list[str], bool]:
        patch = pytest.MonkeyPatch()
        patch.setattr(keep, "PAUSE", 0.02)
        patch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
        target = small(9)
        run = nb.fit(task, pack, plan, tmp_path / "run", keep=target, **QUIET)
        said, state = [text for text in run.events if str(target) in text], states(run)[0]
        files = Counter(
            name for one in manifests(target) for name, _, _ in chain(*json.loads(one.read_text())["files"].values())
        )
        stray = [path.name for path in target.iterdir() if path.is_file() and path.name not in files]
        whole = nb.Run.open(target, toy).best["epoch"]
        small(100, again=True)
        again = nb.fit(task, pack, plan, tmp_path / "run", keep=target, **QUIET)
        return said, state, stray, states(again), whole == 1 and same(nb.Run.open(target, toy), again)

    said, state, stray, after, right = ast.literal_eval(done(trained))
    assert "No space left on device" in said[0]
    assert "the run continues, and is complete in" in said[0]
    assert "not kept to the end" in said[-1]
    assert len(said) == 2
    assert state == "local"
    assert all(name.startswith("0003-") for name in stray), "what an earlier copy that failed left takes up the room"
    assert after[0] == "copied"
    assert right


def test_what_is_missing_follows_when_drive_is_back_though_nothing_new_is_saved(copy, tmp_path, monkeypatch):
    target, gone = tmp_path / "drive", threading.Event()
    monkeypatch.setattr(keep, "PAUSE", 0.02)
    failing(monkeypatch, target, lambda: gone.is_set() and away())
    gone.set()
    keeper, end = Keeper(copy, target), time.monotonic() + 30
    keeper.keep()
    while not keeper.complaints:
        assert time.monotonic() < end
        time.sleep(0.01)
    gone.clear()
    while keeper.behind:
        assert time.monotonic() < end
        time.sleep(0.01)
    keeper.close()
    assert ["not kept" in keeper.complaints[0], "kept again" in keeper.complaints[1]] == [True, True]
    assert manifests(target)


def test_a_drive_that_stays_away_is_named_at_the_end_with_what_is_not_safe(pack, tmp_path, monkeypatch):
    target, gone = tmp_path / "drive", threading.Event()
    failing(monkeypatch, target, lambda: gone.is_set() and away())
    steps = len(range(0, pack.splits["train"], toy.PLAN.batch_size))
    task = acting({steps + 2: leaving(gone, target)})
    run = nb.fit(task, pack, toy.PLAN.replace(epochs=3), tmp_path / "run", keep=target, **QUIET)
    assert len(run.summary()) == 3
    assert re.search(
        r"not kept to the end \(.*\)\. What is kept there ends at step \d+; all of it is in", run.events[-1]
    )
    assert states(run)[0] == "local"
    gone.clear()
    again = nb.fit(toy, pack, toy.PLAN.replace(epochs=3), tmp_path / "run", keep=target, **QUIET)
    assert states(again)[0] == "copied"
    assert same(nb.Run.open(target, toy), again)


def test_drive_is_mounted_anew_at_the_end_but_not_when_the_user_stops_the_run(pack, tmp_path, monkeypatch):
    target, gone = tmp_path / "drive", threading.Event()
    failing(monkeypatch, target, lambda: gone.is_set() and away())
    monkeypatch.setattr(keep, "remount", lambda path: gone.clear() if path == target else None)
    gone.set()
    ctrl_c = acting({2: lambda: os.kill(os.getpid(), signal.SIGINT)})
    stopped = interrupted(lambda: nb.fit(ctrl_c, pack, ONE, tmp_path / "run", target, **QUIET))
    assert "not kept to the end" in stopped.events[-1]
    done = nb.fit(toy, pack, ONE, tmp_path / "run", target, **QUIET)
    assert "kept again" in done.events[-1]
    assert same(nb.Run.open(target, toy), done)


def test_a_drive_that_hangs_is_said_and_the_wait_for_it_can_be_interrupted(pack, tmp_path, monkeypatch):
    target, gone, back = tmp_path / "drive", threading.Event(), threading.Event()
    monkeypatch.setattr(keep, "SLOW", 0.0)
    monkeypatch.setattr(keep, "PATIENCE", 0.01)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    failing(monkeypatch, target, lambda: gone.is_set() and back.wait())
    real, before = Surface.report, set(threading.enumerate())

    def report(surface, message):
        real(surface, message)
        if "Interrupt to end the wait" in message:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Surface, "report", report)
    steps = len(range(0, pack.splits["train"], toy.PLAN.batch_size))
    task, plan = acting({steps + 2: leaving(gone, target)}), toy.PLAN.replace(epochs=5)
    run = nb.fit(task, pack, plan, tmp_path / "run", keep=target, **QUIET)
    assert len(run.summary()) == 5
    slow, waits, ends = [text for text in run.events if str(target) in text]
    assert "a copy has been under way for 0 minutes; the run continues" in slow
    assert re.search(
        r"waiting for the last copy of this run\. What is kept there ends at step \d+; all of it is in", waits
    )
    assert "not kept to the end (interrupted)" in ends
    old = manifests(target)
    [hung] = [thread for thread in threading.enumerate() if thread.name == "nbtools-keeper" and thread not in before]
    back.set()
    hung.join(30)
    assert not hung.is_alive()
    assert manifests(target) == old, "what was left does not go on next to a newer start"
    monkeypatch.setattr(keep, "PATIENCE", 30.0)
    again = nb.fit(toy, pack, plan, tmp_path / "run", keep=target, **QUIET)
    assert states(again)[0] == "copied"
    assert same(nb.Run.open(target, toy), again)


def test_a_copy_that_failed_is_made_up_for_and_no_snapshot_names_what_is_absent(run, tmp_path, monkeypatch):
    """Drive's Errno 5, once at each write of a run's copy."""
    real, target = disk.write_atomic, tmp_path / "drive"
    for broken in range(0, 100, 3):
        left = [broken]

        def flaky(path, *data, left=left):
            if path.is_relative_to(target):
                left[0] -= 1
                if left[0] == -1:
                    away(errno.EIO)
            return real(path, *data)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_atomic", flaky)
            complaints = kept(run.folder, target)
        if manifests(target):
            assert nb.Run.open(target, toy).model("cpu") is not None
        assert kept(run.folder, target) == []
        assert nb.Run.open(target, toy).best == run.best
        shutil.rmtree(target)
        if not complaints:
            break
    assert 8 < broken < 99


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.full)])
def test_copying_killed_at_any_operation_leaves_whole_snapshots_only_and_goes_on(copy, tmp_path, step):
    def there(target: Path) -> dict[str, bytes]:
        return contents(tree(nb.stage(target, progress=False)))

    put(copy / "notes.json", b'{"notes": "old"}')
    kept(copy, tmp_path / "first")
    old = there(tmp_path / "first")
    put(copy / "notes.json", b'{"notes": "new"}')
    put(copy / "table.csv", b"a,b")
    new = {**old, "notes.json": b'{"notes": "new"}', "table.csv": b"a,b"}
    for nth in range(0, 200, step):
        target = shutil.copytree(tmp_path / "first", tmp_path / f"drive-{nth}")
        ended = ended_at(nth, kill, kept, copy, target)
        assert there(target) == new or (there(target) == old and ended == -9)
        assert kept(copy, target) == []
        assert there(target) == new
        assert not list(target.rglob("*.part"))
        if ended == 0:
            break
    assert 15 < nth < 199


def test_what_reads_back_differently_is_not_kept(copy, tmp_path, monkeypatch):
    target, real = tmp_path / "drive", disk.write

    def write(file, data):
        flips = os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(str(target / "card."))
        return real(file, bytes(data)[:-1] + b"?" if flips else data)

    monkeypatch.setattr(disk, "write", write)
    [said] = kept(copy, target)
    assert "card." in said
    assert "reads back differently" in said
    assert manifests(target) == []


def test_a_checkpoint_that_is_damaged_here_does_not_keep_the_others_from_being_kept(copy, tmp_path):
    [best] = copy.glob("*.best.safetensors")
    best.write_bytes(best.read_bytes()[:-1] + b"?")
    target = tmp_path / "drive"
    assert kept(copy, target) == [f"{best}: damaged since it was written; what is kept lacks it"]
    assert best.name not in newest(target)["files"]
    assert same(nb.Run.open(target, toy), nb.Run.open(copy, toy)), "the last one"


@pytest.mark.parametrize("harm", ["of its facts", "gone"])
def test_best_weights_that_cannot_be_kept_are_named_and_the_others_are_kept(copy, tmp_path, harm):
    [best] = copy.glob("*.best.safetensors")
    path = best if harm == "gone" else best.with_suffix(".json")
    data = path.read_bytes()
    path.unlink()
    if harm != "gone":
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    [said] = kept(copy, tmp_path / "drive")
    assert re.match(rf"{path}: (damaged since it was written|is missing); what is kept lacks it", said)
    files = newest(tmp_path / "drive")["files"]
    assert f"{checkpoint.read_index(copy)['last']}.safetensors" in files
    assert best.name not in files


def test_a_checkpoint_is_hashed_once_and_then_read_back_wherever_it_is_written(pack, tmp_path, monkeypatch):
    hashed, real, of_file = Counter[str](), hashlib.sha256, disk.sha256

    def sha256(data=b"", **more):
        hashed["in memory"] += memoryview(data).nbytes
        return real(data, **more)

    def read_back(path, *more):
        hashed["read back"] += path.stat().st_size
        return of_file(path, *more)

    state = nb.TrainState(toy, pack, LARGE, "cpu")
    monkeypatch.setattr(hashlib, "sha256", sha256)
    monkeypatch.setattr(disk, "sha256", read_back)
    checkpoint.save(tmp_path / "run", state, rows=0)
    [path] = (tmp_path / "run").glob("*.safetensors")
    size = path.stat().st_size
    assert (round(hashed["in memory"] / size, 1), round(hashed["read back"] / size, 1)) == (1.0, 1.0)
    assert kept(tmp_path / "run", tmp_path / "drive") == []
    assert (round(hashed["in memory"] / size, 1), round(hashed["read back"] / size, 1)) == (1.0, 2.0)
    path.write_bytes(bytes(size))
    [said] = kept(tmp_path / "run", tmp_path / "other")
    assert said == f"{path}: damaged since it was written; what is kept lacks it"


def waiting(keeper: Keeper, patch: pytest.MonkeyPatch) -> threading.Event:
    """What copies wait for from now on."""
    copy, event = keeper.copy, threading.Event()
    patch.setattr(keeper, "copy", lambda index: event.wait() and copy(index))
    return event


def test_an_index_kept_while_the_run_goes_on_names_what_was_there(copy, tmp_path, monkeypatch):
    target, keeper = tmp_path / "drive", Keeper(copy, tmp_path / "drive")
    index, busy = checkpoint.read_index(copy), waiting(keeper, monkeypatch)
    keeper.keep()  # the run is one checkpoint further before it copies
    checkpoint.mark(copy, last="0009-00000081", best="0009-00000081.best")
    busy.set()
    keeper.close()
    found = nb.Run.open(target, toy).folder
    assert checkpoint.read_index(found) == index
    assert len(checkpoint.weights(found)) > 0


@pytest.mark.parametrize("follows", [True, False])
def test_what_is_pruned_before_it_is_kept_is_no_complaint_where_a_newer_state_follows(
    copy, tmp_path, monkeypatch, follows
):
    keeper = Keeper(copy, tmp_path / "drive")
    busy = waiting(keeper, monkeypatch)
    keeper.keep()
    index = checkpoint.read_index(copy)
    for path in copy.glob(f"{index['last']}*"):
        path.unlink()
    checkpoint.mark(copy, last=checkpoint.names(copy)[0], best=None)
    busy.set()
    if follows:
        keeper.keep()
    keeper.close()
    assert ["not kept to the end (a file of it was deleted meanwhile)" in text for text in keeper.complaints] == (
        [] if follows else [True]
    )
    assert bool(manifests(tmp_path / "drive")) == follows


def test_a_copy_that_hangs_lets_the_process_end(copy, tmp_path, monkeypatch):
    """At exit Python waits for every thread that is no daemon."""
    before, keeper = threading.enumerate(), Keeper(copy, tmp_path / "drive")
    busy = waiting(keeper, monkeypatch)
    keeper.keep()
    assert [thread.daemon for thread in threading.enumerate() if thread not in before] == [True]
    busy.set()
    keeper.close()


MINE = (
    "thesis.txt",
    "backup.202401011200.zip",
    "plot.202401011200.png",
    "scan.20240101120000.jpg",
    "model.abcdefabcdef.safetensors",
    "report.abcdefabcdef",
    "report.abcdefabcdef.pdf.part",
    "2024-20240101.json",
    "run.json.bak",
    "photos.202312241830/1.jpg",
    "0001-00000003.abcdefabcdef.json/1.jpg",
    "snapshots/film.part",
    "snapshots/20240101-202401011200.json",
)


def test_files_of_others_stay_and_no_other_runs_copy_is_replaced(copy, run, pack, tmp_path):
    target = tmp_path / "drive"
    for name in MINE:
        put(target / name, b"mine")
    left = [put(target / f"0009-00000009.abcdefabcdef.json{end}", b"half of it") for end in ("", ".1-2.part")]
    for number in range(5):
        put(copy / "notes.json", json.dumps({"notes": number}).encode())
        kept(copy, target)
    assert [name for name in MINE if not (target / name).exists()] == []
    assert not any(path.exists() for path in left), "by a copy that failed"
    (target / MINE[-1]).unlink()
    assert len(manifests(target)) == 3
    assert len(list(target.glob("notes.*"))) == 3
    nb.fit(toy, pack, ONE, tmp_path / "other", **QUIET)
    with pytest.raises(CheckpointError, match="holds a different run"):
        nb.fit(toy, pack, ONE, tmp_path / "other", keep=target, **QUIET)
    with pytest.raises(CheckpointError, match="is a folder where a run is kept; name it with keep="):
        nb.fit(toy, pack, ONE, target, **QUIET)


def test_a_newer_copy_counts_as_soon_as_all_of_it_has_come(copy, tmp_path):
    """A manifest may reach Drive before what it names."""
    for number in (1, 2):
        put(copy / "notes.json", json.dumps({"notes": number}).encode())
        kept(copy, tmp_path / "drive")
    part = tmp_path / "drive" / newest(tmp_path / "drive")["files"]["notes.json"][0][0]
    late = part.rename(tmp_path / "on its way")
    assert nb.Run.open(tmp_path / "drive", toy).notes == 1
    late.rename(part)
    assert nb.Run.open(tmp_path / "drive", toy).notes == 2
