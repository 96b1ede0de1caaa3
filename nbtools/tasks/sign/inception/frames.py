"""Frames of filmed clips, found and decoded: a folder of images is a clip, and so is a file of several of them (GIF,
WebP, APNG, TIFF). Videos are refused in a sentence: to decode them takes ffmpeg, on which nbtools does not depend.

T frames of H × W pixels.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nbtools.data import Refused, Row
from nbtools.table import sized
from nbtools.tasks.sign.clips.files import walked
from nbtools.tasks.sign.clips.matching import SUFFIX

STILLS = (".jpg", ".jpeg", ".bmp")
FILMS = (".gif", ".webp", ".png", ".apng", ".tif", ".tiff")  # may hold one image, or many
VIDEOS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)  # what Pillow raises


@dataclass(frozen=True)
class Film:
    """A clip that is to be looked at. name: of its `.npz`, from the source on; files: its frames in order, or the one
    file that holds them all."""

    name: str
    files: tuple[Path, ...]
    moving: bool


def found(folder: Path) -> tuple[list[Film], list[Row]]:
    """The clips below a folder, and what cannot be one. Frames are in the order of the numbers in their names."""
    images, rows = defaultdict(list), []
    for name in sorted(walked(folder)):
        way = PurePosixPath(name)
        if way.suffix.lower() in (*STILLS, *FILMS):
            images[way.parent].append(name)
        elif way.suffix.lower() in VIDEOS:
            rows.append(video(name))
    films: dict[str, Film] = {}
    for parent, names in sorted(images.items()):
        names.sort(key=natural)
        if not several(folder / names[0]) and any(parent in other.parents for other in images):
            rows.append(astray(names))
            continue
        for film in films_of(folder, parent, names):
            if film.name in films:
                rule, fix = "clips have names of their own", "rename it; both would be written to one .npz"
                rows.append(Row("", rule, f"also {films[film.name].files[0].name}", fix, file=film.files[0].name))
            films.setdefault(film.name, film)
    return list(films.values()), rows


def films_of(folder: Path, parent: PurePosixPath, names: list[str]) -> Iterator[Film]:
    """The clips that lie in one folder: it is one itself, unless its first file holds several frames."""
    if several(folder / names[0]):
        for name in names:
            yield Film(f"{PurePosixPath(name).with_suffix('')}{SUFFIX}", (folder / name,), moving=True)
    else:
        own = str(parent) if parent.name else folder.resolve().name
        yield Film(own + SUFFIX, tuple(folder / name for name in names), moving=False)


def astray(names: list[str]) -> Row:
    fix = "move them into one, or delete them"
    return Row("", "frames lie in a folder of their own", f"{len(names)} beside folders of frames", fix, file=names[0])


def natural(name: str) -> list[str | int]:
    """Sorts frame_2 before frame_10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def several(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return path.suffix.lower() in FILMS and getattr(image, "is_animated", False)
    except UNREADABLE:
        return False  # refused by name when it is decoded


def video(name: str) -> Row:
    fix = "write its frames, as ffmpeg -i VIDEO -vf fps=30 CLIP/%05d.jpg does"
    return Row(
        "", "frames are images: decoding videos takes ffmpeg or PyAV", PurePosixPath(name).suffix, fix, file=name
    )


def chunks(film: Film, size: int, pool: ThreadPoolExecutor) -> Iterator[Tensor]:
    """A clip's frames (n, 3, H, W) uint8, n ≤ size at once; stills are decoded ahead by the pool's threads.

    Raises Refused for frames that cannot be decoded, or differ in size.
    """
    frames = moving(film.files[0]) if film.moving else decoded(film.files, pool, 2 * size)
    first = None
    while part := list(islice(frames, size)):
        first = part[0] if first is None else first
        other = next((frame for frame in part if frame.shape != first.shape), first)
        if other is not first and other.shape != first.shape:
            value = f"{sized(*other.shape[:2])} after {sized(*first.shape[:2])}"
            raise Refused(Row("", "all frames of a clip have one size", value, "extract them again at one size"))
        yield torch.from_numpy(np.stack(part)).permute(0, 3, 1, 2)


def decoded(files: Iterable[Path], pool: ThreadPoolExecutor, ahead: int) -> Iterator[np.ndarray]:
    """(H, W, 3) uint8 each, in order; at most so many wait in memory."""
    waiting: deque[Future[np.ndarray]] = deque()
    for file in files:
        waiting.append(pool.submit(still, file))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def still(path: Path) -> np.ndarray:
    with opened(path) as image:
        if path.suffix.lower() in FILMS and getattr(image, "is_animated", False):
            fix = "put it into a folder of its own kind, or delete it"
            raise Refused(Row("", "a frame is one image", f"{path.name} holds several", fix))
        return np.asarray(image.convert("RGB"))


def moving(path: Path) -> Iterator[np.ndarray]:
    with opened(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            yield np.asarray(image.convert("RGB"))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except UNREADABLE as error:
        if isinstance(error, Refused):
            raise
        said = getattr(error, "strerror", None) or str(error)
        raise Refused(
            Row("", "a frame can be decoded", f"{path.name}: {said}", "copy it again, or delete it")
        ) from error
