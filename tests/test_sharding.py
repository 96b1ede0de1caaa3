"""What several processes may share or shorten: the optimizer's buffers (ZeRO), the bytes of gradients. Over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from acting import QUIET, acting, asking
from ranks import in_turn, together

import nbtools as nb
from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.train import TrainState, checkpoint, join, local_optimizer, obey, train

PLAN = toy.PLAN.replace(epochs=2, hidden=512, ema=0.9)
SAVED, END = 8, 12  # steps
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Pack:
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=189)


def trained(packed: Path, plan: toy.Plan, saves: Path, resumes: Path | None = None) -> dict[str, Any]:
    """What a rank has after END steps. saves: where rank 0 leaves a checkpoint after SAVED; resumes: from which one."""
    pack, ranks = Pack.open(packed), join()
    state = TrainState(toy, pack, plan, ranks=ranks)
    losses, sent = [], {}
    if ranks is not None and not ranks.first:
        obey(toy, state, pack)
    else:
        if resumes is not None:
            found = checkpoint.newest(resumes)
            state.load(found.tensors, found.facts["state"])
        for record in train(toy, state, pack):
            losses.append(record.values.get("loss"))
            sent[state.step] = written()
            if state.step == SAVED and resumes is None:
                checkpoint.save(saves, state, rows=0)
            if state.step == END:
                break
        if ranks is not None:
            ranks.end()
    kept = local_optimizer(state.optimizer).state.values()
    return {
        "weights": {name: weight.detach().numpy() for name, weight in state.model.named_parameters()},
        "buffers": sum(value.nbytes for each in kept for value in each.values() if value.dim()),
        "losses": losses,
        "sent": sent[END] - sent[END - 1] if sent else 0,
    }


def written() -> int:
    """Bytes that this process has given to the system, to sockets for the most part."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["wchar"])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether the weights are, within 1e-6."""
    return all(abs(a["weights"][name] - b["weights"][name]).max() < 1e-6 for name in a["weights"])


RUNS = {
    "plain": {},
    "sharded": {"shard_optimizer": True},
    "resumed": {"shard_optimizer": True},  # from what the plain one saved
    "compressed": {"compress_gradients": True},
}


@pytest.fixture(scope="module")
def two(pack, tmp_path_factory) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Run → (its checkpoint, what two ranks have); one after another in the same processes."""
    saves = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    calls = [
        (trained, pack.folder, PLAN.replace(**own), saves[name], saves["plain"] if name == "resumed" else None)
        for name, own in RUNS.items()
    ]
    found = zip(*together(2, in_turn, *calls), strict=True)
    return {name: (saves[name], list(ranks)) for name, ranks in zip(RUNS, found, strict=True)}


def test_each_rank_keeps_half_of_the_optimizers_buffers_and_weights_and_checkpoints_are_the_same(two):
    (folder, whole), (sharded, shares) = two["plain"], two["sharded"]
    assert same(shares[0], whole[0])
    assert same(shares[1], whole[0])
    assert sum(rank["buffers"] for rank in shares) == whole[0]["buffers"]
    assert max(rank["buffers"] for rank in shares) < 0.55 * whole[0]["buffers"]
    updated = shares[0]["buffers"] / 2  # bytes of its weights, which have two moments each
    assert shares[0]["sent"] - whole[0]["sent"] == pytest.approx(updated, rel=0.05)
    ours, theirs = checkpoint.newest(sharded).tensors, checkpoint.newest(folder).tensors
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_a_run_goes_on_with_a_sharded_optimizer_or_without_and_alone(pack, two):
    (folder, whole), (_, resumed) = two["plain"], two["resumed"]
    assert same(resumed[1], whole[1])
    assert len(resumed[0]["losses"]) < len(whole[0]["losses"])
    alone = TrainState(toy, pack, PLAN.replace(shard_optimizer=True), CPU)
    found = checkpoint.newest(folder)
    alone.load(found.tensors, found.facts["state"])
    kept = alone.tensors()
    assert [name for name in kept if not torch.equal(kept[name], found.tensors[name])] == []


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd", "channels_last": True}])
def test_another_number_of_processes_goes_on_from_shares(pack, tmp_path, settings):
    sharded = PLAN.replace(shard_optimizer=True, **settings)
    together(2, trained, pack.folder, sharded, tmp_path)
    ends = [together(3, trained, pack.folder, plan, tmp_path, tmp_path) for plan in (sharded, PLAN.replace(**settings))]
    assert all(same(a, b) for a, b in zip(*ends, strict=True))
    assert sum(rank["buffers"] for rank in ends[0]) == ends[1][0]["buffers"]


def test_compressed_gradients_are_half_the_bytes_as_the_system_counts_them_and_train_about_as_well(two):
    (_, whole), (_, found) = two["plain"], two["compressed"]
    gradients = sum(weight.nbytes for weight in whole[0]["weights"].values())
    assert whole[0]["sent"] - found[0]["sent"] == pytest.approx(gradients / 2, rel=0.05)
    assert not same(found[0], whole[0]), "bf16 has three digits"
    assert [r for r in found[0]["losses"] if r is not None] == pytest.approx(
        [r for r in whole[0]["losses"] if r is not None], rel=0.02
    )
    assert same(found[0], found[1])


def test_batch_norm_over_all_processes_is_refused_where_torch_has_none(pack, tmp_path):
    said = "Plan.sync_batchnorm needs CUDA: torch has no SyncBatchNorm on cpu; set sync_batchnorm=False"
    with pytest.raises(AssertionError, match=said):
        together(2, trained, pack.folder, PLAN.replace(sync_batchnorm=True), tmp_path)


def test_in_one_process_they_do_nothing_and_that_is_said(pack, tmp_path):
    plan = PLAN.replace(sync_batchnorm=True, shard_optimizer=True, compress_gradients=True)
    runs = [nb.fit(toy, pack, each, tmp_path / str(i), **QUIET) for i, each in enumerate((plan, PLAN))]
    said = "sync_batchnorm, shard_optimizer, compress_gradients: no effect in one process"
    assert [said in "\n".join(run.events) for run in runs] == [True, False]
    ours, theirs = (checkpoint.newest(run.folder).tensors for run in runs)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_what_changes_no_result_may_change_when_a_run_is_resumed(pack, tmp_path):
    stop = acting({1: asking(tmp_path, "stop")})
    nb.fit(stop, pack, PLAN.replace(shard_optimizer=True), tmp_path, **QUIET)
    other = PLAN.replace(compress_gradients=True, checkpoint_activations=True)
    assert len(nb.fit(toy, pack, other, tmp_path, **QUIET).history.of("epoch")) == 2
    with pytest.raises(TrainError, match=r"cannot change .*sync_batchnorm no → yes"):
        nb.fit(toy, pack, PLAN.replace(sync_batchnorm=True), tmp_path, **QUIET)


@pytest.mark.full
def test_a_launched_run_with_shares_and_compression_goes_on_in_one_process_without(pack, tmp_path):
    plan = PLAN.replace(epochs=1, shard_optimizer=True, compress_gradients=True)
    assert nb.launch(toy, pack, plan, tmp_path / "run", processes=2, **QUIET).events
    history = nb.fit(toy, pack, PLAN, tmp_path / "run", **QUIET).history.of("epoch")
    assert [row["epoch"] for row in history] == [0, 1]
    assert history[1]["train_loss"] < history[0]["train_loss"]
