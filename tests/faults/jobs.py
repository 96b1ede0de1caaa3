"""What fails: stage, shard, pack, save, rotate, keep, restore, train, each as a job with what it finds and what it
leaves."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toy
from archives import archived, put, tree

import nbtools as nb
from nbtools import disk, folder, measure
from nbtools.data import Pack, archive, build, manifests, parallel
from nbtools.live import send
from nbtools.train import History, Keeper, Record, TrainState, checkpoint, train


@dataclass(frozen=True)
class Job:
    """prepare(place): what is there before; act(place): what is done; seen(place) → what is there and taken for whole,
    each as text. keeps: there is always something. far: the folder that is on Drive, "" if none is."""

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    seen: Callable[[Path], list[str]]
    keeps: bool = True
    far: str = ""


def digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# -- what is done with data

FILES = {"digits/labels.csv": b"file,label\n", "digits/a.bin": bytes(range(256)) * 300, "digits/b/c.bin": b"c" * 700}
OLD = {"digits/labels.csv": b"file,label\n1,2\n", "digits/old.bin": b"old" * 100}


def folder_there(place: Path, files: dict[str, bytes] = FILES) -> None:
    for name, content in files.items():
        put(place / "drive" / name, content)


def archive_there(form: str) -> Callable[[Path], object]:
    return lambda place: put(place / "drive" / f"digits.{form}", archived(FILES, form))


def shards_there(place: Path) -> None:
    folder_there(place)
    sharding(place)
    (place / "sharded").rename(place / "drive" / "shards")


def sharding(place: Path) -> None:
    vars(sys.modules[nb.shard.__module__])["LEAST"] = 1
    nb.shard("drive:digits", place / "sharded", 9000, progress=False)


def sharded(place: Path) -> list[str]:
    """What the manifest names."""
    path = place / "sharded" / "shards.json"
    names = [one["file"] for one in json.loads(path.read_text())["shards"]] if path.exists() else []
    return [digest([(name, (place / "sharded" / name).read_bytes()) for name in names])] if names else []


def replaced(place: Path) -> None:
    """An older version of the source was staged."""
    path = put(place / "drive" / "digits.zip", archived(OLD, "zip"))
    nb.stage("drive:digits.zip", progress=False)
    put(path, archived(FILES, "zip"))


def staging(name: str, **options: Any) -> Callable[[Path], object]:
    return lambda place: nb.stage(f"drive:{name}", progress=False, **options)


def staged(place: Path) -> list[str]:
    """What the next call takes as it is: receipts, and all that lies next to them."""
    receipts = (place / "cache").glob("*/.stage.json")
    return [json.loads(r.read_text())["version"] + digest(sorted(tree(r.parent).items())) for r in receipts]


def packing(place: Path) -> None:
    build.CHUNK = parallel.CHUNK = 4
    toy.pack(place / "raw", into=place / "pack")


def packed(place: Path) -> list[str]:
    there = (place / "pack" / "pack.json").exists()
    return [Pack.open(place / "pack").verify().card.digest] if there else []


def to_keep(place: Path) -> None:
    """A pack, and an older one where it is to be kept."""
    older = toy.pack(toy.demo(place / "older", 5), into=place / "older-pack")
    older.keep(place / "kept.tar")
    toy.make_pack(place, count=9)


def keeping(place: Path) -> None:
    Pack.open(place / "pack").keep(place / "kept.tar")


def kept(place: Path) -> list[str]:
    shutil.rmtree(out := place.with_name("out"), ignore_errors=True)
    archive.extract(place / "kept.tar", out)
    return [Pack.open(out).verify().card.digest]


# -- what is done with a run


def saves(place: Path) -> None:
    """A run with three checkpoints, one of them the best; the state of the next one is in STATES."""
    pack = toy.make_pack(place, count=60)
    state = TrainState(toy, pack, toy.PLAN, "cpu")
    history = History(place / "run" / "history.csv")
    disk.write_atomic(place / "run" / "plan.json", state.plan.to_json())
    for record in train(toy, state, pack):
        if record.kind == "step":
            if state.step == 8:
                break
            if state.step % 2 == 0:
                history.append(Record("step", state.epoch, state.step, 0, {"loss": 1.0 / state.step}))
                checkpoint.save(place / "run", state, len(history), best=state.step == 4)
    checkpoint.mark(place / "run", id="one")
    STATES[:] = [state]


STATES: list[TrainState] = []


def saving(place: Path) -> None:
    checkpoint.save(place / "run", STATES[0], 4, best=True)


def rotating(place: Path) -> None:
    checkpoint.rewind(place / "run", "0001-00000004")


def run_in(place: Path) -> str:
    """The newest state that can be resumed, the best weights, and that there are as many older ones as promised."""
    found = checkpoint.newest(place)
    assert found.name == checkpoint.read_index(place)["last"], found.complaints
    assert all(checkpoint.read(place, name) for name in checkpoint.reached(place, found.name)[: 1 + checkpoint.OLDER])
    values = [(name, tensor.numpy().tobytes()) for name, tensor in sorted(found.tensors.items())]
    best = [(name, tensor.numpy().tobytes()) for name, tensor in sorted(checkpoint.weights(place).items())]
    return f"{found.name} {digest((values, found.facts['state'], best))}"


def saved(place: Path) -> list[str]:
    return [run_in(place / "run")]


def kept_before(place: Path) -> None:
    """A kept run that lacks the last two checkpoints."""
    saves(place)
    copied(place / "run", place / "kept")
    checkpoint.save(place / "run", STATES[0], 4, best=True)


def copied(source: Path, target: Path) -> None:
    keeper = Keeper(source, target)
    keeper.keep()
    keeper.close()
    if keeper.complaints:
        raise nb.NbtoolsError(keeper.complaints[-1])


def copying(place: Path) -> None:
    copied(place / "run", place / "kept")


def lost_here(place: Path) -> None:
    saves(place)
    copied(place / "run", place / "kept")
    shutil.rmtree(place / "run")


def restoring(place: Path) -> None:
    folder.restore(place / "run", place / "kept")


def in_kept(place: Path) -> list[str]:
    """As it is read from there: by way of a copy that is compared with its hashes."""
    return [run_in(nb.stage(place / "kept", progress=False))]


def restored(place: Path) -> list[str]:
    return saved(place) if (place / "run").exists() else in_kept(place)


def rows(place: Path) -> None:
    history = History(place / "history.csv")
    for step in range(5):
        history.append(Record("step", 0, step, 0, {"loss": step / 7}))


def appending(place: Path) -> None:
    history = History(place / "history.csv")
    history.cut(3)
    for step in (3, 4, 5):
        history.append(Record("step", 0, step, 0, {"loss": step / 9, **({"lr": 0.1} if step == 4 else {})}))


def first_rows(place: Path) -> list[str]:
    """Those that a checkpoint counts on, and all once the last is there."""
    found = History(place / "history.csv").rows
    assert [row["step"] for row in found[:3]] == [0, 1, 2]
    return [digest(found if len(found) == 6 else found[:3])]


def training(place: Path) -> None:
    """A run that saves after every step and is kept."""
    folder.SAVE_EVERY, folder.SAVE_SHARE = 0.0, float("inf")
    pack = Pack.open(place / "pack")
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=2), place / "run", place / "kept", receipt=False, progress=False)
    if unkept := [event for event in run.events if "not kept" in event]:
        raise nb.NbtoolsError(unkept[-1])


def finished(place: Path) -> None:
    """A run to its end, without the receipt that follows."""
    pack = toy.make_pack(place, count=60)
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), place / "run", receipt=False, progress=False)


def measuring(place: Path) -> None:
    """The receipt, by the shortest of measurements."""
    vars(sys.modules[measure.Receipt.__module__]).update(ROUNDS=1, SECONDS=0.01)
    vars(sys.modules[measure.step_profile.__module__]).update(SECONDS=0.05)
    run = nb.fit(toy, Pack.open(place / "pack"), None, place / "run", progress=False)
    if missing := [event for event in run.events if event.startswith("no receipt")]:
        raise nb.NbtoolsError(missing[-1])


def measured(place: Path) -> list[str]:
    """Whether it is there: the figures are a clock's. The run is what it was, and can be read with all of its files."""
    run = nb.Run.open(place / "run", toy)
    run.to_dict()
    return [digest((weights_of(run.folder), losses_of(run.folder), run.receipt is not None))]


def asked_before(place: Path) -> None:
    (place / "run").mkdir()
    send(place / "run", ["pause"])


def asking(place: Path) -> None:
    send(place / "run", ["save"], {"lr": 0.005})


def asked(place: Path) -> list[str]:
    """The requests of both; of one that is made twice it is the same."""
    found = json.loads((place / "run" / "control.json").read_text())
    return [repr(sorted({*found.pop("do")}) + sorted(found.items()))]


def trained(place: Path) -> list[str]:
    """Weights and losses of a run that is done; both copies of one that is not can be resumed."""
    ended = []
    kept = [nb.stage(place / "kept", progress=False)] if manifests(place / "kept") else []
    for path in (place / "run", *kept):
        if path.exists() and checkpoint.names(path):
            over = checkpoint.newest(path).facts["state"]["position"]["epoch"] == 2
            if over and len(History(path / "history.csv").of("epoch")) == 2:  # its row follows the last evaluation
                ended.append(digest((weights_of(path), losses_of(path))))
    return ended


def weights_of(path: Path) -> list[tuple[str, bytes]]:
    """The tensors of the last state, and the best weights."""
    best = {f"best {name}": value for name, value in checkpoint.weights(path).items()}
    return [
        (name, value.numpy().tobytes()) for name, value in sorted({**checkpoint.newest(path).tensors, **best}.items())
    ]


def losses_of(path: Path) -> list[dict[str, Any]]:
    """The history without what a clock decides, and without remarks about what happened."""
    rows = [row for row in History(path / "history.csv").rows if row["kind"] not in ("event", "change")]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


CLOCK = ("samples_per_s", "data_wait", "memory", "epoch_time", "eval_time", "wall")


JOBS = {
    "stage a folder": Job(folder_there, staging("digits"), staged, keeps=False, far="drive"),
    "stage and extract a tar.gz": Job(
        archive_there("tar.gz"), staging("digits.tar.gz"), staged, keeps=False, far="drive"
    ),
    "stage a tar.xz as one file": Job(
        archive_there("tar.xz"), staging("digits.tar.xz", extract=False), staged, keeps=False, far="drive"
    ),
    "stage shards": Job(shards_there, staging("shards"), staged, keeps=False, far="drive"),
    "shard": Job(folder_there, sharding, sharded, keeps=False, far="drive"),
    "stage a newer version": Job(replaced, staging("digits.zip"), staged, keeps=False, far="drive"),
    "pack": Job(lambda place: toy.demo(place / "raw", 11), packing, packed, keeps=False),
    "keep a pack": Job(to_keep, keeping, kept),
    "save": Job(saves, saving, saved),
    "rotate": Job(saves, rotating, saved),
    "keep a run": Job(kept_before, copying, in_kept, far="kept"),
    "restore a run": Job(lost_here, restoring, restored, far="kept"),
    "write the history": Job(rows, appending, first_rows),
    "train": Job(lambda place: toy.make_pack(place, count=60), training, trained, keeps=False),
    "measure the receipt": Job(finished, measuring, measured),
    "make a request": Job(asked_before, asking, asked),
}
