"""What the settings of signs do to batches, loss, metrics and augmentation, and none of the guide's faults. Its folders
data/processed/{transformer_only,iv3_gru_only,test_15fps}/CLIP.npz, each with a labels.csv, open as they are."""

import csv
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from acting import QUIET, refused
from packs import raw_batch
from torch import nn

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import Draws, Pack
from nbtools.errors import PackError, PlanError
from nbtools.tasks import sign
from nbtools.tasks.sign.keypoints import LEFT, POINTS, RIGHT, SHOULDERS
from nbtools.tasks.sign.networks import POSITIONS, Gru, Transformer, sinusoids
from nbtools.tasks.sign.task import Plan
from tests.sign.test_clips_become_a_pack import clip, listed, packed

pytestmark = pytest.mark.usefixtures("one_cache")


def PACK(folder: Path) -> Pack:
    """14 of 24 clips train; frames, hands and faces are missing here and there."""
    return sign.pack(sign.demo(folder, 24, glosses=6, categories=3, features=True, frames=(10, 16)), progress=False)


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(Transformer, "width", 32)
    monkeypatch.setattr(Transformer, "depth", 1)


def test_the_loss_is_the_sum_of_both_heads_by_alpha_and_beta_in_float32_against_the_formula_and_never_of_nothing():
    plan = Plan(alpha=0.7, beta=0.2, label_smoothing=0.1)
    torch.manual_seed(0)
    outputs = gloss, category = torch.randn(7, 6).bfloat16(), torch.randn(7, 3).bfloat16()
    labels = torch.stack([torch.randint(6, (7,)), torch.randint(3, (7,))], 1)
    expected = 0.0
    for b in range(7):
        for logits, place, factor in ((gloss, 0, 0.7), (category, 1, 0.2)):
            p = logits[b].float().log_softmax(0)
            expected += factor * -(0.9 * p[labels[b, place]] + 0.1 * p.mean())
    loss_sum, count = sign.loss(lambda _: outputs, {"label": labels}, plan)
    assert (count, float(loss_sum), loss_sum.dtype) == (7, pytest.approx(float(expected), rel=1e-5), torch.float32)
    refused(PlanError, r"Plan\.alpha and Plan\.beta must not both be 0", Plan, alpha=0, beta=0)


@pytest.mark.parametrize("classes", [3, 9])
def test_metrics_are_the_obvious_counts(classes):
    torch.manual_seed(0)
    gloss, category = torch.randn(40, classes), torch.randn(40, 4)
    labels = torch.stack([torch.randint(classes, (40,)), torch.randint(4, (40,))], 1)
    found = sign.metrics((gloss, category), {"label": labels})
    ranks = [int((row > row[truth]).sum()) for row, truth in zip(gloss, labels[:, 0], strict=True)]
    assert found["gloss_accuracy"] == (ranks.count(0), 40)
    assert found["top5"] == (sum(r < 5 for r in ranks), 40)
    assert found["cat_accuracy"] == ((category.argmax(1) == labels[:, 1]).sum(), 40)


@pytest.mark.parametrize("kind", ["body", "hands"])
def test_where_a_body_stands_and_how_large_it_is_changes_nothing(pack, kind):
    plan, raw = Plan(normalise=kind), raw_batch(pack, range(5))
    nearer = {**raw, "x": torch.where(raw["x"] != 0, raw["x"] * 0.7 + 0.11, 0)}
    x = sign.batch(raw, plan, None)["x"]
    torch.testing.assert_close(sign.batch(nearer, plan, None)["x"], x, atol=2e-4, rtol=0)
    both = raw["mask"][0, :, SHOULDERS].all(1)
    left, right = x.unflatten(2, (-1, 2))[0, both, SHOULDERS].mean(0)
    torch.testing.assert_close(left, -right, atol=1e-4, rtol=0)
    assert float((left - right).norm()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", ["none", "body", "hands"])
def test_without_shoulders_or_any_point_nothing_is_nan(pack, kind, narrow):
    for clips, places in ((slice(3), SHOULDERS), (slice(3), slice(0, POINTS)), (slice(1), slice(0, POINTS))):
        raw, keys, network = raw_batch(pack, range(3)), [], cast(Any, sign.model(pack, Plan()))
        raw["mask"] = raw["mask"].clone()
        raw["mask"][clips, :, places] = False
        for layer in network.layers:
            layer.register_forward_hook(lambda _m, given, _out, keys=keys: keys.append(given[1]))
        batch = sign.batch(raw, Plan(normalise=kind), None)
        loss, _ = sign.loss(network, batch, Plan())
        loss.backward()
        assert torch.isfinite(batch["x"]).all()
        assert all(torch.isfinite(t).all() for t in (loss, *(p.grad for p in network.parameters())))
        assert all(k.any(3).all() for k in keys), "older kernels make NaN of a softmax over nothing"


def test_the_mirror_image_of_a_mirror_image_is_the_clip(pack):
    raw, plan = raw_batch(pack, range(6)), Plan(normalise="none", mirror=1.0)
    once = sign.batch(raw, plan, Draws(0, 0, raw["id"]))
    twice = sign.batch({**once, "id": raw["id"]}, plan, Draws(0, 0, raw["id"]))
    torch.testing.assert_close(twice["x"], sign.batch(raw, Plan(normalise="none"), None)["x"], atol=1e-6, rtol=0)
    assert torch.equal(once["mask"][:, :, RIGHT], raw["mask"][:, :, LEFT])
    left, right = raw["x"].unflatten(2, (-1, 2))[:, :, LEFT], once["x"].unflatten(2, (-1, 2))[:, :, RIGHT]
    seen = raw["mask"][:, :, LEFT]
    torch.testing.assert_close(right[seen], left[seen] * torch.tensor([-1.0, 1]) + torch.tensor([1.0, 0]))


def test_a_point_that_is_not_seen_says_nothing_and_nothing_is_seen_beyond_a_clip(pack):
    raw = raw_batch(pack, range(12))
    noisy = {**raw, "x": torch.where(raw["mask"].repeat_interleave(2, 2), raw["x"], 9.0)}
    plan = Plan(time_warp=1.0, time_crop=0.4, mirror=0.5)
    changed, blind = (sign.batch(each, plan, Draws(1, 0, raw["id"])) for each in (raw, noisy))
    torch.testing.assert_close(blind["x"], changed["x"], atol=1e-5, rtol=1e-4)
    for seen, frames in zip(changed["mask"], changed["x_length"].tolist(), strict=True):
        assert not seen[frames:].any()


def test_a_warped_clip_keeps_its_ends_and_its_order():
    """A point that only moves to the right still does, from where it began to where it stopped."""
    line = torch.linspace(0.1, 0.9, 20)[None, :, None].expand(3, 20, 2 * POINTS)
    raw = {"x": line, "mask": torch.ones(3, 20, POINTS), "x_length": torch.tensor([20, 20, 11]), "id": torch.arange(3)}
    raw["mask"][:, 10:, 1] = False  # which is seen or not as in the nearer frame
    batch = sign.batch(raw, Plan(normalise="none", time_warp=1.0), Draws(0, 0, raw["id"]))
    lengths = batch["x_length"].tolist()
    for b, (length, last) in enumerate(zip(lengths, (0.9, 0.9, float(line[0, 10, 0])), strict=True)):
        own = batch["x"][b, :length, 0]
        assert (own.diff() > 0).all()
        assert own[[0, -1]].tolist() == pytest.approx([0.1, last], abs=1e-5)
        assert batch["mask"][b, :length, 1].tolist() == (own < 0.5).tolist()
        assert batch["mask"][b].any(1).tolist() == [t < length for t in range(batch["mask"].shape[1])]
    assert lengths != [20, 20, 11]


def clips(*lengths: int) -> dict[str, torch.Tensor]:
    shape, length = (len(lengths), max(lengths)), torch.tensor(lengths)
    inside = torch.arange(max(lengths)) < length[:, None]
    x, features = torch.randn(*shape, 2 * POINTS), torch.randn(*shape, 20)
    mask = (torch.rand(*shape, POINTS) < 0.9) & inside[..., None]
    return {"x": x, "mask": mask, "x_length": length, "features": features, "features_length": length}


def small(name: str) -> Any:
    return Gru(20, 7, 3).eval() if name == "gru" else Transformer(2 * POINTS, 7, 3).eval()


def test_a_layer_is_torchs_pre_ln_encoder_layer(narrow):
    ours: Any = small("transformer").layers[0]
    theirs = nn.TransformerEncoderLayer(32, 8, 128, 0.0, batch_first=True, norm_first=True)
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(ours.attention.qkv.weight)
        theirs.self_attn.in_proj_bias.copy_(ours.attention.qkv.bias)
    pairs = {"self_attn.out_proj": ours.attention.out, "linear1": ours.feed[1], "linear2": ours.feed[4]}
    for to, module in pairs.items():
        theirs.get_submodule(to).load_state_dict(module.state_dict())
    x, keys = torch.randn(2, 9, 32), torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    expected = theirs.train()(x, src_key_padding_mask=~keys)  # in eval mode it takes another path and zeroes padding
    torch.testing.assert_close(ours(x, keys[:, None, None]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["transformer", "gru"])
def test_a_clip_of_no_frame_in_a_batch_gives_no_nan_and_changes_nobody(name, narrow):
    network, batch = small(name), clips(5, 0)
    with torch.no_grad():
        logits = network(batch)[0]
        alone = network({column: values[:1] for column, values in batch.items()})[0]
    torch.testing.assert_close(logits[0], alone[0], atol=1e-6, rtol=1e-5)
    assert torch.isfinite(logits).all()


def test_clips_beyond_the_guides_table_are_learned_and_read_as_before_and_ones_beyond_ours_refused(tmp_path, narrow):
    with torch.no_grad():
        assert small("transformer")(clips(POSITIONS))[0].shape == (1, 7)
        with pytest.raises(PlanError, match=r"a clip has 3001 frames.* 3000; cut or thin out such clips"):
            small("transformer")(clips(POSITIONS + 1))
    assert torch.equal(sinusoids(POSITIONS, 256)[:300], sinusoids(300, 256))
    pack = sign.pack(sign.demo(tmp_path / "raw", 20, glosses=2, categories=1, frames=(301, 301)), progress=False)
    run = nb.fit(sign, pack, sign.BASELINE.replace(epochs=1, batch_size=8), tmp_path / "run", **QUIET)
    assert nb.evaluate(run, pack, "val")["top5"] == 1
    assert {*run.predict(pack.raw.source / pack.names[0])} < {*pack.classes}


KEYPOINTS, FEATURES, VALIDATION = "transformer_only", "iv3_gru_only", "test_15fps"


@pytest.fixture(scope="module")
def processed(tmp_path_factory):
    """30 train clips: 10 in both folders, 10 with keypoints alone, 10 with features alone; 10 to validate."""
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("guide") / "data" / "processed"
    sign.demo(made, 40, glosses=6, categories=2, frames=(10, 16), features=True)
    rows: dict[str, list[str]] = {KEYPOINTS: [], FEATURES: [], VALIDATION: []}
    for split in ("train", "val"):
        for n, row in enumerate(csv.DictReader((made / split / "labels.csv").read_text().splitlines())):
            with np.load(made / split / f"{row['file']}.npz") as file:
                arrays = dict(file)
            both = (KEYPOINTS, FEATURES)
            for place in [VALIDATION] if split == "val" else both if n < 10 else [both[n % 2]]:
                without = {KEYPOINTS: ("X2048",), FEATURES: ("X", "mask"), VALIDATION: ()}[place]
                path = clip(folder / place / f"{row['file']}_how are you.npz", without=without, **arrays)
                rows[place].append(f"{path.stem},{row['gloss']},{row['cat']}")
    for place, lines in rows.items():
        listed(folder / place / "labels.csv", *lines)
    return folder


def fitted(pack: Pack, network: str, folder: Path) -> nb.Run:
    plan = sign.BASELINE.replace(network=network, epochs=1, batch_size=4, feed="auto")
    return nb.fit(sign, pack, plan, folder, receipt=False, progress=False)


def test_the_three_folders_are_one_pack_whose_third_validates(processed):
    report = nb.validate(sign, processed, progress=False)
    assert (report.about, report.errors) == ("50 clips, 50 with a label", 0)
    made = packed(processed)
    assert (made.splits, len(made.bad), len(made.classes)) == ({"train": 40, "val": 10, "test": 0}, 0, 6)
    assert {Path(made.names[i]).parent.name for i in made.ids("val")} == {VALIDATION}


@pytest.mark.parametrize(("network", "key", "column"), [("transformer", "X", "x"), ("gru", "X2048", "features")])
def test_each_network_trains_on_what_it_can_read_and_says_what_it_cannot(processed, network, key, column, tmp_path):
    made = packed(processed)
    run = fitted(made, network, tmp_path / "run")
    assert "this network reads 20 of 40 train, 10 of 10 val samples" in run.events
    assert [row["samples"] for row in run.history.of("epoch")] == [20]
    columns = {"epoch", "train_loss", "val_loss", "val_gloss_accuracy", "val_cat_accuracy", "lr", "epoch_time"}
    assert {*pd.read_csv(run.folder / "history.csv")} >= columns, "the script's, which calls an accuracy acc"
    part = run.readable(made)
    lengths = part.lengths(column, part.ids("train"))
    assert (len(lengths), lengths.min() > 0, part.card.bucket_by) == (20, True, column)
    assert part.raw[part.ids("train")[0]].keys() == {*part.columns, "id"}, "and decodes nothing else"
    assert run.card == part.card
    assert len(run.predict_pack(made, part.ids("train"))) == 20
    missing = sorted(set(made.ids("train")) - set(part.ids("train")))[0]
    with pytest.raises(PackError, match=rf"sample {missing} has nothing .*take ids from run\.readable\(pack\)"):
        run.predict_pack(made, [missing])
    refused(PackError, f"must have {key}", run.predict, processed / made.names[missing])


def test_the_advice_is_for_the_clips_that_are_read(processed):
    packs = packed(processed), packed(processed, kp_key=None)
    assert nb.advise(sign, packs[0], measure=False).plan.given() == {}, "its recipe is advice: a GPU has another"
    advice, other = (nb.advise(sign, pack, measure=False).plan.to_dict() for pack in packs)
    assert (advice["network"], advice["batch_size"]) == ("transformer", 16)
    assert (other["network"], other["batch_size"]) == ("gru", 20), "all that there are"
    assert sign.with_network(sign.Plan(**advice), packs[0], "gru").batch_size == 20


@pytest.mark.parametrize(("folder", "other"), [(KEYPOINTS, FEATURES), (FEATURES, KEYPOINTS)])
def test_a_folder_alone_validates_packs_and_trains_its_network(processed, folder, other, tmp_path, capsys):
    assert main(["validate", "sign", str(processed / folder)]) == 0
    assert "20 clips, 20 with a label: 0 errors" in capsys.readouterr().out
    assert main(["validate", "sign", "--require-x2048", str(processed / folder)]) == (folder == KEYPOINTS)
    made = packed(processed / folder, val=5, test=0)
    assert made.splits == {"train": 15, "val": 5, "test": 0}
    run = fitted(made, "auto", tmp_path / "run")
    assert [row["samples"] for row in run.history.of("epoch")] == [15]
    new = run.pack(processed / VALIDATION, test=1.0, progress=False)
    assert nb.evaluate(run, new).keys() == {"loss", "gloss_accuracy", "cat_accuracy", "top5"}
    refused(PackError, "a clip must have X", run.pack, processed / other, test=1.0, progress=False)
