"""Frames of filmed clips: a folder of images is a clip, and so is a file of several images (GIF, WebP, APNG, TIFF).
Videos are refused in a sentence, since decoding them takes ffmpeg, on which nbtools does not depend.

T frames of H × W pixels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from nbtools.table import sized
from nbtools.tasks.common.files import in_threads, open_image, walk
from nbtools.tasks.common.report import Refused, Row
from nbtools.tasks.sign.labels import CLIP

STILLS = (".jpg", ".jpeg", ".bmp")
FILMS = (".gif", ".webp", ".png", ".apng", ".tif", ".tiff")  # may hold one image, or several
VIDEOS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")


@dataclass(frozen=True)
class Film:
    """A filmed clip. name: of its `.npz`, relative to the source; files: its frames in order, or the one file that
    holds them all."""

    name: str
    files: tuple[Path, ...]
    one_file: bool


def find_films(folder: Path) -> tuple[list[Film], list[Row]]:
    """The clips below a folder, and what cannot be one. Frames are in the order of the numbers in their names."""
    images, rows = defaultdict(list), []
    for name in walk(folder):
        path = PurePosixPath(name)
        if path.suffix.lower() in (*STILLS, *FILMS):
            images[path.parent].append(name)
        elif path.suffix.lower() in VIDEOS:
            rule = "frames are images: decoding videos takes ffmpeg or PyAV"
            fix = "write its frames, as ffmpeg -i VIDEO -vf fps=30 CLIP/%05d.jpg does"
            rows.append(Row("", rule, path.suffix, fix, file=name))
    films: dict[str, Film] = {}
    for parent, names in sorted(images.items()):
        names.sort(key=natural)
        if is_animated(folder / names[0]):
            own = [Film(f"{PurePosixPath(name).with_suffix('')}{CLIP}", (folder / name,), True) for name in names]
        elif any(parent in other.parents for other in images):
            rule, fix = "frames are in a folder of their own", "move them into one, or delete them"
            rows.append(Row("", rule, f"{len(names)} next to folders of frames", fix, file=names[0]))
            continue
        else:
            name = str(parent) if parent.name else folder.resolve().name
            own = [Film(name + CLIP, tuple(folder / name for name in names), False)]
        for film in own:
            if film.name in films:
                rule, fix = "clips have names of their own", "rename it; both would be written to one .npz"
                rows.append(Row("", rule, f"also {films[film.name].files[0].name}", fix, file=film.files[0].name))
            films.setdefault(film.name, film)
    return list(films.values()), rows


def natural(name: str) -> list[str | int]:
    """Sorts frame_2 before frame_10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def is_animated(path: Path) -> bool:
    """Whether a file holds several images; False for one that cannot be read, which is reported when it is decoded."""
    try:
        with open_image(path) as image:
            return path.suffix.lower() in FILMS and getattr(image, "is_animated", False)
    except (Refused, OSError):
        return False


def batches_of(film: Film, size: int) -> Iterator[Tensor]:
    """A clip's frames (n, 3, H, W) uint8, n ≤ size at once; images are decoded ahead in threads.

    Raises Refused for frames that cannot be decoded or differ in size.
    """
    frames = images_in(film.files[0]) if film.one_file else in_threads(image_of, film.files, 2 * size)
    first = None
    while batch := list(islice(frames, size)):
        first = batch[0].shape if first is None else first
        for other in {frame.shape for frame in batch} - {first}:
            value = f"{sized(*other[:2])} after {sized(*first[:2])}"
            raise Refused(Row("", "all frames of a clip have one size", value, "extract them again at one size"))
        yield torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2)


def image_of(path: Path) -> np.ndarray:
    """(H, W, 3) uint8."""
    with open_image(path, key="frame") as image:
        if path.suffix.lower() in FILMS and getattr(image, "is_animated", False):
            fix = "put it into a folder of its own kind, or delete it"
            raise Refused(Row("", "a frame is one image", f"{path.name} holds several", fix))
        return np.asarray(image.convert("RGB"))


def images_in(path: Path) -> Iterator[np.ndarray]:
    """(H, W, 3) uint8 of each image in a file."""
    with open_image(path, key="frame") as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            yield np.asarray(image.convert("RGB"))
