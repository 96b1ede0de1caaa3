"""The panel: a form over a plan's fields, used here without a front end; what it holds is always a valid plan."""

import dataclasses
import math
import sys
import threading
import types
from dataclasses import dataclass

import pytest

from nbtools.errors import MissingExtra, PlanError, TrainError
from nbtools.live import Panel, Wishes
from nbtools.live.panel.form import IN_VIEW, ORDER, written
from nbtools.live.panel.offers import Before
from nbtools.live.panel.panel import VIEW
from nbtools.train import plan as plans

EVIL = "<img src=x onerror=alert(1)>"


@dataclass(frozen=True)
class Plan(plans.Plan):
    """A task's plan with a knob of every kind of its own."""

    network: str = plans.knob("small", f"which network {EVIL}", choices=("small", "large"))
    scales: tuple[float, ...] = plans.knob((0.5, 1.0), "sizes to evaluate at", above=0)
    alpha: float = plans.knob(0.5, "weight of the first loss", least=0, most=1)


@dataclass(frozen=True)
class Advice:
    plan: Plan
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    baseline: Plan | None = None
    largest: Plan | None = None
    largest_reason: str = ""


def panel(reasons=None, baseline=None, largest=None, largest_reason="", **knobs):
    return Panel(Advice(Plan(**knobs), reasons or {}, baseline, largest, largest_reason))


def refuse_above(samples):
    """The check of a run that has so many training samples."""

    def check(plan):
        if plan.batch_size > samples:
            raise TrainError(f"Plan.batch_size {plan.batch_size} is larger than the train split ({samples} samples)")

    return check


def running(made, fixed=None, samples=10_000):
    """The wishes of a run that this panel belongs to."""
    wishes = Wishes()
    made.begin(wishes, fixed or {"optimizer": f"its state is of one kind {EVIL}"}, refuse_above(samples))
    return wishes


def buttons(widget):
    """Every button inside a widget by its label."""
    if type(widget).__name__ == "Button":
        return {widget.description: widget}
    return {label: found for child in getattr(widget, "children", ()) for label, found in buttons(child).items()}


def test_every_knob_of_the_plan_has_a_field_and_untouched_it_is_the_advised_plan():
    made = panel(lr=0.00123456789, batch_size=48)
    assert list(made.fields) == [field.name for field in dataclasses.fields(Plan)]
    made.read()
    assert made.plan == made.advised
    assert made.plan.lr == 0.00123456789


@pytest.mark.parametrize(
    ("name", "said", "value"),
    [
        ("epochs", "30", 30),
        ("lr", " 3e-4 ", 3e-4),
        ("clip_norm", "1", 1.0),
        ("clip_norm", "none", None),
        ("betas", "0.8, 0.95", (0.8, 0.95)),
        ("scales", "0.5,0.75,1", (0.5, 0.75, 1.0)),
        ("amp", "bf16", "bf16"),
        ("compile", True, True),
        ("network", "large", "large"),
    ],
)
def test_a_field_sets_its_knob(name, said, value):
    made = panel(clip_norm=2.0)
    made.fields[name].value = said
    assert getattr(made.plan, name) == value
    assert f"Changed: {name}" in made.said.value


@pytest.mark.parametrize(
    ("name", "said", "rule"),
    [
        ("lr", "-1", "lr must be &gt; 0, got -1.0"),
        ("lr", "fast", "lr must be a number, got &#x27;fast&#x27;"),
        ("epochs", "2.5", "epochs must be a whole number"),
        ("epochs", "", "epochs must be a whole number"),
        ("alpha", "1.5", "alpha must be ≤ 1"),
        ("betas", "0.9", "betas must be 2 values"),
        ("micro_batch_size", "128", "micro_batch_size must be ≤ batch_size (64)"),
        ("seed", EVIL, "&lt;img src=x onerror=alert(1)&gt;"),
    ],
)
def test_a_value_that_breaks_a_rule_shows_the_rule_and_changes_nothing(name, said, rule):
    made = panel()
    made.fields[name].value = said
    assert made.plan == made.advised
    assert rule in made.notes[name].value
    assert "Not taken" in made.said.value
    assert made.fields[name].value == said


def test_a_wrong_field_does_not_hold_up_the_others_and_its_rule_goes_when_it_is_mended():
    made = panel()
    made.fields["lr"].value = "no"
    made.fields["epochs"].value = "3"
    assert (made.plan.epochs, made.plan.lr) == (3, made.advised.lr)
    made.fields["lr"].value = "0.01"
    assert made.plan.lr == 0.01
    assert "must be" not in made.notes["lr"].value
    assert "Not taken" not in made.said.value


def test_a_rule_between_fields_is_told_beside_the_changed_one_and_mending_either_helps():
    made = panel(epochs=20, warmup_epochs=5.0)
    made.fields["epochs"].value = "3"
    assert made.plan.epochs == 20
    assert "warmup_epochs must be ≤ epochs (3)" in made.notes["epochs"].value
    made.fields["seed"].value = "7"
    assert (made.plan.seed, made.plan.epochs) == (7, 20)
    made.fields["warmup_epochs"].value = "2"
    assert (made.plan.epochs, made.plan.warmup_epochs) == (3, 2.0)
    assert "Not taken" not in made.said.value


def test_a_change_of_batch_size_moves_lr_by_the_rule_and_shows_it():
    made = panel(lr=1e-3, lr_rule="sqrt")
    made.fields["batch_size"].value = "128"
    assert math.isclose(made.plan.lr, math.sqrt(2) * 1e-3)
    assert made.fields["lr"].value == "0.00141"  # for the eye: the plan keeps every bit, also when others change
    made.fields["weight_decay"].value = "0.02"
    assert math.isclose(made.plan.lr, math.sqrt(2) * 1e-3)
    made.fields["batch_size"].value = "64"
    assert math.isclose(made.plan.lr, 1e-3)


def test_presets_and_reset_bring_whole_plans_back_even_over_a_wrong_value():
    baseline = Plan(epochs=150, feed="workers", optimizer="adam")
    made = panel(baseline=baseline, epochs=5)
    made.fields["lr"].value = "no"
    buttons(made.view)["Guide's baseline"].click()
    assert made.plan == baseline
    assert made.fields["epochs"].value == "150"
    assert made.fields["lr"].value == "0.001"
    assert [label for label, button in buttons(made.view).items() if button.button_style] == ["Guide's baseline"]
    made.reset()
    assert made.plan == made.advised
    assert [label for label, button in buttons(made.view).items() if button.button_style] == ["As advised"]


def test_without_a_baseline_or_a_largest_batch_there_are_no_buttons_for_them():
    assert list(buttons(panel().view.children[1])) == ["As advised"]


def test_the_largest_batch_is_one_click_and_says_what_it_rests_on():
    made = panel(largest=Plan(batch_size=1024, lr=4e-3), largest_reason="rule of thumb: batch 1024 (guide 2)")
    button = buttons(made.view)["Largest batch"]
    assert button.tooltip == "rule of thumb: batch 1024 (guide 2)"
    button.click()
    assert (made.plan.batch_size, made.plan.lr) == (1024, 4e-3)
    assert made.fields["batch_size"].value == "1024"


def test_where_no_batch_is_larger_its_button_is_disabled_and_says_why():
    button = buttons(panel(largest_reason="64 is as large as it goes").view)["Largest batch"]
    assert (button.disabled, button.tooltip) == (True, "64 is as large as it goes")


def test_eight_fields_stand_in_view_and_all_others_under_more():
    made = panel()
    _, _, *rows, more = made.view.children
    shown = [row.children[0].value.split()[0] for row in rows if row is not made.form.offer_row]
    inside = [row.children[0].value.split()[0] for row in more.children[0].children]
    assert shown == list(ORDER[:IN_VIEW])
    assert inside[:2] == ["weight_decay", "micro_batch_size"]
    assert sorted(shown + inside) == sorted(made.fields)


def test_reasons_and_help_stand_beside_the_fields_and_are_escaped():
    made = panel(reasons={"lr": f"because {EVIL}"})
    assert "because &lt;img" in made.notes["lr"].value
    assert "which network &lt;img" in made.notes["network"].value
    assert not [note.value for note in made.notes.values() if "<img" in note.value]
    made.fields["lr"].value = "0.5"
    assert "advised 0.001: because" in made.notes["lr"].value


def test_text_of_every_value_is_read_back_as_the_same_value():
    for name, value in (("clip_norm", None), ("betas", (0.9, 0.999)), ("lr", 2e-4), ("seed", 2**31 - 1)):
        assert Plan.parse(name, written(value)) == value


def test_a_plain_plan_makes_a_panel_and_something_else_does_not():
    assert Panel(Plan(epochs=2)).plan == Plan(epochs=2)
    with pytest.raises(PlanError, match="takes an Advice or a Plan, got dict"):
        Panel({"lr": 1})


def test_a_slider_moves_its_field_to_two_digits_or_a_power_of_two():
    made = panel(lr=1e-3, batch_size=48)
    made.sliders["lr"].value = 10**-3.45
    assert (made.fields["lr"].value, made.plan.lr) == ("0.00035", 0.00035)
    made.sliders["batch_size"].value = 256.0
    assert (made.fields["batch_size"].value, made.plan.batch_size) == ("256", 256)
    assert not any(slider.continuous_update for slider in made.sliders.values())


def test_a_slider_follows_its_field_beyond_its_ends_and_the_text_keeps_every_digit():
    made = panel(lr=1e-3, batch_size=64)
    made.fields["lr"].value = "1.2345e-7"
    assert made.plan.lr == 1.2345e-7
    assert made.sliders["lr"].value == pytest.approx(1.2345e-7)
    made.fields["batch_size"].value = "5000"
    assert (made.plan.batch_size, made.sliders["batch_size"].value) == (5000, 5000)
    made.fields["batch_size"].value = "1"
    assert (made.plan.batch_size, made.sliders["batch_size"].value) == (1, 1)


def test_a_refused_text_leaves_the_slider_where_the_plan_is():
    made = panel(lr=1e-3)
    made.fields["lr"].value = "-3"
    assert made.sliders["lr"].value == pytest.approx(1e-3)
    made.sliders["lr"].value = 2e-3
    assert (made.plan.lr, made.fields["lr"].value) == (2e-3, "0.002")
    assert "must be" not in made.notes["lr"].value


def offered(made):
    """The visible offers under the batch size, in order."""
    row = made.form.offer_row
    shown = [button.description for button in row.children[1:] if button.layout.display != "none"]
    return shown if row.layout.display != "none" else []


def test_another_batch_size_offers_lr_by_rule_with_its_number_before_it_is_taken():
    made = panel(lr=1e-3, batch_size=64)
    assert offered(made) == []
    made.fields["batch_size"].value = "256"
    assert "batch 64 → 256: lr stays 0.001" in made.form.offered.value
    assert offered(made) == ["√ rule: 0.002", "linear: 0.004"]
    assert made.plan.lr == 1e-3
    buttons(made.form.offer_row)["√ rule: 0.002"].click()
    assert (made.plan.lr, made.fields["lr"].value, offered(made)) == (0.002, "0.002", [])


def test_offers_count_from_the_last_lr_that_was_chosen_not_from_the_last_batch():
    made = panel(lr=1e-3, batch_size=64)
    made.fields["batch_size"].value = "128"
    made.fields["batch_size"].value = "256"
    assert offered(made) == ["√ rule: 0.002", "linear: 0.004"]
    made.fields["batch_size"].value = "64"
    assert offered(made) == []
    made.fields["batch_size"].value = "256"
    made.fields["lr"].value = "0.003"
    assert offered(made) == []
    made.fields["batch_size"].value = "1024"
    assert "batch 256 → 1024" in made.form.offered.value
    assert offered(made) == ["√ rule: 0.006", "linear: 0.012"]


def test_a_plan_with_a_rule_follows_it_at_once_and_offers_the_others():
    made = panel(lr=1e-3, batch_size=64, lr_rule="sqrt")
    made.fields["batch_size"].value = "256"
    assert made.plan.lr == pytest.approx(2e-3)
    assert "lr 0.001 → 0.002 by its rule (sqrt)" in made.form.offered.value
    assert offered(made) == ["keep: 0.001", "linear: 0.004"]
    buttons(made.form.offer_row)["keep: 0.001"].click()
    assert made.plan.lr == 1e-3


def test_offers_are_the_rules_of_the_plan():
    for rule, lr in Before(64, 1e-3).offers(96).items():
        assert lr == pytest.approx(Plan(batch_size=64, lr=1e-3, lr_rule=rule).with_batch_size(96).lr, rel=5e-3)


def test_a_micro_batch_says_what_it_does_to_the_step():
    made = panel(batch_size=256)
    assert "batch 256 in one forward pass" in made.notes["micro_batch_size"].value
    made.fields["micro_batch_size"].value = "100"
    assert "batch 256 in 3 forward passes of 100" in made.notes["micro_batch_size"].value


def test_without_a_run_every_button_is_disabled_and_says_what_it_would_do():
    made = panel()
    found = buttons(made.buttons.view)
    assert list(found) == ["Pause", "Stop", "Evaluate now", "Save now", "What limits it?", "Back to best", "Undo"]
    for button in found.values():
        assert button.disabled
        assert button.icon
        assert "no run is under way" in button.tooltip
    found["Stop"].click()
    assert made.buttons.heard.value == ""


def test_buttons_wish_and_say_that_they_were_heard_until_it_is_granted():
    made = panel()
    wishes = running(made)
    for label, name, heard in (
        ("Evaluate now", "evaluate", "evaluating after this step"),
        ("Save now", "save", "saving after this step"),
        ("Stop", "stop", "stopping after this step"),
    ):
        button = buttons(made.controls)[label]
        assert not button.disabled
        button.click()
        assert getattr(wishes, name)
        assert button.disabled
        assert heard in made.buttons.heard.value
        setattr(wishes, name, False)
        made.refresh()
        assert not button.disabled
        assert made.buttons.heard.value == ""


def test_pause_becomes_resume_whoever_paused():
    made = panel()
    wishes = running(made)
    buttons(made.controls)["Pause"].click()
    assert wishes.paused
    assert "paused" in made.buttons.heard.value
    buttons(made.controls)["Resume"].click()
    assert not wishes.paused
    wishes.do("pause")
    made.refresh()
    assert "Resume" in buttons(made.buttons.view)
    wishes.do("resume")
    made.refresh()
    assert "Pause" in buttons(made.buttons.view)


def test_a_change_during_a_run_is_a_wish_and_shown_as_one_until_it_is_granted():
    made = panel(lr=1e-3)
    wishes = running(made)
    made.fields["lr"].value = "5e-4"
    assert wishes.plan is made.plan
    assert "after this step: lr 0.001 → 0.0005" in made.buttons.heard.value
    made.refresh()
    assert "after this step" in made.buttons.heard.value
    made.take(made.plan)
    assert made.buttons.heard.value == ""


def test_offers_outlive_the_granting_of_the_batch_size():
    made = panel(lr=1e-3, batch_size=64)
    running(made)
    made.fields["batch_size"].value = "256"
    made.take(made.plan)
    assert offered(made) == ["√ rule: 0.002", "linear: 0.004"]


def test_a_granted_plan_does_not_take_back_what_was_wished_since():
    made = panel(lr=1e-3)
    wishes = running(made)
    made.fields["lr"].value = "5e-4"
    granted = made.plan
    made.fields["epochs"].value = "20"
    made.take(granted)
    assert (made.plan.lr, made.plan.epochs, made.fields["epochs"].value) == (5e-4, 20, "20")
    assert made.buttons.heard.value.count("→") == 1
    assert "after this step: epochs 10 → 20" in made.buttons.heard.value
    assert wishes.plan is made.plan


def test_a_value_that_a_run_refuses_is_no_wish_and_its_reason_stands_beside_the_field():
    made = panel()
    wishes = running(made, samples=300)
    made.fields["batch_size"].value = "512"
    assert (wishes.plan, made.plan.batch_size, made.sliders["batch_size"].value) == (None, 64, 64)
    assert "larger than the train split (300 samples)" in made.notes["batch_size"].value
    made.fields["lr"].value = "fast"
    assert wishes.plan is None
    made.end()
    made.fields["batch_size"].value = "512"
    assert made.plan.batch_size == 512


def test_what_a_started_run_keeps_is_disabled_with_the_reason_until_it_ends():
    made = panel()
    wishes = running(
        made, {"optimizer": f"fixed: its state is of one kind {EVIL}", "lr": "planted", "unknown": "ignored"}
    )
    assert [name for name, field in made.fields.items() if field.disabled] == ["lr", "optimizer"]
    assert made.sliders["lr"].disabled
    assert "fixed: its state is of one kind &lt;img" in made.notes["optimizer"].value
    made.fields["optimizer"].value = "sgd"  # as a front end that lags behind might
    assert (made.plan.optimizer, wishes.plan) == ("adamw", None)
    assert "optimizer cannot change now: fixed: its state" in made.notes["optimizer"].value
    made.end()
    assert not any(field.disabled for field in (*made.fields.values(), *made.sliders.values()))
    assert "fixed" not in made.notes["optimizer"].value


def test_a_preset_during_a_run_changes_what_may_change_and_says_what_it_kept():
    made = panel(baseline=Plan(optimizer="adam", feed="workers", lr=2e-4))
    wishes = running(made, {"optimizer": "its state", "feed": "opened at the start"})
    buttons(made.view)["Guide's baseline"].click()
    assert made.plan == Plan(lr=2e-4)
    assert wishes.plan == made.plan
    assert "kept: optimizer, feed (fixed in a started run)" in made.said.value
    assert "after this step: lr 0.001 → 0.0002" in made.buttons.heard.value


def test_a_preset_that_changes_more_than_three_settings_of_a_run_asks_once():
    made = panel(largest=Plan(batch_size=1024, lr=4e-3, warmup_epochs=2.0, amp="bf16"))
    wishes = running(made)
    buttons(made.view)["Largest batch"].click()
    assert (wishes.plan, made.plan) == (None, made.advised)
    assert "4 settings change at once: batch_size 64 → 1024, lr 0.001 → 0.004" in made.said.value
    buttons(made.view)["Apply 4 changes: batch_size, lr, warmup_epochs, amp"].click()
    assert wishes.plan == made.presets["Largest batch"]
    assert not [label for label in buttons(made.view) if label.startswith("Apply")]
    assert "after this step: batch_size, lr, warmup_epochs, amp<" in made.buttons.heard.value


def test_a_preset_far_beyond_the_advised_asks_once_and_counts_one_change():
    made = panel(baseline=Plan(lr=0.5))
    running(made)
    buttons(made.view)["Guide's baseline"].click()
    assert [label for label in buttons(made.view) if label.startswith("Apply")] == ["Apply 1 change: lr"]


def test_a_preset_that_changes_three_settings_or_no_run_does_not_ask():
    three = panel(largest=Plan(batch_size=1024, lr=4e-3, warmup_epochs=2.0))
    wishes = running(three)
    buttons(three.view)["Largest batch"].click()
    assert wishes.plan == three.presets["Largest batch"]
    many = panel(largest=Plan(batch_size=1024, lr=4e-3, warmup_epochs=2.0, amp="bf16"))
    buttons(many.view)["Largest batch"].click()
    assert many.plan == many.presets["Largest batch"]


@pytest.mark.parametrize(
    ("name", "typed", "usual", "ratio"),
    [("lr", "1000", {"lr": 0.002}, "500,000"), ("weight_decay", "2", {"weight_decay": 0.1}, "20")],
)
def test_a_value_beyond_ten_times_the_advised_asks_once_more_beside_its_field(name, typed, usual, ratio):
    made = panel(**usual)
    wishes = running(made)
    made.fields[name].value = typed
    assert (wishes.plan, made.plan) == (None, made.advised)
    assert f"{name} {typed} is {ratio}× the advised {usual[name]}" in made.notes[name].value
    assert made.fields[name].value == typed
    row = made.form.rows[name]
    assert list(buttons(row)) == [f"Apply {name} = {typed}"]
    buttons(row)[f"Apply {name} = {typed}"].click()
    assert wishes.plan is made.plan
    assert getattr(made.plan, name) == float(typed)
    assert not buttons(row)
    assert "Not" not in made.said.value


def test_what_is_asked_about_is_forgotten_when_another_value_is_typed_or_chosen():
    made = panel(lr=0.002)
    wishes = running(made)
    made.fields["lr"].value = "1000"
    made.fields["epochs"].value = "20"
    assert (made.plan.epochs, made.plan.lr, wishes.plan) == (20, 0.002, made.plan), "a question holds nothing else up"
    assert buttons(made.form.rows["lr"])
    made.fields["lr"].value = "0.004"
    assert (made.plan.lr, buttons(made.form.rows["lr"])) == (0.004, {})
    made.sliders["lr"].value = 0.1
    assert (made.plan.lr, list(buttons(made.form.rows["lr"]))) == (0.004, ["Apply lr = 0.1"])
    made.reset()
    assert (made.plan, buttons(made.form.rows["lr"])) == (made.advised, {})
    assert made.fields["lr"].value == "0.002"


def test_up_to_ten_times_the_advised_and_on_the_way_down_nothing_is_asked():
    made = panel(lr=0.002)
    wishes = running(made)
    made.fields["lr"].value = "0.02"
    assert (made.plan.lr, wishes.plan) == (0.02, made.plan)
    made.fields["lr"].value = "1000"
    made.insist()
    made.fields["lr"].value = "1"
    assert made.plan.lr == 1.0


def test_before_a_run_nothing_is_asked():
    made = panel(lr=0.002)
    made.fields["lr"].value = "1000"
    assert made.plan.lr == 1000


def test_the_advised_is_that_of_the_run_where_it_knows_another():
    made = panel(lr=1.0)
    wishes = Wishes()
    made.begin(wishes, {}, lambda plan: None, advised=Plan(lr=0.002))
    made.fields["lr"].value = "2"
    assert wishes.plan is None
    assert "lr 2 is 1,000× the advised 0.002" in made.notes["lr"].value


def test_back_to_best_and_undo_are_disabled_while_there_is_nothing_to_go_back_to():
    made, able, wishes = panel(), set(), Wishes()
    made.begin(wishes, {}, lambda plan: None, able=lambda action: action in able or action not in ("best", "undo"))
    found = buttons(made.controls)
    assert [found[label].disabled for label in ("Back to best", "Undo", "Save now")] == [True, True, False]
    able |= {"best", "undo"}
    made.refresh()
    found["Back to best"].click()
    found["Undo"].click()
    assert (wishes.best, wishes.undo) == (True, True)
    assert "going back to the best checkpoint after this step" in made.buttons.heard.value
    assert "undoing the last change after this step" in made.buttons.heard.value


def test_a_preset_that_the_run_refuses_changes_nothing():
    made = panel(largest=Plan(batch_size=1024))
    wishes = running(made, samples=300)
    buttons(made.view)["Largest batch"].click()
    assert (made.plan, wishes.plan) == (made.advised, None)
    assert "Not taken" in made.said.value
    assert "1024 is larger than the train split" in made.said.value


def test_a_plan_that_came_from_elsewhere_is_shown_and_not_wished():
    made = panel(lr=1e-3)
    wishes = running(made)
    made.fields["epochs"].value = "no"
    made.take(made.plan.replace(lr=7e-4, batch_size=128))
    assert (made.plan.lr, made.fields["lr"].value, wishes.plan) == (7e-4, "0.0007", None)
    assert made.sliders["lr"].value == pytest.approx(7e-4)
    assert made.buttons.heard.value == ""
    assert offered(made) == []
    assert made.fields["epochs"].value == "no"
    assert "must be a whole number" in made.notes["epochs"].value


def test_after_a_run_the_buttons_wish_nothing():
    made = panel()
    wishes = running(made)
    made.end()
    assert all(button.disabled for button in buttons(made.buttons.view).values())
    buttons(made.controls)["Stop"].click()
    made.fields["lr"].value = "0.1"
    made.refresh()
    assert wishes == Wishes()
    assert made.plan.lr == 0.1


def test_a_person_on_another_thread_is_not_lost_while_the_run_fills_the_fields():
    made = panel(epochs=100)
    wishes = running(made)

    def type_epochs():
        for epochs in range(1, 31):
            made.fields["epochs"].value = str(epochs)

    person = threading.Thread(target=type_epochs)
    person.start()
    while person.is_alive():
        made.take(wishes.plan or made.plan)
        made.refresh()
    person.join()
    assert (made.plan.epochs, made.fields["epochs"].value) == (30, "30")


def test_a_page_without_a_kernel_shows_the_plan_as_a_table():
    made = panel(reasons={"lr": f"because {EVIL}"})
    bundle = made._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] == made.whole.model_id
    assert "because &lt;img" in bundle["text/html"]
    assert "<img" not in bundle["text/html"]
    for shown in (bundle["text/html"], bundle["text/plain"]):
        assert all(name in shown for name in made.fields)


def test_the_panels_own_cell_has_the_buttons_while_a_run_is_under_way():
    """fit's output, which has them too, is gone once its cell was run again or the page loaded anew."""
    made = panel()
    assert "Pause" not in buttons(visible(made.whole))
    wishes = running(made)
    buttons(visible(made.whole))["Pause"].click()
    assert wishes.paused
    assert "Resume" in buttons(visible(made.whole))
    made.end()
    assert "Pause" not in buttons(visible(made.whole))


def visible(widget):
    """A widget with what is displayed of its children."""
    shown = [child for child in widget.children if child.layout.display != "none"]
    return types.SimpleNamespace(children=shown)


def test_without_ipywidgets_it_says_so(monkeypatch):
    for module in ("nbtools.live.panel.form", "nbtools.live.panel.buttons"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(MissingExtra, match="Panel is drawn with ipywidgets"):
        Panel(Plan())


def test_in_a_terminal_it_is_a_table_of_knobs_and_reasons():
    assert "half the guide's" in repr(panel(reasons={"lr": "half the guide's"}))


def test_a_verdict_is_shown_with_a_button_that_makes_its_change():
    made = panel(amp="off")
    shown = buttons(made.buttons.view)
    made.propose(f"Compute-bound: {EVIL}; amp = bf16 makes training 1.4× as fast", {"amp": "bf16"})
    assert EVIL not in made.proposal.said.value
    assert "Compute-bound" in made.proposal.said.value
    assert made.proposal.button.description == "Make it so: amp = bf16"
    wishes = Wishes()
    made.begin(wishes, {}, lambda plan: None)
    made.proposal.button.click()
    assert wishes.plan is not None
    assert wishes.plan.amp == made.plan.amp == "bf16"
    assert made.proposal.view.layout.display == "none", "a change that was made is proposed no more"
    assert {"Pause", "Stop", "Evaluate now", "Save now", "What limits it?"} <= set(shown)


def test_a_verdict_without_a_change_has_no_button_and_a_refused_change_stays_proposed():
    made = panel()
    made.propose("Compute-bound: nothing worth changing", None)
    assert made.proposal.button.layout.display == "none"
    made.propose("Launch-bound: larger batch", {"batch_size": 10**6})

    def check(plan):
        raise PlanError("Plan.batch_size is larger than the train split")

    made.begin(Wishes(), {}, check)
    made.proposal.button.click()
    assert made.plan.batch_size == Plan().batch_size
    assert "larger than the train split" in made.notes["batch_size"].value
    assert made.proposal.view.layout.display == "flex"


def test_what_limits_it_is_a_wish():
    made, wishes = panel(), Wishes()
    made.begin(wishes, {}, lambda plan: None)
    buttons(made.controls)["What limits it?"].click()
    assert wishes.profile


def test_the_slider_of_a_small_batch_never_asks_for_none():
    made = panel(batch_size=8)
    assert made.sliders["batch_size"].min == 0
    made.sliders["batch_size"].value = 1
    assert made.plan.batch_size == 1
