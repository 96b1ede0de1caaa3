"""Demo data in the raw format: PNG files `LABEL_n.png`, drawn by the `captcha` package."""

import functools
import io
import random
import threading
from pathlib import Path
from unittest import mock

from nbtools.errors import MissingExtra
from nbtools.tasks.common.files import File, require, whole, write_demo

ONE_AT_A_TIME = threading.Lock()


def demo(
    folder: str | Path,
    count: int = 6000,
    *,
    alphabet: str = "0123456789",
    length: int | tuple[int, int] = 4,
    size: tuple[int, int] = (60, 160),
    seed: int = 0,
) -> Path:
    """Write `count` captchas into a folder; the same seed gives the same files, byte for byte.

    alphabet: of the text. length: characters, or (fewest, most): the width then grows with the text, as CTC takes it.
    size: (height, width) in pixels; of four characters where the length varies.
    Raises PackError on an impossible request, MissingExtra without the captcha package, DiskError.
    """
    fewest, most = (length, length) if isinstance(length, int) else length
    require(whole(count, 1), "count must be 1 captcha or more", count)
    require(alphabet != "", "alphabet must be the characters to draw", alphabet)
    require(1 <= fewest <= most, "length must be 1 or more characters, or (fewest, most)", length)
    canvas(size)
    files: list[File] = []
    for number in range(count):  # each by its number alone, so that 100 are the first of 6,000, whoever draws them
        rng = Seeded(f"{seed}-{number}")
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(fewest, most)))
        room = size if fewest == most else (size[0], round(size[1] * len(text) / 4))
        files.append((f"{text}_{number}.png", functools.partial(draw, text, room, rng)))
    return write_demo(folder, files, (".png",))


class Seeded(random.Random):
    """A generator that stands in for the module `secrets`, with which the captcha package draws."""

    randbits = random.Random.getrandbits

    def randbelow(self, bound: int) -> int:
        return int(self.random() * bound)  # a third of the time of randrange; there are 200 an image


def draw(text: str, size: tuple[int, int], rng: Seeded) -> bytes:
    content = io.BytesIO()
    with ONE_AT_A_TIME, mock.patch("captcha.image.secrets", rng):
        image = canvas(size).generate_image(text)
    image.save(content, "PNG", compress_level=3)
    return content.getvalue()


@functools.lru_cache(maxsize=64)
def canvas(size: tuple[int, int]):
    """Return an ImageCaptcha, kept because it loads its fonts; 42, 50, 56 are for 60 pixels. Raises MissingExtra."""
    try:
        from captcha.image import ImageCaptcha
    except ImportError:
        fix = "pip install captcha, or the extra captcha. Images of your own need no extra package"
        raise MissingExtra(f"demo captchas need the package captcha: {fix}") from None
    height, width = size
    return ImageCaptcha(width, height, font_sizes=tuple(round(s * height / 60) for s in (42, 50, 56)))
