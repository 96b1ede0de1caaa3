"""The folders of the guide for signs as its reader has them, from demo data.

data/processed/{transformer_only,iv3_gru_only,test_15fps}/CLIP.npz, each with a labels.csv
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nbtools.tasks import sign

GLOSSES = ("how are you", "thank you", "good morning", "water", "father", "red")  # names of clips have blanks
KEYPOINTS, FEATURES, VALIDATION = "transformer_only", "iv3_gru_only", "test_15fps"
EXTRA = ("mask", "timestamps_ms", "meta")


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
