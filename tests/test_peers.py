"""Claims about what `benchmarks.tasks` compares: every program trains the same, and is watched alike."""

import logging
import warnings
from contextlib import suppress
from importlib.util import find_spec

import pytest

from benchmarks.peers import OURS, PROGRAMS, Enough, Job, Levers, Meter, lines, package_of, run
from nbtools import Run
from nbtools.data import batches_in
from nbtools.tasks import captcha

PLAN = captcha.PLAN.replace(network="small", loss="cross_entropy", epochs=2, batch_size=16, lr=2e-3, warmup_epochs=0.5)
PLAN = PLAN.replace(amp="off", channels_last=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captchas")
    source = captcha.demo(folder / "raw", 48)
    return source, captcha.pack(source, into=folder / "pack", progress=False)


@pytest.fixture
def trained(files, tmp_path, monkeypatch):
    """trained(name) -> (its meter, its folder)"""
    source, pack = files
    network = captcha.model

    def model(card, plan):
        net = network(card, plan)
        vars(net.dropout)["p"] = 0.0  # some peers draw from torch's random numbers before they train
        return net

    monkeypatch.setattr(captcha, "model", model)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def train(name):
        meter, folder = Meter(), tmp_path / name
        folder.mkdir()
        with warnings.catch_warnings(), meter.watching(captcha), suppress(Enough):
            warnings.simplefilter("ignore")
            run(name, Job(captcha, pack, source, PLAN, Levers(), meter), folder)
        return meter, folder

    return train


def mean_losses(meter):
    return [float(total / count) for total, count in meter.losses]


PEERS = [
    pytest.param(name, marks=pytest.mark.skipif(not find_spec(package_of(name)), reason=f"{name} is of make bench"))
    for name in PROGRAMS
    if name not in OURS
]


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_has_the_losses_and_scores_of_nbtools_and_keeps_its_best_weights(trained, files, peer):
    ours, folder = trained("nbtools")
    theirs, kept = trained(peer)
    assert len(ours.losses) == PLAN.epochs * batches_in(files[1].splits["train"], PLAN.batch_size)
    assert mean_losses(theirs) == pytest.approx(mean_losses(ours), abs=1e-4)
    rows = Run.open(folder / "run", captcha).history.of("epoch")
    assert theirs.scores == pytest.approx([row["val_whole_accuracy"] for row in rows])
    assert any(path.suffix in (".pt", ".pth", ".ckpt", ".safetensors") for path in kept.rglob("*"))
    assert lines(PROGRAMS[peer][0]) <= 40
