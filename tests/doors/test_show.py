"""Tables: nothing in a cell is markup, columns line up, what is unknown is a dash. Values are written in one way."""

import math

from nbtools import show


def test_no_cell_header_or_caption_becomes_markup_or_steers_the_terminal():
    page = show.html(["<b>"], [["<img src=x onerror=alert(1)>"], ['"&'], [", 9 s" * 40]], caption="</table><script>")
    assert not [tag for tag in ("<img", "<b>", "<script", "</table><") if tag in page]
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert ", 9\xa0s" * 40 in page, "pandas would cut a long text; a unit stays with its number"
    assert "\x1b" not in show.text(["file"], [["\x1b[2Jgone\n"]])


def test_terminal_columns_line_up_with_wide_characters_and_what_holds_nothing_is_left_out():
    rows = [("漢字", "1.5 GB", None, 7), ("0001.png", "12 GB", "", 12.5), ("x", "9 GB", None, None)]
    said = "name      size    n|漢字      1.5 GB  7|0001.png  12 GB   12.5|x         9 GB    –"
    assert show.text(["name", "size", "note", "n"], rows).replace("\n", "|") == said
    assert show.text(["a"], []) == ""


SHOWN = {0.002 * 2**0.5: "0.00283", 3e-4: "0.0003", 123456.789: "123457", 1e-6: "1e-6", None: "none", True: "yes"}
MEASURED = {480.8672: "481", 0.00494975: "0.00495", 0.99954: "0.9995", 9.996: "10.0", 2e-7: "2.00e-7", math.inf: "inf"}


def test_values_read_as_they_were_typed_and_measured_ones_have_three_digits_but_no_share_below_one_shows_as_one():
    assert {value: show.shown(value) for value in SHOWN} == SHOWN
    assert {value: show.number(value) for value in MEASURED} == MEASURED
