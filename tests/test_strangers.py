"""Twelve jobs of somebody who has read README and docs/your-own.md: each in at most 15 lines of theirs."""

import inspect
import sys
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from acting import refused
from PIL import Image
from problems import points
from test_your_own import CELLS, Flipped, Net, run_cell
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.errors import PackError, TrainError

RNG = np.random.default_rng(0)
plan = partial(nb.Plan, epochs=5, batch_size=16, lr=1e-2)


@pytest.fixture(autouse=True)
def same_numbers(desk):
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def picture(kind: int, size: tuple[int, int] = (40, 48)) -> Image.Image:
    pixels, stripes = RNG.integers(90, 150, (*size, 3)).astype(np.uint8), np.mgrid[: size[0], : size[1]][1 - kind]
    pixels[stripes // 4 % 2 == 0] //= 3
    return Image.fromarray(pixels)


def vectors(count: int = 150, classes: int = 3) -> list[tuple[np.ndarray, int]]:
    return [(RNG.normal(3 * (i % classes), 1, 6).astype(np.float32), i % classes) for i in range(count)]


def words(text: str) -> list[int]:
    return [1 + ["good", "fine", "bad", "poor"].index(word) for word in text.split()]


def test_1_images_by_class_among_odd_files():
    for i in range(60):
        file = Path("photos", ("down", "across")[i % 2], f"{i}.{('png', 'jpg')[i % 2]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(i % 2, (30 + i % 9, 40)).convert(("RGB", "L", "CMYK")[i % 3 * (i % 2)]).save(file)
    for odd in ("Thumbs.db", "down/empty.png", "down/.hidden.png", "across/note.txt"):
        Path("photos", odd).write_bytes(b"")
    pack = nb.pack("photos", size=32)
    run = nb.fit(nb.classify(Net(2)), pack, plan(), run="runs/photos")
    answers = run.predict("photos/across")
    assert (pack.bad["file"].tolist(), {*pack.classes}) == (["down/empty.png"], {"across", "down"})
    assert sum(answer.name == "across" for answer in answers.values()) >= 28
    assert run.report(pack, "train").table.loc["across", "support"] > 20


def test_2_several_labels_a_picture_from_a_csv_whose_empty_cells_mean_none():
    tags = [["down", "across", "down across", ""][i % 4] for i in range(80)]
    for i, text in enumerate(tags):
        kinds = [("down", "across").index(tag) for tag in text.split()]
        drawn = [np.array(picture(k)) for k in kinds] or [np.full((40, 48, 3), 120, np.uint8)]
        Image.fromarray(np.min(drawn, 0)).save(f"{i}.png")
    pd.DataFrame({"filename": [f"{i}.png" for i in range(80)], "tags": tags}).to_csv("labels.csv", index=False)
    pack = nb.pack("labels.csv", image="filename", target="tags", sep=" ", size=32)
    run = nb.fit(nb.classify(Net), pack, plan(epochs=12), run="runs/tags")
    assert len(pack) == 80, "a picture without a label is a sample"
    assert not pack.arrays["y"][3].any()
    assert nb.evaluate(run, pack, "train")["f1"] > 0.8


def test_3_a_table_with_dates_and_gaps():
    frame = pd.DataFrame({"day": pd.date_range("2025-01-01", periods=300).astype(str), "shop": ["a", "b", "c"] * 100})
    frame["warm"] = RNG.normal(15, 8, 300)
    frame["price"] = 100 + 10 * frame["warm"] + 50 * (frame["shop"] == "b")
    frame.loc[::20, "warm"] = np.nan
    frame["day"] = pd.to_datetime(frame["day"]).dt.day_of_year
    assert len(nb.pack(pd.get_dummies(frame), target="price").bad) == 15, "a row with a gap is left out, and listed"
    frame["warm"] = frame["warm"].fillna(frame["warm"].mean())
    found = run_cell(CELLS["table"], houses=frame)
    assert nb.evaluate(found["run"], found["pack"])["mae"] < 40
    assert nb.pack(frame, inputs="warm", target="price").columns["x"].shape == (1,), "one name needs no list"


def test_4_texts():
    texts = [" ".join(RNG.choice([["good", "fine"], ["bad", "poor"]][i % 2], 2 + i % 5)) for i in range(120)]
    frame = pd.DataFrame({"text": ["", *texts], "label": ["blame", *["praise", "blame"] * 60]})
    pack_texts, again = partial(nb.pack, frame, inputs="text", target="label"), FunctionType(words.__code__, globals())
    with patch(f"{__name__}.words", wraps=words) as reading:
        pack = pack_texts(text=again)
    assert (reading.call_count, pack.bad.file.tolist()) == (64 + 121, ["row 0"]), "read to look, and to pack"
    assert pack_texts(text=words).folder == pack.folder

    class Bag(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(5, 8, padding_idx=0), nn.Linear(8, classes)

        def forward(self, text):
            return self.head(self.words(text))

    run = nb.fit(nb.classify(Bag), pack, plan(), run="runs/texts")
    for given in (["good fine", "poor"], pd.Series(["good fine", "poor"], [7, 8])):
        assert [answer.name for answer in run.predict(given)] == ["praise", "blame"]
    for text, why in (("", r"item 0 \(str\): text must be"), ("great", "great: 'great' is not in list")):
        refused(PackError, why, run.predict, [text])


def test_5_series_of_any_length():
    series = [(RNG.normal(i % 2, 0.3, (5 + i % 20, 3)), ("low", "high")[i % 2]) for i in range(100)]
    run = run_cell(CELLS["sequences"], sequences=series)["run"]
    assert [answer.name for answer in run.predict([x for x, _ in series[:2]])] == ["low", "high"]


def face() -> dict[str, Any]:
    pixels, (x, y) = np.full((48, 48, 3), 60, np.uint8), RNG.integers(5, 43, 2)
    pixels[y - 3 : y + 4, x - 3 : x + 4] = 250
    return {"image": Image.fromarray(pixels), "nose": np.array([[x, y]], np.float32)}


def test_6_key_points_that_move_with_the_picture():
    faces = [face() for _ in range(60)]
    pack = nb.pack(faces, inputs="image", target="nose", size=24, points="nose")
    task = nb.regress(nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 2), nn.Unflatten(1, (1, 2))), augment=["flip"])
    run = nb.fit(task, pack, plan(lr=1e-3), run="runs/faces")
    np.testing.assert_allclose(pack.arrays["y"][7], faces[7]["nose"] / 2)
    refused(TrainError, "a report compares classes, labels, texts and class maps", run.report, pack)
    with pytest.raises(PackError, match=r"points must name columns.*got 'ear' of image .*, y float32 \(1, 2\)"):
        nb.pack(faces, inputs="image", target="nose", size=24, points="ear")


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(11, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.cat([x, F.interpolate(self.down(x).relu(), scale_factor=2)], 1))


def scene() -> tuple[Image.Image, Image.Image]:
    pixels, mask = RNG.integers(0, 90, (40, 50, 3)).astype(np.uint8), np.zeros((40, 50), np.uint8)
    x, y = RNG.integers(0, 25, 2)
    pixels[y : y + 15, x : x + 20] += 120
    mask[y : y + 15, x : x + 20] = 1
    return Image.fromarray(pixels), Image.fromarray(mask)


def test_7_masks_with_a_unet():
    scenes = [scene() for _ in range(60)]
    run = run_cell(CELLS["masks"], UNet=UNet, scenes=scenes)["run"]
    assert run.report(nb.pack(scenes, size=32)).table.loc["1", "IoU"] > 0.7
    assert run.predict(scenes[0][0])[0].shape == (32, 32)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.back = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x).relu()
        return {"out": self.head(hidden), "again": self.back(hidden)}


def test_8_two_losses_and_an_optimizer_of_ones_own():
    class Both(nb.Task):
        metrics = ("accuracy",)  # pyright: ignore[reportAssignmentType]

        def model(self, card, plan):
            return Twice()

        def loss(self, model, batch, plan):
            outputs = model(batch)
            return F.cross_entropy(outputs["out"], batch["y"]) + 0.1 * F.mse_loss(outputs["again"], batch["x"])

        def optimizer(self, groups, plan):
            return torch.optim.RMSprop(groups, lr=plan.lr)

    pack = nb.pack(vectors())
    assert nb.evaluate(nb.fit(Both, pack, plan(), run="runs/both"), pack)["accuracy"] > 0.9


def test_9_a_pretrained_transformer_with_a_frozen_body():
    transformers = pytest.importorskip("transformers")  # of `dev`; the other stacks have none
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).save_pretrained("body")
    ids = [RNG.integers(0, 10, 3 + i % 7) + 10 * (i % 2) for i in range(100)]
    items = [{"input_ids": x, "attention_mask": np.ones_like(x), "label": i % 2} for i, x in enumerate(ids)]
    net = transformers.AutoModelForSequenceClassification.from_pretrained("body")
    net.bert.requires_grad_(False)
    pack = nb.pack(items)
    run = nb.fit(nb.classify(net, pretrained=True), pack, plan(epochs=12, lr=0.1), run="runs/bert")
    assert nb.evaluate(run, pack, "train")["accuracy"] > 0.9
    pairs = zip(run.model("cpu").bert.parameters(), net.bert.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_10_random_transforms_and_no_copy():
    for seed in range(20):
        torch.manual_seed(seed)
        with pytest.raises(PackError, match="store=False: each epoch then reads the Dataset itself, and val= must be"):
            nb.pack(Flipped(), progress=False)
    pack = nb.pack(Flipped(), store=False)
    assert nb.evaluate(nb.fit(nb.classify(Net), pack, plan(), run="runs/random"), pack)["accuracy"] > 0.9


def test_11_few_of_one_class_folds_and_a_sweep():
    kinds = ["rare" if i % 10 == 0 else "often" for i in range(200)]
    rare = [(RNG.normal(3 * (kind == "rare"), 1, 6).astype(np.float32), kind) for kind in kinds]
    scores = {}
    for lr in (1e-4, 1e-2):
        for k, pack in enumerate(nb.pack(rare, folds=3)):
            weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
            task = nb.classify(points, loss=weighted, metrics=["balanced_accuracy"])
            scores[lr, k] = nb.fit(task, pack, plan(lr=lr), run=f"runs/{lr}/{k}").best["val_balanced_accuracy"]
    assert all(scores[1e-2, k] > max(0.9, scores[1e-4, k]) for k in range(3))
    assert len(nb.runs("runs/0.01")) == 3


def test_12_stop_resume_extend_fine_tune_and_log():
    seen, pack = [], nb.pack(vectors())
    task, log = nb.classify(points), lambda record, run: seen.append(record.values)
    run = nb.fit(task, pack, plan(), run="runs/long", callbacks=[log, lambda record, run: "stop" * (record.step == 12)])
    assert (run.state, run.history.rows[-1]["step"]) == ("stopped", 12)
    run = nb.fit(task, pack, plan(), run="runs/long", callbacks=[log])
    assert (run.state, len(run.summary())) == ("done", 5)
    run = nb.fit(task, pack, plan(epochs=7), run="runs/long", callbacks=[log])
    assert (run.state, len(run.summary()), "val_accuracy" in seen[-1]) == ("done", 7, True)
    fine = nb.fit(nb.classify(run.model(), pretrained=True), nb.pack(vectors(90)), plan(lr=1e-4), run="runs/fine")
    torch.testing.assert_close(fine.model("cpu")[0].weight, run.model("cpu")[0].weight, atol=0.01, rtol=0)


def test_a_job_has_at_most_15_lines_besides_its_checks():
    jobs = [each for name, each in vars(sys.modules[__name__]).items() if name[5:6].isdigit()]
    assert len(jobs) == 12
    for job in jobs:
        lines = [line for line in inspect.getsource(job).splitlines()[1:] if line.strip()]
        theirs = [line for line in lines if not line.lstrip().startswith(("assert", "with pytest"))]
        assert len(theirs) <= 15, job.__name__
