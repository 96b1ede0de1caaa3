"""While a cell trains its widgets react, and nothing else changes: real kernels, widgets and messages."""

import re
from html import escape
from types import SimpleNamespace
from typing import Any

import browser
import pytest
from jupyters import IPYKERNEL_6, LIMIT, STACKS, Client, over, parent, started

from nbtools.live import view
from nbtools.live.panel import VIEW

EVENTS = 10
TRAIN = """
import os, signal, threading, time, ipywidgets
from IPython.display import display
from nbtools.live import Messages
slider, seen = ipywidgets.IntSlider(), []
slider.observe(lambda change: (seen.append(change["new"]), print("callback")), "value")
display(slider)
{before}
print("ready", flush=True)
end = time.time() + {patience}
with Messages() as messages:
    while len(seen) < {events} and time.time() < end:
        time.sleep(0.001)
        if messages.handle():
            print("after", len(seen), flush=True)
            display(f"shown {{len(seen)}}")
print("end", seen, messages.trouble, flush=True)
{after}
"""


def train(events: int, before: str = "", after: str = "") -> str:
    return TRAIN.format(events=events, before=before, after=after, patience=LIMIT)


OLDER = [pytest.param(name, marks=pytest.mark.full) if name == "ipykernel-7.3" else name for name in STACKS]


@pytest.fixture(scope="module", params=OLDER)
def kernel(request, tmp_path_factory):
    with started(request.param, tmp_path_factory.mktemp("kernel")) as client:
        yield client


def begin(kernel: Client, code: str) -> tuple[str, str]:
    cell = kernel.client.execute(code)
    kernel.printed("ready")
    return cell, kernel.slider()


@pytest.fixture(scope="module")
def recording(kernel):
    """A cell during which the user slid a slider, one event after another, and ran other cells between them."""
    cell, slider = begin(kernel, train(EVENTS))
    events, queued = [], []
    for value in range(1, EVENTS + 1):
        if value in (3, 4, 9):
            queued.append(kernel.client.execute(f"print('queued', {value})"))
        events.append(kernel.slide(slider, value))
    kernel.end(queued[-1])
    return SimpleNamespace(kernel=kernel, cell=cell, events=events, queued=queued)


def test_every_event_is_handled_while_its_cell_runs_busy_and_idle_once_so_that_sliders_do_not_stall(recording):
    assert f"end {list(range(1, EVENTS + 1))} None\n" in recording.kernel.text(recording.cell)
    states = [m for m in recording.kernel.said if m["msg_type"] == "status"]
    for event in recording.events:
        assert recording.kernel.states(event) == ["busy", "idle"]
        idle = next(i for i, m in enumerate(states) if over(m) and parent(m) == event)
        assert (states[idle + 1]["content"]["execution_state"], parent(states[idle + 1])) == ("busy", recording.cell)


def test_what_the_cell_prints_lands_in_its_own_output_and_cells_queued_meanwhile_run_after_it_in_order(recording):
    own = [m["content"] for m in recording.kernel.said if parent(m) == recording.cell]
    text = "".join(content["text"] for content in own if "text" in content)
    shown = [content["data"]["text/plain"] for content in own if "data" in content and "metadata" in content]
    assert [f"after {value}\n" in text for value in range(1, EVENTS + 1)] == EVENTS * [True]
    assert {f"'shown {value}'" for value in range(1, EVENTS + 1)} <= {*shown}
    assert "callback" not in text
    kernel, cells = recording.kernel, [recording.cell, *recording.queued]
    own = [m for m in kernel.said if parent(m) in cells and (m["msg_type"] == "execute_input" or over(m))]
    assert [(parent(m), over(m)) for m in own] == [(cell, end) for cell in cells for end in (False, True)]
    for request, value in zip(recording.queued, (3, 4, 9), strict=True):
        assert kernel.reply(request)["content"]["status"] == "ok"
        assert kernel.text(request) == f"queued {value}\n"


def test_what_a_callback_raises_is_shown_and_training_goes_on(kernel):
    cell, slider = begin(kernel, train(2, before="slider.observe(lambda change: 1 / 0, 'value')"))
    events = [kernel.slide(slider, value) for value in (1, 2)]
    kernel.end(cell)
    assert "end [1, 2] None" in kernel.text(cell)
    assert [kernel.errors(event) for event in events] == [["ZeroDivisionError"]] * 2


def test_a_cell_that_fails_stops_the_queued_cells_as_ever_and_no_others(kernel):
    cell, slider = begin(kernel, train(1, after="1 / 0"))
    queued, asked = kernel.client.execute("print('queued')"), kernel.client.kernel_info()
    kernel.slide(slider, 1)
    kernel.end(cell)
    assert kernel.reply(queued)["content"]["status"] == "aborted"
    assert kernel.reply(asked)["msg_type"] == "kernel_info_reply"
    assert kernel.run("print('next')") == "next\n"


def test_events_that_come_over_a_subshell_are_handled_too(kernel):
    """As JupyterLab ≥ 4.4 sends them, whose page deletes it when it is closed: 7.3 handles them in the subshell."""
    info = kernel.reply(kernel.client.kernel_info())["content"]

    def control(kind: str, **content) -> str | None:
        if "kernel subshells" in info.get("supported_features", []):
            kernel.client.control_channel.send(kernel.client.session.msg(f"{kind}_subshell_request", content))
            return kernel.client.control_channel.get_msg(timeout=LIMIT)["content"].get("subshell_id")

    subshell = control("create")
    assert (subshell is None) == (kernel.stack in IPYKERNEL_6)
    kernel.run("import ipywidgets; form = ipywidgets.IntSlider(); display(form)")
    kernel.slide(form := kernel.slider(), 1, subshell)
    cell, slider = begin(kernel, train(6))
    events = [kernel.slide(slider, value, subshell if value % 3 else None) for value in range(1, 3)]
    control("delete", subshell_id=subshell)
    subshell = control("create")
    events += [kernel.slide(form, 2, subshell)]
    events += [kernel.slide(slider, value, subshell if value % 3 else None) for value in range(3, 7)]
    kernel.end(cell)
    assert "end [1, 2, 3, 4, 5, 6] None" in kernel.text(cell)
    assert [kernel.states(event) for event in events] == [["busy", "idle"]] * 7
    assert kernel.run("print(form.value)") == "2\n"


POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
SETUP = """
import ipywidgets, nbtools as nb, toy
ipywidgets.Widget.close_all()
from pathlib import Path
from PIL import Image
from nbtools.live import draw
Image.new("L", (2, 2)).save("tiny.png")
draw.png = lambda *_: Path("tiny.png").read_bytes()  # drawing takes longer than all that is shown here
pack = toy.make_pack(Path("toy"))
plan = toy.PLAN.replace(epochs=1)
"""


VIEWED = ["colab", pytest.param("newest", marks=pytest.mark.full)]
viewed = pytest.mark.parametrize("kernel", VIEWED, indirect=True, scope="module")


@pytest.fixture(scope="module")
def session(kernel):
    kernel.run(SETUP)
    return kernel


@viewed
def test_training_that_diverges_is_a_sentence_in_the_notebook_and_no_page_of_traceback(session):
    request = session.client.execute('nb.fit(toy, pack, plan.replace(lr=1e30), "ruined", receipt=False)')
    session.end(request)
    [error] = session.own("error", request)
    assert error["ename"] == "Diverged"
    (line,) = error["traceback"]
    assert line.startswith("Diverged: Training diverged at lr 1e30: ")
    assert "1 epochs" in session.run('print(len(nb.fit(toy, pack, plan, "ruined", receipt=False).summary()), "epochs")')


@pytest.mark.browser
@viewed
def test_what_stays_of_a_run_needs_neither_jupyter_nor_another_origin_nor_the_network(session, chromium):
    """As in VS Code and Colab: in a frame of an origin of its own, by a policy of inline scripts and data alone."""
    request = session.client.execute('run = nb.fit(toy, pack, plan, "stays", keep="kept", receipt=False)')
    session.end(request)
    views = [each["data"][VIEW]["model_id"] for each in session.own("display_data", request) if VIEW in each["data"]]
    comms = session.run("print(*get_ipython().kernel.comm_manager.comms)").split()
    assert (len(views), {*views} <= {*comms}, len(comms) < 30) == (1, True, True), "of three runs with their own panels"
    page = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    for message in session.said:
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
                facts = inside.locator(".nbt-top").first.inner_text()
                assert re.search(r"done[^%]*1 of 1[^%]*took", facts), "what is true at the end"
                assert not re.search("kept|left", facts), "no copy or remaining time"
                plots.first.evaluate("plot => plot.dataset.low = plot.dataset.high = 0.9996")
                plots.first.hover()
                assert inside.locator(".nbt-at b").first.inner_text() == "0.9996", "a share just below 1 is not 1"
    assert errors == []
    assert [url for url in requests if not url.startswith(("data:", "about:"))] == []


CELL = """
import gc, torch
def train(run, hidden, *callbacks):
    nb.fit(toy, pack, plan.replace(hidden=hidden), run, receipt=False, callbacks=callbacks)
def used():
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    print("used", sum({t.data_ptr(): t.nbytes for t in tensors}.values()) // 2**20, "MB")
train("first", 16)
used()
"""


@pytest.mark.full
@viewed
def test_a_cell_that_fails_amid_training_leaves_no_memory_behind_and_the_next_one_trains(session):
    used, errors = [session.run(CELL)], []
    for fails in (", lambda *_: 1 / 0", ""):
        cell = session.client.execute(f'train("large", 400_000{fails})')  # 22 MB of weights
        session.end(cell)
        errors += [session.errors(cell)]
        used += [session.run("used()")]
    before, *after = (int(re.findall(r"used (\d+) MB", text)[0]) for text in used)
    assert after == pytest.approx([before] * 2, abs=1)
    assert errors == [["ZeroDivisionError"], []]


@pytest.mark.browser
def test_on_colab_too_the_picture_of_a_run_in_progress_hides_behind_the_live_view(chromium):
    parts = ('<p class="nbtools-live">live</p>', view.STILL, '<img alt="the picture">')
    page = "".join(f'<div class="display_data">{part}</div>' for part in parts)
    with browser.chromium(chromium) as window:
        (tab := window.new_page()).set_content(f'<div id="output-body">{page}</div>')
        assert [each.is_visible() for each in tab.locator(".display_data").all()] == [True, False, False]
