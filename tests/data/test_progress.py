"""Bars of long work: time left that learns, and in a notebook an output of their own of which a sentence stays."""

import re

import kernels

BARS = """
import time
from nbtools.data import bar
with bar(total=10**7, desc="copy", unit="B", unit_scale=True) as copied:
    for _ in range(3):
        time.sleep(0.3)
        copied.update(2_500_000)
"""


def test_in_a_notebook_a_bar_is_a_line_of_the_cell_with_its_speed_and_the_time_left(tmp_path):
    with kernels.started(kernels.MINE, tmp_path) as kernel:
        cell = kernel.client.execute(BARS)
        kernel.end(cell)
    streams = [message["content"] for message in kernel.said if message["msg_type"] == "stream"]
    assert {stream["name"] for stream in streams} == {"stdout"}, "stderr would be red"
    text = "".join(stream["text"] for stream in streams)
    assert re.search(r"copy:  50%.*5\.00M/10\.0M \[00:00<00:0\d, *[\d.]+MB/s\]", text), text
    assert len(text) < 2000, "at most four updates a second"
