"""Labels drawn over pictures with NumPy and Pillow alone: class colours, crisp boundaries, ignored pixels hatched.

H × W pixels, C = 3 or 4 channels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from nbtools.data import Card, Pack
from nbtools.tasks.common.figures import WRONG
from nbtools.tasks.segment.masks.classes import BACKGROUND, IGNORE

ALPHA, FAINT = 0.6, 0.15  # of a class's colour over the picture; of a background's
LINE = np.array((255, 255, 255))  # of the boundary between two classes
EDGE = np.array((20, 20, 20))  # beside it, so that the line is seen on white, too
HATCH, GREY, DARK = 8, 0.5, 0.35  # px from stripe to stripe; of the picture in an ignored pixel, and in a stripe
DIMMED = 0.35  # of the picture where only errors have colour
INKS = np.array([[int(WRONG[i : i + 2], 16) for i in (1, 3, 5)], (110, 0, 190), (0, 0, 0)], np.uint8)
"""Colours for what is wrong, the preferred one first: vermilion as elsewhere, violet, black; dark on a pale picture."""
APART = 30.0  # in CIELAB; side by side 2 is just visible, and these are in different pictures
VISIONS = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ]
)  # of linear RGB: as it is, and as protanopes and deuteranopes see it (Machado et al. 2009)


def colours_of(card: Card | Pack) -> np.ndarray:
    """(K, 3) uint8: the colour of each class, the same in every picture of a data set."""
    return np.array(card.options["colours"], np.uint8).reshape(-1, 3)


def alphas_of(card: Card | Pack) -> np.ndarray:
    """(K,): how strongly each class is coloured; what is called a background, barely."""
    return np.array([FAINT if name.casefold() in BACKGROUND else ALPHA for name in card.classes])


def wrong_ink(card: Card | Pack) -> np.ndarray:
    """(3,) uint8: the colour of what is wrong. It differs from those of the classes, with any colour vision; where none
    does, it is the one farthest from them."""
    classes = colours_of(card)[alphas_of(card) > FAINT]
    apart = np.linalg.norm(seen_as(INKS)[:, :, None] - seen_as(classes)[:, None], axis=-1).min((0, 2), initial=np.inf)
    return INKS[int((apart >= APART).argmax() if (apart >= APART).any() else apart.argmax())]


def seen_as(colours: np.ndarray) -> np.ndarray:
    """(n, 3) uint8 sRGB → (3, n, 3) CIELAB (D65) in each of VISIONS."""
    share = colours / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.einsum("vij,nj->vni", VISIONS, linear), 0, 1)
    xyz = linear @ np.array([[0.4339, 0.2126, 0.0178], [0.3762, 0.7152, 0.1095], [0.1899, 0.0722, 0.8727]])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def overlay(
    image: np.ndarray, label: np.ndarray, colours: np.ndarray, alpha: float | Sequence[float] | np.ndarray = ALPHA
) -> np.ndarray:
    """image (H, W, C) and label (H, W) uint8, colours (K, 3) → (H, W, 3) uint8: classes in colour, a line between two,
    ignored pixels grey with stripes.

    alpha: of all colours, or of each class (K,). The picture below loses its own colours as much, or red on yellow
    would be the orange of another class. What is beyond K is drawn as ignored.
    """
    known = label < len(colours)
    place = np.where(known, label, 0)
    strength = np.broadcast_to(np.asarray(alpha, float), len(colours))[place][..., None]
    seen = opaque(image).astype(float)
    faded = (1 - strength) * seen + strength * grey(seen)
    drawn = (1 - strength) * faded + strength * colours[place]
    drawn = np.where(known[..., None], drawn, hatched(seen))
    return lined(drawn, label).round().astype(np.uint8)


def errors(image: np.ndarray, label: np.ndarray, predicted: np.ndarray, ink: np.ndarray = INKS[0]) -> np.ndarray:
    """image (H, W, C), label and predicted (H, W) → (H, W, 3) uint8: what is wrong in `ink` on the picture in pale
    grey, ignored pixels with stripes; there nothing is wrong."""
    seen = opaque(image).astype(float)
    drawn = 255 - DIMMED * (255 - grey(seen))
    drawn = np.where((predicted != label)[..., None], 0.15 * seen + 0.85 * ink, drawn)
    return np.where((label == IGNORE)[..., None], hatched(seen), drawn).round().astype(np.uint8)


def lined(drawn: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The picture (H, W, 3) with a light line on the boundary's one side, and a dark one on its other."""
    light, dark = sides(label)
    drawn = np.where(dark[..., None], 0.5 * drawn + 0.5 * EDGE, drawn)
    return np.where(light[..., None], 0.15 * drawn + 0.85 * LINE, drawn)


def sides(label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(before, behind) (H, W) bool: pixels whose right or lower neighbour has another label, and those neighbours that
    are not `before` themselves."""
    before, behind = np.zeros(label.shape, bool), np.zeros(label.shape, bool)
    across, down = label[:, 1:] != label[:, :-1], label[1:] != label[:-1]
    before[:, :-1] |= across
    before[:-1] |= down
    behind[:, 1:] |= across
    behind[1:] |= down
    return before, behind & ~before


def hatched(seen: np.ndarray) -> np.ndarray:
    """A picture (H, W, 3) in pale grey with dark stripes from the lower left to the upper right."""
    rows, columns = np.indices(seen.shape[:2])
    share = np.where((rows + columns) % HATCH < 2, DARK, GREY)[..., None]
    ground = np.where(share == DARK, 60.0, 225.0)
    return np.broadcast_to(share * grey(seen) + (1 - share) * ground, seen.shape)


def grey(seen: np.ndarray) -> np.ndarray:
    """(H, W, 3) → the luma (H, W, 1) of ITU-R BT.601."""
    return seen @ np.array([[0.299], [0.587], [0.114]])


def opaque(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8: a picture with alpha on white."""
    if image.shape[2] == 3:
        return image
    share = image[..., 3:] / 255
    return (share * image[..., :3] + (1 - share) * 255).round().astype(np.uint8)


def fitted(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """A picture (H, W, 3 or 4) at another size, averaged."""
    return np.asarray(Image.fromarray(opaque(image)).resize((width, height), Image.Resampling.LANCZOS))


def nearest(label: np.ndarray, width: int, height: int) -> np.ndarray:
    """A label (H, W) at another size: classes have no averages."""
    return np.asarray(Image.fromarray(label).resize((width, height), Image.Resampling.NEAREST))
