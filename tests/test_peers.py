"""Claims about what `benchmarks.tasks` compares: every program trains the same, and is watched alike."""

import logging
import warnings
from contextlib import suppress
from importlib.util import find_spec

import pytest

from benchmarks.peers import OURS, PROGRAMS, Enough, Job, Levers, Meter, lines, package_of, run
from nbtools import Run
from nbtools.data import batches_in, open_feed
from nbtools.tasks import captcha, hwdb

PLAN = captcha.PLAN.replace(network="small", loss="cross_entropy", epochs=2, batch_size=16, lr=2e-3, warmup_epochs=0.5)
PLAN = PLAN.replace(amp="off", channels_last=False)


def without_dropout(card, plan, network=captcha.model):
    net = network(card, plan)
    vars(net.dropout)["p"] = 0.0
    return net


def trained(name, pack, folder):
    meter = Meter()
    folder.mkdir()
    with warnings.catch_warnings(), meter.watching(captcha), suppress(Enough):
        warnings.simplefilter("ignore")
        run(name, Job(captcha, pack, pack.raw.source, PLAN, Levers(), meter), folder)
    return meter, [float(total / count) for total, count in meter.losses]


@pytest.mark.parametrize("peer", [name for name in PROGRAMS if name not in OURS])
def test_a_peer_has_the_losses_and_scores_of_nbtools_and_keeps_its_best_weights(tmp_path, monkeypatch, peer):
    if not find_spec(package_of(peer)):
        pytest.skip(f"{peer} is of make bench")
    monkeypatch.setattr(captcha, "model", without_dropout)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pack = captcha.pack(captcha.demo(tmp_path / "raw", 48), into=tmp_path / "pack", progress=False)
    _, ours = trained("nbtools", pack, tmp_path / "ours")
    meter, theirs = trained(peer, pack, tmp_path / "theirs")
    assert len(ours) == PLAN.epochs * batches_in(pack.splits["train"], PLAN.batch_size)
    assert theirs == pytest.approx(ours, abs=1e-4)
    rows = Run.open(tmp_path / "ours" / "run", captcha).history.of("epoch")
    assert meter.scores == pytest.approx([row["val_whole_accuracy"] for row in rows])
    assert any(path.suffix in (".pt", ".pth", ".ckpt", ".safetensors") for path in tmp_path.rglob("theirs/**/*"))
    assert lines(peer, Job) <= 40


def test_a_peers_batches_are_padded_as_those_of_nbtools(tmp_path):
    pack = hwdb.pack(hwdb.demo(tmp_path / "raw", 12), into=tmp_path / "pack", progress=False)
    job = Job(hwdb, pack, pack.raw.source, hwdb.PLAN.replace(bucket=16, batch_size=4), Levers(), Meter())
    ours = open_feed(pack, job.plan, job.device)(job.order.of(0))
    widths = [[raw["image"].shape[1] for raw in feed] for feed in (job.loader(), ours)]
    assert widths[0] == widths[1]
