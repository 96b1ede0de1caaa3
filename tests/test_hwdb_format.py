"""`.dgrl` and `.dgr`: files made by hand from the published table, not by the writer that is under test."""

import contextlib
import mmap
import os
import pickle
import random
import struct
import tracemalloc

import numpy as np
import pytest

from nbtools.errors import NbtoolsError, PackError
from nbtools.tasks.hwdb.formats import dgr, dgrl, scan
from nbtools.tasks.hwdb.formats.dgrl import UNKNOWN, Line, Page

FUZZED = int(os.environ.get("NBTOOLS_FUZZ", "4000"))
NOTE = b"#CASIA-HWDB2.x page, labelled by line\0"


def header(kind=b"DGRL", note=NOTE, code_type=b"GB", length=2, bits=8):
    return struct.pack("<i8s", 36 + len(note), kind) + note + struct.pack("<20s2h", code_type, length, bits)


def line(codes, top, left, height, width, pixels):
    return struct.pack("<i", len(codes) // 2) + codes + struct.pack("<4i", top, left, height, width) + pixels


def word(code, top, left, height, width, pixels):
    return code + struct.pack("<4h", top, left, height, width) + pixels


def noise(rng, height, width, bits):
    """The bytes of a bitmap, bits past its right edge included."""
    return rng.randbytes(height * (width if bits == 8 else -(-width // 8)))


def some_codes(rng, count):
    kinds = [b"1\0", b"a\0", "啊".encode("gb2312"), "镕".encode("gbk"), "。".encode("gb18030"), b"\xff\xff", b"\xff\0"]
    return [rng.choice(kinds) for _ in range(count)]


def some_page(rng, bits, lines=3):
    """A `.dgrl` with all that real ones may have: lines past the page's edges, no text, rubbish behind the names."""
    parts = [header(b"DGRL\0\xcc\xcc", NOTE, b"GB\0\xcd", 2, bits), struct.pack("<3i", 60, 80, lines)]
    for _ in range(lines):
        height, width = rng.randint(1, 9), rng.randint(1, 40)
        codes = b"".join(some_codes(rng, rng.randint(0, 9)))
        parts.append(
            line(codes, rng.randint(-5, 70), rng.randint(-5, 90), height, width, noise(rng, height, width, bits))
        )
    return b"".join(parts)


def some_words(rng, bits, lines=3):
    parts = [header(b"DGR", NOTE, b"GB", 2, bits), struct.pack("<3i", 60, 80, lines)]
    for n in range(lines):
        codes = some_codes(rng, rng.randint(0, 5))
        parts.append(struct.pack("<i", len(codes)))
        for k, code in enumerate(codes):
            height, width = rng.randint(1, 9), rng.randint(1, 12)
            place = (20 * n + rng.randint(-3, 3), 6 * k + rng.randint(-3, 3))
            parts.append(word(code, *place, height, width, noise(rng, height, width, bits)))
    return b"".join(parts)


def peak_of(action, *args):
    """Bytes allocated at the worst moment of an action."""
    tracemalloc.start()
    try:
        action(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- the layout


def test_a_grey_page_written_by_hand_is_read_field_by_field():
    codes = "手".encode("gb2312") + b"\xff\xff" + b"7\0"
    data = header() + struct.pack("<3i", 300, 200, 2)
    data += line(codes, 11, 12, 2, 3, bytes([255, 0, 7, 8, 9, 255])) + line(b"", 44, 45, 1, 1, b"\x80")
    page = dgrl.read_page(data)
    assert (page.height, page.width, page.bits, page.code_type, len(page.lines)) == (300, 200, 8, "GB", 2)
    assert page.illustration.encode("latin-1") == NOTE
    first, second = page.lines
    assert (first.text, first.top, first.left, first.height, first.width) == (f"手{UNKNOWN}7", 11, 12, 2, 3)
    assert first.image.tolist() == [[255, 0, 7], [8, 9, 255]]
    assert first.image.dtype == np.uint8
    assert (second.text, second.image.tolist()) == ("", [[128]])


def test_with_one_bit_a_pixel_a_set_bit_is_ink_the_highest_leftmost_and_rows_end_on_whole_bytes():
    rng = random.Random(1)
    for width in range(1, 26):
        stride = -(-width // 8)
        pixels = rng.randbytes(4 * stride)
        data = header(bits=1) + struct.pack("<3i", 9, 99, 1) + line(b"", 0, 0, 4, width, pixels)
        for y, row in enumerate(dgrl.read_page(data).lines[0].image):
            for x, grey in enumerate(row):
                ink = pixels[y * stride + x // 8] & (0x80 >> x % 8)
                assert grey == (0 if ink else 255)


def test_words_written_by_hand_are_read_field_by_field():
    data = header(b"DGR") + struct.pack("<4i", 300, 200, 1, 2)
    data += word(b"\xb0\xa1", -1, 12, 1, 2, b"\x01\x02") + word(b"\xff\0", 3, 14, 2, 1, b"\x03\x04")
    ((first, second),) = dgr.read_words(data).lines
    assert (first.text, first.top, first.left, first.image.tolist()) == ("啊", -1, 12, [[1, 2]])
    assert (second.text, second.height, second.width, second.image.tolist()) == (UNKNOWN, 2, 1, [[3], [4]])


def test_the_guides_slivers_are_not_here():
    """Its preprocessing read top, left as height, width: for the second line on a page, a sliver 20 px high; and its
    bitmap began eight bytes early, in the numbers."""
    codes = "天地玄黄".encode("gb2312")
    pixels = random.Random(2).randbytes(96 * 400)
    data = header() + struct.pack("<3i", 2000, 1500, 1) + line(codes, 20, 130, 96, 400, pixels)
    at = data.index(codes) + len(codes)
    assert struct.unpack_from("<2i", data, at) == (20, 130)  # what the guide took for a size
    (found,) = dgrl.read_page(data).lines
    assert found.image.shape == (96, 400)
    assert found.image.tobytes() == pixels
    assert (found.top, found.left) == (20, 130)


# -- text


def test_every_code_is_what_its_own_decoding_says():
    def slow(code):
        if code[0] == 0xFF:
            return UNKNOWN
        try:
            text = (code[:1] if code[1] == 0 else code).decode("gb18030")
        except UnicodeDecodeError:
            return ""
        return text if len(text) == 1 and text.isprintable() | (ord(text) > 127) else ""

    codes = [bytes([first, second]) for first in range(256) for second in range(256)]
    assert scan.spelled(b"".join(codes)).tolist() == [slow(code) for code in codes]


def test_text_goes_to_codes_and_back_and_a_character_without_a_code_is_named():
    every = "".join(character for character in set(scan.characters().tolist()) if character)
    assert len(every) > 23_000
    assert "".join(scan.spelled(scan.codes_of(every))) == every
    for bad in ("😀", "\n", "\0", "\ud800", "ᠠ"):
        with pytest.raises(PackError, match="two bytes in GB18030"):
            scan.codes_of(f"好{bad}")


@pytest.mark.parametrize("code", [b"\x81\x30", b"\x80\x00", b"\0\0", b"\x001", b"1a", b"\n\0", b"\xa1\xff"])
def test_a_code_that_is_none_is_named_with_its_byte_and_spoils_only_its_line(code):
    data = header() + struct.pack("<3i", 9, 9, 3)
    data += line(b"a\0", 0, 0, 1, 1, b"\0") + line(b"b\0" + code, 0, 0, 1, 1, b"\1") + line(b"c\0", 0, 0, 1, 1, b"\2")
    places = list(dgrl.lines_of(data, "017-P03.dgrl"))
    assert [places[0].text, places[2].text] == ["a", "c"]
    offset = len(header()) + 12 + (4 + 2 + 16 + 1) + 4 + 2
    assert data[offset : offset + 2] == code
    for action in (lambda: places[1].text, lambda: places[1].read(data), lambda: dgrl.read_page(data, "017-P03.dgrl")):
        with pytest.raises(PackError, match=rf"GB18030.*0x{code.hex()} at byte {offset} of 017-P03.dgrl; leave line 2"):
            action()
    assert places[2].read(data).image.tolist() == [[2]]


# -- byte-exact both ways


@pytest.mark.parametrize("bits", [1, 8])
@pytest.mark.parametrize(
    ("made", "read", "write"),
    [(some_page, dgrl.read_page, dgrl.write_page), (some_words, dgr.read_words, dgr.write_words)],
)
def test_what_is_read_is_written_back_byte_for_byte(made, read, write, bits):
    for seed in range(150):
        data = made(random.Random(seed), bits, seed % 5)
        assert write(read(data)) == data


def test_a_page_made_of_values_is_the_file_made_by_hand():
    image = np.array([[0, 255, 255], [255, 0, 255]], np.uint8)
    for bits, pixels in ((8, image.tobytes()), (1, b"\x80\x40")):
        page = Page(50, 60, (Line(f"我A{UNKNOWN}", 1, 2, 2, 3, image),), NOTE.decode(), "GB", bits)
        codes = "我".encode("gbk") + b"A\0\xff\xff"
        by_hand = header(bits=bits) + struct.pack("<3i", 50, 60, 1) + line(codes, 1, 2, 2, 3, pixels)
        assert dgrl.write_page(page) == by_hand


def test_what_is_darker_than_the_middle_grey_is_ink_where_a_pixel_has_one_bit():
    grey = np.arange(256, dtype=np.uint8)[None]
    page = Page(9, 9, (Line("", 0, 0, 1, 256, grey),), bits=1)
    (found,) = dgrl.read_page(dgrl.write_page(page)).lines
    assert found.image[0].tolist() == [0] * 128 + [255] * 128


def test_a_changed_text_is_written_and_the_codes_it_was_read_from_are_not():
    data = header() + struct.pack("<3i", 9, 9, 1) + line(b"\xff\0b\0", 0, 0, 1, 1, b"\0")
    (found,) = dgrl.read_page(data).lines
    for text in ("xb", "x", f"{UNKNOWN}c"):
        changed = Line(text, 0, 0, 1, 1, found.image, found.codes)
        assert dgrl.read_page(dgrl.write_page(Page(9, 9, (changed,)))).lines[0].text == text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"height": 3}, r"line 1 must be uint8 \(3, 3\).*got uint8 \(2, 3\)"),
        ({"image": np.zeros((2, 3), np.int64)}, "must be uint8.*got int64"),
        ({"image": np.zeros((2, 0), np.uint8), "width": 0}, "sides 1 to 100,000"),
        ({"top": 1 << 31}, "line 1 must fit in 32 bits"),
        ({"text": "a😀"}, "two bytes in GB18030, got '😀'"),
    ],
)
def test_the_writer_names_the_line_and_field_that_cannot_be_written(changed, said):
    fields = {"text": "字", "top": 0, "left": 0, "height": 2, "width": 3, "image": np.zeros((2, 3), np.uint8)}
    with pytest.raises(PackError, match=said):
        dgrl.write_page(Page(9, 9, (Line(**(fields | changed)),)))


@pytest.mark.parametrize(
    "page",
    [
        Page(0, 9, ()),
        Page(9, 100_001, ()),
        Page(9, 9, (), bits=4),
        Page(9, 9, (), code_type="G" * 21),
        Page(9, 9, (), kind="DGR"),
        Page(9, 9, (), illustration="汉"),
    ],
)
def test_the_writer_refuses_a_page_that_its_reader_would_refuse(page):
    with pytest.raises(PackError, match="got"):
        dgrl.write_page(page)


# -- lazy


@pytest.mark.parametrize("bits", [1, 8])
def test_lines_are_located_and_read_one_by_one_as_the_whole_page_has_them(bits, tmp_path):
    data = some_page(random.Random(5), bits, 6)
    page = dgrl.read_page(data)
    (tmp_path / "page.dgrl").write_bytes(data)
    with open(tmp_path / "page.dgrl", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for source in (data, memoryview(data), bytearray(data), mapped):
            places = list(dgrl.lines_of(source))
            assert [place.index for place in places] == list(range(6))
            for place, whole in zip(places, page.lines, strict=True):
                assert source[place.offset : place.offset + len(whole.codes)] == whole.codes
                one = place.read(source)
                assert (one.text, one.top, one.left) == (whole.text, whole.top, whole.left)
                np.testing.assert_array_equal(one.image, whole.image)
    np.testing.assert_array_equal(one.image, whole.image)  # the map is closed, and what was read from it still stands


def test_locating_lines_and_reading_one_costs_that_line_not_the_page():
    height, width, count = 100, 2000, 40
    one = line(b"a\0", 0, 0, height, width, bytes(height * width // 8))
    data = header(bits=1) + struct.pack("<3i", 3000, 2100, count) + one * count
    scan.characters()
    assert peak_of(lambda: list(dgrl.lines_of(data))) < 40_000  # 8 MB decoded
    assert peak_of(lambda: list(dgrl.lines_of(data))[-1].read(data)) < 1.1 * height * width + 60_000


# -- what is refused


def small():
    return header(note=b"#\0") + struct.pack("<3i", 90, 80, 1) + line(b"1\0\xb0\xa1", 5, 6, 2, 3, b"abcdef")


def with_int(offset, value, layout="<i"):
    data = bytearray(small())
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


TEXT = 38 + 12  # where the line of `small` begins: after 36 + 2 bytes of header, and the page's size
BOX = TEXT + 4 + 4


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the header takes 4 bytes, got 0 up to the end at byte 0 of"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), r"a .dgrl file says DGRL, got .* at byte 4 of page.dgrl; leave it out"),
        (with_int(0, 35), "the header has 36 to 80 bytes, got 35 at byte 0 of"),
        (with_int(0, 1 << 30), "got 1,073,741,824 at byte 0 of"),
        (with_int(0, -1), "got -1 at byte 0 of"),
        (with_int(34, 4, "<h"), "a character's code has 2 bytes, got 4 at byte 34 of"),
        (with_int(36, 24, "<h"), "a pixel has 1 or 8 bits, got 24 at byte 36 of"),
        (with_int(38, 0), "height and width of the page are 1 to 100,000 pixels, got 0 × 80 at byte 38 of"),
        (with_int(42, 1 << 30), "got 90 × 1,073,741,824 at byte 38 of"),
        (with_int(46, 2), "0 to 1 lines fit in the rest of the file, got 2 at byte 46 of"),
        (with_int(46, -1), "got -1 at byte 46 of"),
        (with_int(46, 0), "the file ends after line 0, got 30 bytes more at byte 50 of"),
        (with_int(TEXT, 0x7FFFFFFF), "0 to 13 characters of line 1 fit .*, got 2,147,483,647 at byte 50 of"),
        (with_int(TEXT, -2), "got -2 at byte 50 of"),
        (with_int(TEXT, 13), "the box of line 1 takes 16 bytes, got 0 up to the end at byte 80 of"),
        (with_int(BOX + 8, 0), "height and width of line 1 are 1 to 100,000 pixels, got 0 × 3 at byte 66 of"),
        (with_int(BOX + 12, -3), "got 2 × -3 at byte 66 of"),
        (with_int(BOX + 8, 70_000), r"line 1 of 70,000 × 3 pixels .height × width. takes 210,000 bytes, got 6 up to"),
        (small() + b"\0", "the file ends after line 1, got 1 bytes more at byte 80 of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_refused_with_file_byte_rule_and_what_came(data, said):
    for action in (dgrl.read_page, lambda *args: list(dgrl.lines_of(*args))):
        with pytest.raises(PackError, match=said) as caught:
            action(data, "page.dgrl")
        value, _, fix = caught.value.args  # a row of the table of bad samples
        assert "page.dgrl" in value
        assert "leave it out" in fix or "copy the file again" in fix
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("made", "read"), [(some_page, dgrl.read_page), (some_words, dgr.read_words)], ids=["dgrl", "dgr"]
)
def test_a_file_cut_anywhere_is_refused_and_so_is_one_with_more_behind_it(made, read):
    data = made(random.Random(8), 8, 2)
    read(data)
    for size in range(len(data)):
        with pytest.raises(PackError, match=r"^.*, got .* at byte [\d,]+ of"):
            read(data[:size])
    with pytest.raises(PackError, match="the file ends after line 2"):
        read(data + data)


def test_lines_up_to_the_damage_are_still_found():
    data = (
        header()
        + struct.pack("<3i", 9, 9, 3)
        + 2 * line(b"a\0", 0, 0, 1, 2, b"\0\1")
        + line(b"", 0, 0, 5, 5, b"\2" * 9)
    )
    found = []
    with pytest.raises(PackError, match=r"line 3 of 5 × 5 pixels \(height × width\) takes 25 bytes, got 9"):
        found.extend(place.read(data) for place in dgrl.lines_of(data))
    assert [one.text for one in found] == ["a", "a"]


@pytest.mark.parametrize("box", [(-40, -3, 4, 4), (58, 70, 4, 15), (4_000, -9, 4, 4)])
def test_where_a_line_lies_is_kept_and_not_judged(box):
    top, left, height, width = box
    data = header() + struct.pack("<3i", 60, 80, 1) + line(b"", top, left, height, width, bytes(height * width))
    (found,) = dgrl.read_page(data).lines
    assert (found.top, found.left, found.height, found.width) == box


def test_numbers_that_promise_gigabytes_allocate_nothing():
    claims = [with_int(TEXT, 1 << 30), with_int(46, 1 << 30), with_int(0, 1 << 30)]
    sized = bytearray(small())
    struct.pack_into("<2i", sized, BOX + 8, 99_999, 99_999)
    for data in (*claims, bytes(sized)):

        def refused(data=data):
            with pytest.raises(PackError):
                dgrl.read_page(data)

        assert peak_of(refused) < 50_000


def test_as_many_lines_as_fit_take_memory_in_proportion_to_the_file():
    count = 5_000
    data = header(bits=1) + struct.pack("<3i", 9, 9, count) + line(b"", 0, 0, 1, 1, b"\x80") * count
    assert peak_of(dgrl.read_page, data) < 24 * len(data)


# -- words to lines


@pytest.mark.parametrize("seed", range(8))
def test_words_are_joined_on_blank_paper_at_their_places_the_darker_pixel_on_top(seed):
    data = some_words(random.Random(seed), 8, 5)
    words = [found for found in dgr.read_words(data).lines if found]
    page = dgr.read_page(data)
    for parts, joined in zip(words, page.lines, strict=True):
        canvas = {}
        for part in parts:
            for y, x in np.ndindex(part.image.shape):
                at = (part.top + y, part.left + x)
                canvas[at] = min(canvas.get(at, 255), part.image[y, x])
        assert (joined.top, joined.left) == (min(y for y, _ in canvas), min(x for _, x in canvas))
        assert joined.height == max(y for y, _ in canvas) - joined.top + 1
        for y, x in np.ndindex(joined.image.shape):
            assert joined.image[y, x] == canvas.get((joined.top + y, joined.left + x), 255)
        assert joined.text == "".join(part.text for part in parts)
    written = dgrl.read_page(dgrl.write_page(page))
    assert [line.text for line in written.lines] == [line.text for line in page.lines]


def test_two_words_a_world_apart_ask_for_no_paper_between_them():
    data = header(b"DGR") + struct.pack("<4i", 9, 9, 1, 2)
    data += word(b"a\0", -32768, -32768, 1, 1, b"\0") + word(b"b\0", 32767, 32767, 1, 1, b"\0")
    assert [one.text for one in dgr.read_words(data).lines[0]] == ["a", "b"]
    with pytest.raises(PackError, match=r"line 1 of far.dgr spans at most 16 times its words' 2 pixels, got 65,536"):
        dgr.read_page(data, "far.dgr")


def test_a_word_of_two_characters_cannot_be_written():
    blank = Line("天地", 0, 0, 1, 1, np.zeros((1, 1), np.uint8))
    with pytest.raises(PackError, match="word 1 of line 2 must be one character, got '天地'"):
        dgr.write_words(dgr.WordPage(9, 9, ((), (blank,))))


def test_one_format_is_not_taken_for_the_other():
    with pytest.raises(PackError, match=r"a \.dgr file says DGR, got b'DGRL"):
        dgr.read_words(some_page(random.Random(0), 8))
    with pytest.raises(PackError, match=r"a \.dgrl file says DGRL, got b'DGR"):
        dgrl.read_page(some_words(random.Random(0), 8))


# -- mutated files

NUMBERS = (-1, 0, 1, 2, 7, 35, 36, 255, 256, 32_767, 65_535, 100_000, 0x7FFFFFFF, -0x80000000)


def flipped(rng, data, others):
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(rng, data, others):
    del data[rng.randrange(len(data)) :]


def spliced(rng, data, others):
    """A piece of another file in the place of a piece of this one."""
    other = rng.choice(others)
    a, b = (sorted(rng.choices(range(len(which)), k=2)) for which in (data, other))
    data[slice(*a)] = other[slice(*b)]


def doubled(rng, data, others):
    start, end = sorted(rng.choices(range(len(data)), k=2))
    data[start:start] = data[start:end]


def renumbered(rng, data, others):
    """Another number, mostly in the first hundred bytes: the header, the page, the first line."""
    layout = rng.choice(("<i", "<i", "<h", "<b"))
    at = rng.randrange(min(len(data), rng.choice((110, len(data)))) - struct.calcsize(layout))
    (old,) = struct.unpack_from(layout, data, at)
    bound = 1 << 8 * struct.calcsize(layout)
    new = rng.choice((*NUMBERS, old + 1, old - 1, 2 * old, rng.randrange(bound))) % bound
    data[at : at + struct.calcsize(layout)] = new.to_bytes(struct.calcsize(layout), "little")


def through(data):
    """Read all that can be read, in every way there is, and write it back. Raises what the reader does."""
    if data[4:8] == b"DGR\0":
        assert dgr.write_words(dgr.read_words(data)) == data
        dgr.read_page(data)
    else:
        assert all(place.read(data).text == place.text for place in dgrl.lines_of(data))
        assert dgrl.write_page(dgrl.read_page(data)) == data


def test_mutated_files_raise_only_our_errors_in_bounded_memory_and_what_is_read_is_written_back():
    """NBTOOLS_FUZZ=100000 for the full run (two minutes)."""
    originals = [made(random.Random(n), bits) for made in (some_page, some_words) for bits in (1, 8) for n in range(8)]
    kept = {b"DGRL": 0, b"DGR\0": 0}
    worst = {b"DGRL": 0.0, b"DGR\0": 0.0}
    scan.characters()
    tracemalloc.start()
    try:
        for n in range(FUZZED):
            rng = random.Random(n)
            original = rng.choice(originals)
            kind, mutated = original[4:8], bytearray(original)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                if len(mutated) > 8:
                    rng.choice((flipped, cut, spliced, doubled, renumbered))(rng, mutated, originals)
            data = bytes(mutated)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            with contextlib.suppress(NbtoolsError):
                through(data)
                kept[kind] += 1
            peak = tracemalloc.get_traced_memory()[1] - before - 8_000  # bytes that an error and its trace may take
            worst[kind] = max(worst[kind], peak / (len(data) + 1))
    finally:
        tracemalloc.stop()
    print(f"{FUZZED:,} files, read in whole: {kept}; at most 8 kB and so many times the file's bytes: {worst}")
    assert all(FUZZED / 20 < count < FUZZED / 4 for count in kept.values())
    assert worst[b"DGRL"] < 30
    assert worst[b"DGR\0"] < 200  # a bit is a byte, and may take 16 more of paper when words are joined
