"""`.dgrl` and `.dgr`: files made by hand from the published table; then those of the demo, drawn without a font."""

import random
import struct

import numpy as np
import pytest
from acting import refused

from nbtools import figures
from nbtools.errors import PackError
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb.data import UNKNOWN, image_of, lines_of, text_of_codes
from nbtools.tasks.hwdb.demo import pool


def page(*lines, kind=b"DGRL", note=b"#CASIA-HWDB2.x page, labelled by line\0", bits=8, size=(300, 200)):
    header = struct.pack("<i8s", 36 + len(note), kind) + note + struct.pack("<20s2h", b"GB", 2, bits)
    return header + struct.pack("<3i", *size, len(lines)) + b"".join(lines)


def line(codes, top, left, height, width, pixels):
    return struct.pack("<i", len(codes) // 2) + codes + struct.pack("<4i", top, left, height, width) + pixels


def words(*each):
    return struct.pack("<i", len(each)) + b"".join(each)


def word(code, top, left, height, width, pixels):
    return code + struct.pack("<4h", top, left, height, width) + pixels


def coded(text):
    return b"".join(b"\xff\xff" if one == UNKNOWN else one.encode("gb18030").ljust(2, b"\0") for one in text)


def read(data, name="page.dgrl"):
    return [(text_of_codes(one.codes)[0], image_of(one)) for one in lines_of(data, name)]


def some_rows(rng, lines):
    rows = []
    for n in range(lines):
        sizes = [(rng.randint(1, 9), rng.randint(1, 12)) for _ in range(rng.randint(1, 5))]
        places = [(20 * n + rng.randint(-3, 3), 6 * k + rng.randint(-3, 3)) for k in range(len(sizes))]
        rows.append([(*at, h, w, rng.randbytes(h * w)) for at, (h, w) in zip(places, sizes, strict=True)])
    return rows


def of_words(rows):
    return page(*(words(*(word(b"a\0", *one) for one in row)) for row in rows), kind=b"DGR")


def test_a_grey_page_written_by_hand_is_read_field_by_field():
    codes = "手".encode("gb2312") + b"\xff\xff" + b"7\0"
    data = page(line(codes, 11, 12, 2, 3, bytes([255, 0, 7, 8, 9, 255])), line(b"", -40, 995, 1, 1, b"\x80"))
    (text, image), (none, dot) = read(data)
    assert (text, none) == (f"手{UNKNOWN}7", "")
    assert image.tolist() == [[255, 0, 7], [8, 9, 255]]
    assert image.dtype == np.uint8
    assert dot.tolist() == [[128]]  # where a line lies is not judged


def test_with_one_bit_a_pixel_a_set_bit_is_ink_the_highest_leftmost_and_rows_end_on_whole_bytes():
    rng = random.Random(1)
    for width in range(1, 26):
        stride = -(-width // 8)
        pixels = rng.randbytes(4 * stride)
        [(_, image)] = read(page(line(b"", 0, 0, 4, width, pixels), bits=1))
        for (y, x), grey in np.ndenumerate(image):
            ink = pixels[y * stride + x // 8] & (0x80 >> x % 8)
            assert grey == (0 if ink else 255)


def test_words_are_joined_on_blank_paper_at_their_places_the_darker_pixel_on_top():
    rows = some_rows(random.Random(1), 4)
    for row, (text, image) in zip(rows, read(of_words(rows), "1.DGR"), strict=True):
        canvas = {}
        for top, left, height, width, pixels in row:
            for y, x in np.ndindex(height, width):
                at = (top + y, left + x)
                canvas[at] = min(canvas.get(at, 255), pixels[y * width + x])
        above, before = min(y for y, _ in canvas), min(x for _, x in canvas)
        assert len(image) == max(y for y, _ in canvas) - above + 1
        for (y, x), grey in np.ndenumerate(image):
            assert grey == canvas.get((above + y, before + x), 255)
        assert text == "a" * len(row)


WHOLE = page(line(b"1\0\xb0\xa1", 5, 6, 2, 3, b"abcdef"), note=b"#\0", size=(90, 80))
DAMAGED = [
    (0, b"\xdd\xff\xff\xff", "the header needs -51 bytes, got 68 up to the end at byte 12"),
    (8, b"JUNK", r"a .dgrl file must say DGRL, got .* at byte 12"),
    (50, b"\xff\xff\xff\x7f", "line 1 needs 4,294,967,294 bytes, got 26 up to the end at byte 54"),
    (66, b"\0", "line 1 must have pixels, got 0 × 3"),
]


@pytest.mark.parametrize(("offset", "value", "message"), DAMAGED)
def test_a_damaged_file_is_refused_with_rule_byte_and_what_came(offset, value, message):
    with pytest.raises(PackError, match=message) as caught:
        read(WHOLE[:offset] + value + WHOLE[offset + len(value) :])
    assert "copy the file again" in caught.value.args[2]  # a row of the table of bad samples


@pytest.mark.parametrize("bits", [1, 8, "words"])
def test_a_file_cut_anywhere_is_refused_and_so_is_one_with_more_behind_it(bits):
    rng = random.Random(8)
    data, name = of_words(some_rows(rng, 2)), "1.dgr"
    if bits != "words":
        sizes = (27, 1) if bits == 1 else (216, 8)
        parts = (line(b"a\0\xff\0", -5, 990, 9, 24, bytes(sizes[0])), line(b"", 70, 3, 1, 8, bytes(sizes[1])))
        data, name = page(*parts, bits=bits), "1.dgrl"
    assert len(read(data, name)) == 2
    for size in range(len(data)):
        refused(PackError, r"^.*, got .* at byte [\d,]+;", read, data[:size], name)
    refused(PackError, "the file must end after line 2", read, data + data, name)


def test_the_demo_is_real_pages_in_train_and_test_folders_that_share_no_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "findSystemFonts", list)
    hwdb.demo(tmp_path, 100, height=24)
    files = sorted(tmp_path.rglob("*.dgrl"))
    pages = {path.relative_to(tmp_path).as_posix(): read(path.read_bytes(), path.name) for path in files}
    assert sum(map(len, pages.values())) == 100
    assert next(iter(pages)) == "HWDB2.0Test/002-P16.dgrl"
    hands = {part: {name.split("/")[1][:3] for name in pages if part in name} for part in ("Train", "Test")}
    assert not hands["Test"] & hands["Train"]
    lines = [line for each in pages.values() for line in each]
    assert all(4 <= len(text) <= 12 and image.min() < 150 and np.mean(image == 255) > 0.4 for text, image in lines)
    texts = "".join(text for name in pages if "Train" in name for text, _ in pages[name])
    assert set(texts) == set(pool()[:60])  # every character, as soon as there are as many train lines
