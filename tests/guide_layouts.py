"""The folders of the five guides as their readers have them, from demo data.

    captcha_folders    train/TEXT_n.png  test/TEXT_n.png                                   (guides 1 and 2)
    hwdb_full          hwdb_full/{train,val,test}/NAME.png, {split}_img_id_gt.txt, chars_list.txt, and hwdb_full.tar
    sign_folders       data/processed/{transformer_only,iv3_gru_only,test_15fps}/CLIP.npz, each with a labels.csv
    segment_lists      images/NAME.jpg  labels/NAME.png  train.txt  val.txt                 (lines `image,label`)

Each returns the folder that its guide's commands name.
"""

from __future__ import annotations

import csv
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.hwdb.formats import lines_of

GLOSSES = ("how are you", "thank you", "good morning", "water", "father", "red")  # names of clips have blanks
KEYPOINTS, FEATURES, VALIDATION = "transformer_only", "iv3_gru_only", "test_15fps"
EXTRA = ("mask", "timestamps_ms", "meta")


def captcha_folders(folder: Path, count: int = 60) -> Path:
    """Five sixths of the captchas in train/, the others in test/."""
    made = captcha.demo(folder / "drawn", count, alphabet="0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    for n, path in enumerate(sorted(made.glob("*.png"))):
        move(path, folder / "captchas" / ("test" if n % 6 == 5 else "train") / path.name)
    return folder / "captchas"


def hwdb_full(folder: Path, count: int = 60, length: tuple[int, int] = (2, 4)) -> Path:
    """Lines of train writers, every fifth for validation, and lines of test writers; `hwdb_full.tar` is next to it."""
    full, characters = folder / "hwdb_full", set[str]()
    pages = sorted(hwdb.demo(folder / "pages", count, characters=12, length=length, height=24).rglob("*.dgrl"))
    rows: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for page in pages:
        data = page.read_bytes()
        for line in lines_of(data, page.name):
            tested = "Test" in page.parent.name
            fifth = (len(rows["train"]) + len(rows["val"])) % 5 == 4
            split = "test" if tested else "val" if fifth else "train"
            name = f"{split}_{len(rows[split]):05}.png"
            (full / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(line.image(data)).save(full / split / name)
            rows[split].append(f"{name},{line.text}\n")
            characters |= set(line.text)
    for split, lines in rows.items():
        (full / f"{split}_img_id_gt.txt").write_text("".join(lines), "utf-8")
    (full / "chars_list.txt").write_text("".join(f"{one}\n" for one in sorted(characters)), "utf-8")
    with tarfile.open(folder / "hwdb_full.tar", "w") as tar:
        tar.add(full, "hwdb_full")
    return full


def sign_folders(folder: Path, count: int = 40, feature_key: str = "X2048", together: int | None = None) -> Path:
    """Train clips as keypoints and as features, validation clips as both; returns `data/processed`.

    feature_key: X where the folder of features calls them that. together: how many of the train clips are in both
    folders, by default all; the others are in turn in one of them.
    """
    processed = folder / "data" / "processed"
    made = sign.demo(folder / "made", count, glosses=len(GLOSSES), categories=2, frames=(10, 16), features=True)
    rows: dict[str, list[tuple[str, str, str]]] = {KEYPOINTS: [], FEATURES: [], VALIDATION: []}
    for split in ("train", "val"):
        with open(made / split / "labels.csv", newline="") as file:
            listed = list(csv.DictReader(file))
        for n, row in enumerate(listed):
            with np.load(made / split / f"{row['file']}.npz") as arrays:
                clip = {key: arrays[key] for key in arrays.files}
            number, gloss, cat = row["file"].removeprefix("clip_"), row["gloss"], row["cat"]
            name = f"clip_{number[-4:]}_{GLOSSES[int(gloss)]}"
            forms = {KEYPOINTS: ("X", *EXTRA), FEATURES: ("X2048", "timestamps_ms", "meta")}
            if split == "val":
                forms = {VALIDATION: ("X", "X2048", *EXTRA)}
            elif together is not None and n >= together:
                forms.pop((KEYPOINTS, FEATURES)[n % 2])
            for place, keys in forms.items():
                kept = {feature_key if place == FEATURES and key == "X2048" else key: clip[key] for key in keys}
                (processed / place).mkdir(parents=True, exist_ok=True)
                np.savez(processed / place / f"{name}.npz", **kept)
                rows[place].append((name, gloss, cat))
    for place, labels in rows.items():
        sign_labels(processed / place / "labels.csv", labels)
    return processed


def sign_labels(path: Path, rows: Iterable[Sequence[str]]) -> Path:
    """A list of labels as the guide has it: the file without its suffix."""
    path.write_text("file,gloss,cat\n" + "".join(f"{','.join(row)}\n" for row in rows))
    return path


def segment_lists(folder: Path, count: int = 21, size: tuple[int, int] = (64, 48)) -> Path:
    """Images and labels without folders of splits; lists name those of train and val."""
    made, place = segment.demo(folder / "drawn", count, size=size), folder / "garments"
    for split in ("train", "val"):
        lines = []
        for image in sorted((made / "images" / split).glob("*.jpg")):
            label = made / "labels" / split / f"{image.stem}.png"
            move(image, place / "images" / image.name)
            move(label, place / "labels" / label.name)
            lines.append(f"images/{image.name},labels/{label.name}\n")
        (place / f"{split}.txt").write_text("".join(lines))
    return place


def move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
