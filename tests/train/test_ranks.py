"""Several processes train as one does: real ones, over gloo."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import toy
from acting import QUIET, acting, refused, same, texts
from ranks import in_turn, together
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.nn.functional import all_reduce  # pyright: ignore[reportDeprecated]

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.train import checkpoint, device

PLAN = toy.PLAN.replace(epochs=1, dropout=0.0, noise=0.05)
PACK = partial(toy.make_pack, count=188)  # 126 to train on


def first() -> bool:
    return os.environ.get("RANK", "0") == "0"


class Branched(toy.Linear):
    """With a layer that only some shares use, one that none uses, and a frozen one."""

    def __init__(self):
        super().__init__(8, toy.CLASSES)
        self.rare, self.never, self.frozen = (nn.Linear(8, toy.CLASSES) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, batch):
        found = super().forward(batch) + self.frozen(batch["x"])
        return found + self.rare(batch["x"]) if batch["x"].sum() > 4 * len(batch["x"]) ** 0.5 else found


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "plain": lambda: toy.Linear(8, toy.CLASSES),  # without BatchNorm, whose statistics are those of a share
    "branched": Branched,
    "norm": lambda: toy.Net(16, 0.0),
}
PARTS = {  # → network, the plan, and what of it one process needs for the same parts
    "an uneven last batch, clipping, a moving average": ("plain", {"batch_size": 11, "ema": 0.9}, {}),
    "micro-batches, a last batch of one sample": ("plain", {"batch_size": 25, "micro_batch_size": 5}, {}),
    "parameters that some or all shares leave out": ("branched", {"weight_decay": 0.1, "micro_batch_size": 4}, {}),
    "batch norm over a share": ("norm", {"batch_size": 14, "optimizer": "sgd"}, {"micro_batch_size": 7}),
}


def precise(network: str) -> Any:
    model = {"model": lambda card, plan: NETWORKS[network]().double()}
    return toy.with_(batch=lambda *of: {**(found := toy.batch(*of)), "x": found["x"].double()}, **model)


def fitted(pack: Path, run: Path, network: str, plan: toy.Plan) -> None:
    nb.fit(precise(network), nb.Pack.open(pack), plan, run, **QUIET)


def weights(run: Path) -> dict[str, Tensor]:
    tensors = checkpoint.newest(run).tensors.items()
    return {name: tensor for name, tensor in tensors if name[:3] in ("mod", "ema") and ".layers.1." not in name}


def test_several_processes_equal_one_that_accumulates_the_same_parts(pack, tmp_path):
    calls = []
    for name, (network, settings, alone) in PARTS.items():
        plan = PLAN.replace(**settings)
        calls += [(fitted, pack.folder, tmp_path / name, network, plan)]
        fitted(pack.folder, tmp_path / f"one: {name}", network, plan.replace(**alone))
    together(2, in_turn, *calls)
    for name, (network, *_) in PARTS.items():
        one, several = weights(tmp_path / f"one: {name}"), weights(tmp_path / name)
        assert [each for each in one if not torch.allclose(several[each], one[each], 1e-8, 1e-9)] == [], name
        single, run = (nb.Run.open(tmp_path / each, precise(network)) for each in (f"one: {name}", name))
        for ours, theirs in zip(single.history.of("epoch"), run.history.of("epoch"), strict=True):
            for value in ("train_loss", *(("val_loss", "val_accuracy") if network != "norm" else ())):
                assert theirs[value] == pytest.approx(ours[value], rel=1e-6), (name, value)
        best = run.best["val_loss"]
        assert nb.evaluate(run, pack, "val")["loss"] == pytest.approx(best, rel=1e-6), "buffers are rank 0's on all"


def stretch(pack: Path, run: Path, plan: toy.Plan, until: int = 0) -> list[list[int]]:
    task = acting({until: lambda: os.kill(os.getpid(), signal.SIGINT)} if first() else {})
    nb.fit(task, nb.Pack.open(pack), plan, run, **QUIET)
    return [ids for _, _, ids in task.seen]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit_with_dropout_in_every_process(pack, tmp_path):
    """The whole one is trained amid the halves, which leaves them another random state."""
    plan, halves, whole = PLAN.replace(epochs=2, dropout=0.4), tmp_path / "halves", tmp_path / "whole"
    calls = ((stretch, pack.folder, *each) for each in ((halves, plan, 5), (whole, plan), (halves, plan)))
    for rank in together(2, in_turn, *calls, TORCHELASTIC_RUN_ID="run"):
        assert [len(ids) for ids in rank] == [5, 16, 11]
    assert same(nb.Run.open(halves, toy), nb.Run.open(whole, toy))
    assert not [text for text in texts(nb.Run.open(halves, toy)) if "a process was lost" in text]


def poisoned(pack: Path, run: Path, sample: int) -> list[str]:
    def batch(raw, plan, draws):
        found = toy.batch(raw, plan, draws)
        if draws is not None:
            found["x"][raw["id"] == sample] = torch.nan
        return found

    return nb.fit(toy.with_(batch=batch), nb.Pack.open(pack), PLAN.replace(epochs=2), run, **QUIET).events


def test_a_sample_that_is_no_number_is_left_out_by_all_and_its_share_is_named(pack, tmp_path):
    for sample in pack.ids("train")[[3, -3]].tolist():
        said, _ = together(2, poisoned, pack.folder, tmp_path / str(sample), sample)
        skipped = [text for text in said if "skipped: batch['x'] is not finite (sample ids" in text]
        assert len(skipped) == 2, said
        assert all(str(sample) in text for text in skipped)
        assert all(tensor.isfinite().all() for tensor in weights(tmp_path / str(sample)).values())


ACTS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "own": RuntimeError("Connection to the label server timed out"),  # in words of a process group
    "stop evaluating": signal.SIGINT,
}


def ending(pack: Path, run: Path, what: str) -> str:
    """How a fit ends in which something happens to rank 1, in step 3 or evaluating, or Ctrl-C to 0, where 1 is late."""

    def loss(model, batch, plan):
        kinds.append(isinstance(model, nn.Module))
        if first() == (what[:4] == "stop") and kinds[-3:] == [True, True, "evaluating" not in what]:
            if isinstance(act := ACTS.get(what, signal.SIGSTOP), Exception):
                raise act
            os.kill(os.getpid(), act)
        return toy.loss(model, batch, plan)

    kinds: list[bool] = []  # whether it trains
    sleep(what[:4] == "stop" and not first())
    try:
        return nb.fit(toy.with_(loss=loss), nb.Pack.open(pack), PLAN, run, **QUIET).state
    except (TrainError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


ENDS = {
    "memory": ["TrainError: out of memory on rank 1 of 2 (CUDA out of memory); set a smaller micro_batch_size"],
    "own": ["RuntimeError: Connection to the label server timed out"],
    "hang": [],
    "hang evaluating": [],
}


@pytest.mark.parametrize("what", ENDS)
def test_what_happens_to_one_rank_ends_the_others_within_the_timeout_and_another_attempt_trains(pack, tmp_path, what):
    lost, store = None if ENDS[what] else 1, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = dict[str, Any](MASTER_PORT=str(store.port), NBTOOLS_TIMEOUT="3", TORCHELASTIC_RUN_ID="run")
    zero, *one = together(2, ending, pack.folder, tmp_path / "run", what, lost=lost, **env)
    assert zero.startswith("RankLost: another rank of this run ended, or did not answer for 3 s (NBTOOLS_TIMEOUT)")
    assert zero.endswith("start again to resume from the last checkpoint")
    assert [text.partition(" See ")[0].rstrip(".") for text in one] == ENDS[what]
    env["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert together(2, ending, pack.folder, tmp_path / "run", "stop evaluating", **env)[0] == "stopped"


class Exchanging(nn.Module):
    """What SyncBatchNorm does, which a CPU lacks: it communicates in every forward and backward pass."""

    def forward(self, x):
        if not self.training:
            return x
        total = all_reduce(torch.cat([x.sum(0), x.new_tensor([len(x)])]))
        return x - total[:-1] / total[-1]


def exchanging(pack: Path, run: Path) -> int:
    def model(card, plan):
        network = toy.Net(16, 0.0)
        network.layers[1] = Exchanging()
        network.register_forward_hook(lambda net, given, made: passes.append(net.training))
        return network

    device.require, passes = (lambda *_: None), []  # it refuses a CPU
    plan = PLAN.replace(batch_size=17, micro_batch_size=4, sync_batchnorm=True)
    for stop in (12, 0):
        task = acting({stop: lambda: os.kill(os.getpid(), signal.SIGINT)} if first() else {}, model=model)
        nb.fit(task, nb.Pack.open(pack), plan, run, **QUIET)
    return sum(passes)


def test_layers_that_communicate_run_as_often_on_every_rank(pack, tmp_path):
    zero, one = together(2, exchanging, pack.folder, tmp_path / "run", NBTOOLS_TIMEOUT="5", TORCHELASTIC_RUN_ID="run")
    assert zero == one == 7 * 3 + 1


def test_what_needs_a_gpu_or_one_process_is_refused():
    for setting, said in (("sync_batchnorm", "needs CUDA, but this device is cpu"), ("graph", "2 train together")):
        refused(TrainError, said, device.require, PLAN.replace(**{setting: True}), torch.device("cpu"), 2)
