"""Frames become X2048 by a frozen or fine-tuned backbone; torchvision is needed for its own network alone.

A small real network stands in for InceptionV3: all but that network is the same.
"""

import sys
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.errors import CheckpointError, MissingExtra, PackError, TrainError
from nbtools.tasks import sign
from nbtools.tasks.sign import inception as backbones
from nbtools.tasks.sign.features import TUNED
from nbtools.tasks.sign.inception import STEM, Backbone, inception, read_weights

H, W = 12, 18
pytestmark = pytest.mark.usefixtures("own_cache")


def torchvision_imports() -> bool:
    try:
        backbones.torchvision_models()
    except MissingExtra:
        return False
    return True


own_network = pytest.mark.skipif(not torchvision_imports(), reason="torchvision does not import here")


def network(seed: int = 0) -> nn.Sequential:
    """Normalised frames (N, 3, 299, 299) → (N, 2048)."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.AvgPool2d(50), nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2048)
    )


def picture(seed: int, size=(W, H)) -> Image.Image:
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), np.uint8))


def filmed(folder: Path, frames: int = 3, seed: int = 0) -> list[Image.Image]:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [picture(1000 * seed + i) for i in range(frames)]
    for i, image in enumerate(pictures):
        image.save(folder / f"frame_{i + 1}.png")
    return pictures


def keypoints(path: Path, frames: int = 3) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(zlib.crc32(path.name.encode()))
    arrays = {
        "X": draw.random((frames, 156), np.float32),
        "mask": draw.random((frames, 78)) < 0.9,
        "timestamps_ms": np.arange(frames) * 33,
        "meta": np.array('{"video": "1.MOV"}'),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return arrays


def corpus(folder: Path, glosses: int = 2, takes: int = 2) -> Path:
    """Clips whose frames are of the gloss's own colour, in train and val."""
    for split in ("train", "val"):
        rows = ["file,gloss,cat"]
        for gloss in range(glosses):
            for take in range(takes):
                name = f"{split}_{gloss}_{take}"
                (folder / split / name).mkdir(parents=True)
                for frame in range(3 + take):
                    shade = 20 * take + 10 * frame + 100 * (split == "val")
                    colour = (200, shade, 0) if gloss else (0, shade, 200)
                    Image.new("RGB", (W, H), colour).save(folder / split / name / f"{frame}.png")
                rows.append(f"{name},{gloss},{gloss}")
        (folder / split / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def made(source: Path, into: Path, **more):
    more = {"network": network(), "device": "cpu", **more}
    return sign.features(source, into, progress=False, **more)


def held(path: Path, key: str = "X2048") -> np.ndarray:
    with np.load(path) as clip:
        return clip[key]


def slowly(net: nn.Module, images: Sequence[Image.Image]) -> np.ndarray:
    """Frame by frame: squeezed to 299 × 299, ImageNet's mean and deviation."""
    rows = []
    for image in images:
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        x = F.interpolate(x, (299, 299), mode="bilinear", align_corners=False)
        for channel, (mean, std) in enumerate(zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)):
            x[:, channel] = (x[:, channel] - mean) / std
        with torch.no_grad():
            rows.append(net.eval()(x)[0].numpy())
    return np.stack(rows)


# Features of frames


@pytest.mark.parametrize("batch_size", [4])
def test_a_clip_gets_the_features_of_its_frames_in_order_whatever_the_batch(tmp_path, batch_size):
    images = filmed(tmp_path / "raw" / "hello", frames=11)  # frame_10 comes after frame_9, not after frame_1
    result = made(tmp_path / "raw", tmp_path / "clips", batch_size=batch_size)
    assert (result.written, result.ready, result.rows) == (("hello.npz",), (), ())
    values = held(tmp_path / "clips" / "hello.npz")
    assert (values.shape, values.dtype) == ((11, 2048), np.float32)
    np.testing.assert_allclose(values, slowly(network(), images), atol=1e-5)


def test_a_file_of_several_frames_is_a_clip(tmp_path):
    images = [Image.new("RGB", (W, H), colour) for colour in ("red", "lime", "blue", "white")]
    (tmp_path / "raw").mkdir()
    for form, more in {"gif": {}, "png": {}, "tiff": {}, "webp": {"lossless": True}}.items():
        images[0].save(tmp_path / "raw" / f"{form}.{form}", save_all=True, append_images=images[1:], **more)
    assert made(tmp_path / "raw", tmp_path / "clips").written == ("gif.npz", "png.npz", "tiff.npz", "webp.npz")
    for path in (tmp_path / "clips").glob("*.npz"):
        np.testing.assert_allclose(held(path), slowly(network(), images), atol=1e-3)


def test_features_come_to_what_a_clip_has_with_its_labels_and_the_pack_takes_them(tmp_path):
    source, into = corpus(tmp_path / "raw"), tmp_path / "clips"
    before = {f"train/{p.name}.npz": len(list(p.iterdir())) for p in (source / "train").iterdir() if p.is_dir()}
    before = {name: keypoints(into / name, frames) for name, frames in before.items()}
    (into / "train" / "labels.csv").write_text((source / "train" / "labels.csv").read_text() + "\n")
    assert made(source, into).ok
    for name, arrays in before.items():
        for key, values in arrays.items():
            np.testing.assert_array_equal(held(into / name, key), values)
            assert held(into / name, key).dtype == values.dtype
    assert nb.validate(sign, into / "train", require_x2048=True, progress=False).rows == ()
    assert (into / "train" / "labels.csv").read_text().endswith("\n\n"), "a list that is there is not replaced"
    packed = sign.pack(into, kp_key=None, progress=False)
    assert packed.splits == {"train": 4, "val": 4, "test": 0}
    np.testing.assert_array_equal(
        packed.sample(packed.names.index("val/val_1_1.npz"))["features"], held(into / "val" / "val_1_1.npz")
    )


# Again, and after an interruption


class Interrupted(nn.Module):
    """Stops like Ctrl-C at its n-th batch."""

    def __init__(self, inner: nn.Module, at: int):
        super().__init__()
        self.inner, self.left = inner, at

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.inner(x)

    def state_dict(self, *args, **more):
        return self.inner.state_dict(*args, **more)


def test_an_interrupted_extraction_resumes_and_leaves_nothing_half_written(tmp_path):
    for k in range(3):
        filmed(tmp_path / "raw" / f"clip_{k}", seed=k)
    into = tmp_path / "clips"
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "raw", into, network=Interrupted(network(), at=2))
    assert [path.name for path in into.iterdir()] == ["clip_0.npz"]
    result = made(tmp_path / "raw", into)
    assert (result.written, result.ready) == (("clip_1.npz", "clip_2.npz"), ("clip_0.npz",))
    made(tmp_path / "raw", tmp_path / "whole")
    for name in ("clip_0.npz", "clip_1.npz", "clip_2.npz"):
        np.testing.assert_array_equal(held(into / name), held(tmp_path / "whole" / name))


def test_features_of_two_backbones_do_not_mix(tmp_path):
    filmed(tmp_path / "raw" / "a")
    into = tmp_path / "clips"
    made(tmp_path / "raw", into)
    filmed(tmp_path / "raw" / "b")
    for other in ({"network": network(seed=1)}, {"crop": True}):
        with pytest.raises(PackError, match=r"features of the backbones .*cannot be mixed"):
            made(tmp_path / "raw", into, **other)
    assert not (into / "b.npz").exists()
    result = made(tmp_path / "raw", into, network=network(seed=1), overwrite=True)
    assert (result.written, result.ready) == (("a.npz", "b.npz"), ())


# What cannot be used


def test_what_cannot_be_used_has_a_row_and_the_rest_is_made(tmp_path):
    raw, into = tmp_path / "raw", tmp_path / "clips"
    for name in ("whole", "torn", "sizes", "short", "wreck"):
        filmed(raw / name, seed=1)
    (raw / "torn" / "frame_2.png").write_bytes((raw / "torn" / "frame_2.png").read_bytes()[:200])
    picture(5, size=(W + 1, H)).save(raw / "sizes" / "frame_3.png")
    keypoints(into / "short.npz", frames=4)
    into.joinpath("wreck.npz").write_bytes(b"no archive")
    (raw / "talk.MOV").write_bytes(b"....ftypqt")
    picture(0).save(raw / "poster.jpg")
    (raw / "twice").mkdir()
    for name in ("twice/hello.gif", "twice/hello.webp"):
        picture(1).save(raw / name, save_all=True, append_images=[picture(2)])
    before = {path: path.read_bytes() for path in into.iterdir()}
    result = made(raw, into)
    assert (result.written, result.ok) == (("twice/hello.npz", "whole.npz"), False)
    rows = {row.file: (row.rule, row.value) for row in result.rows}
    assert rows.pop("torn.npz")[0] == "the file must be a whole image"
    assert rows.pop("wreck.npz")[0] == "a clip must be a .npz archive"
    sizes = "12 × 19 pixels (height × width) after 12 × 18 pixels (height × width)"
    assert rows == {
        "talk.MOV": ("frames must be images: decoding videos takes ffmpeg or PyAV", ".MOV"),
        "poster.jpg": ("frames must be in a folder of their own", "1 next to folders of frames"),
        "hello.webp": ("clips must have unique names", "also hello.gif"),
        "sizes.npz": ("all frames of a clip must have one size", sizes),
        "short.npz": ("there must be as many frames as in X, 4", "3"),
    }
    assert {path: path.read_bytes() for path in before} == before
    assert "7 files could not be used" in str(result)


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [
        ({"finetune": -1}, PackError, "finetune must be a whole number of epochs, 0 or more, got -1"),
        ({"batch_size": 0}, PackError, "batch_size must be a whole number of frames, 1 or more, got 0"),
        ({"device": "gpu"}, TrainError, r"device must be a device that torch has here, .* got 'gpu'"),
        (
            {"network": nn.Sequential(network(), nn.Linear(2048, 1000))},
            PackError,
            r"network must return \(3, 2048\) for \(3, 3, 299, 299\), got \(3, 1000\)",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, option, error, said):
    filmed(tmp_path / "raw" / "hello")
    with pytest.raises(error, match=said):
        made(tmp_path / "raw", tmp_path / "clips", **option)
    assert not list(tmp_path.rglob("*.npz"))


@pytest.mark.parametrize(
    ("file", "said"),
    [("readme.txt", "no frames; give a folder"), ("a.mp4", "takes ffmpeg or PyAV, got .mp4; extract its")],
)
def test_a_folder_without_frames_is_refused_with_what_to_do(tmp_path, file, said):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / file).write_bytes(b"....")
    with pytest.raises(PackError, match=said):
        made(tmp_path / "raw", tmp_path / "clips")


# Fine-tuning


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


WEIGHTS = {"1.weight", "1.bias", "2.weight", "2.bias", "5.weight", "5.bias"}
STATISTICS = {"2.running_mean", "2.running_var"}


@pytest.mark.parametrize(
    ("more", "learned"),
    [
        ({}, set()),
        ({"finetune": 2, "lr": 5e-3}, WEIGHTS),  # the statistics stay those of the pretraining
        ({"finetune": 1, "weights": None}, WEIGHTS | STATISTICS),
    ],
)
def test_a_backbone_learns_what_it_is_asked_to_and_makes_the_features_with_it(tmp_path, more, learned):
    source, backbone, into = corpus(tmp_path / "raw"), network(), tmp_path / "clips"
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    losses = made(source, into, network=backbone, **more).losses
    assert changed(before, backbone) - {"2.num_batches_tracked"} == learned
    assert (into / TUNED).exists() == bool(learned)
    assert len(losses) == more.get("finetune", 0)
    if len(losses) > 1:
        assert losses[-1] < losses[0]
    frames = [Image.open(path) for path in sorted((source / "val" / "val_1_0").iterdir())]
    np.testing.assert_allclose(held(into / "val" / "val_1_0.npz"), slowly(backbone, frames), atol=1e-5)


# torchvision and its weights


@pytest.mark.parametrize("error", ["RuntimeError('operator torchvision::nms does not exist')", "ImportError('libcu')"])
def test_a_torchvision_that_does_not_import_is_a_sentence_and_ready_features_need_none(tmp_path, monkeypatch, error):
    source = corpus(tmp_path / "raw", takes=1)
    made(source, source)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "site" / "torchvision").mkdir(parents=True)
    (tmp_path / "site" / "torchvision" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert len(made(source, source, network=None).ready) == 4
    model = sign.model(sign.pack(source, kp_key=None, progress=False), sign.Plan(network="gru"))
    assert sum(p.numel() for p in model.parameters()) < 110_000, "the GRU without an InceptionV3"
    with pytest.raises(MissingExtra, match=r"need torchvision, which does not import .*install nbtools\[features]"):
        made(source, tmp_path / "clips", network=None)


def test_a_file_that_holds_no_weights_is_refused_and_runs_no_code(tmp_path):
    for junk in ("junk.pth", "junk.safetensors"):
        (tmp_path / junk).write_bytes(b"no weights at all")
    torch.save({"model": Planted()}, tmp_path / "pickled.pth")
    for name in ("absent.pth", "junk.pth", "junk.safetensors", "pickled.pth"):
        with pytest.raises(CheckpointError, match=f"weights: .*{name} cannot be read"):
            read_weights(tmp_path / name)


@pytest.fixture(autouse=True)
def any_torch(monkeypatch):
    """The oldest that these tests run on reads its own pickles too."""
    monkeypatch.setattr(sys.modules[read_weights.__module__], "SAFE", (2, 6))


class Planted:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle ran')",)


def published(url: str) -> Any:
    """torchvision's models, as far as the weights' download goes."""
    one = SimpleNamespace(url=url, get_state_dict=partial(torch.hub.load_state_dict_from_url, url))
    return SimpleNamespace(Inception_V3_Weights=SimpleNamespace(IMAGENET1K_V1=one))


def test_a_pickle_planted_in_torchs_cache_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "checkpoints" / "inception-0cc3c7bd.pth"
    cached.parent.mkdir(parents=True)
    torch.save({STEM: Planted()}, cached)
    with pytest.raises(CheckpointError, match=r"inception-0cc3c7bd\.pth cannot be read as weights"):
        backbones.imagenet(published("https://example.org/inception-0cc3c7bd.pth"))


@own_network
def test_inception_gives_what_torchvisions_has_before_its_classifier(tmp_path):
    models = backbones.torchvision_models()
    torch.manual_seed(3)
    whole = models.inception_v3(weights=None, init_weights=False, transform_input=True).eval()
    torch.save(whole.state_dict(), tmp_path / "inception.pth")
    pooled = []
    whole.avgpool.register_forward_hook(lambda module, inputs, output: pooled.append(output.flatten(1)))
    images = filmed(tmp_path / "raw" / "hello", frames=2)
    made(tmp_path / "raw", tmp_path / "clips", network=None, weights=tmp_path / "inception.pth")
    slowly(whole, images)
    np.testing.assert_allclose(held(tmp_path / "clips" / "hello.npz"), torch.cat(pooled).numpy(), atol=1e-4)
    torch.save({STEM: torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="does not fit the network"):
        inception(tmp_path / "other.pth")
    frames = torch.randint(0, 256, (2, 3, 360, 640), dtype=torch.uint8)
    theirs = models.Inception_V3_Weights.IMAGENET1K_V1.transforms()(frames.float() / 255)
    torch.testing.assert_close(Backbone(network(), crop=True).prepared(frames), theirs, atol=1e-5, rtol=0)
