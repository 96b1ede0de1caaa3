"""Nothing is lost: a share of what `make faults` counts, and that its machinery notices what it is there for."""

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from archives import tar_bytes
from faults import __main__ as faults
from faults import kills, mutations, operations
from faults.jobs import JOBS

from nbtools.data import archive
from nbtools.train import History, Record, checkpoint

SEED = 20


@pytest.fixture
def root(tmp_path, monkeypatch) -> Iterator[Path]:
    """In memory where there is some: most of the time would go into the disk."""
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path / "drive"))
    monkeypatch.setenv("FAULTS_PLACE", "")
    memory = TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    yield Path(memory.name)
    memory.cleanup()


def test_a_batch_that_fails_or_is_killed_is_noted_and_the_other_parts_go_on(tmp_path, monkeypatch, root):
    def fails(name, *_):
        if name == "tar":
            raise OSError(5, "Input/output error", tempfile.mkdtemp(dir=root))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(faults, "DONE", tmp_path / "faults.jsonl")
    monkeypatch.setattr(faults, "commit", lambda: "123abc")
    monkeypatch.setattr(mutations, "swept", fails)
    parts = ["mutations: tar", "mutations: zip", "truncations: zip"]
    for _ in range(2):  # a part that failed is tried again by the next call
        lines, any_wrong = faults.run([*parts], 10, 2)
        assert any_wrong
    text = faults.page(lines)
    assert "| zip | 1 of 1 | 625 | 0 | refused 625 |" in text
    assert "| tar | 10,000 of 1,000,000 | 0 | 2 |  |" in text
    assert re.search(r"\| mutations: tar, from seed 5000 on: OSError: \[Errno 5\] Input/output error: '\w*' \|", text)
    assert "| mutations: zip, from seed 0 on: killed by signal 9 |" in text
    assert str(root) not in text


@pytest.mark.parametrize("name", JOBS)
def test_an_operation_on_the_disk_that_fails_loses_nothing_and_publishes_nothing_half(name, root):
    every = {"train": 331, "measure the receipt": 331}.get(name, 33)
    totals, wrong = operations.swept(name, root / "it", nth=every // 2, of=every)
    assert wrong == []
    assert totals


@pytest.mark.parametrize(
    ("how", "name"),
    [*(("full", name) for name in JOBS if name != "train"), *(("gone", name) for name, job in JOBS.items() if job.far)],
)
def test_a_disk_that_is_full_or_gone_loses_nothing_and_publishes_nothing_half(how, name, root):
    totals, wrong = operations.swept(name, root / "it", how=how)
    if skipped := [ended for ended in totals if ended.startswith("skipped")]:
        pytest.skip(skipped[0])
    assert wrong == []
    assert totals


@pytest.mark.parametrize("name", ["own, resident, gloo 1", "own, workers 2, gloo 2"])
def test_a_run_that_is_killed_anywhere_resumes_bit_for_bit(name, root):
    totals, wrong = kills.swept(name, SEED, 12, root / "it")
    assert wrong == []
    assert totals.total() >= 12


def test_the_same_kills_are_noticed_where_files_are_written_in_place(root):
    assert not any(map(kills.Case("own, resident, gloo 1", root / "whole").killed_at, range(8)))
    case = kills.Case("own, resident, gloo 1", root / "torn", kills.in_place)
    assert any(map(case.killed_at, range(20))), "a torn index is not noticed"


def older_ones_spoiled() -> None:
    """Nothing that a run notices, as long as the last one is whole."""
    prune = checkpoint.prune

    def pruned(folder, index):
        prune(folder, index)
        for name in checkpoint.reached(folder, index["last"])[1:]:
            (folder / f"{name}.safetensors").write_bytes(b"")

    checkpoint.prune = pruned


def one_row_too_many() -> None:
    snapshot = checkpoint.snapshot
    checkpoint.snapshot = lambda state, rows, best=False: snapshot(state, rows + 1, best)


@pytest.mark.parametrize("patch", [older_ones_spoiled, one_row_too_many])
def test_a_kill_is_wrong_that_leaves_less_than_the_run_may_go_back_to(patch, root):
    case = kills.Case("own, resident, gloo 1", root / "it", patch)
    assert any(case.killed_at(at).startswith("after a kill: ") for at in range(80, 90))


def test_a_run_that_differs_is_reported_with_what_it_said(root):
    case = kills.Case("own, resident, gloo 1", root / "it")
    name = next(name for name in case.expected[1] if name.startswith("best "))
    case.expected[1][name] = b""
    History(root / "it" / "run" / "history.csv").append(Record("event", 1, 7, 0, {"what": "out of memory"}))
    assert case.differs() == f"1 tensors differ: {name}; events: out of memory (step 7)"


@pytest.mark.parametrize("name", mutations.CASES)
def test_a_mutated_file_is_refused_in_a_sentence_or_read_right(name, root):
    count = 100 if name == "checkpoints" else 400
    totals, wrong = mutations.swept(name, range(count), root)
    assert wrong == []
    assert totals.total() == count
    if name in mutations.FORMS:
        assert totals["refused before extraction"] < 0.7 * count


ONCE_WRONG = sorted(
    {
        (found[1], int(found[2]))
        for line in faults.recorded()
        for wrong in line["wrong"]
        if (found := re.match(r"(.*), seed (\d+): ", wrong)) and line["part"] == f"mutations: {found[1]}"
    }
)


@pytest.mark.parametrize(("name", "seed"), ONCE_WRONG)
def test_a_mutated_file_that_was_once_wrong_is_right_now(name, seed, root):
    assert mutations.swept(name, [seed], root)[1] == []


@pytest.mark.parametrize("form", mutations.FORMS)
def test_an_archive_cut_at_any_byte_is_refused_or_whole(form, root):
    """`make faults` cuts the plain tar, which is much longer, at every byte too."""
    assert mutations.truncations(form, root, step=13 if form == "tar" else 1)[1] == []


@pytest.mark.parametrize("name", mutations.TRAVERSALS)
def test_a_published_traversal_is_refused_where_pythons_own_extraction_leaves_its_folder(name, root):
    data = tar_bytes(mutations.TRAVERSALS[name])
    assert mutations.escapes(data, root / "t", lambda path, out: mutations.by_python(path, out, "fully_trusted"))
    assert not mutations.escapes(data, root / "t", archive.extract)
