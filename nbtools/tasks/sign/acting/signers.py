"""People who sign the demo's glosses: bodies, habits and arms that reach where the hands go, before a camera.

The unit is the width of the shoulders, the origin between them; x to the right of the picture, y down, z to the camera,
until `pictured`. A right hand is in the left of the picture: it is drawn as such, and a left one as its mirror image.
T frames, P = 78 points in the order of `landmarks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbtools.tasks.sign.acting.motions import PLACES, RELAXED, SHAPES, Gloss
from nbtools.tasks.sign.landmarks import FACE, LEFT, MIRROR, POINTS, RIGHT

SIGNER = 2  # the stream of random numbers of signers
LEFT_HANDED = 0.12  # of people, about
ARM = (0.85, 0.75)  # shoulder to elbow, elbow to wrist
BASE = (-0.45, 0.75, 0.5)  # of the hand that is held still below the other; as a right hand
FLIP = np.array([-1.0, 1.0, 1.0])

HEAD = (
    *((0, -0.69, 0.35), (0.06, -0.84, 0.3), (0.11, -0.84, 0.28), (0.16, -0.83, 0.26)),
    *((0.27, -0.77, 0), (0.09, -0.54, 0.3)),
)
"""The nose; of the left side: inner, middle and outer eye, ear, corner of the mouth."""

MESH = (
    *((0, -0.62, 0.36), (-0.17, -0.83, 0.26), (0.17, -0.83, 0.26), (-0.07, -0.83, 0.3), (0.07, -0.83, 0.3)),
    *((-0.10, -0.52, 0.3), (0.10, -0.52, 0.3), (-0.15, -0.94, 0.28), (0.15, -0.94, 0.28)),
    *((0, -0.38, 0.3), (0, -0.66, 0.38)),
)
"""As FACE_MESH: nose, eyes (outer, inner), mouth, brows, chin, tip of the nose."""

KNUCKLES = np.array([(0.12, 0.14), (0.48, 0.12), (0.50, 0.02), (0.46, -0.08), (0.40, -0.17)])
"""Where a finger begins, from the wrist along the hand and towards the thumb, in lengths of the hand."""

BONES = np.array([(0.18, 0.15, 0.12), (0.22, 0.14, 0.10), (0.25, 0.15, 0.11), (0.23, 0.14, 0.10), (0.17, 0.10, 0.09)])
SPREAD = np.array([0.75, 0.10, 0.0, -0.10, -0.22])  # radians towards the thumb
CURL = np.array([(0.3, 0.6, 0.9), *[(1.4, 3.1, 4.1)] * 4])  # radians that each bone of a closed finger is bent, in all
FOLD = np.array([(0.5, 1.2, 1.9), *[(0.0, 0.0, 0.0)] * 4])  # radians that it is laid across the palm: the thumb is


class Limb(NamedTuple):
    """One hand over time: wrist (T, 3), bend of its fingers (T, 5), and its direction in radians (T,): aim, from
    upwards to the body's middle; roll, of the palm away from the camera."""

    wrist: np.ndarray
    bend: np.ndarray
    aim: np.ndarray
    roll: np.ndarray


@dataclass(frozen=True, eq=False)
class Signer:
    """A person. middle (2,) and width: of the shoulders in the picture; habits (places, 3): by how much each place is
    elsewhere; tempo: 0 quick to 1 slow; large: of movements; hand: its length; rest (3,): of a right hand."""

    middle: np.ndarray
    width: float
    yaw: float
    tilt: float
    limbs: float
    hand: float
    head: float
    tempo: float
    large: float
    left_handed: bool
    rest: np.ndarray
    habits: np.ndarray


def signer(number: int, seed: int) -> Signer:
    rng = np.random.default_rng([seed, SIGNER, number])
    rest = (-0.62, 1.55, 0.2) if rng.random() < 0.7 else (-0.30, 1.10, 0.45)
    return Signer(
        middle=np.array([rng.uniform(0.44, 0.56), rng.uniform(0.47, 0.58)]),
        width=rng.uniform(0.20, 0.28),
        yaw=rng.normal(0, 0.12),
        tilt=rng.normal(0, 0.04),
        limbs=rng.uniform(0.93, 1.07),
        hand=rng.uniform(0.56, 0.68),
        head=rng.uniform(0.92, 1.08),
        tempo=rng.uniform(0, 1),
        large=rng.uniform(0.8, 1.2),
        left_handed=bool(rng.random() < LEFT_HANDED),
        rest=np.array(rest) + rng.normal(0, 0.06, 3),
        habits=rng.normal(0, 0.07, (len(PLACES), 3)),
    )


def signed(person: Signer, gloss: Gloss, raised: np.ndarray, done: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The points (T, P, 2) of a person in the picture, who signs; raised (T,): 0 at rest, 1 in the sign; done (T,): how
    much of the movement."""
    main, other = limbs(person, gloss, raised, done, rng)
    points = skeleton(person, main, other, head_moves(len(raised), rng))
    if person.left_handed:
        points = points[:, MIRROR] * FLIP
    return pictured(person, points)


def limbs(
    person: Signer, gloss: Gloss, raised: np.ndarray, done: np.ndarray, rng: np.random.Generator
) -> tuple[Limb, Limb]:
    """(signing hand, the other), each as a right hand."""
    held = gloss.at(done)
    place = np.array(gloss.place) + person.habits[gloss.category] + rng.normal(0, 0.04, 3)
    if gloss.hands == "both":
        place[0] = min(place[0], -0.4)  # hands that cross hide each other
    offset = np.pad(held.offset, ((0, 0), (0, 1))) * person.large * rng.uniform(0.9, 1.1)
    aim, roll = gloss.aim + held.turn[:, 0] + rng.normal(0, 0.08), gloss.roll + 1.2 * held.turn[:, 0]
    main = lifted(person, raised, place + offset, held.bend, aim, roll)
    if gloss.hands == "both":
        return main, main
    if gloss.hands == "one":
        return main, lifted(person, 0 * raised, place, held.bend, aim, roll)
    base = np.array(BASE) + rng.normal(0, 0.04, 3)
    return main, lifted(person, raised, base, np.array(SHAPES["flat"]), np.array(1.3), np.array(1.2))


def lifted(person: Signer, raised: np.ndarray, wrist, bend, aim, roll) -> Limb:
    """A hand between its rest, where it hangs or lies, and what it does in the sign."""
    part = raised[:, None]
    return Limb(
        wrist=(1 - part) * person.rest + part * wrist,
        bend=(1 - part) * RELAXED + part * bend,
        aim=(1 - raised) * 2.6 + raised * aim,
        roll=(1 - raised) * 1.4 + raised * roll,
    )


def head_moves(count: int, rng: np.random.Generator) -> np.ndarray:
    """(T, 3): a head sways and nods a little."""
    time = np.linspace(0, 2 * math.pi, count)[:, None]
    return 0.025 * np.sin(time * rng.uniform(0.5, 2, 3) + rng.uniform(0, 6, 3))


def skeleton(person: Signer, main: Limb, other: Limb, head: np.ndarray) -> np.ndarray:
    """(T, P, 3)."""
    points = np.empty((len(head), POINTS, 3))
    face = np.array(HEAD)
    sides = face[[0, 1, 2, 3, 1, 2, 3, 4, 4, 5, 5]]
    sides[[4, 5, 6, 8, 10], 0] *= -1
    points[:, :11] = person.head * sides + head[:, None]
    points[:, FACE] = person.head * np.array(MESH) + head[:, None]
    for limb, hand, side, flip in ((other, LEFT, 0, FLIP), (main, RIGHT, 1, 1.0)):
        elbow, wrist = reached(limb.wrist, person.limbs)
        fingers = wrist[:, None] + person.hand * opened(limb)
        points[:, 11 + side] = np.array([-0.5, 0, 0]) * flip
        points[:, 13 + side], points[:, 15 + side] = elbow * flip, wrist * flip
        points[:, 17 + side], points[:, 19 + side] = fingers[:, 17] * flip, fingers[:, 5] * flip
        points[:, 21 + side], points[:, 23 + side] = fingers[:, 3] * flip, np.array([-0.33, 1.6, 0]) * flip
        points[:, hand] = fingers * flip
    return points


def reached(wrist: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(elbow, wrist) (T, 3) of a right arm: the elbow hangs down and outwards, the wrist comes as far as it can."""
    shoulder, (upper, lower) = np.array([-0.5, 0, 0]), (scale * bone for bone in ARM)
    way = wrist - shoulder
    far = np.linalg.norm(way, axis=1, keepdims=True)
    along = way / far
    far = np.clip(far, upper - lower + 0.05, 0.99 * (upper + lower))
    foot = (upper**2 - lower**2 + far**2) / (2 * far)
    down = np.array([-0.5, 1.0, -0.4])
    down = down - (along @ down)[:, None] * along
    down /= np.linalg.norm(down, axis=1, keepdims=True)
    elbow = shoulder + foot * along + np.sqrt(np.maximum(upper**2 - foot**2, 0)) * down
    return elbow, shoulder + far * along


def opened(limb: Limb) -> np.ndarray:
    """(T, 21, 3): a right hand from its wrist, in lengths of the hand."""
    aim, roll = limb.aim[:, None], limb.roll[:, None]
    none = np.zeros_like(aim)
    along = np.concatenate([np.sin(aim), -np.cos(aim), none], 1)
    side = np.concatenate([np.cos(aim) * np.cos(roll), np.sin(aim) * np.cos(roll), -np.sin(roll)], 1)  # to the thumb
    palm = np.concatenate([np.cos(aim) * np.sin(roll), np.sin(aim) * np.sin(roll), np.cos(roll)], 1)
    bent = limb.bend[:, :, None] * CURL
    turned = SPREAD[:, None] - limb.bend[:, :, None] * FOLD
    bones = BONES[..., None] * np.stack([np.cos(bent) * np.cos(turned), np.cos(bent) * np.sin(turned), np.sin(bent)], 3)
    local = np.zeros((len(aim), 5, 4, 3))  # along the hand, to the thumb, out of the palm
    local[:, :, 0, :2] = KNUCKLES
    local[:, :, 1:] = local[:, :, :1] + bones.cumsum(2)
    frame = np.stack([along, side, palm], 1)  # (T, 3, 3)
    fingers = local.reshape(len(aim), 20, 3) @ frame
    return np.concatenate([np.zeros((len(aim), 1, 3)), fingers], 1)


def pictured(person: Signer, points: np.ndarray) -> np.ndarray:
    """(T, P, 3) → (T, P, 2) in the picture: the body stands a little turned, the camera a little askew."""
    x = points[..., 0] * math.cos(person.yaw) + points[..., 2] * math.sin(person.yaw)
    y = points[..., 1]
    cos, sin = math.cos(person.tilt), math.sin(person.tilt)
    return person.middle + person.width * np.stack([cos * x - sin * y, sin * x + cos * y], 2)
