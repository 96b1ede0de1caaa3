"""Frames become X2048 by a frozen or fine-tuned backbone: a small network instead of InceptionV3, all else the same."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.errors import MissingExtra, PackError
from nbtools.tasks import sign
from nbtools.tasks.sign.features import TUNED, inception
from tests.sign.test_clips_become_a_pack import arrays, clip, listed

H, W = 12, 18
pytestmark = pytest.mark.usefixtures("own_cache")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.AvgPool2d(50), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2048)
    return nn.Sequential(*layers)


def filmed(folder: Path, frames: int = 3, seed: int = 0) -> list[Image.Image]:
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    pictures = [Image.fromarray(draw.integers(0, 256, (H, W, 3), np.uint8)) for _ in range(frames)]
    for i, image in enumerate(pictures):
        image.save(folder / f"frame_{i + 1}.png")
    return pictures


def corpus(folder: Path, takes: int = 2) -> Path:
    for split in ("train", "val"):
        names = [f"{split}_{gloss}_{take}" for gloss in range(2) for take in range(takes)]
        for seed, name in enumerate(names):
            filmed(folder / split / name, frames=3 + seed % takes, seed=seed)
        listed(folder / split / "labels.csv", *(f"{name},{name[-3]},{name[-3]}" for name in names))
    return folder


def made(source: Path, into: Path, **more):
    return sign.features(source, into, progress=False, **{"network": network(), **more})


def held(path: Path, key: str = "X2048") -> np.ndarray:
    with np.load(path) as clip:
        return clip[key]


def slowly(net: nn.Module, images: Sequence[Image.Image]) -> np.ndarray:
    """Frame by frame: squeezed to 299 × 299, ImageNet's mean and deviation."""
    rows = []
    for image in images:
        x = F.interpolate(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255, (299, 299), mode="bilinear")
        mean, std = (torch.tensor(of)[:, None, None] for of in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        with torch.no_grad():
            rows.append(net.eval()((x - mean) / std)[0].numpy())
    return np.stack(rows)


def test_a_clip_gets_the_features_of_its_frames_in_order_whatever_the_batch(tmp_path):
    images = filmed(tmp_path / "raw" / "hello", frames=11)  # frame_10 comes after frame_9, not after frame_1
    report = made(tmp_path / "raw", tmp_path / "clips", batch_size=4)
    assert report.about.endswith("1 clip got features, 0 already had them")
    values = held(tmp_path / "clips" / "hello.npz")
    assert (values.shape, values.dtype) == ((11, 2048), np.float32)
    np.testing.assert_allclose(values, slowly(network(), images), atol=1e-5)


def test_features_come_to_what_a_clip_has_with_its_labels_and_the_pack_takes_them(tmp_path):
    source, into = corpus(tmp_path / "raw"), tmp_path / "clips"
    frames = {path.name: len([*path.iterdir()]) for path in (source / "train").iterdir() if path.is_dir()}
    for name, count in frames.items():
        clip(into / f"train/{name}.npz", frames=count, without=("X2048",))
    (into / "train" / "labels.csv").write_text((source / "train" / "labels.csv").read_text() + "\n")
    assert made(source, into).ok
    for name, count in frames.items():
        for key in ("X", "mask", "timestamps_ms", "meta"):
            np.testing.assert_array_equal(held(into / f"train/{name}.npz", key), arrays(0, count)[key])
    assert nb.validate(sign, into / "train", require_x2048=True, progress=False).rows == []
    assert (into / "train" / "labels.csv").read_text().endswith("\n\n"), "a list that is there is not replaced"
    packed = sign.pack(into, kp_key=None, progress=False)
    assert packed.splits == {"train": 4, "val": 4, "test": 0}
    sample = packed.sample(packed.names.index("val/val_1_1.npz"))
    np.testing.assert_array_equal(sample["features"], held(into / "val" / "val_1_1.npz"))


def test_an_interrupted_extraction_resumes_and_leaves_nothing_half_written(tmp_path):
    for k in range(3):
        filmed(tmp_path / "raw" / f"clip_{k}", seed=k)
    into, stopping = tmp_path / "clips", network()

    def stop(*_):
        if (into / "clip_0.npz").exists():
            raise KeyboardInterrupt

    stopping.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "raw", into, network=stopping)
    assert [path.name for path in into.glob("*.npz")] == ["clip_0.npz"]
    assert made(tmp_path / "raw", into).about.endswith("2 clips got features, 1 already had them")
    made(tmp_path / "raw", tmp_path / "whole")
    for name in ("clip_0.npz", "clip_1.npz", "clip_2.npz"):
        np.testing.assert_array_equal(held(into / name), held(tmp_path / "whole" / name))


def test_features_of_two_backbones_do_not_mix(tmp_path):
    source, into = corpus(tmp_path / "raw"), tmp_path / "clips"
    made(source, into)
    filmed(source / "train" / "new")
    for other in ({"network": network(seed=1)}, {"finetune": 1}):
        with pytest.raises(PackError, match=r"has features of another backbone, and they cannot be mixed"):
            made(source, into, **other)
    assert not (into / "train" / "new.npz").exists()


def test_what_cannot_be_used_has_a_row_and_the_rest_is_made_but_not_by_a_network_with_its_classifier(tmp_path):
    raw, into = tmp_path / "raw", tmp_path / "clips"
    for name in ("whole", "torn", "sizes", "short", "wreck"):
        filmed(raw / name, seed=1)
    (raw / "torn" / "frame_2.png").write_bytes((raw / "torn" / "frame_2.png").read_bytes()[:200])
    Image.new("RGB", (W + 1, H)).save(raw / "sizes" / "frame_3.png")
    clip(into / "short.npz", frames=4, without=("X2048",))
    into.joinpath("wreck.npz").write_bytes(b"no archive")
    before = {path: path.read_bytes() for path in into.iterdir()}
    assert {row.file: row.rule for row in made(raw, into).rows} == {
        "torn/frame_2.png": "the file must be a whole image",
        "wreck.npz": "a clip must be a whole .npz archive",
        "sizes.npz": "all frames of a clip must have one size",
        "short.npz": "there must be as many frames as in X, 4",
    }
    assert {path: path.read_bytes() for path in before} == before
    assert (into / "whole.npz").exists()
    with pytest.raises(PackError, match=r"no frames .*; give a folder with a folder of images for each clip"):
        made(into, tmp_path / "other")
    with pytest.raises(PackError, match=r"network must return \(N, 2048\), got \(3, 1000\) for 3 frames"):
        made(raw, tmp_path / "other", network=nn.Sequential(network(), nn.Linear(2048, 1000)))
    assert not list(tmp_path.rglob("other/*.npz"))


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_backbone_is_frozen_or_fine_tuned_and_makes_the_features_with_what_it_learned(tmp_path, epochs):
    source, backbone, into = corpus(tmp_path / "raw"), network(), tmp_path / "clips"
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    frames = [Image.open(path) for path in sorted((source / "val" / "val_1_0").iterdir())]
    for again in (False, True):  # by another network, which gets what the first one learned
        made(source, into, network=network() if again else backbone, finetune=epochs)
        np.testing.assert_allclose(held(into / "val" / "val_1_0.npz"), slowly(backbone, frames), atol=1e-5)
        (into / "val" / "val_1_0.npz").unlink()
    changed = {name for name, tensor in backbone.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == ({"1.weight", "1.bias", "2.weight", "2.bias", "5.weight", "5.bias"} if epochs else set())
    assert (into / TUNED).exists() == bool(epochs)


@pytest.mark.parametrize("error", ["RuntimeError('operator torchvision::nms does not exist')", "ImportError('libcu')"])
def test_a_torchvision_that_does_not_import_is_a_sentence_and_ready_features_need_none(tmp_path, monkeypatch, error):
    source = corpus(tmp_path / "raw", takes=1)
    made(source, source)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "site" / "torchvision").mkdir(parents=True)
    (tmp_path / "site" / "torchvision" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert made(source, source, network=None).about.endswith("0 clips got features, 4 already had them")
    model = sign.model(sign.pack(source, kp_key=None, progress=False), sign.Plan(network="gru"))
    assert sum(p.numel() for p in model.parameters()) < 110_000, "the GRU without an InceptionV3"
    with pytest.raises(MissingExtra, match=r"need torchvision, which does not import .*install the extra features"):
        made(source, tmp_path / "clips", network=None)


def test_the_own_network_is_torchvisions_before_its_classifier_and_random_weights_give_features():
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    own = inception(None).eval()
    whole = models.inception_v3(weights=None, init_weights=False, transform_input=True).eval()
    whole.load_state_dict(own.state_dict(), strict=False)
    frames, kept = torch.rand(2, 3, 299, 299), {}
    whole.fc.register_forward_hook(lambda _module, given, _out: kept.update(features=given[0]))
    with torch.no_grad():
        whole(frames)
        features = own(frames)
    torch.testing.assert_close(features, kept["features"])
    assert features.shape == (2, 2048)
    assert 1e-3 < features.abs().mean() < 1e3
