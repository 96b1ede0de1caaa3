"""Demo data in the raw format: PNG files `LABEL_n.png`, half by the `captcha` package, half drawn with Pillow."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from nbtools.errors import MissingExtra
from nbtools.tasks.common.demo import File, require, whole, write_demo

Size = tuple[int, int]

FONT_SIZES = (36, 40, 44)
DOT_SHADES = 6
ONE_AT_A_TIME = threading.Lock()

font_of = functools.lru_cache(maxsize=32)(ImageFont.load_default)


def demo(
    folder: str | Path,
    count: int = 6000,
    *,
    alphabet: str = "0123456789",
    length: int | tuple[int, int] = 4,
    size: Size = (60, 160),
    seed: int = 0,
) -> Path:
    """Write `count` captchas into a folder; the same seed gives the same files, byte for byte.

    length: characters, or (fewest, most): the width then grows with the text, as the CTC network takes it.
    size: (height, width) in pixels; of four characters where the length varies.
    Raises PackError on an impossible request, MissingExtra without the captcha package, DiskError.
    """
    shortest, longest = (length, length) if isinstance(length, int) else length
    require(
        {
            "count must be a whole number of captchas, 1 or more": (whole(count, 1), count),
            "alphabet must be the characters to draw": (bool(alphabet), alphabet),
            "length must be 1 or more characters, or (fewest, most)": (1 <= shortest <= longest, length),
        }
    )
    require_captcha()
    files = (file_of(n, alphabet, (shortest, longest), size, seed) for n in range(count))
    return write_demo(folder, files, (".png",))


def file_of(number: int, alphabet: str, length: tuple[int, int], size: Size, seed: int) -> File:
    """A captcha: a pure function of its number, so that 100 are the first 100 of 6,000, whoever draws them."""
    rng = random.Random(f"{seed}-{number}")
    text = "".join(rng.choice(alphabet) for _ in range(rng.randint(*length)))
    room = size if length[0] == length[1] else (size[0], round(size[1] * len(text) / 4))
    return f"{text}_{number}.png", functools.partial(drawn, text, room, rng, bool(number % 2))


def drawn(text: str, size: Size, rng: random.Random, by_package: bool) -> bytes:
    """The PNG of a captcha, by the package or with Pillow alone."""
    if by_package:
        with seeded_captcha(rng) as maker:
            image = canvas(maker, size).generate_image(text)
    else:
        image = drawn_by_hand(text, size, rng)
    content = io.BytesIO()
    image.save(content, "PNG", compress_level=3)
    return content.getvalue()


class Seeded:
    """Stands in for `secrets`, with which the captcha package draws: numbers of a generator that can be seeded."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def randbelow(self, bound: int) -> int:
        return int(self.rng.random() * bound)  # a third of the time of randrange; there are 200 an image

    def __getattr__(self, name: str):
        return getattr(self.rng, "getrandbits" if name == "randbits" else name)


def require_captcha() -> Any:
    """The module of the captcha package that draws. Raises MissingExtra."""
    try:
        from captcha import image as module
    except ImportError:
        raise MissingExtra(
            "demo captchas need the package captcha: pip install captcha, or nbtools[captcha]. "
            "Images of your own need no extra package"
        ) from None
    return module


@contextlib.contextmanager
def seeded_captcha(rng: random.Random) -> Iterator[type]:
    """ImageCaptcha, which draws its random numbers from a generator instead of `secrets` for as long as the block
    lasts, one thread at a time."""
    module = require_captcha()
    with ONE_AT_A_TIME:
        original = vars(module)["secrets"]
        vars(module)["secrets"] = Seeded(rng)
        try:
            yield module.ImageCaptcha
        finally:
            vars(module)["secrets"] = original


@functools.lru_cache(maxsize=64)
def canvas(maker: type, size: Size):
    """An ImageCaptcha of a size; kept, for it loads its fonts once. Its own font sizes are for 60 pixels of height."""
    height, width = size
    return maker(width, height, font_sizes=tuple(round(s * height / 60) for s in (42, 50, 56)))


def drawn_by_hand(text: str, size: Size, rng: random.Random) -> Image.Image:
    """Rotated dark characters on light paper under 5–8 lines and 100–300 dots."""
    height, width = size
    image = Image.new("RGB", (width, height), shade(rng, 225, 255))
    pitch = width / len(text)
    for place, character in enumerate(text):
        glyph = Image.new("L", (height, height), 0)
        font = font_of(round(rng.choice(FONT_SIZES) * height / 60))
        ImageDraw.Draw(glyph).text((height / 2, height / 2), character, fill=255, font=font, anchor="mm")
        glyph = glyph.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR)
        left = round(pitch * (place + 0.5) - height / 2 + rng.uniform(-0.1, 0.1) * pitch)
        image.paste(shade(rng, 0, 150), (left, round(rng.uniform(-0.1, 0.1) * height)), glyph)
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(5, 8)):
        pen.line([point(rng, size), point(rng, size)], fill=shade(rng, 60, 200), width=rng.randint(1, 2))
    dots = [point(rng, size) for _ in range(rng.randint(100, 300))]
    for start in range(DOT_SHADES):
        pen.point(dots[start::DOT_SHADES], fill=shade(rng, 60, 200))
    return image


def shade(rng: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def point(rng: random.Random, size: Size) -> tuple[int, int]:
    return int(rng.random() * size[1]), int(rng.random() * size[0])
