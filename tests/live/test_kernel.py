"""While a cell trains its widgets react, and nothing else changes: real kernels, real widgets, real messages."""

from types import SimpleNamespace

import pytest
from kernels import IPYKERNEL_6, LIMIT, STACKS, Client, over, parent, started

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
    """A cell that runs until so many events were handled."""
    return TRAIN.format(events=events, before=before, after=after, patience=LIMIT)


OLDER = [pytest.param(name, marks=pytest.mark.full) if name == "ipykernel-7.3" else name for name in STACKS]


@pytest.fixture(scope="module", params=OLDER)
def kernel(request, tmp_path_factory):
    with started(request.param, tmp_path_factory.mktemp("kernel")) as client:
        yield client


def begin(kernel: Client, code: str) -> tuple[str, str]:
    """Starts a training cell and waits until it trains; the request and its slider."""
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
    """After each the kernel is busy with the cell again."""
    assert f"end {list(range(1, EVENTS + 1))} None\n" in recording.kernel.text(recording.cell)
    states = [m for m in recording.kernel.said if m["msg_type"] == "status"]
    for event in recording.events:
        assert recording.kernel.states(event) == ["busy", "idle"]
        idle = next(i for i, m in enumerate(states) if over(m) and parent(m) == event)
        assert (states[idle + 1]["content"]["execution_state"], parent(states[idle + 1])) == ("busy", recording.cell)


def test_what_the_cell_prints_and_shows_after_an_event_lands_in_its_own_output(recording):
    own = [m["content"] for m in recording.kernel.said if parent(m) == recording.cell]
    text = "".join(content["text"] for content in own if "text" in content)
    shown = [content["data"]["text/plain"] for content in own if "data" in content and "metadata" in content]
    assert [f"after {value}\n" in text for value in range(1, EVENTS + 1)] == EVENTS * [True]
    assert {f"'shown {value}'" for value in range(1, EVENTS + 1)} <= {*shown}
    assert "callback" not in text


def test_cells_queued_meanwhile_run_after_it_in_order_and_once(recording):
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
