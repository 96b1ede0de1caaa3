"""The panel: a form over a plan's fields, used here without a front end; what it holds is always a valid plan."""

import dataclasses
import math
from dataclasses import dataclass

import pytest

from nbtools import plan as plans
from nbtools.errors import PlanError
from nbtools.panel import SHOWN, Panel, written

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


def panel(reasons=None, baseline=None, **knobs):
    return Panel(Advice(Plan(**knobs), reasons or {}, baseline))


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
    assert made.fields["lr"].value == "0.00141421"
    made.fields["batch_size"].value = "64"
    assert math.isclose(made.plan.lr, 1e-3)


def test_presets_and_reset_bring_whole_plans_back_even_over_a_wrong_value():
    baseline = Plan(epochs=150, feed="workers", optimizer="adam")
    made = panel(baseline=baseline, epochs=5)
    made.fields["lr"].value = "no"
    buttons(made.view)["The guide's baseline"].click()
    assert made.plan == baseline
    assert made.fields["epochs"].value == "150"
    assert made.fields["lr"].value == "0.001"
    made.reset()
    assert made.plan == made.advised
    assert "As advised" in made.said.value


def test_without_a_baseline_there_is_no_button_for_it():
    assert list(buttons(panel().view)) == ["As advised"]


def test_eight_fields_stand_in_view_and_all_others_under_more():
    made = panel()
    _, *rows, more = made.view.children
    assert len(rows) == 8
    inside = [row.children[0].value.split()[0] for row in more.children[0].children]
    shown = [row.children[0].value.split()[0] for row in rows]
    assert shown == [name for name in SHOWN if name in made.fields][:8]
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
        assert Plan.parse(name, written(value, "")) == value


def test_a_plain_plan_makes_a_panel_and_something_else_does_not():
    assert Panel(Plan(epochs=2)).plan == Plan(epochs=2)
    with pytest.raises(PlanError, match="takes an Advice or a Plan, got dict"):
        Panel({"lr": 1})


def test_in_a_terminal_it_is_a_table_of_knobs_and_reasons():
    assert "half the guide's" in repr(panel(reasons={"lr": "half the guide's"}))
