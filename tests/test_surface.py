"""A run under its live view in a notebook's kernel, and what it leaves there when it is over."""

import re
from pathlib import Path

import numpy as np
import pytest
import toy
from kernels import Client, parent, started

from nbtools.live import View
from nbtools.live.samples import Preview
from nbtools.train import History

SETUP = f"""
import sys, threading, time; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
import torch; torch.set_num_threads(1)
import nbtools as nb, toy
from nbtools.live import surface
from pathlib import Path
surface.LOOK_EVERY = 0.0
from io import BytesIO
from types import SimpleNamespace
from PIL import Image
from nbtools.live import png
file = BytesIO()
Image.new("L", (2, 2)).save(file, "png")
png.draw = lambda *_: file.getvalue()  # drawing takes longer than all that is shown here
pack = toy.make_pack(Path("toy"))
plan = toy.PLAN.replace(epochs=1)
def task(**hooks):
    return SimpleNamespace(**dict(vars(toy), preview=None, **hooks))
"""
TURNED_EARLY = """
def model(card, plan):
    other = threading.Thread(target=setattr, args=(panel.fields["lr"], "value", "0.005"))
    other.start(); other.join()
    return toy.model(card, plan)
panel = nb.Panel(plan)
run = nb.fit(task(model=model), pack, panel, "early", receipt=False)
print(run.plan.lr, [row["what"] for row in run.history.of("change")], panel.plan == run.plan)
"""
OWN_DATA = """
def loss(outputs, y):
    steps.append(len(y))
    if len(steps) == 5:
        panel.fields["lr"].value = "0.005"
    return torch.nn.functional.cross_entropy(outputs, y)
steps, panel = [], nb.Panel(nb.Plan(epochs=40, lr=0.01, batch_size=16))
images = [(torch.rand(3, 8, 8), i % 2) for i in range(100)]
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
run = nb.fit(nb.classify(net, loss=loss), nb.pack(images), panel, "own_data", receipt=False)
print(run.plan.lr, [row["what"] for row in run.history.of("change")], panel.plan == run.plan)
"""
ASKED_AMID_AN_EVALUATION = """
def batch(raw, plan, draws):
    if draws is None and panel.running and not notes:
        panel.fields["lr"].value = "0.005"
        notes.append(panel.form.pending.value)
    return toy.batch(raw, plan, draws)
notes, panel = [], nb.Panel(plan.replace(epochs=2))
run = nb.fit(task(batch=batch), pack, panel, "amid", receipt=False)
print(notes, [row["what"] for row in run.history.of("change")], repr(panel.form.pending.value))
"""
TWICE = """
def batch(raw, plan, draws):
    if draws is not None and len(notes) < plan.epochs:
        notes.append(panel.form.pending.value)
    return toy.batch(raw, plan, draws)
notes = []
for epochs in (1, 2):
    panel = nb.Panel(plan.replace(epochs=epochs))
    nb.fit(task(batch=batch), pack, panel, "twice", receipt=False)
print(notes)
"""
SLOW_STEPS = """
def batch(raw, plan, draws):
    if draws is not None and len(notes) < 3:
        notes.append(panel.form.pending.value)
        time.sleep(1.2)
    return toy.batch(raw, plan, draws)
notes, panel = [], nb.Panel(plan)
run = nb.fit(task(batch=batch), pack, panel, "slow", receipt=False)
print(notes, repr(panel.form.pending.value))
"""
ASKED_ELSEWHERE = """
go, notes, watching, begin = threading.Event(), [], [], nb.Panel.begin
nb.Panel.begin = lambda self, *given: (begin(self, *given), watching.append(self))
def batch(raw, plan, draws):
    if draws is not None: go.wait()
    time.sleep(0.01)
    return toy.batch(raw, plan, draws)
def wait(words):
    while words not in panel.form.pending.value: time.sleep(0.01)
    notes.append(words)
def user():
    global panel
    while not watching: time.sleep(0.01)
    [panel] = watching
    panel.fields["lr"].value = "0.005"
    wait("after this step: lr 0.01 → 0.005")
    while not Path("held/control.json").exists(): time.sleep(0.01)
    panel.form.actions["pause"].click()
    wait("pausing after this step")
    time.sleep(1)
    wait("pausing after this step")
    wait("after this step: lr 0.01 → 0.005")
    go.set()
    wait("paused between two steps")
    panel.form.actions["pause"].click()
    while panel.requests.state.applied.lr != 0.005: time.sleep(0.01)
    notes.append("after this step" in panel.form.pending.value)
    panel.form.actions["stop"].click()
given = (task(batch=batch), pack, plan.replace(epochs=1000), "held", None, False, False)
threads = [threading.Thread(target=nb.fit, args=given), threading.Thread(target=user)]
for thread in threads: thread.start()
nb.watch("held", toy)
for thread in threads: thread.join()
nb.Panel.begin = begin
print(*notes, sep="|")
"""


@pytest.fixture(scope="module", params=["colab", pytest.param("newest", marks=pytest.mark.full)])
def kernel(request, tmp_path_factory):
    with started(request.param, tmp_path_factory.mktemp("kernel")) as client:
        client.run(SETUP)
        yield client


def open_widgets(kernel: Client) -> set[str]:
    """Those that were opened so far and not closed, as a frontend counts them."""
    found = set()
    for message in kernel.said:
        if message["msg_type"] == "comm_open":
            found.add(message["content"]["comm_id"])
        if message["msg_type"] == "comm_close":
            found.discard(message["content"]["comm_id"])
    return found


def test_a_run_leaves_nothing_of_its_picture_behind(kernel):
    before = len(open_widgets(kernel))
    kernel.run("form = nb.Panel(plan)")
    form = len(open_widgets(kernel)) - before
    assert "1 epochs" in kernel.run('print(nb.fit(toy, pack, plan, "own", receipt=False).plan.epochs, "epochs")')
    assert len(open_widgets(kernel)) == before + 2 * form


def test_where_no_picture_can_be_drawn_it_is_said_and_so_is_the_rest(kernel):
    said = kernel.run(
        """
from nbtools.live import view as live
real, live.picture = live.picture, lambda *rest, **more: 1 / 0
run = nb.fit(toy, pack, plan, "unseen", receipt=False)
live.picture = real
"""
    )
    assert "no picture: ZeroDivisionError" in said
    assert "no longer drawn" in said


def test_a_panel_that_the_user_made_outlives_the_run(kernel):
    kernel.run("given = nb.Panel(plan)")
    panel = open_widgets(kernel)
    kernel.run('run = nb.fit(toy, pack, given, "given", receipt=False)')
    assert open_widgets(kernel) == panel


def test_a_knob_turned_while_the_run_is_made_ready_is_a_wish(kernel):
    text = kernel.run(TURNED_EARLY)
    assert "0.005 ['lr 0.01 → 0.005'] True" in text


def test_the_panel_acts_on_a_network_and_data_of_ones_own(kernel):
    text = kernel.run(OWN_DATA)
    assert "0.005 ['lr 0.01 → 0.005'] True" in text


def test_training_that_diverges_is_a_sentence_in_the_notebook_and_no_page_of_traceback(kernel):
    request = kernel.client.execute('nb.fit(toy, pack, plan.replace(lr=1e30), "ruined", receipt=False)')
    kernel.end(request)
    (error,) = [m["content"] for m in kernel.said if m["msg_type"] == "error" and parent(m) == request]
    assert error["ename"] == "Diverged"
    (line,) = error["traceback"]
    assert line.startswith("Diverged: Training diverged at lr 1e30: ")
    assert "1 epochs" in kernel.run('print(len(nb.fit(toy, pack, plan, "ruined", receipt=False).summary()), "epochs")')


def test_a_run_says_where_its_model_is_and_what_to_do_next_and_resumed_from_which_step_it_goes_on(kernel):
    text = kernel.run(TWICE)
    assert (
        len(
            re.findall(
                r"done: the best model is\s+twice/\S+\.safetensors\s+\([\w ]+\s+[\d.]+\s+in\s+epoch\s+\d\);\s+next:",
                text,
            )
        )
        == 2
    )
    assert re.search(r"\['', .*>continuing from step \d+<", text)


def test_a_change_that_waits_for_the_end_of_an_evaluation_says_so_at_once(kernel):
    text = kernel.run(ASKED_AMID_AN_EVALUATION)
    assert "after this step: lr 0.01 → 0.005<" in text
    assert text.endswith("['lr 0.01 → 0.005'] ''\n")


def test_where_a_step_takes_seconds_it_is_said_before_anybody_waits_for_an_answer(kernel):
    """Clicks are read between steps: while one lasts nothing can answer them."""
    notes, after = kernel.run(SLOW_STEPS).rsplit("] ", 1)
    assert notes.count(">the last step took 1 s; requests are read between steps") == 2
    assert after == "''\n"


def test_a_request_that_another_process_has_not_read_yet_says_so(kernel):
    changing, pausing = "after this step: lr 0.01 → 0.005", "pausing after this step"
    said = [changing, pausing, pausing, changing, "paused between two steps", "False"]
    assert "|".join(said) in kernel.run(ASKED_ELSEWHERE)


def test_a_terminal_is_told_truth_and_prediction_of_the_samples(tmp_path, capsys):
    view = View(tmp_path / "run", History(), toy.PLAN, 16, "-cer", None, show=True)
    view.show_samples([Preview(np.zeros((32, 400), np.uint8), "手写中文", "手与中文")])
    assert "truth     手写中文\npredicted 手与中文\n            ^^\n" in capsys.readouterr().err
    assert view.cards[0].truth == "手写中文"
    assert view.visible
    view.show_samples([Preview(np.zeros((8, 8, 3), np.uint8), "", "")])
    assert capsys.readouterr().err == "", "no empty line for samples without a text"
    view.bar.close()
    capsys.readouterr()
    quiet = View(tmp_path / "run", History(), toy.PLAN, 16, "-cer", None, show=False)
    quiet.show_samples([Preview(np.zeros((32, 400), np.uint8), "手", "手")])
    assert capsys.readouterr() == ("", "")
    assert not quiet.visible
