"""While a cell trains its widgets react, and nothing else changes: real kernels, real widgets, real messages."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import pytest
from kernels import PATIENCE, STACKS, Client, parent, started

EVENTS = 16

LOOPS = {"counting": "time.sleep(0.001)", "torch": "(net(x) ** 2).mean().backward()"}

TRAIN = """
import os, signal, threading, time, ipywidgets
from IPython.display import display
slider, seen = ipywidgets.IntSlider(), []
slider.observe(lambda change: (seen.append(change["new"]), print("callback")), "value")
display(slider)
{before}
print("ready", flush=True)
end = time.time() + {patience}
with Messages() as messages:
    while len(seen) < {events} and time.time() < end:
        {step}
        if messages.handle():
            print("after", len(seen), flush=True)
            display(f"shown {{len(seen)}}")
print("end", seen, messages.trouble, flush=True)
{after}
"""


def train(events: int, step: str = LOOPS["counting"], before: str = "", after: str = "") -> str:
    """A cell that runs until so many events were handled."""
    return TRAIN.format(events=events, step=step, before=before, after=after, patience=PATIENCE)


@pytest.fixture(scope="module", params=STACKS)
def kernel(request, tmp_path_factory):
    with started(request.param, tmp_path_factory.mktemp("kernel")) as client:
        yield client


def begin(kernel: Client, code: str) -> tuple[str, str]:
    """Starts a training cell and waits until it trains; the request and its slider."""
    cell = kernel.client.execute(code)
    kernel.printed("ready")
    return cell, kernel.slider()


def slide(kernel: Client, slider: str, value: int, subshell: str | None = None) -> str:
    """Moves a slider and waits until the kernel says that this is done."""
    event = kernel.slide(slider, value, subshell)
    kernel.idle(event)
    return event


@dataclass
class Recording:
    """A training cell during which a person slid a slider and asked for other things."""

    kernel: Client
    cell: str
    events: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)  # seconds from sending to the idle that ends the event
    queued: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module", params=LOOPS)
def recording(kernel, request):
    """Events come one by one, as a frontend sends them, and other requests between them."""
    setup = "import torch; net, x = torch.nn.Linear(256, 256), torch.randn(512, 256)"
    cell, slider = begin(kernel, train(EVENTS, LOOPS[request.param], setup if request.param == "torch" else ""))
    record = Recording(kernel, cell)
    for value in range(1, EVENTS + 1):
        if value in (3, 4, 9):
            record.queued.append(kernel.client.execute(f"print('queued', {value})"))
        if value == 5:
            record.asked += [kernel.client.kernel_info(), kernel.client.complete("displ")]
        sent = time.monotonic()
        record.events.append(kernel.slide(slider, value))
        record.latencies.append(kernel.idle(record.events[-1])["arrived"] - sent)
    kernel.idle(record.queued[-1])
    return record


def test_each_stack_is_the_one_it_is_named_for(kernel):
    lists = Path(__file__).parent / "stacks" / f"{kernel.stack}.txt", Path(__file__).parent.parent / "constraints.txt"
    pins = next(path for path in lists if path.exists()).read_text().splitlines()
    assert f"ipykernel=={kernel.run('import ipykernel; print(ipykernel.__version__)').strip()}" in pins


def test_every_event_is_handled_while_its_cell_runs(recording):
    assert f"end {list(range(1, EVENTS + 1))} None\n" in recording.kernel.text(recording.cell)


def test_an_event_is_handled_within_a_quarter_of_a_second(recording):
    assert quantiles(recording.latencies, n=20)[-1] <= 0.25, recording.latencies


def test_each_event_is_busy_and_idle_once_so_that_sliders_do_not_stall(recording):
    for event in recording.events:
        assert recording.kernel.states(event) == ["busy", "idle"]


def test_what_the_cell_prints_and_shows_after_an_event_lands_in_its_own_output(recording):
    own = [m["content"] for m in recording.kernel.said if parent(m) == recording.cell]
    text = "".join(content["text"] for content in own if "text" in content)
    shown = [content["data"]["text/plain"] for content in own if "data" in content and "metadata" in content]
    for value in range(1, EVENTS + 1):
        assert f"after {value}\n" in text
        assert f"'shown {value}'" in shown
    assert "callback" not in text


def test_cells_queued_meanwhile_run_after_it_in_order_and_once(recording):
    kernel, cells = recording.kernel, [recording.cell, *recording.queued]
    own = [m for m in kernel.said if parent(m) in cells and (m["msg_type"] == "execute_input" or over(m))]
    assert [(parent(m), over(m)) for m in own] == [(cell, end) for cell in cells for end in (False, True)]
    for request, value in zip(recording.queued, (3, 4, 9), strict=True):
        assert kernel.reply(request)["content"]["status"] == "ok"
        assert kernel.text(request) == f"queued {value}\n"


def over(message: dict) -> bool:
    return message["content"].get("execution_state") == "idle"


def test_other_requests_are_not_lost(recording):
    info, complete = map(recording.kernel.reply, recording.asked)
    assert info["msg_type"] == "kernel_info_reply"
    assert "display" in complete["content"]["matches"]


def test_an_interrupt_ends_the_cell_and_the_kernel_goes_on(kernel):
    cell, slider = begin(kernel, train(9))
    slide(kernel, slider, 1)
    kernel.manager.interrupt_kernel()
    kernel.idle(cell)
    assert kernel.errors(cell) == ["KeyboardInterrupt"]
    slide(kernel, slider, 2)
    assert kernel.run("print(seen)") == "[1, 2]\n"


def test_an_interrupt_in_a_callback_is_the_cells(kernel):
    cell, slider = begin(
        kernel, train(9, before="slider.observe(lambda change: os.kill(os.getpid(), signal.SIGINT), 'value')")
    )
    event = slide(kernel, slider, 1)
    kernel.idle(cell)
    assert kernel.errors(cell) == ["KeyboardInterrupt"]
    assert kernel.states(event) == ["busy", "idle"]


STORM = """
armed, hits = False, 0
def interrupt(*_):
    if armed: raise KeyboardInterrupt
def storm():
    while not os.path.exists("stop"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.0005)
signal.signal(signal.SIGINT, interrupt)
thread = threading.Thread(target=storm)
thread.start()
"""

UNDER_FIRE = """if os.path.exists("stop"): break
        try:
            armed, messages._due = True, 0
            messages.handle()
        except KeyboardInterrupt: hits += 1
        finally: armed = False"""

CALM = "thread.join(); os.remove('stop'); print(hits > 20)"


def test_no_interrupt_at_any_moment_loses_a_request_or_misplaces_an_output(kernel):
    cell, slider = begin(kernel, train(1000, UNDER_FIRE, STORM, CALM))
    queued = []
    for value in range(1, 41):
        queued.append(kernel.client.execute(f"print({value})"))
        slide(kernel, slider, value)
    (Path(kernel.manager.connection_file).parent / "stop").touch()
    kernel.idle(queued[-1])
    assert kernel.text(cell).endswith(" None\nTrue\n")
    assert [kernel.text(request) for request in queued] == [f"{value}\n" for value in range(1, 41)]


def test_what_a_callback_raises_is_shown_and_training_goes_on(kernel):
    cell, slider = begin(kernel, train(2, before="slider.observe(lambda change: 1 / 0, 'value')"))
    events = [slide(kernel, slider, value) for value in (1, 2)]
    kernel.idle(cell)
    assert "end [1, 2] None" in kernel.text(cell)
    assert [kernel.errors(event) for event in events] == [["ZeroDivisionError"]] * 2


def test_what_even_the_kernels_own_handler_raises_is_shown_and_training_goes_on(kernel):
    broken = "before = handlers['comm_msg']; handlers['comm_msg'] = lambda *_: seen.append(7) or 1 / 0"
    cell, slider = begin(
        kernel,
        train(
            1, before=f"handlers = get_ipython().kernel.shell_handlers; {broken}", after="handlers['comm_msg'] = before"
        ),
    )
    event = slide(kernel, slider, 1)
    kernel.idle(cell)
    assert "end [7] None" in kernel.text(cell)
    assert "ZeroDivisionError" in kernel.text(event)
