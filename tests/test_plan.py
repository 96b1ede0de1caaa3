"""Plan: a value that is either right or refused by field, rule and what came."""

import dataclasses
import json
import math
import typing
from dataclasses import dataclass

import pytest

from nbtools.errors import NbtoolsError, PlanError
from nbtools.train import Plan, knob, plan


@dataclass(frozen=True)
class TaskPlan(Plan):
    alpha: float = knob(0.25, "weight of the first loss", least=0, most=1)
    scales: tuple[float, ...] = knob((1.0,), "sizes to evaluate at", above=0)
    network: str = knob("small", "which model", choices=("guide", "small"))
    length: int | None = knob(None, "characters; None: any", least=1)


FIELDS = {field.name: field for field in dataclasses.fields(TaskPlan)}
HINTS = typing.get_type_hints(TaskPlan)


def broken(name: str) -> list[tuple[object, str]]:
    """(a value that breaks a rule, words of the refusal) for every rule that a field's metadata and type state."""
    rule, hint = FIELDS[name].metadata, HINTS[name]
    wrap = (lambda x: (x, x)) if "tuple" in str(hint) else (lambda x: x)
    whole = int in plan.options(hint)
    cases: list[tuple[object, str]] = []
    if rule["choices"]:
        cases += [("no such word", f"must be one of {', '.join(rule['choices'])}, got 'no such word'")]
    if rule["least"] is not None:
        value = rule["least"] - 1 if whole else rule["least"] - 0.5
        cases += [(wrap(value), f"must be ≥ {rule['least']}, got {value}")]
    if rule["above"] is not None:
        cases += [(wrap(float(rule["above"])), f"must be > {rule['above']}, got {float(rule['above'])}")]
    if rule["most"] is not None:
        value = rule["most"] + 1 if whole else rule["most"] + 0.5
        cases += [(wrap(value), f"must be ≤ {rule['most']}, got {value}")]
    cases += [(wrap(object), "must be ")]
    if hint is not bool:
        cases += [(wrap(True), "got True")]
    if not whole and hint in (float, float | None):
        cases += [(value, f"must be finite, got {value}") for value in (math.inf, math.nan)]
    if type(None) not in plan.options(hint):
        cases += [(None, "got None")]
    return cases


@pytest.mark.parametrize(("name", "value", "words"), [(n, *case) for n in FIELDS for case in broken(n)])
def test_every_rule_of_every_field_refuses_by_field_rule_and_what_came(name, value, words):
    with pytest.raises(PlanError) as caught:
        TaskPlan(**{name: value})
    assert str(caught.value).startswith(f"TaskPlan.{name} must be ")
    assert words in str(caught.value)


def test_the_table_of_broken_rules_covers_every_field():
    assert all(broken(name) for name in FIELDS)
    assert len(FIELDS) == len(dataclasses.fields(Plan)) + 4


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"batch_size": 8, "micro_batch_size": 9}, r"micro_batch_size must be ≤ batch_size \(8\), got 9; lower it"),
        ({"lr": 1e-3, "min_lr": 1e-2}, r"min_lr must be ≤ lr \(0.001\), got 0.01; lower it"),
        ({"epochs": 2, "warmup_epochs": 3}, r"warmup_epochs must be ≤ epochs \(2\), got 3; lower it"),
        ({"betas": (0.9,)}, r"betas must be 2 values, got \(0.9,\)"),
        ({"betas": 0.9}, "betas must be 2 values, got 0.9"),
        ({"scales": 1.0}, "scales must be several values, got 1.0"),
        ({"batch_size": 64.5}, "batch_size must be a whole number, got 64.5"),
        ({"epochs": "3"}, "epochs must be a whole number, got '3'"),
        ({"compile": 1}, "compile must be true or false, got 1"),
    ],
)
def test_knobs_that_do_not_fit_each_other_or_their_type_are_refused(knobs, words):
    with pytest.raises(PlanError, match=words):
        TaskPlan(**knobs)


def test_a_refusal_is_an_nbtools_error_and_a_value_error():
    assert issubclass(PlanError, NbtoolsError)
    assert issubclass(PlanError, ValueError)


def test_values_take_the_type_of_their_field():
    made = TaskPlan(lr=1, batch_size=64.0, betas=[0, 1e-3], scales=[1, 2])  # type: ignore[arg-type]
    assert (made.lr, made.batch_size, made.betas, made.scales) == (1.0, 64, (0.0, 1e-3), (1.0, 2.0))
    assert [type(v) for v in (made.lr, made.batch_size, *made.betas)] == [float, int, float, float]


@pytest.mark.parametrize("entry", [lambda n: TaskPlan().replace(**{n: 1}), lambda n: TaskPlan.parse(n, "1")])
def test_an_unknown_knob_lists_near_ones(entry):
    with pytest.raises(PlanError, match=r"TaskPlan has no setting 'batchsize'; did you mean .*batch_size"):
        entry("batchsize")
    with pytest.raises(PlanError, match=r"no setting 'qqqqqq'; it has epochs, batch_size, .*, alpha"):
        entry("qqqqqq")


def test_a_plan_survives_json_with_its_own_knobs():
    made = TaskPlan(lr=0.1 + 0.2, scales=(0.5, 2.0), length=4, betas=(0.5, 0.99), ema=0.999, seed=2**31 - 1)
    assert TaskPlan.from_json(made.to_json()) == made
    assert list(json.loads(made.to_json())) == [f.name for f in dataclasses.fields(TaskPlan)]
    assert TaskPlan.from_json("{}") == TaskPlan()


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError, match="TaskPlan must be a JSON object of settings"):
        TaskPlan.from_json(text)


def test_replace_validates_and_leaves_the_original():
    made = TaskPlan()
    assert made.replace(alpha=0.5).alpha == 0.5
    with pytest.raises(PlanError, match=r"TaskPlan.alpha must be ≤ 1, got 1.5"):
        made.replace(alpha=1.5)
    assert made == TaskPlan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "12", 12),
        ("lr", "3e-4", 3e-4),
        ("lr", "1", 1.0),
        ("compile", "true", True),
        ("compile", "Off", False),
        ("compile", "1", True),
        ("optimizer", "sgd", "sgd"),
        ("lr_rule", "none", "none"),  # a word of a field that cannot be None
        ("clip_norm", "none", None),
        ("clip_norm", "", None),
        ("clip_norm", "0.5", 0.5),
        ("micro_batch_size", "None", None),
        ("betas", "0.9,0.999", (0.9, 0.999)),
        ("betas", "(0.9, 0.999)", (0.9, 0.999)),
        ("scales", "[0.5, 1, 2]", (0.5, 1.0, 2.0)),
        ("length", "4", 4),
    ],
)
def test_typed_text_becomes_the_value_of_its_field(name, text, value):
    found = TaskPlan.parse(name, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("epochs", "many", "a whole number"),
        ("lr", "", "a number"),
        ("compile", "perhaps", "true or false"),
        ("betas", "a,b", "numbers with commas between"),
    ],
)
def test_typed_text_of_another_type_is_refused(name, text, words):
    with pytest.raises(PlanError, match=f"TaskPlan.{name} must be {words}, got '{text}'"):
        TaskPlan.parse(name, text)


@pytest.mark.parametrize("name", FIELDS)
def test_every_default_can_be_typed(name):
    default = getattr(TaskPlan(), name)
    assert TaskPlan.parse(name, str(default)) == default


@pytest.mark.parametrize(("rule", "lr"), [("none", 1e-3), ("sqrt", 2e-3), ("linear", 4e-3)])
def test_another_batch_size_moves_lr_by_the_rule(rule, lr):
    made = TaskPlan(batch_size=64, lr=1e-3, lr_rule=rule)
    larger = made.with_batch_size(256)
    assert (larger.batch_size, larger.lr) == (256, pytest.approx(lr))
    assert larger.with_batch_size(64).lr == pytest.approx(made.lr)


def test_a_smaller_batch_size_takes_micro_batch_and_min_lr_along():
    made = TaskPlan(batch_size=64, micro_batch_size=32, lr=1e-3, min_lr=9e-4, lr_rule="linear")
    smaller = made.with_batch_size(16)
    assert (smaller.micro_batch_size, smaller.min_lr, smaller.lr) == (16, 2.5e-4, 2.5e-4)
    assert made.with_batch_size(128).micro_batch_size == 32


@pytest.mark.parametrize("size", [0, -4, 2.5, "64"])
@pytest.mark.parametrize("rule", ["none", "sqrt", "linear"])
def test_another_batch_size_is_checked_before_the_rule(size, rule):
    with pytest.raises(PlanError, match=r"TaskPlan.batch_size must be"):
        TaskPlan(lr_rule=rule).with_batch_size(size)


def test_turning_the_batch_size_moves_lr_by_the_rule_unless_an_lr_is_given():
    made = Plan(batch_size=64, lr=1e-3, lr_rule="linear")
    assert made.turn(batch_size=128).lr == 2e-3
    assert made.turn(batch_size=128, lr=5e-4).lr == 5e-4
    assert made.turn(batch_size=128, lr_rule="none").lr == 1e-3
    assert made.turn(epochs=3) == made.replace(epochs=3)
    with pytest.raises(PlanError, match="did you mean batch_size"):
        made.turn(batchsize=3)
