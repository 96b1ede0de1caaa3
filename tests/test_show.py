"""Tables: nothing in a cell is markup, columns line up, what is unknown is a dash."""

import math

import pytest

from nbtools import show


def test_no_cell_header_or_caption_becomes_markup_or_steers_the_terminal():
    page = show.html(["<b>"], [["<img src=x onerror=alert(1)>"], ['"&'], ["x" * 200]], caption="</table><script>")
    assert not [tag for tag in ("<img", "<b>", "<script", "</table><") if tag in page]
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "&amp;" in page
    assert "x" * 200 in page, "pandas would cut a long text"
    assert "\x1b" not in show.text(["file"], [["\x1b[2Jgone\n"]])


def test_terminal_columns_line_up_with_wide_characters_and_what_holds_nothing_is_left_out():
    rows = [("漢字", "1.5 GB", None, 7, "a"), ("0001.png", "12 GB", "", 12.5, "b"), ("x", "9 GB", None, None, "c")]
    assert show.text(["name", "size", "note", "n", "why"], rows).split("\n") == [
        "name        size     n  why",
        "────────  ──────  ────  ───",
        "漢字      1.5 GB     7  a",
        "0001.png   12 GB  12.5  b",
        "x           9 GB     –  c",
    ]
    drawn = show.text(["why", "n"], [["word " * 40, 1], ["b", 2]])
    assert drawn.split().count("word") == 40
    assert max(map(len, drawn.split("\n"))) < 80
    assert show.text(["a"], []) == ""


SHOWN = {
    0.002 * 2**0.5: "0.00283",
    0.1 + 0.2: "0.3",
    3e-4: "0.0003",
    0.99995: "0.99995",
    1000.0: "1000",
    123456.789: "123457",
    2 / 3 * 1e-9: "6.67e-10",
    1e-6: "1e-6",
    math.inf: "inf",
    None: "–",
    True: "yes",
    False: "no",
    3: "3",
}


@pytest.mark.parametrize(("value", "text"), SHOWN.items())
def test_values_read_as_they_were_typed_and_computed_floats_have_three_digits(value, text):
    assert show.shown(value) == text


MEASURED = {
    480.8672: "481",
    0.00494975: "0.00495",
    31.24: "31.2",
    0.9731: "0.973",
    0.99954: "0.9995",
    0.9996: "0.9996",
    9.996: "10.0",
    1.0: "1.00",
    0.000495: "0.000495",
    2e-7: "2.00e-7",
    123_456.7: "123,457",
    2.5e12: "2.50e12",
    -0.5: "-0.500",
    0.0: "0",
    math.inf: "inf",
}


@pytest.mark.parametrize(("value", "text"), MEASURED.items())
def test_measured_numbers_have_three_digits_and_a_share_below_one_does_not_show_as_one(value, text):
    assert show.number(value) == text


def test_sizes_are_decimal_and_times_and_shares_have_units():
    sizes = {
        0: "0 B",
        999: "999 B",
        1500: "1.5 kB",
        999_600: "1.0 MB",
        123_456_789: "123 MB",
        1.7e9: "1.7 GB",
        2.5e12: "2.5 TB",
    }
    assert [show.size(count) for count in sizes] == list(sizes.values())
    assert [show.timing(seconds) for seconds in (0.2031, 1.3512, 18.0, 135.2)] == [
        "203 ms",
        "1.35 s",
        "18.0 s",
        "2 min 15 s",
    ]
    assert [show.percent(0.943), show.percent(0.0043, 1)] == ["94 %", "0.4 %"]
