"""Frames become X2048 by a frozen or fine-tuned backbone; torchvision is needed for its own network alone.

Wherever torchvision does not import, a small real network stands in for InceptionV3: all but that network is the same.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nbtools
from nbtools import disk
from nbtools.errors import CheckpointError, DiskError, MissingExtra, PackError, TrainError
from nbtools.tasks.sign import inception as backbones
from nbtools.tasks.sign.clips import has_features
from nbtools.tasks.sign.data import pack, validate
from nbtools.tasks.sign.features import TUNED, features, train_clips
from nbtools.tasks.sign.frames import find_films
from nbtools.tasks.sign.inception import IMAGENET, STEM, Backbone, clip_loss, inception, without_classifiers
from nbtools.tasks.sign.networks import Gru

H, W = 12, 18


def torchvision_imports() -> bool:
    try:
        backbones.torchvision_models()
    except MissingExtra:
        return False
    return True


own_network = pytest.mark.skipif(not torchvision_imports(), reason="torchvision does not import here")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


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


def clip_of(path: Path, frames: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
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
    return features(source, into, progress=False, **more)


def held(path: Path, key: str = "X2048") -> np.ndarray:
    with np.load(path) as clip:
        return clip[key]


def slowly(net: nn.Module, images: list[Image.Image]) -> np.ndarray:
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


# -- features of frames


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_a_clip_gets_the_features_of_its_frames_in_order_whatever_the_batch(tmp_path, batch_size):
    images = filmed(tmp_path / "raw" / "hello", frames=11)  # frame_10 comes after frame_9, not after frame_1
    result = made(tmp_path / "raw", tmp_path / "clips", batch_size=batch_size)
    assert (result.written, result.ready, result.rows) == (("hello.npz",), (), ())
    values = held(tmp_path / "clips" / "hello.npz")
    assert (values.shape, values.dtype) == ((11, 2048), np.float32)
    np.testing.assert_allclose(values, slowly(network(), images), atol=1e-5)


@pytest.mark.parametrize("form", ["gif", "png", "tiff", "webp"])
def test_a_file_of_several_frames_is_a_clip(tmp_path, form):
    colours = ["red", "lime", "blue", "white"]
    images = [Image.new("RGB", (W, H), colour) for colour in colours]
    more: dict[str, Any] = {"lossless": True} if form == "webp" else {}
    (tmp_path / "raw").mkdir()
    images[0].save(tmp_path / "raw" / f"hello.{form}", save_all=True, append_images=images[1:], **more)
    assert made(tmp_path / "raw", tmp_path / "clips").written == ("hello.npz",)
    np.testing.assert_allclose(held(tmp_path / "clips" / "hello.npz"), slowly(network(), images), atol=1e-3)


def test_features_come_to_what_a_clip_has_and_the_pack_takes_them(tmp_path):
    source = corpus(tmp_path / "raw")
    for k, path in enumerate(sorted((source / "train").iterdir())):
        if path.is_dir():
            clip_of(source / "train" / f"{path.name}.npz", len(list(path.iterdir())), seed=k)
    before = {path: dict(np.load(path)) for path in source.rglob("*.npz")}
    assert made(source, source).ok
    for path, arrays in before.items():
        for key, values in arrays.items():
            np.testing.assert_array_equal(held(path, key), values)
            assert held(path, key).dtype == values.dtype
    assert validate(source / "train", require_x2048=True, progress=False).rows == ()
    packed = pack(source, kp_key=None, progress=False)
    assert packed.splits == {"train": 4, "val": 4, "test": 0}
    np.testing.assert_array_equal(
        packed.sample(packed.names.index("val/val_1_1.npz"))["features"], held(source / "val" / "val_1_1.npz")
    )


def test_lists_of_labels_come_along_but_replace_none(tmp_path):
    source, into = corpus(tmp_path / "raw"), tmp_path / "clips"
    (into / "val").mkdir(parents=True)
    (into / "val" / "labels.csv").write_text("mine")
    made(source, into)
    assert (into / "train" / "labels.csv").read_text() == (source / "train" / "labels.csv").read_text()
    assert (into / "val" / "labels.csv").read_text() == "mine"


def test_cut_means_the_middle_of_a_frame(tmp_path):
    frame = np.zeros((342, 700, 3), np.uint8)
    frame[:, 200:500] = 255  # 350 ± 150: all that the cut shows
    whole, cut = (
        Backbone(network(), crop=crop).prepared(torch.from_numpy(frame).permute(2, 0, 1)[None])
        for crop in (False, True)
    )
    white = (1 - 0.485) / 0.229
    torch.testing.assert_close(cut[0, 0, 100, 1:-1], torch.full((297,), white), atol=1e-4, rtol=0)
    assert whole[0, 0, 100, 0] < 0 < whole[0, 0, 100, 150]


def test_a_network_of_other_outputs_is_refused(tmp_path):
    filmed(tmp_path / "raw" / "hello")
    with pytest.raises(PackError, match=r"network must make \(3, 2048\) of \(3, 3, 299, 299\), got \(3, 1000\)"):
        made(tmp_path / "raw", tmp_path / "clips", network=nn.Sequential(network(), nn.Linear(2048, 1000)))
    assert not list(tmp_path.rglob("*.npz"))


# -- again, and after an interruption


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


def test_an_interrupted_run_is_gone_on_with_and_leaves_nothing_half_written(tmp_path):
    for k in range(3):
        filmed(tmp_path / "raw" / f"clip_{k}", seed=k)
    into = tmp_path / "clips"
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "raw", into, network=Interrupted(network(), at=2))
    assert [path.name for path in into.iterdir()] == ["clip_0.npz"]
    first = (into / "clip_0.npz").stat().st_mtime_ns
    result = made(tmp_path / "raw", into)
    assert (result.written, result.ready) == (("clip_1.npz", "clip_2.npz"), ("clip_0.npz",))
    assert (into / "clip_0.npz").stat().st_mtime_ns == first
    made(tmp_path / "raw", tmp_path / "whole")
    for name in ("clip_0.npz", "clip_1.npz", "clip_2.npz"):
        np.testing.assert_array_equal(held(into / name), held(tmp_path / "whole" / name))


def test_a_full_disk_leaves_the_clip_as_it_was(tmp_path, monkeypatch):
    filmed(tmp_path / "raw" / "hello")
    clip_of(tmp_path / "clips" / "hello.npz")
    before = (tmp_path / "clips" / "hello.npz").read_bytes()

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(DiskError, match=r"writing features: .*the disk is full"):
        made(tmp_path / "raw", tmp_path / "clips")
    assert {path.name for path in (tmp_path / "clips").iterdir()} == {"hello.npz"}
    assert (tmp_path / "clips" / "hello.npz").read_bytes() == before


def test_features_of_two_backbones_do_not_mix(tmp_path):
    filmed(tmp_path / "raw" / "a")
    into = tmp_path / "clips"
    made(tmp_path / "raw", into)
    filmed(tmp_path / "raw" / "b")
    for other in ({"network": network(seed=1)}, {"crop": True}):
        with pytest.raises(PackError, match=r"a\.npz has features of the backbone .*do not mix"):
            made(tmp_path / "raw", into, **other)
    assert not (into / "b.npz").exists()
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "raw", into, network=Interrupted(network(seed=1), at=2), overwrite=True)
    made(tmp_path / "raw", tmp_path / "before")
    (tmp_path / "before" / "b.npz").replace(into / "b.npz")
    with pytest.raises(PackError, match=r"features of several backbones: .*do not mix"):
        made(tmp_path / "raw", into)
    result = made(tmp_path / "raw", into, network=network(seed=1), overwrite=True)
    assert (result.written, result.ready) == (("b.npz",), ("a.npz",))
    again = made(tmp_path / "raw", into, network=network(seed=1), overwrite=True)
    assert (again.written, again.ready) == ((), ("a.npz", "b.npz"))


# -- what cannot be used


def test_what_cannot_be_used_is_told_and_the_rest_is_made(tmp_path):
    raw, into = tmp_path / "raw", tmp_path / "clips"
    for name in ("whole", "torn", "sizes", "short", "wreck", "mixed"):
        filmed(raw / name, seed=1)
    (raw / "torn" / "frame_2.png").write_bytes((raw / "torn" / "frame_2.png").read_bytes()[:200])
    picture(5, size=(W + 1, H)).save(raw / "sizes" / "frame_3.png")
    clip_of(into / "short.npz", frames=4)
    into.joinpath("wreck.npz").write_bytes(b"no archive")
    several = [picture(1), picture(2)]
    several[0].save(raw / "mixed" / "frame_2.png", save_all=True, append_images=several[1:])
    (raw / "talk.MOV").write_bytes(b"....ftypqt")
    picture(0).save(raw / "poster.jpg")
    before = {path: path.read_bytes() for path in into.iterdir()}
    result = made(raw, into)
    assert (result.written, result.ok) == (("whole.npz",), False)
    told = {row.file: (row.rule, row.value) for row in result.rows}
    assert told["talk.MOV"] == ("frames are images: decoding videos takes ffmpeg or PyAV", ".MOV")
    assert told["poster.jpg"] == ("frames are in a folder of their own", "1 next to folders of frames")
    assert told["sizes.npz"] == (
        "all frames of a clip have one size",
        "12 × 19 pixels (height × width) after 12 × 18 pixels (height × width)",
    )
    assert told["short.npz"] == ("there are as many frames as in X, 4", "3")
    assert told["torn.npz"][0] == "the frame is a whole image"
    assert told["mixed.npz"] == ("a frame is one image", "frame_2.png holds several")
    assert told["wreck.npz"][0] == "a clip is a .npz archive"
    assert {path: path.read_bytes() for path in before} == before
    assert "could not be used" in str(result)


def test_two_clips_of_one_name_are_not_written_over_each_other(tmp_path):
    filmed(tmp_path / "raw" / "hello")
    images = [Image.new("RGB", (W, H), colour) for colour in ("red", "blue")]
    images[0].save(tmp_path / "raw" / "hello.gif", save_all=True, append_images=images[1:])
    result = made(tmp_path / "raw", tmp_path / "clips")
    assert result.written == ("hello.npz",)
    assert [row.rule for row in result.rows] == ["clips have names of their own"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("readme.txt",), "no frames; give a folder"),
        (("a.mp4",), "takes ffmpeg or PyAV, got .mp4; write its frames, as ffmpeg"),
    ],
)
def test_a_folder_without_frames_is_refused_with_what_to_do(tmp_path, files, said):
    (tmp_path / "raw").mkdir()
    for name in files:
        (tmp_path / "raw" / name).write_bytes(b"....")
    with pytest.raises(PackError, match=said):
        made(tmp_path / "raw", tmp_path / "clips")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"finetune": -1}, "finetune must be a whole number of epochs, 0 or more, got -1"),
        ({"finetune": 1.5}, "finetune must be a whole number of epochs, 0 or more, got 1.5"),
        ({"batch_size": 0}, "batch_size must be a whole number of frames, 1 or more, got 0"),
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"feature_key": "mask"}, "feature_key must be the name of an array of numbers, got 'mask'"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, option, said):
    filmed(tmp_path / "raw" / "hello")
    with pytest.raises(PackError, match=said):
        made(tmp_path / "raw", tmp_path / "clips", **option)
    with pytest.raises(TrainError, match=r"device must be a device that torch has here, .* got 'gpu'"):
        made(tmp_path / "raw", tmp_path / "clips", device="gpu")


# -- fine-tuning


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], module: nn.Module) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}


def test_a_frozen_backbone_stays_as_it_is_and_one_to_be_tuned_learns(tmp_path):
    source, frozen, tuned = corpus(tmp_path / "raw"), network(), network()
    before = state(frozen)
    assert made(source, tmp_path / "frozen", network=frozen).losses == ()
    assert changed(before, frozen) == set()
    assert not (tmp_path / "frozen" / TUNED).exists()
    losses = made(source, tmp_path / "tuned", network=tuned, finetune=6, lr=3e-3).losses
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]
    weights = {"1.weight", "1.bias", "2.weight", "2.bias", "5.weight", "5.bias"}
    statistics = {"2.running_mean", "2.running_var"}
    assert changed(before, tuned) & (weights | statistics) == weights, "the statistics stay those of the pretraining"
    name = "val/val_1_0.npz"
    np.testing.assert_allclose(
        held(tmp_path / "tuned" / name),
        slowly(tuned, [Image.open(p) for p in sorted((source / "val" / "val_1_0").iterdir())]),
        atol=1e-5,
    )


def test_a_network_that_has_learned_nothing_learns_its_statistics_too(tmp_path):
    untrained = network()
    before = state(untrained)
    made(corpus(tmp_path / "raw"), tmp_path / "clips", network=untrained, weights=None, finetune=1)
    assert {"2.running_mean", "2.running_var"} <= changed(before, untrained)


def test_fine_tuning_keeps_no_activations_of_frames(tmp_path):
    filmed(tmp_path / "hello", frames=8)
    [film], kept = find_films(tmp_path)[0], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        large = nn.Sequential(nn.Conv2d(3, 3, 1), network())  # a convolution keeps what it reads
        clip_loss(Backbone(large, frozen=False), Gru(2048, 2, 2), film, (0, 0), 2).backward()
    assert 0 < sum(kept.values()) < 3 * 299 * 299 * 4, "less than one frame as the network reads it"


def test_how_many_frames_at_once_changes_no_loss(tmp_path):
    source = corpus(tmp_path / "raw")
    runs = [made(source, tmp_path / f"{n}", finetune=2, batch_size=n).losses for n in (1, 100)]
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)


def test_fine_tuning_is_kept_and_taken_up_again(tmp_path):
    source, into = corpus(tmp_path / "raw"), tmp_path / "clips"
    made(source, into, finetune=2)
    (into / "val" / "val_0_0.npz").unlink()
    (into / "train" / "train_0_0.npz").unlink()
    kept = held(into / "val" / "val_1_1.npz")
    again = made(source, into, finetune=2)
    assert (again.losses, again.written) == ((), ("train/train_0_0.npz", "val/val_0_0.npz"))
    made(source, tmp_path / "other", finetune=2)
    for name in ("val/val_0_0.npz", "train/train_0_0.npz"):
        np.testing.assert_array_equal(held(into / name), held(tmp_path / "other" / name))
    np.testing.assert_array_equal(held(into / "val" / "val_1_1.npz"), kept)
    (into / TUNED).unlink()
    with pytest.raises(PackError, match="do not mix"):
        made(source, into, finetune=2)


def test_only_labelled_clips_of_train_teach(tmp_path):
    source = corpus(tmp_path / "raw")
    filmed(source / "train" / "unlabelled")
    films, _ = find_films(source)
    assert [(film.name, ids) for film, ids in train_clips(source, films)] == [
        (f"train/train_{gloss}_{take}.npz", (gloss, gloss)) for gloss in range(2) for take in range(2)
    ]
    with pytest.raises(PackError, match="below a folder train/, and there are none"):
        made(source / "val", tmp_path / "clips", finetune=1)


def test_a_damaged_frame_stops_fine_tuning_by_the_clips_name(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "train" / "train_0_1" / "2.png").write_bytes(b"no image")
    with pytest.raises(PackError, match=r"train_0_1\.npz: .*the frame is a whole image, got .*2\.png"):
        made(source, tmp_path / "clips", finetune=1)


# -- torchvision and its weights


def planted(folder: Path, line: str) -> Path:
    """A torchvision that answers its import with a line of code."""
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision" / "__init__.py").write_text(line)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "raise RuntimeError('operator torchvision::nms does not exist')",  # PyPI's beside a CPU build of torch
        "raise ImportError('libcudart.so.13: cannot open shared object file')",
    ],
)
def test_a_torchvision_that_does_not_import_is_a_sentence(tmp_path, monkeypatch, line):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(planted(tmp_path / "site", line))
    filmed(tmp_path / "raw" / "hello")
    with pytest.raises(
        MissingExtra, match=r"need torchvision, which does not import here \(.*install nbtools\[features]"
    ):
        features(tmp_path / "raw", tmp_path / "clips", progress=False)


def test_no_network_is_built_and_no_torchvision_imported_for_ready_features(tmp_path):
    site = planted(tmp_path / "site", "raise SystemExit('torchvision was imported')")
    source = corpus(tmp_path / "raw", takes=1)
    made(source, source)
    script = f"""
import torch
from nbtools.tasks import sign
source = {str(source)!r}
assert sign.features(source, source, progress=False).written == ()
assert sign.validate(source, kp_key=None, progress=False).ok
pack = sign.pack(source, kp_key=None, progress=False)
plan = sign.Plan(network="gru")
model = sign.model(pack, plan)
values = torch.from_numpy(pack.sample(0)["features"].copy())[None]
batch = {{"features": values, "features_length": torch.tensor([values.shape[1]]), "label": torch.tensor([[0, 0]])}}
sign.loss(model, sign.batch(batch, plan, None), plan)[0].backward()
print(sum(p.numel() for p in model.parameters() if p.grad is not None))
"""
    package = str(Path(nbtools.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), package)), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 99_000, "the GRU without an InceptionV3 has 0.10 million parameters"


def test_weights_are_found_under_any_name_and_classifiers_left_out():
    values = {
        name: torch.zeros(1) for name in (STEM, "Mixed_5b.branch1x1.conv.weight", "fc.weight", "AuxLogits.fc.bias")
    }
    for before in ("", "module.", "feat_extractor.backbone."):
        held = {"gru.weight": torch.ones(1)} | {before + name: value for name, value in values.items()}
        for saved in (held, {"epoch": 3, "model": held}):
            found = without_classifiers(saved, "a.pth")
            assert set(found) - {"gru.weight"} == {STEM, "Mixed_5b.branch1x1.conv.weight"}
    with pytest.raises(CheckpointError, match="is not an InceptionV3"):
        without_classifiers({"conv1.weight": torch.zeros(1)}, "resnet.pth")


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


@pytest.mark.parametrize("name", ["absent.pth", "junk.pth", "junk.safetensors", "pickled.pth"])
def test_a_file_that_holds_no_weights_is_refused_and_runs_no_code(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for junk in ("junk.pth", "junk.safetensors"):
        (tmp_path / junk).write_bytes(b"no weights at all")
    torch.save({"model": Harmful()}, tmp_path / "pickled.pth")
    with pytest.raises(CheckpointError, match=f"weights: .*{name} cannot be read"):
        backbones.read_weights(tmp_path / name)
    assert not (tmp_path / "harmed").exists()


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


@own_network
def test_a_network_that_has_learned_nothing_is_the_same_for_a_seed_and_keeps_the_size_of_numbers():
    first, second, other = (Backbone(inception(None, seed)) for seed in (0, 0, 1))
    assert first.mark() == second.mark() != other.mark()
    values = first(torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8))
    assert 0.1 < values.mean() < 1, "0.35 in the published clips"


@own_network
def test_inception_is_fine_tuned(tmp_path):
    source = corpus(tmp_path / "raw", takes=1)
    result = made(source, tmp_path / "clips", network=None, weights=None, finetune=1, batch_size=4)
    assert np.isfinite(result.losses).all()
    assert has_features(tmp_path / "clips" / "val" / "val_1_0.npz", "X2048")


@own_network
def test_the_cut_is_that_of_the_published_weights():
    models = backbones.torchvision_models()
    frames = torch.randint(0, 256, (2, 3, 360, 640), dtype=torch.uint8)
    ours = Backbone(network(), crop=True).prepared(frames)
    theirs = models.Inception_V3_Weights.IMAGENET1K_V1.transforms()(frames.float() / 255)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert IMAGENET == "imagenet"
