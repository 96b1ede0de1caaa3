"""Checkpoints are copied in the step's thread and written behind it: each is of the moment of its copy, training goes
on meanwhile, and a disk that fails is reported all the same."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import toy
from acting import QUIET, acting, first_is_best, last_step, same
from faults.forks import Child
from safetensors.torch import load, save

import nbtools as nb
from nbtools import disk
from nbtools.data import newest, transfer
from nbtools.errors import CheckpointError, DiskError
from nbtools.folder import begin
from nbtools.train import checkpoint

LIMIT = 30.0  # seconds after which something never happens


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, pack):
    return nb.fit(toy, pack, toy.PLAN, tmp_path_factory.mktemp("runs") / "untouched", **QUIET)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_checkpoint_is_of_the_moment_that_it_was_copied_however_late_it_is_written(pack, tmp_path, ema):
    state, writes, moments, places = nb.TrainState(toy, pack, toy.PLAN.replace(ema=ema), "cpu"), [], [], []
    for record in nb.train(toy, state, pack):
        if record.kind == "epoch" and len(moments) < 2:
            writes.append(partial(checkpoint.publish, tmp_path, checkpoint.snapshot(state, record.step, best=True)))
            tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
            best = {name: tensor.clone() for name, tensor in state.evaluated.state_dict().items()}
            moments.append((tensors, json.loads(json.dumps(state.facts())), best))
            places.append({name: copy.data_ptr() for name, copy in state.copies.items()})
        elif writes and state.step % 3 == 0:  # three steps later
            assert checkpoint.read_index(tmp_path).get("last") != checkpoint.name_of(state)
            writes.pop()()
            found, (tensors, facts, best) = checkpoint.newest(tmp_path), moments[-1]
            assert {**found.facts["state"], "wall": 0} == {**facts, "wall": 0}
            assert found.tensors.keys() == tensors.keys()
            assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
            written = checkpoint.weights(tmp_path)
            assert written.keys() == best.keys()
            assert all(torch.equal(written[name], tensor) for name, tensor in best.items())
    assert len(moments) == 2
    assert places[0] == places[1], "the second copy goes to the memory of the first"


def waits_for_a_step(monkeypatch, acted: threading.Event) -> list[bool]:
    """Writing the best weights waits until training has gone on; returns whether it did, each time."""
    real, went = disk.write_atomic, []

    def write_atomic(path, *data):
        if path.name.endswith(".best.safetensors"):
            went.append(acted.wait(LIMIT))
        return real(path, *data)

    monkeypatch.setattr(disk, "write_atomic", write_atomic)
    return went


def test_training_goes_on_while_the_best_epochs_checkpoint_is_written(pack, tmp_path, monkeypatch, untouched):
    acted = threading.Event()
    went = waits_for_a_step(monkeypatch, acted)
    steps = untouched.history.of("epoch")[0]["step"]
    run = nb.fit(acting({steps + 2: acted.set}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert went
    assert all(went)
    assert same(run, untouched)
    assert run.best["epoch"] == untouched.best["epoch"]


def test_a_disk_that_is_full_behind_a_step_ends_the_run_with_a_sentence_and_it_resumes(
    pack, tmp_path, monkeypatch, untouched
):
    real = disk.write_atomic

    def write_atomic(path, *data):
        if path.name.endswith(".best.safetensors"):
            assert threading.current_thread() is not threading.main_thread()
            raise OSError(28, "No space left on device")
        return real(path, *data)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_atomic", write_atomic)
        with pytest.raises(DiskError, match=r"saving checkpoint 0001-\d+: .*the disk is full"):
            nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert same(nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET), untouched)


def test_the_best_of_a_run_in_progress_is_that_whose_weights_are_on_the_disk(pack, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", -1.0)  # no best epoch is written before the run ends
    steps, found = 3 * len(pack.ids("train")) // toy.PLAN.batch_size, []
    acted = acting({steps: lambda: found.append(nb.Run.open(tmp_path / "run", toy).best)})
    run = nb.fit(acted, pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert (found, bool(run.best)) == ([{}], True)


def test_a_best_epoch_that_was_copied_is_written_though_the_gpu_is_lost(pack, tmp_path, monkeypatch):
    class Event:
        """CUDA's, of which only what was asked for before an assertion of a kernel is answered."""

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    real, steps = checkpoint.snapshot, len(pack.ids("train")) // toy.PLAN.batch_size
    monkeypatch.setattr(checkpoint, "snapshot", lambda *given: dataclasses.replace(real(*given), copied=Event()))
    monkeypatch.setattr(checkpoint, "save", lambda folder, state, rows: checkpoint.publish(folder, real(state, rows)))
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", -1.0)
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({steps + 3: lambda: 1 / 0}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert checkpoint.read_index(tmp_path / "run")["best"].startswith("0001-")


# -- the format


def test_what_is_packed_is_what_the_library_loads():
    torch.manual_seed(0)
    tensors: dict[str, Any] = {str(dtype): torch.arange(5).to(dtype) for dtype in checkpoint.NAMES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3), "é": torch.tensor([True, False, True])}
    tensors["strided"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for other in ({}, {"rarer": torch.arange(3).to(torch.float8_e5m2)}):
        found = load(bytes(checkpoint.packed({**tensors, **other})))
        assert found.keys() == {**tensors, **other}.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def test_the_same_state_gives_the_same_bytes_whatever_the_order_of_its_tensors(pack):
    """Else a checkpoint that a resumed run writes again, and is killed before it writes the facts, is not what the
    older facts vouch for: nothing may be left where the run's folder was restored. A file is read in any order."""
    state = nb.TrainState(toy, pack, toy.PLAN, "cpu")
    next(record for record in nb.train(toy, state, pack) if record.kind == "epoch")
    tensors = state.tensors()
    backwards = dict(reversed(tensors.items()))
    assert bytes(checkpoint.packed(tensors)) == bytes(checkpoint.packed(backwards))


def test_a_resumed_run_does_not_write_the_checkpoint_again_that_it_resumed_from(pack, tmp_path, monkeypatch):
    """Whatever comes before its first step, as an evaluation that was asked for."""
    monkeypatch.setattr("nbtools.folder.SAVE_EVERY", 0.0)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))

    def die():
        while not last_step(tmp_path / "run"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    kill = acting({3: die})
    Child(lambda: nb.fit(kill, pack, toy.PLAN, tmp_path / "run", **QUIET)).end()
    last, load = checkpoint.read_index(tmp_path / "run")["last"], nb.TrainState.load
    publish, names = checkpoint.publish, []

    def with_an_evaluation(state, *given):
        load(state, *given)
        state.evaluate_next = True

    def noting(folder, taken):
        names.append(taken.name)
        publish(folder, taken)

    monkeypatch.setattr(nb.TrainState, "load", with_an_evaluation)
    monkeypatch.setattr(checkpoint, "publish", noting)
    run = nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert ("evaluation", checkpoint.place(last)[1]) in [(row["kind"], row["step"]) for row in run.history.rows]
    assert names
    assert last not in names


def test_packing_lets_other_threads_run():
    """The library's `save` does not, which is why there is another; where it does some day, that one can go."""
    tensors = {str(i): torch.zeros(2**20) for i in range(32)}  # 128 MiB

    def longest(act) -> float:
        """The longest that this thread stands still meanwhile, as a share of the time."""
        thread, times = threading.Thread(target=act, args=(tensors,)), [time.perf_counter()]
        thread.start()
        while thread.is_alive():
            time.sleep(1e-4)
            times.append(time.perf_counter())
        return max(b - a for a, b in pairwise(times)) / (times[-1] - times[0])

    assert min(longest(checkpoint.packed) for _ in range(4)) < 0.5 * min(longest(save) for _ in range(2))


def test_a_resumed_run_has_room_for_its_checkpoints_before_its_first_step(pack, tmp_path, untouched):
    shutil.copytree(untouched.folder, tmp_path / "run")
    state = nb.TrainState(toy, pack, toy.PLAN, "cpu")
    begin(tmp_path / "run", pack, state)
    places = {name: copy.data_ptr() for name, copy in state.copies.items()}
    assert places.keys() == state.tensors().keys()
    checkpoint.snapshot(state, rows=0)
    assert places == {name: copy.data_ptr() for name, copy in state.copies.items()}


def test_the_picture_is_drawn_while_training_goes_on(pack, tmp_path, monkeypatch):
    went_on, waited = threading.Event(), []

    def draw(*_):
        waited.append(went_on.wait(LIMIT))
        return b"\x89PNG"

    monkeypatch.setattr("nbtools.live.png.draw", draw)
    monkeypatch.setattr("nbtools.live.view.STILL_EVERY", 0.0)
    steps = 2 * len(pack.ids("train")) // toy.PLAN.batch_size - 2  # within the second epoch
    run = nb.fit(acting({steps: went_on.set}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert waited[0], "no step was made while the first picture was drawn"
    assert (run.folder / "plot.png").read_bytes() == b"\x89PNG"


def test_the_last_picture_stays_that_of_a_run_that_failed_while_one_was_drawn(pack, tmp_path, monkeypatch):
    drawn, begun = [], threading.Event()

    def draw(made, *_):
        drawn.append(made.state)
        begun.set()
        time.sleep(0.3 if len(drawn) == 1 else 0)
        return made.state.encode()

    monkeypatch.setattr("nbtools.live.png.draw", draw)
    monkeypatch.setattr(
        "nbtools.live.view.STILL_EVERY", 0.0
    )  # else a run of less than a minute has no picture before its end
    steps = len(pack.ids("train")) // toy.PLAN.batch_size + 3  # in the second epoch, while the first's is drawn
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({steps: lambda: begun.wait(LIMIT) and 1 / 0}), pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert drawn == ["training", "failed"]
    assert (tmp_path / "run" / "plot.png").read_bytes() == b"failed"


# -- what is verified


@pytest.mark.parametrize("seal", ["seal", "3eal"])
@pytest.mark.parametrize("name", ["run.json", "the checkpoint's JSON"])
def test_a_number_changed_on_the_disk_is_noticed(pack, tmp_path, name, seal):
    run = nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
    newest = checkpoint.names(run.folder)[0]
    path = run.folder / ("run.json" if name == "run.json" else f"{newest}.json")
    text = path.read_text().replace('"seal"', f'"{seal}"')
    path.write_text(text.replace(newest if name == "run.json" else '"step": ', '"step": 1', 1))
    if name == "run.json":
        with pytest.raises(CheckpointError, match=r"run\.json: not "):
            nb.Run.open(run.folder, toy)
    else:
        assert "not as it was written" in checkpoint.newest(run.folder).complaints[0]


@pytest.mark.parametrize(
    "entries", [{"last": "-00000006"}, {"best": "../other"}, {"last": 6}, {"anchor": ["0001-00000004"]}]
)
def test_an_index_without_a_seal_that_names_no_checkpoint_is_refused(pack, tmp_path, entries):
    """Of an older nbtools, and damaged since."""
    run = nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET)
    index = checkpoint.read_index(run.folder)
    (run.folder / "run.json").write_text(json.dumps(index))
    nb.Run.open(run.folder, toy)
    (run.folder / "run.json").write_text(json.dumps({**index, **entries}))
    with pytest.raises(CheckpointError, match=r"run\.json: .* names no checkpoint; restore it from the kept copy"):
        nb.Run.open(run.folder, toy)


def test_a_checkpoint_is_read_back_before_older_ones_go(pack, tmp_path, monkeypatch):
    """A disk that stores something else than it was given."""
    state = nb.TrainState(toy, pack, toy.PLAN, "cpu")
    checkpoint.save(tmp_path, state, rows=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = disk.write

    def forgetful(file, data):
        real(file, bytes(len(data)) if len(data) > 5000 else data)

    monkeypatch.setattr(disk, "write", forgetful)
    state.position.epoch += 1
    with pytest.raises(DiskError, match="reads back differently from what was written"):
        checkpoint.save(tmp_path, state, rows=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_checkpoints_of_quick_epochs_take_a_hundredth_of_the_time(pack, tmp_path, monkeypatch):
    """On a disk that takes 20 ms a file, and where most epochs are the best; the first save and those of the end are
    not counted, nor the one in whose favour the time has just come."""
    saved, real = [], disk.write_atomic

    def slow(*args):
        time.sleep(0.02)
        return real(*args)

    def noted(folder, taken):
        start = time.perf_counter()
        publish(folder, taken)
        saved.append(time.perf_counter() - start)

    publish = checkpoint.publish
    monkeypatch.setattr(disk, "write_atomic", slow)
    monkeypatch.setattr(checkpoint, "publish", noted)
    start = time.perf_counter()
    run = nb.fit(rising(), pack, toy.PLAN.replace(epochs=40), tmp_path / "run", **QUIET)
    plain = saved[2:-2]
    assert sum(plain) <= 0.01 * (time.perf_counter() - start) + max(plain, default=0)
    assert checkpoint.read_index(run.folder)["best"].startswith("0040-")


def rising(actions: Any = MappingProxyType({})) -> Any:
    """Each evaluation is better than all before it."""
    return acting(actions, metrics=lambda outputs, batch: {"accuracy": (time.monotonic_ns() // 1000, 10**12)})


@pytest.mark.parametrize("ends", ["fails", "killed"])
def test_a_best_epoch_that_is_not_written_yet_is_not_claimed_and_a_run_that_fails_writes_it(
    pack, tmp_path, monkeypatch, ends
):
    """Nothing but the first epoch is cheap enough to be written."""
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", 0.0)
    steps = len(range(0, pack.splits["train"], toy.PLAN.batch_size))

    def trained() -> None:
        end = (lambda: 1 / 0) if ends == "fails" else (lambda: os.kill(os.getpid(), signal.SIGKILL))
        nb.fit(rising({2 * steps + 3: end}), pack, toy.PLAN, tmp_path / "run", **QUIET)

    Child(trained).end()
    run = nb.Run.open(tmp_path / "run", toy)
    assert len(run.history.of("epoch")) == 2
    epoch = run.best["epoch"]
    assert epoch == (2 if ends == "fails" else 1)
    assert checkpoint.read_index(run.folder)["best"].startswith(f"000{epoch}-")
    whole = nb.fit(rising(), pack, toy.PLAN, tmp_path / "whole", **QUIET)
    again = nb.fit(rising(), pack, toy.PLAN, tmp_path / "run", **QUIET)
    assert same(again, whole)
    assert again.best["epoch"] == 3


@pytest.mark.usefixtures("written")
def test_two_older_checkpoints_that_are_whole_stay_behind_the_last_and_the_best(pack, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtools.folder.SAVE_EVERY", 0.0)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    task = acting(**first_is_best())
    folder = nb.fit(task, pack, toy.PLAN, tmp_path / "run", **QUIET).folder
    index, names = checkpoint.read_index(folder), checkpoint.names(folder)
    assert names[0] == index["last"]
    assert len(names) == 4
    assert f"{names[3]}.best" == index["best"]
    assert all(checkpoint.read(folder, name).tensors for name in (*names, index["best"]))
    for name in names[:2]:
        (folder / f"{name}.safetensors").write_bytes(b"")
    found = checkpoint.newest(folder)
    assert (found.name, len(found.complaints)) == (names[2], 2)


def damage(folder, *names: str) -> None:
    for name in names:
        path = folder / f"{name}.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.usefixtures("written")
def test_a_run_that_resumed_from_behind_damaged_checkpoints_keeps_the_intact_one_and_discards_those(
    pack, tmp_path, monkeypatch
):
    monkeypatch.setattr("nbtools.folder.SAVE_EVERY", 0.0)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    task = acting(**first_is_best())
    folder = nb.fit(task, pack, toy.PLAN, tmp_path / "run", **QUIET).folder
    *newer, intact = checkpoint.names(folder)[:3]
    checkpoint.mark(folder, anchor={"name": newer[0], "facts": {}, "best": None, "limit": None})
    damage(folder, *newer)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", -1.0)  # nothing is written before the run ends
    run = nb.fit(task, pack, toy.PLAN.replace(epochs=4), folder, **QUIET)
    assert [event for event in run.events if event.endswith(f"it is damaged; {intact} is used")]
    names = checkpoint.names(folder)
    assert names[1] == intact
    assert all(checkpoint.read(folder, name).tensors for name in names)
    assert checkpoint.read_index(folder)["anchor"]["name"] == intact, "to undo the change of epochs"


def test_where_every_checkpoint_is_damaged_the_way_out_is_the_kept_copy_and_none_is_said_to_be_used(pack, tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    nb.fit(toy, pack, toy.PLAN, folder, keep=kept, **QUIET)
    damage(folder, *checkpoint.names(folder))
    with pytest.raises(
        CheckpointError, match=r"its hash differs; it is damaged.*move this folder away to resume"
    ) as no:
        nb.fit(toy, pack, toy.PLAN, folder, keep=kept, **QUIET)
    assert "used" not in str(no.value)
    folder.rename(tmp_path / "away")
    nb.fit(toy, pack, toy.PLAN, folder, keep=kept, **QUIET)
    assert checkpoint.newest(folder).complaints == ()


def test_damaged_best_weights_are_read_from_the_whole_checkpoint_of_their_epoch(pack, tmp_path):
    run = nb.fit(toy, pack, toy.PLAN.replace(ema=0.9), tmp_path / "run", **QUIET)
    best = checkpoint.read_index(run.folder)["best"]
    weights = run.model("cpu").state_dict()
    damage(run.folder, best)
    found = run.model("cpu").state_dict()
    assert all(map(torch.equal, found.values(), weights.values()))
    damage(run.folder, best.partition(".")[0])
    with pytest.raises(CheckpointError, match=r"best.safetensors: .*it is damaged; copy it from where the run is kept"):
        run.model("cpu")


def test_a_lost_index_is_made_anew_and_the_run_resumes_with_its_best_weights(pack, tmp_path, untouched):
    folder, steps = tmp_path / "run", len(range(0, pack.splits["train"], toy.PLAN.batch_size))
    with pytest.raises(ZeroDivisionError):
        nb.fit(acting({2 * steps + 3: lambda: 1 / 0}), pack, toy.PLAN, folder, **QUIET)
    (folder / "run.json").unlink()
    run = nb.fit(toy, pack, toy.PLAN, folder, **QUIET)
    assert any("run.json: is missing; rebuilt from the checkpoints" in event for event in run.events)
    assert same(run, untouched)
    ours, theirs = (checkpoint.read_index(each.folder) for each in (run, untouched))
    assert {**ours, "id": 0} == {**theirs, "id": 0}
    assert ours["best"].startswith("0002-"), "from before"
    (folder / "run.json").write_text(json.dumps({"last": ours["last"]}))
    with pytest.raises(CheckpointError, match=r"run.json names no task; give it, as in nb\.Run\.open\(folder, task\)"):
        nb.Run.open(folder)


def test_a_run_whose_index_was_lost_goes_on_being_kept_where_it_is(pack, tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), folder, kept, **QUIET)
    (folder / "run.json").unlink()
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=2), folder, kept, **QUIET)
    assert checkpoint.read_index(folder)["id"] == newest(kept)["id"]
    assert len(nb.Run.open(kept, toy).summary()) == len(run.summary()) == 2


@pytest.mark.parametrize("form", ["safetensors", "json"])
def test_one_error_of_a_disk_is_no_damage_and_costs_no_checkpoint(pack, tmp_path, monkeypatch, form):
    monkeypatch.setattr(transfer, "PAUSE", 0.001)
    folder = nb.fit(toy, pack, toy.PLAN, tmp_path / "run", **QUIET).folder
    before, path = checkpoint.names(folder), folder / f"{checkpoint.names(folder)[0]}.{form}"
    real, failed = Path.open, []

    def failing(self, *args, **options):
        if self == path and not failed:
            failed.append(True)
            raise OSError(errno.EIO, "Input/output error", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", failing)
    found = checkpoint.load(folder, nb.TrainState(toy, pack, toy.PLAN, "cpu"))
    assert failed
    assert (found.name, found.complaints) == (before[0], ())
    assert checkpoint.names(folder) == before


def test_rows_that_a_resumed_run_lacks_are_counted_in_its_messages(pack, tmp_path):
    folder = tmp_path / "run"
    rows = len(nb.fit(toy, pack, toy.PLAN, folder, **QUIET).history)
    (folder / "history.csv").unlink()
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=4), folder, **QUIET)
    assert any(f"history.csv: {rows} of {rows} rows are missing; charts, tables" in event for event in run.events)


@pytest.mark.parametrize("name", ["card.json", "plan.json", "receipt.json", "verdict.json", "evaluation.json"])
def test_a_damaged_file_of_a_run_is_named_with_what_to_do(pack, tmp_path, untouched, name):
    folder = shutil.copytree(untouched.folder, tmp_path / "run")
    fix = "copy the whole run folder again" if name in ("card.json", "plan.json") else "delete it"
    for text in ("{", "[1]", "\xff"):
        (folder / name).write_text(text, encoding="latin-1")
        with pytest.raises(
            CheckpointError, match=rf"run/{name} is (damaged, not JSON \(.*\)|not a JSON object); {fix}"
        ):
            nb.Run.open(folder, toy).to_dict()
    if name in ("card.json", "plan.json"):
        with pytest.raises(CheckpointError, match=rf"run/{name} is damaged"):
            nb.fit(toy, pack, None, folder, **QUIET)


def test_what_a_killed_process_left_half_written_goes_and_the_files_of_others_stay(pack, tmp_path):
    folder = tmp_path / "run"
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), folder, **QUIET)
    own = {f"{name}.12-34.part" for name in ("run.json", "history.csv", "plan.json", "plot.png", "kept.json")}
    others = {
        "control.json.12-34.part",
        "notes.json.12-34.part",
        "mine.part",
        "data.2024-01.part",
        "model.onnx.1-2.part",
    }
    for name in own | others:
        (folder / name).touch()
    nb.fit(toy, pack, toy.PLAN, folder, **QUIET)
    assert {path.name for path in folder.glob("*.part")} == others
