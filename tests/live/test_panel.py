"""The panel: a form over a plan's fields, used here without a front end; what it holds is always a valid plan."""

import dataclasses
import re
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

import pytest
from acting import refused

from nbtools.errors import PlanError
from nbtools.live import Panel, Plans, Requests
from nbtools.measure import Advice
from nbtools.train import knob
from nbtools.train import plan as plans

EVIL = "<img src=x onerror=alert(1)>"
FIELDS = [("lr", " 3e-4 ", 3e-4), ("clip_norm", "none", None), ("compile", True, True), ("layers", 4, 4)]
FIELDS += [("scales", "0.5,0.75,1", (0.5, 0.75, 1.0))]
ACTIONS = {"Evaluate now": "evaluate", "Save now": "save", "Stop": "stop", "What limits it?": "profile"}
ACTIONS |= {"Back to best": "best", "Undo": "undo"}


@dataclass(frozen=True)
class Plan(plans.Plan):
    """A task's plan with a setting of every kind of its own."""

    network: str = knob("small", f"which network {EVIL}", choices=("small", "large"))
    scales: tuple[float, ...] = knob((0.5, 1.0), "sizes to evaluate at", above=0)
    layers: int = knob(2, "of the network", choices=(1, 2, 4))
    alpha: float = knob(0.5, "weight of the first loss", least=0, most=1)


def panel(reasons=None, baseline=None, optimised=None, **chosen):
    presets = {"guide": (optimised, "")} if optimised else {}
    return Panel(Advice(Plan(**chosen), reasons or {}, baseline=baseline, presets=presets))


def running(made, able=lambda action: True):
    """The requests to a run that this panel belongs to, which has 300 training samples."""
    requests = Requests(Plans(made.plan, made.plan), made.advised, lambda new: new.require_batch(300), able)
    made.begin(requests)
    return requests


def widgets(made):
    """All visible widgets of the panel's own cell and of its part in the output of fit."""

    def below(widget):
        if widget.layout.display != "none":
            yield widget
            for child in getattr(widget, "children", ()):
                yield from below(child)

    yield from below(made.form.controls if made.running else made.form.whole)


def buttons(made) -> dict[str, Any]:
    return {one.description: one for one in widgets(made) if type(one).__name__ == "Button" and one.description}


def page(made) -> str:
    """The HTML of all that is said, notes next to settings included."""
    notes = [made.form.notes[name].value for name in made.fields]
    return " ".join([*(str(one.value) for one in widgets(made) if type(one).__name__ == "HTML"), *notes])


def words(made) -> str:
    return unescape(re.sub("<[^>]*>", "", page(made)))


def test_untouched_it_is_the_advised_plan_with_a_field_for_every_setting():
    made = panel(lr=0.00123456789, batch_size=48)
    assert list(made.fields) == [field.name for field in dataclasses.fields(Plan)]
    assert made.plan == made.advised == Plan(lr=0.00123456789, batch_size=48)
    refused(PlanError, "takes an Advice or a Plan, got dict", Panel, {"lr": 1})


@pytest.mark.parametrize(("name", "text", "value"), FIELDS)
def test_a_field_sets_its_setting(name, text, value):
    made = panel(clip_norm=2.0)
    made.fields[name].value = text
    assert getattr(made.plan, name) == value
    assert f"Changed: {name}" in words(made)


@pytest.mark.parametrize(("name", "text", "rule"), [("lr", "-1", "must be greater than 0, got"), ("seed", EVIL, EVIL)])
def test_a_value_that_breaks_a_rule_shows_the_rule_and_changes_nothing(name, text, rule):
    made = panel()
    made.fields[name].value = text
    assert made.plan == made.advised
    assert rule in words(made)
    assert "Not applied" in words(made)
    assert made.fields[name].value == text
    assert "<img" not in page(made)


def test_the_menu_of_other_settings_brings_whole_plans_also_over_a_wrong_value():
    baseline, optimised = Plan(epochs=150, feed="workers", optimizer="adam"), Plan(batch_size=1024, lr=4e-3)
    made = panel(baseline=baseline, optimised=optimised, epochs=5)
    made.fields["lr"].value = "no"
    plans = {"the guide's before": baseline, "the guide's optimised": optimised, "as advised": made.advised}
    for label, plan in plans.items():
        made.form.menu.value = label
        assert made.plan == plan
        assert (made.fields["epochs"].value, made.fields["lr"].value) == (f"{plan.epochs}", f"{plan.lr}")
    assert [*panel(baseline=baseline).presets] == ["as advised", "the baseline"], "of a task without a guide"


def test_help_and_reasons_of_changes_stand_next_to_fields_are_escaped_and_a_page_without_a_kernel_names_changes():
    made = panel(reasons={"lr": f"because {EVIL}"})
    assert "because" not in words(made), "the advice says it"
    assert f'title="because {escape(EVIL)}"' in made.form.notes["lr"].value
    made.fields["lr"].value = "2e-3"
    assert f"advised 0.001: because {EVIL}" in words(made)
    assert f"which network {EVIL}" in words(made)
    assert "<img" not in page(made)
    assert made._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"]["model_id"]
    made.fields["epochs"].value = "30"
    assert made._repr_mimebundle_()["text/plain"] == "Panel. Changed: epochs 10 → 30, lr 0.001 → 0.002"
    demo = Panel(made.advised, epochs=2, lr=made.advised.lr)
    assert "Set instead of the advice: epochs 10 → 2" in words(demo), "by the notebook, not the user"
    assert (demo.plan.epochs, demo.advised.epochs, "lr" in demo.plan.given()) == (2, 10, "lr" in made.advised.given())


def test_while_it_trains_the_panels_cell_has_the_buttons_and_points_to_the_settings():
    made = panel()
    for _ in range(2):  # before a run, and after one
        assert (made.form.own.layout.display, made.form.before.layout.display) == ("none", "flex")
        requests = running(made)
        assert (made.form.own.layout.display, made.form.before.layout.display) == ("flex", "none")
        assert "in the cell below" in made.form.own.children[-1].value
        made.end()
    made.fields["lr"].value = "1000"
    assert made.plan.lr == 1000, "without a run nothing is asked"
    assert (requests.state.plan, requests.pending) == (Plan(), set())


def test_a_resumed_run_shows_the_plan_it_had_applied_and_says_so_until_something_is_changed():
    made = panel(lr=0.002)
    made.begin(Requests(Plans(Plan(lr=0.001), Plan(lr=0.001)), Plan(lr=0.003)))
    assert made.fields["lr"].value == "0.001"
    assert "This run continues with its applied settings: lr 0.002 → 0.001" in words(made)
    made.fields["epochs"].value = "30"
    assert re.search("Changed: epochs 10 → 30$", made.changed), "and not lr, which the user left alone"
    made.form.menu.value = "as advised"
    assert made.fields["lr"].value == "0.003", "for this run"
    assert "continues with" not in words(made)


@pytest.mark.parametrize("label", ACTIONS)
def test_a_button_posts_a_request_and_shows_it_until_the_run_has_answered(label):
    action, message = ACTIONS[label], f"{label} – after this step …"
    able: set[str] = set()
    made = panel()
    requests = running(made, able.__contains__)
    assert buttons(made)[label].disabled, "there is nothing to do for it"
    able.add(action)
    made.refresh()
    buttons(made)[label].click()
    assert requests.pending == {action}
    assert buttons(made)[label].disabled
    assert message in words(made)
    assert requests.take(action)
    made.refresh()
    assert not buttons(made)[label].disabled
    assert message not in words(made)


def test_a_change_is_pending_until_applied_with_what_was_requested_since_and_one_that_the_run_refuses_is_not_wanted():
    made = panel(lr=1e-3, batch_size=64)
    requests = running(made)
    made.fields["batch_size"].value = "256"
    first = requests.state.plan
    assert first == made.plan
    assert "after this step: batch_size 64 → 256" in words(made)
    made.fields["epochs"].value = "20"
    requests.state.applied = first
    made.refresh()
    assert (made.plan.batch_size, made.plan.epochs, made.fields["epochs"].value) == (256, 20, "20")
    assert "after this step: epochs 10 → 20" in words(made)
    requests.state.applied = requests.state.plan
    made.refresh()
    assert "after this step" not in words(made)
    made.fields["batch_size"].value = "512"
    assert requests.state.plan.batch_size == 256
    assert "batch_size 512 is larger than the train split (300 samples)" in words(made)


def test_what_a_started_run_keeps_is_disabled_with_the_reason_until_it_ends_and_two_clicks_in_a_long_step_are_one():
    made = panel()
    requests = running(made)
    disabled = {name for name, field in made.fields.items() if field.disabled}
    assert {"optimizer", "seed", "feed", "network", "alpha"} <= disabled
    assert not disabled & {"lr", "batch_size", "epochs", "amp"}
    assert "fixed in a started run: its model and optimizer depend on it" in words(made)
    made.fields["optimizer"].value = "sgd"  # as a front end that lags behind might
    assert requests.state.plan.optimizer == made.fields["optimizer"].value == "adamw"
    assert [made.click("pause"), made.click("pause"), requests.paused] == [None, None, True]
    made.end()
    assert not any(field.disabled for field in made.fields.values())


def test_more_than_three_settings_at_once_are_asked_about_together():
    optimised = Plan(batch_size=256, lr=4e-3, warmup_epochs=2.0, amp="bf16")
    made = panel(optimised=optimised)
    requests = running(made)
    made.form.menu.value = "the guide's optimised"
    assert requests.state.plan == made.advised
    assert "4 settings change at once: batch_size 64 → 256, lr 0.001 → 0.004" in words(made)
    buttons(made)["Apply 4 changes"].click()
    assert requests.state.plan == optimised


@pytest.mark.parametrize("wrong", ["inf", "1000"])
@pytest.mark.parametrize("back", ["Undo", "Keep lr = 0.002", "Escape"])
def test_an_invalid_or_doubted_field_is_restored_before_a_change_is_undone(back, wrong):
    made = panel(lr=0.002)
    requests = running(made)
    made.fields["weight_decay"].value = "0.02"
    requests.state.applied = requests.state.plan
    made.refresh()
    made.fields["lr"].value = wrong
    assert "Not applied: lr " in words(made)
    if back == "Escape":
        made.fields["lr"].value = ""  # what the page does
    else:
        buttons(made)[back].click()
    assert made.fields["lr"].value == "0.002"
    assert "Not applied" not in words(made)
    assert (requests.pending, made.plan.weight_decay) == (set(), 0.02)
    assert "Apply lr = 1000" not in buttons(made)
    buttons(made)["Undo"].click()
    assert requests.pending == {"undo"}


def test_a_verdict_is_shown_with_a_button_that_makes_its_change():
    made = panel(amp="off")
    made.propose(f"Compute-bound: {EVIL}; amp = bf16 makes training 1.4× as fast", {"amp": "bf16"})
    assert f"Compute-bound: {EVIL}" in words(made)
    assert "<img" not in page(made)
    requests = running(made)
    buttons(made)["Apply amp = bf16"].click()
    assert requests.state.plan.amp == "bf16"
    assert "Compute-bound" not in words(made), "a change that was made is proposed no more"
    made.propose("Compute-bound: nothing worth changing")
    assert not [label for label in buttons(made) if label.startswith("Apply")]
