"""Demo data in the raw format: clips of invented signs, by signers of whom a fifth are held out for val.

Each category has a place in front of the body. Its glosses come in families of six: three postures, the corners of a
triangle with a hand shape each, in one of six orders: all six have the same mean frame, and a linear model on it cannot
tell them apart. As from a real detector, points shake, times jitter, and hands are lost for a while or never found.

Postures are in shoulder widths about the middle between the shoulders, as of a right hand. T frames, P = 78 points.
"""

import io
import itertools
import json
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbtools.tasks.common.files import File, require, whole, write_demo
from nbtools.tasks.sign.keypoints import FACE, HANDS, LEFT, MIRROR, ORDER, POINTS, RIGHT

TAKES, HELD = 10, 5  # clips of a signer; every fifth signer is a val signer
SIGNER, GLOSS, CLIP, TURN, BACKBONE = range(5)  # streams of random numbers
REFERENCE, LIST = ("gloss_id", "label", "cat_id", "category"), ("file", "gloss", "cat")  # columns
FPS, GRAIN, SHAKE = 30, 2**13, 0.01  # GRAIN: steps of a coordinate, or files are twice as large; SHAKE: shoulder widths

CATEGORIES = ["greeting", "survival", "number", "calendar", "days"]  # the guide's
CATEGORIES += ["family", "relationships", "colour", "food", "drink"]
WRISTS = [(-0.5, -0.7), (-0.4, 0.5), (-1.0, 0.0), (-0.5, 1.0), (0.2, 0.1)]  # about where they are in its glosses
WRISTS += [(-0.2, -0.3), (-0.6, 0.2), (0.1, -0.7), (-0.9, 0.6), (-1.0, -0.7)]
FLAT, FIST, POINT, TWO = (0.1, 0, 0, 0, 0), (0.8, 1, 1, 1, 1), (0.8, 0, 1, 1, 1), (0.8, 0, 0, 1, 1)
SHAPES = np.array([FLAT, FIST, POINT, TWO, (0.3, 0.5, 0.5, 0.5, 0.5), (0.2, 0, 1, 1, 0)])
"""How far fingers are bent, from the thumb on: 0 straight, 1 closed."""

FAN = np.array([0.75, 0.25, 0.05, -0.15, -0.35])  # radians from the hand's direction to a finger, towards the thumb
OPEN, CLOSED = np.array([(0.4, 0.65, 0.85, 1.0), (0.4, 0.5, 0.4, 0.3)])  # a finger's joints, in lengths of the hand
HANGING = (-0.62, 1.5, 2.6, 0.25, 0.3, 0.35, 0.4, 0.45)  # a posture
MIDDLE = {0: (0, -0.69), 1: (0.06, -0.84), 2: (0.11, -0.84), 3: (0.16, -0.83), 7: (0.27, -0.77)}  # nose, left eye, ear
BODY = MIDDLE | {9: (0.09, -0.54), 11: (0.5, 0), 23: (0.33, 1.6)}  # mouth, shoulder, hip
MESH = [0, 6, 3, 4, 1, 10, 9, 5, 2, 0, 0]  # points of the pose near those of the face mesh
ABOVE = np.array([0, 0, 0, 0, 0, 0, 0, 0.1, 0.1, -0.31, -0.03])[:, None] * (0, -1)  # and how far: brows and chin

PACE = np.array([1, 1.5, 0.6, 1, 0.6, 1, 0.6, 1.5, 1])  # rest, rise, hold, move, hold, move, hold, fall, rest
IDLE = 0.4  # of the clips of one-handed signs: the other hand is never found
GAPS = ((HANDS[0], 1.0, 4), (HANDS[1], 1.0, 4), (FACE, 0.15, 8), (slice(0, POINTS), 0.3, 2))
"""(points, how often they are lost in a clip, for how many frames on average)."""


class Sign(NamedTuple):
    """postures (3, 8): x and y of the wrist, radians from upwards to the body's middle, how far five fingers are bent;
    both: hands, the other one in mirror image."""

    name: str
    category: int
    postures: np.ndarray
    both: bool


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
    """Write `count` clips of invented signs below train/ and val/, with lists of labels; return the folder.

    glosses, categories: how many signs, and kinds of them. frames: fewest and most of a clip; the guide's have about
    122. features: also write X2048, what a frozen image network might make of the frames. The same seed gives the same
    files, and 100 clips are the first of 1,000. An earlier demo in the folder is replaced.
    Raises PackError on an impossible request and where a clip that no demo wrote would be lost, DiskError.
    """
    require(whole(count, 1), "count must be 1 clip or more", count)
    require(whole(categories, 1, len(CATEGORIES)), f"categories must be 1 to {len(CATEGORIES)}", categories)
    require(whole(glosses, categories), f"glosses must be at least one a category, {categories}", glosses)
    require(10 <= frames[0] <= frames[1] <= 3000, "frames must be (fewest, most), from 10 to 3,000", frames)
    signs = [sign_of(n % categories, n // categories, seed) for n in range(glosses)]
    named = [(i, sign.name, sign.category, CATEGORIES[sign.category]) for i, sign in enumerate(signs)]
    files: list[File] = [("labels_reference.csv", partial(table, REFERENCE, *named))]
    rows: dict[str, list[tuple]] = {"train": [], "val": []}
    for number in range(count):
        split, name = "val" if number // TAKES % HELD == 1 else "train", f"clip_{number:05}"
        turn, place = divmod(len(rows[split]), glosses)
        gloss = int(np.random.default_rng([seed, TURN, split == "val", turn]).permutation(glosses)[place])
        rows[split].append((name, gloss, signs[gloss].category))
        files.append((f"{split}/{name}.npz", partial(clip_bytes, signs[gloss], number, frames, features, seed)))
    files += [(f"{split}/labels.csv", partial(table, LIST, *some)) for split, some in rows.items()]
    return write_demo(folder, files, (".npz",))


def table(*rows: tuple) -> bytes:
    return "".join(f"{','.join(map(str, row))}\n" for row in rows).encode()


def sign_of(category: int, number: int, seed: int) -> Sign:
    """Return a gloss by its number within its category; the same whatever the number of glosses."""
    family, variant = divmod(number, 6)
    rng = np.random.default_rng([seed, GLOSS, category, family])
    angles = rng.uniform(0, 2 * np.pi) + np.arange(3) * 2 * np.pi / 3
    wrists = WRISTS[category] + 0.42 * np.stack([np.sin(angles), np.cos(angles)], 1)
    postures = np.hstack([wrists, rng.uniform(-0.4, 0.8, (3, 1)), SHAPES[rng.permutation(len(SHAPES))[:3]]])
    order = list(itertools.permutations(range(3)))[variant]
    name = f"{CATEGORIES[category]} {family + 1}{'abcdef'[variant]}"
    return Sign(name, category, postures[list(order)], bool(rng.random() < 0.4))


def clip_bytes(sign: Sign, number: int, frames: tuple[int, int], features: bool, seed: int) -> bytes:
    signer, rng = number // TAKES, np.random.default_rng([seed, CLIP, number])
    points, width, left_handed = perform(sign, np.random.default_rng([seed, SIGNER, signer]), frames, rng)
    x = points + width * SHAKE * rng.standard_normal(points.shape)
    x = np.round(x * GRAIN).astype(np.float32) / GRAIN
    seen = detect(x, None if sign.both else HANDS[int(left_handed)], rng)
    times = np.round(np.arange(len(x)) * 1000 / FPS + rng.uniform(-3, 3, len(x))).astype(np.int64)
    arrays: dict[str, Any] = {"X": np.where(seen[..., None], x, np.float32(0)).reshape(len(x), -1)}
    if features:  # which see hands that a detector loses
        (weights, bias), flat = backbone(), (points.reshape(len(points), -1) - 0.5).astype(np.float32)
        noise = 0.05 * rng.standard_normal((len(points), len(bias)), np.float32)
        arrays["X2048"] = np.maximum(flat @ weights + bias + noise, 0)
    meta = np.array(json.dumps({"video": f"nbtools demo, signer {signer}, {number}.MOV", "order": ORDER}))
    arrays |= {"mask": seen, "timestamps_ms": times - times[0], "meta": meta}
    content, save = io.BytesIO(), np.savez if features else np.savez_compressed  # which takes too long for features
    save(content, **arrays)
    return content.getvalue()


def perform(
    sign: Sign, person: np.random.Generator, frames: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, float, bool]:
    """Return (points (T, P, 2) of a clip, the signer's width, whether they are left-handed). A signer is the numbers
    that `person` draws: where they stand, pace, size of movements, habits, the hand they sign with."""
    pace, left_handed = person.random(), person.random() < 0.12
    middle, width = person.uniform((0.44, 0.47), (0.56, 0.58)), person.uniform(0.20, 0.28)
    hand, size, rest = person.uniform(0.56, 0.68), person.uniform(0.8, 1.2), np.array(HANGING)
    rest[:2] += person.normal(0, 0.1, 2)
    habit = person.normal(0, 0.07, (len(CATEGORIES), 2))[sign.category]
    postures, centre = sign.postures.copy(), sign.postures[:, :2].mean(0)
    postures[:, :2] = centre + size * (postures[:, :2] - centre) + habit + rng.normal(0, 0.04, 2)
    postures[:, 2] += rng.normal(0, 0.08)
    main = np.stack([rest, *postures, rest])
    stations = skeletons(main, main if sign.both else np.stack([rest] * 5), hand)
    if left_handed:
        stations = stations[:, MIRROR] * (-1, 1)
    count = round(frames[0] + (frames[1] - frames[0]) * (0.7 * pace + 0.3 * rng.random()))
    return middle + width * between(stations.repeat(2, 0), count, rng), width, left_handed


def skeletons(main: np.ndarray, other: np.ndarray, size: float) -> np.ndarray:
    """Return (K, P, 2) of K postures (K, 8) of the signing hand and the other one, each as a right hand, so long."""
    points = np.zeros((len(main), POINTS, 2))
    for point, place in BODY.items():
        points[:, MIRROR[point]], points[:, point] = np.array(place) * (-1, 1), place
    points[:, FACE] = points[:, MESH] + ABOVE
    for hand, side, posture, flip in ((RIGHT, 1, main, 1), (LEFT, 0, other, -1)):
        wrist, angle, bend = posture[:, None, :2], (posture[:, 2:3] + FAN)[..., None], posture[:, 3:, None]
        reach = size * (OPEN + bend * (CLOSED - OPEN))
        joints = np.stack([reach * np.sin(angle), -reach * np.cos(angle)], 3).reshape(-1, 20, 2)
        points[:, hand] = np.concatenate([wrist, wrist + joints], 1) * (flip, 1)
        points[:, 13 + side] = (wrist[:, 0] / 2 + (-0.4, 0.3)) * (flip, 1)  # the elbow
        points[:, 15 + side : 23 + side : 2] = points[:, hand][:, [0, 17, 5, 3]]  # wrist, little finger, index, thumb
    return points


def between(stations: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return (T, P, 2): from the first of the stations (K, P, 2) to the last, with pauses and paths of any length."""
    ends = np.cumsum([0, *PACE * rng.uniform(0.5, 1.5, len(PACE))])
    at = np.interp(np.linspace(0, ends[-1], count), ends, np.arange(len(ends)))
    first = at.astype(int).clip(max=len(ends) - 2)
    return stations[first] + (at - first)[:, None, None] * (stations[first + 1] - stations[first])


def detect(x: np.ndarray, idle: slice | None, rng: np.random.Generator) -> np.ndarray:
    """Return (T, P) which of the points (T, P, 2) are seen: none outside of the picture, a hand whole or not at all."""
    seen = np.all((x > 0) & (x < 1), axis=2)
    for points, often, long in GAPS:
        for _ in range(rng.poisson(often)):
            start = rng.integers(len(x))
            seen[start : start + rng.geometric(1 / long), points] = False
    if idle is not None and rng.random() < IDLE:
        seen[:, idle] = False
    for hand in HANDS:
        seen[:, hand] &= seen[:, hand].all(1, keepdims=True)
    return seen


@cache
def backbone() -> tuple[np.ndarray, np.ndarray]:
    """Return (weights (2 P, 2048), bias (2048,)) float32, the same for all demos, of what a network might make of a
    frame: as InceptionV3's of real clips, 0 or more and about 0.35 on average."""
    rng = np.random.default_rng(BACKBONE)
    weights = np.float32(0.3) * rng.standard_normal((2 * POINTS, 2048), np.float32)
    return weights, rng.uniform(-0.4, 0.6, 2048).astype(np.float32)
