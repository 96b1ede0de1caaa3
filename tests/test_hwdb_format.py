"""`.dgrl` and `.dgr`: files made by hand from the published table, not by the writer of the demo."""

import contextlib
import random
import struct
import tracemalloc

import numpy as np
import pytest

from nbtools.errors import PackError
from nbtools.tasks.hwdb.demo import page_bytes
from nbtools.tasks.hwdb.formats import UNKNOWN, character, code_of, lines_of

NOTE = b"#CASIA-HWDB2.x page, labelled by line\0"


def header(kind=b"DGRL", note=NOTE, code_type=b"GB", length=2, bits=8):
    return struct.pack("<i8s", 36 + len(note), kind) + note + struct.pack("<20s2h", code_type, length, bits)


def page(*lines, kind=b"DGRL", bits=8, size=(300, 200)):
    return header(kind, bits=bits) + struct.pack("<3i", *size, len(lines)) + b"".join(lines)


def line(codes, top, left, height, width, pixels):
    return struct.pack("<i", len(codes) // 2) + codes + struct.pack("<4i", top, left, height, width) + pixels


def words(*found):
    return struct.pack("<i", len(found)) + b"".join(found)


def word(code, top, left, height, width, pixels):
    return code + struct.pack("<4h", top, left, height, width) + pixels


def coded(text):
    return b"".join(b"\xff\xff" if one == UNKNOWN else one.encode("gb18030").ljust(2, b"\0") for one in text)


def some_page(rng, bits, lines=3):
    """A `.dgrl` with all that real ones may have: lines past the page's edges, no text, rubbish behind the names."""
    codes = [b"1\0", b"a\0", "啊".encode("gb2312"), "镕".encode("gbk"), "。".encode("gb18030"), b"\xff\xff", b"\xff\0"]
    parts = [header(b"DGRL\0\xcc\xcc", NOTE, b"GB\0\xcd", 2, bits), struct.pack("<3i", 60, 80, lines)]
    for _ in range(lines):
        height, width, top, left = rng.randint(1, 9), rng.randint(1, 40), rng.randint(-5, 70), rng.randint(-5, 90)
        pixels = rng.randbytes(height * (width if bits == 8 else -(-width // 8)))
        parts.append(line(b"".join(rng.choices(codes, k=rng.randint(0, 9))), top, left, height, width, pixels))
    return b"".join(parts)


def some_rows(rng, lines, bits=8):
    """Words (top, left, height, width, pixels) of each line of a `.dgr`, which may overlap."""
    rows = []
    for n in range(lines):
        sizes = [(rng.randint(1, 9), rng.randint(1, 12)) for _ in range(rng.randint(1, 5))]
        places = [(20 * n + rng.randint(-3, 3), 6 * k + rng.randint(-3, 3)) for k in range(len(sizes))]
        pixels = [rng.randbytes(h * (w if bits == 8 else -(-w // 8))) for h, w in sizes]
        rows.append([(*at, *size, data) for at, size, data in zip(places, sizes, pixels, strict=True)])
    return rows


def some_words(rng, bits, lines=3):
    rows = some_rows(rng, lines, bits)
    return page(*(words(*(word(b"a\0", *one) for one in row)) for row in rows), kind=b"DGR", bits=bits)


def peak_of(action, *args):
    """Bytes allocated at the worst moment of an action."""
    tracemalloc.start()
    try:
        action(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read(data, name="page.dgrl"):
    return [(one.text, one.image(data)) for one in lines_of(data, name)]


# The layout


def test_a_grey_page_written_by_hand_is_read_field_by_field():
    codes = "手".encode("gb2312") + b"\xff\xff" + b"7\0"
    data = page(line(codes, 11, 12, 2, 3, bytes([255, 0, 7, 8, 9, 255])), line(b"", -40, 995, 1, 1, b"\x80"))
    first, second = lines_of(data, "page.dgrl")
    assert (first.text, first.number, second.text, second.number) == (f"手{UNKNOWN}7", 1, "", 2)
    assert first.image(data).tolist() == [[255, 0, 7], [8, 9, 255]]
    assert first.image(data).dtype == np.uint8
    assert second.image(data).tolist() == [[128]]  # where a line lies is kept and not judged
    assert [(box.top, box.left) for one in (first, second) for box in one.boxes] == [(11, 12), (-40, 995)]


def test_with_one_bit_a_pixel_a_set_bit_is_ink_the_highest_leftmost_and_rows_end_on_whole_bytes():
    rng = random.Random(1)
    for width in range(1, 26):
        stride = -(-width // 8)
        pixels = rng.randbytes(4 * stride)
        [(_, image)] = read(page(line(b"", 0, 0, 4, width, pixels), bits=1))
        for (y, x), grey in np.ndenumerate(image):
            ink = pixels[y * stride + x // 8] & (0x80 >> x % 8)
            assert grey == (0 if ink else 255)


@pytest.mark.parametrize("seed", range(2))
def test_words_are_joined_on_blank_paper_at_their_places_the_darker_pixel_on_top(seed):
    rows = some_rows(random.Random(seed), 4)
    data = page(*(words(*(word(b"a\0", *one) for one in row)) for row in rows), words(), kind=b"DGR")
    found = list(lines_of(data, "1.DGR"))
    assert len(found) == 4  # one without words has nothing to show
    for row, joined in zip(rows, found, strict=True):
        canvas = {}
        for top, left, height, width, pixels in row:
            for y, x in np.ndindex(height, width):
                at = (top + y, left + x)
                canvas[at] = min(canvas.get(at, 255), pixels[y * width + x])
        above, before = min(y for y, _ in canvas), min(x for _, x in canvas)
        image = joined.image(data)
        assert len(image) == max(y for y, _ in canvas) - above + 1
        for (y, x), grey in np.ndenumerate(image):
            assert grey == canvas.get((above + y, before + x), 255)
        assert joined.text == "a" * len(row)


# Text


def test_every_code_is_a_character_once_or_none_and_each_character_has_its_code():
    codes = [bytes([first, second]) for first in range(256) for second in range(256)]
    known = {code: character(code) for code in codes if character(code)}
    single = [code for code in known if code[0] < 0x80]
    assert len(known) > 23_000
    assert {known[code] for code in codes if code[0] == 0xFF} == {UNKNOWN}
    assert sorted(known[code] for code in single) == [chr(n) for n in range(0x20, 0x7F)]
    assert all(code[1] == 0 for code in single)
    assert all(code_of(text) == code for code, text in known.items() if text != UNKNOWN)
    for bad in ("😀", "\n", "\0", "\ud800", "ᠠ"):
        with pytest.raises(PackError, match="two bytes in GB18030"):
            code_of(bad)


@pytest.mark.parametrize("code", [b"\x81\x30", b"\0\0", b"1a", b"\n\0", b"\xa1\xff"])
def test_a_code_that_is_none_is_named_with_its_byte_and_spoils_only_its_line(code):
    one = [line(codes, 0, 0, 1, 1, bytes([n])) for n, codes in enumerate((b"a\0", b"b\0" + code, b"c\0"))]
    data = page(*one)
    first, second, third = lines_of(data, "017-P03.dgrl")
    offset = data.index(one[1]) + 4 + 2
    with pytest.raises(PackError, match=rf"GB18030.*0x{code.hex()} at byte {offset} of 017-P03.dgrl; leave line 2"):
        _ = second.text
    assert (first.text, third.text, third.image(data).tolist()) == ("a", "c", [[2]])


def test_a_page_of_the_demo_is_the_file_made_by_hand():
    images = [np.array([[0, 255, 127], [128, 0, 255]], np.uint8), np.full((4, 1), 9, np.uint8)]
    lines = [line(coded(f"我A{UNKNOWN}"), 2, 2, 2, 3, images[0].tobytes()), line(coded("b"), 6, 2, 4, 1, b"\t" * 4)]
    assert page_bytes([f"我A{UNKNOWN}", "b"], images, NOTE.decode()) == page(*lines, size=(12, 7))


# What is refused


def with_int(offset, value, layout="<i"):
    """80 bytes: 38 of the header, 12 of the page's size, 30 of one line."""
    data = header(note=b"#\0") + struct.pack("<3i", 90, 80, 1) + line(b"1\0\xb0\xa1", 5, 6, 2, 3, b"abcdef")
    return data[:offset] + struct.pack(layout, value) + data[offset + struct.calcsize(layout) :]


TEXT, BOX = 50, 58  # where the line begins, and its box


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the header needs 4 bytes, got 0 up to the end at byte 0 of"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), r"a .dgrl file must say DGRL, got .* at byte 4 of page.dgrl; leave it out"),
        (page(words(), kind=b"DGR"), r"a \.dgrl file must say DGRL, got b'DGR"),
        (with_int(0, 35), "the header must have 36 to 80 bytes, got 35 at byte 0 of"),
        (with_int(36, 24, "<h"), "a pixel must have 1 or 8 bits, got 24 at byte 36 of"),
        (with_int(38, 0), "height and width of the page must be 1 to 100,000 pixels, got 0 × 80 at byte 38 of"),
        (with_int(46, 2), "0 to 1 lines fit in the rest of the file, got 2 at byte 46 of"),
        (with_int(TEXT, 0x7FFFFFFF), "0 to 13 characters of line 1 fit .*, got 2,147,483,647 at byte 50 of"),
        (with_int(BOX + 8, 0), "height and width of line 1 must be 1 to 100,000 pixels, got 0 × 3 at byte 66 of"),
        (with_int(BOX + 8, 70_000), r"line 1 of 70,000 × 3 pixels .height × width. needs 210,000 bytes, got 6 up to"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_refused_with_file_byte_rule_and_what_came(data, message):
    with pytest.raises(PackError, match=message) as caught:
        read(data)
    value, _, fix = caught.value.args  # a row of the table of bad samples
    assert "page.dgrl" in value
    assert "leave it out" in fix or "copy the file again" in fix

    def refused():
        with contextlib.suppress(PackError):
            read(data)

    assert peak_of(refused) < 50_000  # numbers that promise gigabytes


@pytest.mark.parametrize(("make", "name"), [(some_page, "page.dgrl"), (some_words, "page.dgr")])
def test_a_file_cut_anywhere_is_refused_and_so_is_one_with_more_behind_it(make, name):
    data = make(random.Random(8), 8, 2)
    assert len(read(data, name)) > 0
    for size in range(len(data)):
        with pytest.raises(PackError, match=r"^.*, got .* at byte [\d,]+ of"):
            read(data[:size], name)
    with pytest.raises(PackError, match="the file must end after line 2"):
        read(data + data, name)
