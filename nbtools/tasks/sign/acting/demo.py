"""Demo data in the raw format: `.npz` clips of people who sign, in folders of train and val signers, with lists."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from nbtools import disk
from nbtools.errors import PackError
from nbtools.tasks.sign.acting.detector import FPS, Clip, filmed
from nbtools.tasks.sign.acting.motions import PLACES, Gloss, lexicon
from nbtools.tasks.sign.acting.signers import signer
from nbtools.tasks.sign.clips.labels import COLUMNS, LABELS, NAMES, REFERENCE
from nbtools.tasks.sign.landmarks import FACE_MESH, POINTS

TRAIN, VAL = "train", "val"
TAKES = 10  # clips of a signer
HELD = 5  # every fifth signer is a val signer, as 426 of the guide's 2,130 clips are val clips
CLIP, ORDER = 3, 4  # streams of random numbers: of what happens in a clip, of which gloss comes when
CHUNK = 64  # clips at once in threads: bounds memory
SIGNED = "nbtools demo"  # how meta's video begins: by it another demo may replace the clips


@dataclass(frozen=True)
class Take:
    """Clip n of the demo: who signs, what, and whether it is held back for val."""

    number: int
    signer: int
    held: bool
    gloss: int

    @property
    def name(self) -> str:
        return f"clip_{self.number:05}"

    @property
    def folder(self) -> str:
        return VAL if self.held else TRAIN


def demo(
    folder: str | Path,
    count: int = 1000,
    *,
    glosses: int = 20,
    categories: int = 4,
    frames: tuple[int, int] = (24, 48),
    features: bool = False,
    seed: int = 0,
) -> Path:
    """Write `count` clips of invented signs; returns the folder, with train/, val/ and the names of the ids.

    Up to six glosses of a category show the same postures in other orders: a linear model on the mean frame names 29 to
    44 % of the default's (three seeds), a Transformer 96 % of 12 glosses after 14 epochs of 600 clips (one seed).
    frames: fewest and most of a clip; the guide's have about 122, at 30 a second.
    features: also write X2048, what a frozen network might make of the frames.
    The same seed gives the same files, byte for byte, and 100 clips are the first of 1,000. As soon as there are as
    many train clips as glosses, each occurs there. Train and val signers differ; a fifth are val signers.
    Cost: 2 ms of CPU time a clip and 11 kB; 7.5 ms and 120 kB with features.
    Raises PackError on an impossible request, DiskError.
    """
    require(count, frames, seed)
    meanings, folder = lexicon(glosses, categories, seed), Path(folder)
    plan = list(takes(count, glosses, seed))
    with disk.explained("writing demo clips", folder), ThreadPoolExecutor() as pool:
        clear(folder)
        made = filmed_all(plan, meanings, frames, features, seed)
        while chunk := list(islice(made, CHUNK)):
            list(pool.map(functools.partial(write_clip, folder), chunk))
        for name in (TRAIN, VAL):
            rows = [(take.name, take.gloss, meanings[take.gloss].category) for take in plan if take.folder == name]
            write(folder / name / LABELS, csv_of(COLUMNS, rows))
        called = list(PLACES)
        named = [(i, gloss.name, gloss.category, called[gloss.category]) for i, gloss in enumerate(meanings)]
        write(folder / REFERENCE, csv_of(NAMES, named))
    return folder


def require(count: int, frames: tuple[int, int], seed: int) -> None:
    rules = {
        "count must be 1 clip or more": (count >= 1, count),
        "frames must be (fewest, most), from 10 to 3,000": (10 <= frames[0] <= frames[1] <= 3000, frames),
        "seed must be 0 or more": (seed >= 0, seed),
    }
    for rule, (kept, value) in rules.items():
        if not kept:
            raise PackError(f"{rule}, got {value}")


def takes(count: int, glosses: int, seed: int) -> Iterator[Take]:
    """The clips of a demo; each split goes through all glosses in ever new orders, so that they come equally often."""
    made = {True: 0, False: 0}
    for number in range(count):
        person = number // TAKES
        held = person % HELD == 1
        turn, place = divmod(made[held], glosses)
        made[held] += 1
        yield Take(number, person, held, int(order(glosses, turn, held, seed)[place]))


@functools.lru_cache(maxsize=8)
def order(glosses: int, turn: int, held: bool, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, ORDER, int(held), turn]).permutation(glosses)


def filmed_all(
    plan: Sequence[Take], meanings: Sequence[Gloss], frames: tuple[int, int], features: bool, seed: int
) -> Iterator[tuple[Take, Clip]]:
    """Each a pure function of its number and the seed."""
    for take in plan:
        rng = np.random.default_rng([seed, CLIP, take.number])
        yield take, filmed(signer(take.signer, seed), meanings[take.gloss], frames, rng, features)


def write_clip(folder: Path, made: tuple[Take, Clip]) -> None:
    """One `.npz`, its arrays and meta as the extractor of real clips writes them; compressing releases the GIL."""
    take, clip = made
    arrays = {"X": clip.x} if clip.features is None else {"X": clip.x, "X2048": clip.features}
    arrays |= {"mask": clip.mask, "timestamps_ms": clip.times, "meta": np.array(json.dumps(meta(take)))}
    write(folder / take.folder / f"{take.name}.npz", packed(arrays))


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    """As np.savez_compressed, whose level of compression takes three times as long for a tenth fewer bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    return content.getvalue()


def meta(take: Take) -> dict:
    return {
        "video": f"{SIGNED}, signer {take.signer}, {take.number}.MOV",
        "target_fps": FPS,
        "out_size": 256,
        "dims_per_frame": 2 * POINTS,
        "keypoints_total": POINTS,
        "order": "pose25,left_hand21,right_hand21,face11",
        "pose_indices": list(range(25)),
        "face_indices": list(FACE_MESH),
        "conf_thresh": 0.5,
        "interpolation_max_gap": 5,
    }


def csv_of(head: Iterable[str], rows: Iterable[Iterable]) -> bytes:
    content = io.StringIO(newline="")
    csv.writer(content, lineterminator="\n").writerows([head, *rows])
    return content.getvalue().encode()


def write(path: Path, data: bytes) -> None:
    """Not fsynced: demo data is made anew in seconds."""
    disk.remove(path)
    with disk.create(path) as file:
        disk.write(file, data)


def clear(folder: Path) -> None:
    """Make the folders, without clips of an earlier demo. Raises PackError at the first clip that is not a demo's."""
    paths = [path for name in (TRAIN, VAL) for path in sorted((folder / name).glob("*.npz"))]
    for path in paths:
        if not is_demo(path):
            raise PackError(f"{path} was not written by this demo, and would be lost: choose another folder")
    for path in paths:
        disk.remove(path)
    for name in (TRAIN, VAL):
        disk.make_folder(folder / name)


def is_demo(path: Path) -> bool:
    with contextlib.suppress(LookupError, ValueError, EOFError, zipfile.BadZipFile), np.load(path) as clip:
        return json.loads(str(clip["meta"]))["video"].startswith(SIGNED)
    return False
