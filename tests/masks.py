"""Small folders of images and labels, as people have them, and what packing and validating report of them."""

from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from nbtools.data import Pack
from nbtools.tasks import segment
from nbtools.tasks.common.rules import Row

H, W = 36, 48
NAMES = ["ground", "shirt", "shoe"]
Content = np.ndarray | Image.Image | bytes | str


def ids(seed: int = 0, height: int = H, width: int = W) -> np.ndarray:
    """A label of three classes, in blocks with corners."""
    label = np.zeros((height, width), np.uint8)
    draw = np.random.default_rng(seed)
    for value in (1, 2):
        top, left = draw.integers(0, height // 2), draw.integers(0, width // 2)
        label[top : top + height // 3, left : left + width // 3] = value
    return label


def photo(seed: int = 0, height: int = H, width: int = W, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def saved(path: Path, content: Content, **more) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        (Image.fromarray(content) if isinstance(content, np.ndarray) else content).save(path, **more)
    return path


def tree(folder: Path, files: Mapping[str, Content]) -> Path:
    for name, content in files.items():
        saved(folder / name, content)
    return folder


def corpus(folder: Path) -> Path:
    """Four images and labels: two train, one validates, the last tests."""
    for k, split in enumerate(("train", "train", "val", "test")):
        tree(folder, {f"images/{split}/{k}.png": photo(k), f"labels/{split}/{k}.png": ids(k)})
    return folder


def pair(folder: Path, image: Content, label: Content, name: str = "a.png", mask: str = "a.png", **more) -> Path:
    """A folder of one image with its label."""
    saved(folder / "images" / name, image, **more)
    saved(folder / "labels" / mask, label)
    return folder


def labelled(folder: Path, label: Content, mask: str = "a.png") -> Path:
    """A folder of one image with such a label, and a good one next to it."""
    tree(folder, {"images/b.png": photo(), "labels/b.png": ids()})
    return pair(folder, photo(), label, mask=mask)


def xml(folder: Path, shapes: str, labels: str = "shirt shoe", place: str = 'name="a.png"') -> Path:
    """CVAT's file with one image, next to it; place: its name there, and its subset."""
    saved(folder / "a.png", photo())
    named = "".join(f"<label><name>{name}</name><color>#00ff00</color></label>" for name in labels.split())
    text = (
        f'<?xml version="1.0" encoding="utf-8"?><annotations><version>1.1</version><meta><task><labels>{named}'
        f'</labels></task></meta><image id="0" {place} width="{W}" height="{H}">{shapes}</image></annotations>'
    )
    saved(folder / "annotations.xml", text)
    return folder


def polygon(points: str, label: str = "shirt", z: int | str = 0) -> str:
    return f'<polygon label="{label}" points="{points}" z_order="{z}"></polygon>'


packed = partial(segment.pack, progress=False)
checked = partial(segment.validate, progress=False)


def only(report) -> Row:
    """The one row of a report, shown too."""
    [row] = report.rows
    assert escape(row.rule) in report._repr_html_()
    return row


def sample(made: Pack, name: str) -> dict[str, np.ndarray]:
    return made.sample(made.names.index(name))


def sole(source: Path, **more) -> dict[str, np.ndarray]:
    """The arrays of a pack of one image."""
    return packed(source, val=0, test=0, **more).sample(0)
