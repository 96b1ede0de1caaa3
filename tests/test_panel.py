"""The panel: a form over a plan's fields, used here without a front end; what it holds is always a valid plan."""

import dataclasses
import functools
import math
import re
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtools.errors import PlanError, TrainError
from nbtools.live import ACTIONS, Panel, Plans, Requests, form
from nbtools.live.panel import RESTS
from nbtools.train import knob
from nbtools.train import plan as plans

EVIL = "<img src=x onerror=alert(1)>"
VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class Plan(plans.Plan):
    """A task's plan with a setting of every kind of its own."""

    network: str = knob("small", f"which network {EVIL}", choices=("small", "large"))
    scales: tuple[float, ...] = knob((0.5, 1.0), "sizes to evaluate at", above=0)
    alpha: float = knob(0.5, "weight of the first loss", least=0, most=1)


@dataclass(frozen=True)
class Advice:
    plan: Plan
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    baseline: Plan | None = None
    largest: Plan | None = None
    largest_reason: str = ""


def panel(reasons=None, baseline=None, largest=None, largest_reason="", **chosen):
    return Panel(Advice(Plan(**chosen), reasons or {}, baseline, largest, largest_reason))


def running(made, samples=10_000, **more):
    """The requests to a run that this panel belongs to, which has so many training samples."""

    def check(plan):
        if plan.batch_size > samples:
            raise TrainError(f"Plan.batch_size {plan.batch_size} is larger than the train split ({samples} samples)")

    requests = Requests(Plans(made.plan, made.plan), more.pop("advised", made.advised), check, **more)
    made.begin(requests)
    return requests


def applied(made, requests):
    """The run goes on with what is wanted."""
    requests.state.applied = requests.state.plan
    made.refresh()


def buttons(widget) -> dict[str, Any]:
    """Every visible button inside a widget by its label."""
    if widget.layout.display == "none":
        return {}
    if type(widget).__name__ == "Button":
        return {widget.description: widget}
    return {label: found for child in getattr(widget, "children", ()) for label, found in buttons(child).items()}


def offered(made):
    return [made.form.offers[rule].description for rule in form.OFFERS if made.form.offers[rule].description]


def question(made):
    return made.form.confirm.description


def pending(made):
    return made.form.pending.value


def summary(made):
    return made.form.notice.value


def test_untouched_it_is_the_advised_plan_with_a_field_for_every_setting():
    made = panel(lr=0.00123456789, batch_size=48)
    assert list(made.fields) == [field.name for field in dataclasses.fields(Plan)]
    assert made.plan == made.advised == Plan(lr=0.00123456789, batch_size=48)
    assert Panel(Plan(epochs=2)).plan == Plan(epochs=2)
    wrong: Any = {"lr": 1}
    with pytest.raises(PlanError, match="takes an Advice or a Plan, got dict"):
        Panel(wrong)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "30", 30),
        ("lr", " 3e-4 ", 3e-4),
        ("clip_norm", "none", None),
        ("betas", "0.8, 0.95", (0.8, 0.95)),
        ("scales", "0.5,0.75,1", (0.5, 0.75, 1.0)),
        ("amp", "bf16", "bf16"),
        ("compile", True, True),
    ],
)
def test_a_field_sets_its_setting(name, text, value):
    made = panel(clip_norm=2.0)
    made.fields[name].value = text
    assert getattr(made.plan, name) == value
    assert f"Changed: {name}" in summary(made)


@settings(max_examples=20)
@given(
    lr=st.floats(1e-12, 1e6),
    batch_size=st.integers(1, 2**20),
    clip_norm=st.none() | st.floats(1e-6, 1e6),
    scales=st.lists(st.floats(0.1, 4), min_size=1, max_size=4).map(tuple),
)
def test_what_the_fields_show_is_read_back_as_the_same_plan_bit_for_bit(lr, batch_size, clip_norm, scales):
    made, plan = shared(), Plan(lr=lr, batch_size=batch_size, clip_norm=clip_norm, scales=scales)
    made.put(plan)
    assert made.changes() == ({}, {})
    assert made.plan == plan
    assert float(made.fields["lr"].value) == pytest.approx(lr, rel=5e-3), "three digits, for the eye"


@functools.cache
def shared() -> Panel:
    return panel()


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("lr", "-1", "lr must be greater than 0, got -1.0"),
        ("lr", "fast", "lr must be a number, got &#x27;fast&#x27;"),
        ("epochs", "", "epochs must be a whole number"),
        ("alpha", "1.5", "alpha must be at most 1"),
        ("betas", "0.9", "betas must be 2 values"),
        ("micro_batch_size", "128", "micro_batch_size must be at most batch_size (64)"),
        ("seed", EVIL, "&lt;img src=x onerror=alert(1)&gt;"),
    ],
)
def test_a_value_that_breaks_a_rule_shows_the_rule_and_changes_nothing(name, text, rule):
    made = panel()
    made.fields[name].value = text
    assert made.plan == made.advised
    assert rule in made.form.notes[name].value
    assert "Plan." not in made.form.notes[name].value
    assert "Not applied" in summary(made)
    assert made.fields[name].value == text


def test_a_rule_between_fields_is_shown_next_to_the_changed_one_and_correcting_either_helps():
    made = panel(epochs=20, warmup_epochs=5.0)
    made.fields["epochs"].value = "3"
    assert "warmup_epochs must be at most epochs (3)" in made.form.notes["epochs"].value
    made.fields["seed"].value = "7"
    assert (made.plan.seed, made.plan.epochs) == (7, 20), "a wrong field holds no other up"
    made.fields["warmup_epochs"].value = "2"
    assert (made.plan.epochs, made.plan.warmup_epochs) == (3, 2.0)
    assert "Not applied" not in summary(made)


def test_presets_and_reset_bring_whole_plans_back_even_over_a_wrong_value():
    baseline, largest = Plan(epochs=150, feed="workers", optimizer="adam"), Plan(batch_size=1024, lr=4e-3)
    made = panel(baseline=baseline, largest=largest, largest_reason="batch 1024", epochs=5)
    made.fields["lr"].value = "no"
    for label, plan in (("Baseline", baseline), ("Largest batch", largest)):
        buttons(made.form.view)[label].click()
        assert made.plan == plan
        assert (made.fields["epochs"].value, made.fields["lr"].value) == (f"{plan.epochs}", f"{plan.lr}")
        assert [label for label, button in buttons(made.form.view).items() if button.button_style] == [label]
    assert buttons(made.form.view)["Largest batch"].tooltip == "batch 1024"
    made.reset()
    assert made.plan == made.advised
    assert list(buttons(panel().form.view)) == ["As advised"]
    button = buttons(panel(largest_reason="64 is the largest allowed").form.view)["Largest batch"]
    assert (button.disabled, button.tooltip) == (True, "64 is the largest allowed")


def test_reasons_and_help_stand_next_to_the_fields_and_are_escaped():
    made = panel(reasons={"lr": f"because {EVIL}"})
    assert "because &lt;img" in made.form.notes["lr"].value
    assert "which network &lt;img" in made.form.notes["network"].value
    assert not [note.value for note in made.form.notes.values() if "<img" in note.value]
    made.fields["lr"].value = "0.5"
    assert "advised 0.001: because" in made.form.notes["lr"].value


def test_a_slider_moves_its_field_to_two_digits_or_a_power_of_two_and_follows_it_beyond_its_ends():
    made = panel(lr=1e-3, batch_size=8)
    sliders = made.form.sliders
    assert sliders["batch_size"].min == 0, "no batch below one"
    sliders["lr"].value = 10**-3.45
    assert (made.fields["lr"].value, made.plan.lr) == ("0.00035", 0.00035)
    sliders["batch_size"].value = 128.0
    assert (made.fields["batch_size"].value, made.plan.batch_size) == ("128", 128)
    assert not any(slider.continuous_update for slider in sliders.values())
    made.fields["lr"].value = "1.2345e-7"
    assert made.plan.lr == 1.2345e-7
    assert sliders["lr"].value == pytest.approx(1.2345e-7)
    for batch_size in (5000, 1):
        made.fields["batch_size"].value = str(batch_size)
        assert (made.plan.batch_size, sliders["batch_size"].value) == (batch_size, batch_size)


def test_a_sliders_range_is_the_advised_one_again_once_a_value_far_outside_is_gone():
    made = panel(lr=1e-3)
    slider, tick = made.form.sliders["lr"], made.form.ticks["lr"].value
    for far in ("1000", "1e-9"):
        made.fields["lr"].value = far
        assert slider.value == float(far)
        assert made.form.ticks["lr"].value != tick
        made.fields["lr"].value = "2e-3"
        assert (slider.min, slider.max, made.form.ticks["lr"].value) == (-5, -1, tick)


@pytest.mark.parametrize(("pace", "wanted"), [(0.01, [1e-3] * 5), (1.5, [9e-4, 8e-4, 7e-4, 6e-4, 5e-4])])
def test_several_moves_of_a_sliders_handle_are_one_change_once_it_rests(monkeypatch, pace, wanted):
    """Where a step takes more than a second, they come together anyway."""
    now, found = [100.0], []
    monkeypatch.setattr("nbtools.live.panel.time.monotonic", lambda: now[0])
    made = panel(lr=1e-3, batch_size=64)
    requests = running(made, pace=pace)
    for lr in (9e-4, 8e-4, 7e-4, 6e-4, 5e-4):
        made.form.sliders["lr"].value = lr
        found.append(requests.state.plan.lr)
        assert made.fields["lr"].value == f"{lr:g}", "where the handle is"
        now[0] += 0.2
        made.refresh()
    made.form.sliders["batch_size"].value = 128
    assert found == wanted
    now[0] += 2 * RESTS
    made.refresh()
    assert (requests.state.plan.lr, requests.state.plan.batch_size) == (5e-4, 128)
    made.form.sliders["lr"].value = 2e-4
    made.click("undo")
    assert requests.state.plan.lr == 2e-4, "Undo takes back what was seen to change"
    made.form.sliders["lr"].value = 1e-4
    made.reset()
    now[0] += 2 * RESTS
    made.refresh()
    assert made.plan == made.advised


def test_the_strip_has_four_settings_with_the_advised_value_at_its_place_and_the_form_is_folded():
    made = panel(lr=1e-3, batch_size=64, epochs=10)
    running(made)
    form, shown = made.form, made.form.controls.children[1]
    assert [re.findall("<b>(.+?)</b>", knob.children[0].value) for knob in shown.children[:-1]] == [
        ["lr"],
        ["batch_size"],
        ["amp"],
        ["epochs"],
    ]
    assert "advised 0.001" in form.captions["lr"].value
    made.fields["lr"].value = "5e-4"
    assert "* 0.5000" in form.ticks["lr"].value, "the tick stays when the handle moves"
    form.sliders["epochs"].value = 25
    made.settle()
    assert (made.plan.epochs, made.fields["epochs"].value) == (25, "25")
    assert form.fold.layout.display == "none"
    form.all.value = True
    assert form.fold.layout.display == "flex"


def test_the_line_under_the_buttons_has_what_is_pending_else_the_newest_message():
    made = panel()
    requests = running(made)
    made.form.tell(f"saved at step 12 {EVIL}")
    assert "saved at step 12 &lt;img" in pending(made)
    made.form.actions["evaluate"].click()
    assert "saved" not in pending(made)
    assert requests.take("evaluate")
    made.refresh()
    assert "saved at step 12" in pending(made)
    made.end()
    running(made)
    assert pending(made) == "", "of an earlier run"


def test_another_batch_size_offers_lr_by_rule_with_its_number_before_it_is_taken():
    made = panel(lr=1e-3, batch_size=64)
    assert offered(made) == []
    made.fields["batch_size"].value = "128"
    made.fields["batch_size"].value = "256"
    assert "batch 64 → 256: lr stays 0.001" in summary(made)
    assert offered(made) == ["√ rule: 0.002", "linear: 0.004"], "counted from the lr that was chosen"
    assert made.plan.lr == 1e-3
    buttons(made.form.asking)["√ rule: 0.002"].click()
    assert (made.plan.lr, made.fields["lr"].value, offered(made)) == (0.002, "0.002", [])
    made.fields["batch_size"].value = "1024"
    assert "batch 256 → 1024" in summary(made)
    made.fields["batch_size"].value = "256"
    assert offered(made) == []


def test_a_plan_with_a_rule_follows_it_at_once_and_offers_the_others():
    made = panel(lr=1e-3, batch_size=64, lr_rule="sqrt")
    made.fields["batch_size"].value = "128"
    made.fields["weight_decay"].value = "0.02"
    assert math.isclose(made.plan.lr, math.sqrt(2) * 1e-3), "the plan keeps every bit, also when others change"
    assert made.fields["lr"].value == "0.00141"
    assert "lr 0.001 → 0.00141 by its rule (sqrt)" in summary(made)
    assert offered(made) == ["keep: 0.001", "linear: 0.002"]
    buttons(made.form.asking)["keep: 0.001"].click()
    assert made.plan.lr == 1e-3


def test_without_a_run_every_button_is_disabled_and_says_what_it_would_do():
    made = panel()
    for _ in range(2):  # before a run, and after one
        found = buttons(made.form.controls)
        assert list(found) == ["Pause", "Stop", "Evaluate now", "Save now", "What limits it?", "Back to best", "Undo"]
        assert all(button.disabled and button.icon for button in found.values())
        assert all("no run is in progress" in button.tooltip for button in found.values())
        found["Stop"].click()
        assert pending(made) == ""
        requests = running(made)
        made.end()
    made.fields["lr"].value = "1000"
    assert made.plan.lr == 1000, "without a run nothing is asked"
    assert (requests.state.plan, requests.pending) == (Plan(), set())


@pytest.mark.parametrize(
    ("label", "action", "message"),
    [
        ("Evaluate now", "evaluate", "evaluating after this step"),
        ("Save now", "save", "saving after this step"),
        ("Stop", "stop", "stopping after this step"),
        ("What limits it?", "profile", "measuring what a step consists of"),
        ("Back to best", "best", "going back to the best checkpoint after this step"),
        ("Undo", "undo", "undoing the last change after this step"),
    ],
)
def test_a_button_posts_a_request_and_shows_it_until_the_run_has_answered(label, action, message):
    able: set[str] = set()
    made = panel()
    requests = running(made, able=able.__contains__)
    button = buttons(made.form.controls)[label]
    assert button.disabled, "there is nothing to do for it"
    assert form.UNABLE.get(action, "") in button.tooltip
    able.add(action)
    made.refresh()
    assert not button.disabled
    button.click()
    assert requests.pending == {action}
    assert button.disabled
    assert message in pending(made)
    assert requests.take(action)
    made.refresh()
    assert (button.disabled, pending(made)) == (False, "")


def test_pause_becomes_resume_whoever_paused_and_while_it_runs_also_in_the_panels_own_cell():
    """fit's output, which has the buttons too, is gone once its cell was run again or the page loaded anew."""
    made = panel()
    assert "Pause" not in buttons(made.form.whole)
    requests = running(made)
    buttons(made.form.whole)["Pause"].click()
    assert requests.paused
    assert "paused between two steps" in pending(made)
    buttons(made.form.controls)["Resume"].click()
    assert not requests.paused
    requests.post("pause")
    requests.unread = True
    made.refresh()
    assert "Resume" in buttons(made.form.controls)
    assert "pausing after this step" in pending(made)
    made.end()
    assert "Pause" not in buttons(made.form.whole)


def test_a_change_during_a_run_is_pending_until_it_is_applied_and_nothing_requested_since_is_taken_back():
    made = panel(lr=1e-3, batch_size=64)
    requests = running(made)
    made.fields["batch_size"].value = "256"
    first = requests.state.plan
    assert first is made.plan
    assert "after this step: batch_size 64 → 256" in pending(made)
    made.fields["epochs"].value = "20"
    requests.state.applied = first
    made.refresh()
    assert (made.plan.batch_size, made.plan.epochs, made.fields["epochs"].value) == (256, 20, "20")
    assert "after this step: epochs 10 → 20" in pending(made)
    applied(made, requests)
    assert pending(made) == ""
    assert offered(made) == ["√ rule: 0.002", "linear: 0.004"], "offers outlive the change"


def test_a_value_that_a_run_refuses_is_not_wanted_and_its_reason_stands_next_to_the_field():
    made = panel()
    requests = running(made, samples=300)
    made.fields["batch_size"].value = "512"
    assert (requests.state.plan, made.form.sliders["batch_size"].value) == (Plan(), 64)
    assert "larger than the train split (300 samples)" in made.form.notes["batch_size"].value
    made.end()
    made.fields["batch_size"].value = "512"
    assert made.plan.batch_size == 512


def test_what_a_started_run_keeps_is_disabled_with_the_reason_until_it_ends():
    made = panel()
    requests = running(made)
    disabled = {name for name, field in made.fields.items() if field.disabled}
    assert {"optimizer", "seed", "feed", "network", "alpha"} <= disabled
    assert not disabled & {"lr", "batch_size", "epochs", "amp"}
    made.fields["optimizer"].value = "sgd"  # as a front end that lags behind might
    assert requests.state.plan.optimizer == made.plan.optimizer == "adamw"
    assert "optimizer cannot change now: fixed in a started run" in made.form.notes["optimizer"].value
    made.end()
    assert not any(field.disabled for field in made.fields.values())
    assert "fixed" not in made.form.notes["optimizer"].value


def test_a_preset_during_a_run_changes_what_may_change_and_says_what_it_kept():
    made = panel(baseline=Plan(optimizer="adam", feed="workers", lr=2e-4), largest=Plan(batch_size=1024, lr=4e-3))
    requests = running(made, samples=300)
    buttons(made.form.view)["Baseline"].click()
    assert made.plan == requests.state.plan == Plan(lr=2e-4)
    assert "kept: optimizer, feed (fixed in a started run)" in summary(made)
    assert "after this step: lr 0.001 → 0.0002" in pending(made)
    buttons(made.form.view)["Largest batch"].click()
    assert requests.state.plan == Plan(lr=2e-4), "refused, as a whole"
    assert "Not applied: batch_size" in summary(made)
    assert "1024 is larger than the train split" in made.form.notes["batch_size"].value


def test_more_than_three_settings_at_once_are_asked_about_together():
    """As by a preset, or a proposal of several changes."""
    largest = Plan(batch_size=1024, lr=4e-3, warmup_epochs=2.0, amp="bf16")
    made = panel(largest=largest)
    requests = running(made)
    buttons(made.form.view)["Largest batch"].click()
    assert requests.state.plan == made.advised
    assert "4 settings change at once: batch_size 64 → 1024, lr 0.001 → 0.004" in summary(made)
    buttons(made.form.asking)["Apply 4 changes: batch_size, lr, warmup_epochs, amp"].click()
    assert (requests.state.plan, question(made)) == (largest, "")
    assert "after this step: batch_size 64 → 1024, lr 0.001 → 0.004" in pending(made)
    made.propose("Launch-bound", {"lr": 2e-3, "amp": "off", "clip_norm": 1.0, "batch_size": 128})
    made.form.make.click()
    assert (requests.state.plan, question(made)[:15]) == (largest, "Apply 4 changes")
    made.end()
    buttons(made.form.view)["As advised"].click()
    assert made.plan == made.advised, "without a run nothing is asked"


@pytest.mark.parametrize(
    ("name", "text", "usual", "ratio"),
    [("lr", "1000", {"lr": 0.002}, "500,000"), ("weight_decay", "2", {"weight_decay": 0.1}, "20")],
)
def test_a_value_beyond_ten_times_the_advised_asks_once_more(name, text, usual, ratio):
    made = panel(**usual)
    requests = running(made)
    made.fields[name].value = text
    assert requests.state.plan == made.advised
    assert f"{name} {text} is {ratio}× the advised {usual[name]}" in made.form.notes[name].value
    assert made.fields[name].value == text
    buttons(made.form.asking)[f"Apply {name} = {text}"].click()
    assert getattr(requests.state.plan, name) == float(text)
    assert question(made) == ""
    assert "Not" not in summary(made)


def test_what_is_asked_about_is_forgotten_when_another_value_is_typed_or_chosen():
    made = panel(lr=0.002)
    running(made)
    made.fields["lr"].value = "1000"
    assert question(made)
    made.fields["lr"].value = "0.02"
    assert (made.plan.lr, question(made)) == (0.02, ""), "up to ten times nothing is asked"
    made.form.sliders["lr"].value = 0.1
    made.settle()
    assert (made.plan.lr, question(made)) == (0.02, "Apply lr = 0.1")
    made.reset()
    assert (made.plan, question(made), made.fields["lr"].value) == (made.advised, "", "0.002")
    made.fields["lr"].value = "1000"
    made.insist()
    made.fields["lr"].value = "1"
    assert made.plan.lr == 1.0, "on the way down nothing is asked"


def test_what_is_asked_about_says_that_it_is_not_applied_and_can_be_declined():
    made = panel(lr=0.002)
    requests = running(made)
    made.fields["lr"].value = "1000"
    assert "Not applied: lr 1000 is 500,000× the advised 0.002" in summary(made)
    assert made.form.asking.children[0].layout.flex.startswith("0 "), "the buttons stand next to the question"
    buttons(made.form.asking)["Keep lr = 0.002"].click()
    assert (requests.state.plan.lr, made.fields["lr"].value, question(made)) == (0.002, "0.002", "")
    assert "No setting is changed" in summary(made)


def test_that_training_diverged_stands_in_the_place_of_an_older_verdict_until_something_newer_does():
    made = panel(lr=0.002)
    running(made)
    made.propose("Memory bandwidth is the limit", None)
    made.form.tell("Training diverged at lr 1000; back at step 124 with lr 0.002")
    assert (form.WRONG in summary(made), "diverged at lr 1000" in summary(made), pending(made)) == (True, True, "")
    made.form.tell("saved at step 130")
    assert "diverged at lr 1000" in summary(made)
    assert "saved at step 130" in pending(made)
    made.fields["lr"].value = "0.001"
    assert "Changed: lr" in summary(made)


def test_a_valid_change_is_applied_at_once_while_a_doubtful_one_waits_to_be_confirmed():
    made = panel(lr=0.002, batch_size=64)
    requests = running(made)
    made.fields["lr"].value = "5"
    made.fields["batch_size"].value = "32"
    assert (requests.state.plan.batch_size, requests.state.plan.lr) == (32, 0.002)
    assert "after this step: batch_size 64 → 32" in pending(made)
    applied(made, requests)
    assert (made.fields["lr"].value, made.fields["batch_size"].value) == ("5", "32")
    made.fields["epochs"].value = "-1"  # which is refused
    assert "lr 5 is 2,500× the advised 0.002" in made.form.notes["lr"].value
    buttons(made.form.asking)["Apply lr = 5"].click()
    assert (requests.state.plan.batch_size, requests.state.plan.lr, question(made)) == (32, 5.0, "")


@pytest.mark.parametrize(("name", "text"), [("lr", "abc"), ("warmup_epochs", "30"), ("batch_size", "512")])
def test_a_rule_next_to_a_field_names_settings_as_the_form_does(name, text):
    made = panel()
    running(made, samples=300)
    made.fields[name].value = text
    assert f">{name} " in made.form.notes[name].value
    assert "Plan" not in made.form.notes[name].value


def test_the_advised_is_that_of_the_run_where_it_knows_another():
    made = panel(lr=1.0)
    requests = running(made, advised=Plan(lr=0.002))
    made.fields["lr"].value = "2"
    assert requests.state.plan.lr == 1.0
    assert "lr 2 is 1,000× the advised 0.002" in made.form.notes["lr"].value


def test_a_plan_that_came_from_elsewhere_is_shown():
    made = panel(lr=1e-3)
    requests = running(made)
    made.fields["epochs"].value = "no"
    requests.state.plan = made.plan.replace(lr=7e-4, batch_size=128)
    applied(made, requests)
    assert (made.plan.lr, made.fields["lr"].value) == (7e-4, "0.0007")
    assert made.form.sliders["lr"].value == pytest.approx(7e-4)
    assert (pending(made), offered(made)) == ("", [])
    assert made.fields["epochs"].value == "no"
    assert "must be a whole number" in made.form.notes["epochs"].value


def test_a_user_on_another_thread_is_not_lost_while_the_run_fills_the_fields():
    made = panel(epochs=100)
    requests = running(made)

    def type_epochs():
        for epochs in range(1, 31):
            made.fields["epochs"].value = str(epochs)

    user = threading.Thread(target=type_epochs)
    user.start()
    while user.is_alive():
        applied(made, requests)
    user.join()
    assert (made.plan.epochs, made.fields["epochs"].value) == (30, "30")


def test_a_page_without_a_kernel_and_a_terminal_show_the_plan_as_a_table():
    made = panel(reasons={"lr": f"because {EVIL}"})
    bundle = made._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] == made.form.whole.model_id
    assert "because &lt;img" in bundle["text/html"]
    assert "<img" not in bundle["text/html"]
    for shown in (bundle["text/html"], repr(made)):
        assert all(name in shown for name in made.fields)


def test_a_verdict_is_shown_with_a_button_that_makes_its_change():
    made = panel(amp="off")
    form = made.form
    made.propose(f"Compute-bound: {EVIL}; amp = bf16 makes training 1.4× as fast", {"amp": "bf16"})
    assert EVIL not in form.notice.value
    assert "Compute-bound" in form.notice.value
    requests = running(made, samples=300)
    buttons(form.controls)["Apply: amp = bf16"].click()
    assert requests.state.plan.amp == "bf16"
    assert "Compute-bound" not in form.notice.value, "a change that was made is proposed no more"
    assert "Apply: amp = bf16" not in buttons(form.controls)
    made.propose("Launch-bound: larger batch", {"batch_size": 10**6})
    form.make.click()
    assert made.plan.batch_size == Plan().batch_size
    assert "larger than the train split" in form.notes["batch_size"].value
    assert "Apply: batch_size = 1000000" in buttons(form.controls), "a refused change stays proposed"
    made.propose("Compute-bound: nothing worth changing", None)
    assert not [label for label in buttons(form.controls) if label.startswith("Apply")]


def test_what_limits_a_run_stands_in_one_place_until_the_run_ends():
    made = panel()
    running(made)
    made.propose("Memory bandwidth is the limit", None)
    made.form.tell("Memory bandwidth is the limit")
    assert ("Memory" in summary(made), pending(made)) == (True, "")
    made.fields["lr"].value = "0.002"
    assert "Changed: lr" in summary(made), "which is newer"
    made.propose("Memory bandwidth is the limit", {"amp": "bf16"})
    made.fields["lr"].value = "1000"
    assert list(buttons(made.form.asking)) == ["Apply lr = 1000", "Keep lr = 0.002"], "one question at a time"
    made.fields["lr"].value = "0.002"
    assert list(buttons(made.form.asking)) == ["Apply: amp = bf16"]
    made.end()
    assert "Changed: lr" in summary(made)
    made.reset()
    assert "No setting is changed" in summary(made)


def test_every_button_is_a_request_and_says_that_it_is_pending():
    assert form.BUTTONS.keys() <= {*ACTIONS}
    assert form.PENDING.keys() == form.BUTTONS.keys() - {"pause"}
