"""The 78 points of a frame, and whole batches of them on their device: coordinates relative to the body, augmentation.

A frame has MediaPipe's pose 0–24, then 21 points of the left hand, 21 of the right, and 11 of its face mesh. x grows to
the right of the picture, y downwards, both in [0, 1] of it. B clips, T frames, P = 78 points.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbtools.data import Draws, constant, places
from nbtools.tasks.sign.networks import POSITIONS

ORDER = "pose25,left_hand21,right_hand21,face11"
POINTS = 78
LEFT, RIGHT, FACE = slice(25, 46), slice(46, 67), slice(67, 78)
HANDS = (LEFT, RIGHT)  # each a wrist, then four points a finger from the thumb on
SHOULDERS = slice(11, 13)
FACE_MESH = (1, 33, 263, 133, 362, 61, 291, 105, 334, 199, 4)

POSE_PAIRS = ((1, 4), (2, 5), (3, 6), *((i, i + 1) for i in range(7, 25, 2)))
"""Left and right: eyes (inner, middle, outer), then ears, mouth, shoulders, elbows, wrists, little fingers, index
fingers, thumbs, hips. 0 is the nose."""

FACE_PAIRS = ((33, 263), (133, 362), (61, 291), (105, 334))
"""Eye corners (outer, inner), mouth corners, brows, by their numbers in the mesh; nose and chin have no partner."""

SPAN = 3.0  # times a finger is enlarged relative to its wrist: in shoulder widths a hand is a third of what an arm is
NARROW = 0.02  # of the picture: least width of the shoulders, so that a profile view does not enlarge the rest
STRETCH, BEND = 0.3, 0.5  # at time_warp 1: change of a clip's length; of its pace within it

PAIRS = (*POSE_PAIRS, *zip(range(25, 46), range(46, 67), strict=True))
PAIRS += tuple((FACE.start + FACE_MESH.index(a), FACE.start + FACE_MESH.index(b)) for a, b in FACE_PAIRS)
PARTNER = dict(PAIRS) | {b: a for a, b in PAIRS}
MIRROR = tuple(PARTNER.get(point, point) for point in range(POINTS))  # which takes a point's place in the mirrored clip


class Keypoints(NamedTuple):
    """Clips of points (B, T, P, 2), which of them are seen (B, T, P) bool, and their lengths (B,) in frames. Beyond its
    length nothing of a clip is seen."""

    points: Tensor
    seen: Tensor
    lengths: Tensor


def prepare_clips(clips: Keypoints, plan: Any, draws: Draws | None) -> Keypoints:
    """Return clips in the plan's coordinates, augmented given draws; 0 where a point is not seen."""
    if draws is not None and (plan.time_warp or plan.time_crop):
        clips = retime(clips, draws, plan.time_warp, plan.time_crop, longest=POSITIONS)
    if draws is not None and plan.mirror:
        clips = mirror(clips, draws.chance(plan.mirror))
    points = clips.points
    if plan.normalise != "none":
        centre, width = body(points, clips.seen)
        points = (points - centre) / width
    if plan.normalise == "hands":  # MediaPipe finds a hand whole or not at all: where a finger is seen, so is the wrist
        hands = points[:, :, LEFT.start : RIGHT.stop].unflatten(2, (len(HANDS), -1))
        hands[:, :, :, 1:].sub_(hands[:, :, :, :1]).mul_(SPAN)  # fingers relative to their wrist, enlarged
    return clips._replace(points=points.where(clips.seen[..., None], constant((0,), points.device)))


def body(points: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle between the shoulders (B, 1, 1, 2), and their distance (B, 1, 1, 1), over a clip.

    Where no frame shows both shoulders: the middle of all that is seen, and a quarter of the picture. A clip that shows
    nothing has no centre: NaN.
    """
    both = seen[:, :, SHOULDERS].all(2)[:, :, None, None]  # (B, T, 1, 1)
    count = both.sum(1, keepdim=True)
    shoulders = (points[:, :, SHOULDERS] * both).sum(1, keepdim=True) / count  # (B, 1, 2, 2), NaN if there are none
    apart = (shoulders[:, :, :1] - shoulders[:, :, 1:]).norm(dim=3, keepdim=True)
    shown = seen[..., None]
    middle = (points * shown).sum((1, 2), keepdim=True) / shown.sum((1, 2), keepdim=True)
    seen = count > 0
    centre = torch.where(seen, shoulders.mean(2, keepdim=True), middle)
    return centre, torch.where(seen, apart.clamp(min=NARROW), constant((0.25,), seen.device))


def retime(clips: Keypoints, draws: Draws, warp: float, crop: float, longest: int) -> Keypoints:
    """Return clips cut at both ends, and played faster or slower, and unevenly. None grows beyond `longest` frames that
    was not longer before."""
    points, seen, lengths = clips
    device = points.device
    drawn = draws.uniforms((0, crop), (0, 1), (-STRETCH, STRETCH), (-BEND, BEND), (-BEND, BEND))
    drawn = (drawn * constant((-1, 1, warp, warp, warp), device))[..., None]
    (kept, stretch), start, bends = (1 + drawn[:, :3:2]).unbind(1), drawn[:, 1], drawn[:, 3:]  # (B, 1), bends (B, 2, 1)
    lengths = lengths[:, None]
    one, most = (constant((n,), device, torch.int64) for n in (1, longest))
    most = most if points.shape[1] <= longest else lengths.clamp(min=longest)
    new = (lengths * kept * stretch).round().long().clamp(one, most)
    room = min(math.ceil(points.shape[1] * (1 + STRETCH * warp)), max(points.shape[1], longest))
    step = places(room, device)
    u = step / (new - 1).clamp(min=1)  # (B, room), 0 to 1 along the new clip
    periods = constant((math.pi, 2 * math.pi), device)[:, None]
    slow, swing = torch.sin(u[:, None] * periods).mul_(bends).unbind(1)
    last, u = lengths - 1, u.addcdiv(slow, periods[0]).addcdiv(swing, periods[1])
    place = ((start * (1 - kept) + kept * u) * last).clamp(constant((0,), device), last)
    points, seen = between(points, seen, place)
    return Keypoints(points, seen & (step < new)[:, :, None], new[:, 0])


def between(points: Tensor, seen: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return clips at other moments: place (B, R) in frames, with fractions → points (B, R, P, 2), seen (B, R, P).

    A point is interpolated between two frames that show it, or taken from the one that does; seen as in the nearer one.
    """
    frames = torch.stack([place, place.ceil()]).long()  # (2, B, R)
    part = (place - frames[0])[:, :, None]
    rows = places(len(place), place.device)[:, None]
    before, after = seen[rows, frames]  # each (B, R, P)
    share = torch.where(before, part * after, after)[..., None]  # of the later frame; of none where neither shows it
    earlier, later = points[rows, frames]
    return earlier.mul_(1 - share).add_(later.mul_(share)), torch.where(part < 0.5, before, after)


def mirror(clips: Keypoints, chosen: Tensor) -> Keypoints:
    """Return left-right mirror images of the chosen (B,) clips; the left hand then becomes the right one."""
    table, swapped = constant(MIRROR, clips.points.device, torch.int64), chosen[:, None, None]
    image, seen = clips.points.index_select(2, table), clips.seen.index_select(2, table)
    torch.sub(constant((1,), image.device), image[..., 0], out=image[..., 0])
    points = torch.where(swapped[..., None], image, clips.points)
    return Keypoints(points, torch.where(swapped, seen, clips.seen), clips.lengths)
