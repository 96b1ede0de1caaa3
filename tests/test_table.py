"""Tables: nothing in a cell is markup, columns line up, what is unknown is a dash."""

import math

import pytest

from nbtools import table


def test_no_cell_header_or_caption_becomes_markup():
    page = table.html(["<b>"], [["<img src=x onerror=alert(1)>"], ['"&']], caption="</table><script>")
    assert not [tag for tag in ("<img", "<b>", "<script", "</table><") if tag in page]
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "&quot;&amp;" in page


def test_terminal_columns_line_up_with_wide_characters_and_numbers_stand_right():
    lines = table.text(["name", "n", "why"], [("漢字", 7, "a"), ("ab", 12.5, "b"), ("x", None, "c")], width=80).split(
        "\n"
    )
    assert lines[0] == "name     n  why"
    assert lines[2:] == ["漢字     7  a", "ab    12.5  b", "x        –  c"]


def test_unknown_is_a_dash_and_truth_a_word():
    assert [table.shown(value) for value in (None, True, False, 1e-3, 3)] == ["–", "yes", "no", "0.001", "3"]


def test_a_long_last_column_wraps_at_words_and_keeps_its_place():
    reason = "the guide's tier for a GPU of 24 GB, capped by the data set"
    lines = table.text(["field", "why"], [("batch_size", reason)], width=40).split("\n")
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line[12:].strip() for line in lines[2:]) == reason


def test_a_cell_cannot_steer_the_terminal():
    assert "\x1b" not in table.text(["file"], [["\x1b[2Jgone\n"]])


def test_a_ragged_row_is_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        table.html(["a"], [["1"], ["1", "2"]])
    with pytest.raises(ValueError, match="1 headers cannot have rows of 2 cells"):
        table.html(["a"], [["1", "2"]])


def test_a_table_without_rows_still_shows_its_headers():
    assert table.text(["a", "b"], []).split("\n")[0] == "a  b"
    assert "<th" in table.html(["a"], [])


def test_numbers_with_units_stand_right_and_file_names_left():
    rows = [("0001.png", "1.5 GB", "97 %", 1e-6, "24.3×"), ("2.png", "12 GB", "8 %", None, "9×")]
    assert table.numeric(["file", "size", "use", "lr", "ratio"], rows) == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.002 * 2**0.5, "0.00283"),
        (0.1 + 0.2, "0.3"),
        (3e-4, "0.0003"),
        (0.99995, "0.99995"),
        (1000.0, "1000"),
        (123456.789, "123457"),
        (2 / 3 * 1e-9, "6.67e-10"),
        (math.inf, "inf"),
    ],
)
def test_a_float_is_shown_as_it_was_typed_and_a_computed_one_in_three_digits(value, text):
    assert table.shown(value) == text


def test_a_count_and_its_noun_agree():
    assert [table.plural(2, noun) for noun in ("batch", "class", "epoch")] == ["2 batches", "2 classes", "2 epochs"]
    assert [table.plural(n, "thread") for n in (0, 1, 2, 1300)] == [
        "0 threads",
        "1 thread",
        "2 threads",
        "1,300 threads",
    ]
