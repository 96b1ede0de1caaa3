"""A run under its live view in a notebook's kernel, and what it leaves there when it is over."""

from html import escape
from typing import Any

import browser
import pytest
from kernels import parent, started

from nbtools.live import view
from nbtools.live.panel import VIEW

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
SETUP = """
import nbtools as nb, toy
from pathlib import Path
from PIL import Image
from nbtools.live import draw
Image.new("L", (2, 2)).save("tiny.png")
draw.png = lambda *_: Path("tiny.png").read_bytes()  # drawing takes longer than all that is shown here
pack = toy.make_pack(Path("toy"))
plan = toy.PLAN.replace(epochs=1)
"""


@pytest.fixture(scope="module", params=["colab", pytest.param("newest", marks=pytest.mark.full)])
def kernel(request, tmp_path_factory):
    with started(request.param, tmp_path_factory.mktemp("kernel")) as client:
        client.run(SETUP)
        yield client


def test_training_that_diverges_is_a_sentence_in_the_notebook_and_no_page_of_traceback(kernel):
    request = kernel.client.execute('nb.fit(toy, pack, plan.replace(lr=1e30), "ruined", receipt=False)')
    kernel.end(request)
    [error] = kernel.own("error", request)
    assert error["ename"] == "Diverged"
    (line,) = error["traceback"]
    assert line.startswith("Diverged: Training diverged at lr 1e30: ")
    assert "1 epochs" in kernel.run('print(len(nb.fit(toy, pack, plan, "ruined", receipt=False).summary()), "epochs")')


@pytest.mark.browser
def test_what_stays_of_a_run_needs_neither_jupyter_nor_another_origin_nor_the_network(kernel, chromium):
    """As in VS Code and Colab: in a frame of an origin of its own, by a policy of inline scripts and data alone."""
    request = kernel.client.execute('run = nb.fit(toy, pack, plan, "stays", receipt=False)')
    kernel.end(request)
    views = [each["data"][VIEW]["model_id"] for each in kernel.own("display_data", request) if VIEW in each["data"]]
    comms = kernel.run("print(*get_ipython().kernel.comm_manager.comms)").split()
    assert (len(views), {*views} <= {*comms}, len(comms) < 30) == (1, True, True), "of three runs with their own panels"
    page = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    for message in kernel.said:
        if parent(message) == request and message["msg_type"] in ("display_data", "update_display_data"):
            data = message["content"]["data"]
            if "image/png" in data:
                page += f'<div><img src="data:image/png;base64,{data["image/png"]}"></div>'
            page += f"<div>{data.get('text/html', '')}</div>"
    errors, requests = [], []
    with browser.chromium(chromium) as window:
        for sandbox in (None, "allow-scripts", ""):
            framed = f'<iframe sandbox="{sandbox}" srcdoc="{escape(page)}" width="900" height="700"></iframe>'
            tab = window.new_page()
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.on("request", lambda request: requests.append(request.url))
            tab.set_content(page if sandbox is None else framed)
            inside: Any = tab if sandbox is None else tab.frame_locator("iframe")
            picture, charts, plots = map(inside.locator, ("img", "svg", ".nbt-plot"))
            if sandbox == "":
                picture.first.wait_for()
                assert charts.count() == 0
            else:
                charts.first.wait_for()
                assert charts.count() >= 4
                plots.first.evaluate("plot => plot.dataset.low = plot.dataset.high = 0.9996")
                plots.first.hover()
                assert inside.locator(".nbt-at b").first.inner_text() == "0.9996", "a share just below 1 is not 1"
    assert errors == []
    assert [url for url in requests if not url.startswith(("data:", "about:"))] == []


@pytest.mark.browser
def test_on_colab_too_the_picture_of_a_run_in_progress_hides_behind_the_live_view(chromium):
    parts = ('<p class="nbtools-live">live</p>', view.STILL, '<img alt="the picture">')
    page = "".join(f'<div class="display_data">{part}</div>' for part in parts)
    with browser.chromium(chromium) as window:
        (tab := window.new_page()).set_content(f'<div id="output-body">{page}</div>')
        assert [each.is_visible() for each in tab.locator(".display_data").all()] == [True, False, False]
