"""Plan: a value that is either right or refused by field, rule and what came; the learning rate as a function of it."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from acting import refused

from nbtools.errors import PlanError
from nbtools.train import Plan, knob


@dataclass(frozen=True)
class TaskPlan(Plan):
    alpha: float = knob(0.25, "weight of the first loss", least=0, most=1)
    scales: tuple[float, ...] = knob((1.0,), "sizes to evaluate at", above=0)
    network: str = knob("small", "which model", choices=("guide", "small"))
    length: int | None = knob(None, "characters; None: any", least=1)


REFUSED: list[tuple[str, Any, str]] = [
    ("micro_batch_size", 65, r"at most batch_size (64), got 65; lower it"),
    ("warmup_epochs", 10.5, "at most epochs (10), got 10.5; lower it"),
    ("betas", (0.9,), r"2 values, got (0.9,)"),
    ("batch_size", 64.5, "a whole number, got 64.5"),
    ("lr", 10**400, "must be finite"),
    ("network", "large", "must be one of guide, small, got 'large'"),
    ("epochs", 0, "must be at least 1, got 0"),
    ("lr", 0.0, "must be greater than 0, got 0.0"),
    ("alpha", 1.5, "must be at most 1, got 1.5"),
    ("lr", True, "got True"),
    ("amp", True, "must be one of off, bf16, fp16, got True"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_every_rule_of_a_field_refuses_by_field_rule_and_what_came(name, value, words):
    with pytest.raises(PlanError) as caught:
        TaskPlan(**{name: value})
    assert f"Plan.{name} must be " in str(caught.value)
    assert words in str(caught.value)


KIND: Any = TaskPlan
ENTRIES = (lambda n: KIND(**{n: 1}), lambda n: KIND().turn(**{n: 1}), lambda n: KIND.parse(n, "1"))
NEAR = {"batchsize": "did you mean .*batch_size", "learning_rate": r"did you mean lr\?", "qqqqqq": "it has epochs"}
NEAR |= {"wd": r"did you mean weight_decay\?", "fp16": r"did you mean amp\?", "max_grad_norm": "did you mean clip_norm"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_unknown_setting_lists_near_ones(entry):
    for name, said in NEAR.items():
        refused(PlanError, f"TaskPlan has no setting '{name}'; {said}", entry, name)


@pytest.mark.parametrize("value", [3, 0.1 + 0.2, 1e-30, 5e-324, 1e22])
def test_every_number_takes_the_type_of_its_field_is_kept_and_reads_back_from_json_and_as_typed(value):
    made = TaskPlan(lr=1, batch_size=64.0, betas=[0, 1e-3], seed=np.int64(3))  # type: ignore[arg-type]
    assert [repr(v) for v in (made.lr, made.batch_size, made.betas, made.seed)] == ["1.0", "64", "(0.0, 0.001)", "3"]
    made = TaskPlan(epochs=3, alpha=min(value, 1.0), weight_decay=value, betas=(0.5, min(value, 0.99)), clip_norm=None)
    assert made.weight_decay == value
    assert TaskPlan(**json.loads(json.dumps(made.to_dict()))) == made
    for name in ("weight_decay", "betas"):
        assert TaskPlan.parse(name, str(getattr(made, name))) == getattr(made, name)


TYPED: dict[tuple[str, str], Any] = {  # → the value, or the rule that refuses it
    ("lr", "1"): 1.0,
    ("compile", "Off"): False,
    ("lr_rule", "none"): "none",  # a word of a field that cannot be None
    ("clip_norm", ""): None,
    ("micro_batch_size", "None"): None,
    ("betas", "0.9,0.999"): (0.9, 0.999),
    ("scales", "[0.5, 1, 2]"): (0.5, 1.0, 2.0),
    ("lr", ""): PlanError("a number"),
    ("epochs", "1.5"): PlanError("a whole number"),
    ("compile", "perhaps"): PlanError("true or false"),
    ("betas", "a,b"): PlanError("numbers separated by commas"),
}


@pytest.mark.parametrize(("name", "text"), TYPED)
def test_typed_text_becomes_the_value_of_its_field_or_is_refused(name, text):
    expected = TYPED[name, text]
    if isinstance(expected, PlanError):
        refused(PlanError, f"TaskPlan.{name} must be {expected}, got '{text}'", TaskPlan.parse, name, text)
    else:
        assert repr(TaskPlan.parse(name, text)) == repr(expected)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_a_turned_batch_size_moves_lr_by_the_rule_unless_an_lr_is_given(rule, factor):
    made = Plan(batch_size=64, lr=1e-3, lr_rule=rule)
    larger = made.turn(batch_size=256)
    assert (larger.batch_size, larger.lr) == (256, pytest.approx(factor * 1e-3))
    assert Plan(lr=2e-3, lr_rule=rule).turn(batch_size=32).turn(batch_size=64).lr == 2e-3, "to the last bit"
    assert Plan(epochs=10, warmup_epochs=4).turn(epochs=2).warmup_epochs == 0.8
    assert made.turn(batch_size=256, lr=5e-4).lr == 5e-4
    assert made.turn(batch_size=256, lr_rule="none").lr == 1e-3
    assert ("lr" in made.marked(["lr"]).turn(batch_size=256).given()) == (factor > 1), "it is the advice's no longer"


TAKEN = [  # what is turned → micro batch, lr and min_lr, of 32, 1e-3 and 9e-4
    ({"batch_size": 16}, (16, 2.5e-4, 2.5e-4)),
    ({"batch_size": 128}, (32, 2e-3, 9e-4)),
    ({"lr": 1e-5}, (32, 1e-5, 1e-5)),
    ({"lr": 1e-5, "min_lr": 1e-6}, (32, 1e-5, 1e-6)),
]


@pytest.mark.parametrize(("turned", "expected"), TAKEN, ids=str)
def test_what_must_not_be_larger_is_taken_along_unless_it_is_given(turned, expected):
    made = Plan(batch_size=64, micro_batch_size=32, lr=1e-3, min_lr=9e-4, lr_rule="linear")
    larger = made.turn(**turned)
    assert (larger.micro_batch_size, larger.lr, larger.min_lr) == expected
    refused(PlanError, r"Plan\.min_lr must be", made.turn, lr=1e-5, min_lr=1e-4)


STEPS, BASE = 50, Plan(epochs=10, lr=1e-2)  # steps of an epoch


def test_warmup_rises_linearly_step_by_step_and_ends():
    made = BASE.replace(warmup_epochs=2, schedule="constant")
    rising = [made.lr_at(step / STEPS) for step in range(1, 2 * STEPS + 1)]
    assert rising == pytest.approx([1e-2 * k / (2 * STEPS) for k in range(1, 2 * STEPS + 1)])
    for own in (None, lambda t: 1.0 + (t > 1)):  # a schedule of one's own ends with the run
        assert [made.lr_at(2 + k / STEPS, own=own) for k in range(9 * STEPS)] == [1e-2] * 9 * STEPS


def test_cosine_is_torchs_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler, made = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10 * STEPS, 1e-4), BASE.replace(min_lr=1e-4)
    for step in range(10 * STEPS):
        assert made.lr_at(step / STEPS) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("knobs", "epochs", "drops", "lr"),
    [
        ({"warmup_epochs": 2, "min_lr": 1e-3}, 4, 0, 1e-3 + 9e-3 * (0.5 + math.sqrt(0.5) / 2)),
        ({"warmup_epochs": 2, "min_lr": 1e-3}, 14, 0, 1e-3),
        ({"schedule": "poly"}, 5, 0, 1e-2 * 0.5**0.9),
        ({"schedule": "step"}, 3.3, 0, 1e-2),
        ({"schedule": "step", "min_lr": 2e-3}, 3.4, 0, 2e-3),
        ({"schedule": "step"}, 10, 0, 1e-4),
        ({"schedule": "plateau", "min_lr": 2e-4}, 9.9, 1, 1e-3),
        ({"schedule": "plateau", "min_lr": 2e-4}, 1, 9, 2e-4),
    ],
)
def test_schedules_at_known_points(knobs, epochs, drops, lr):
    assert BASE.replace(**knobs).lr_at(epochs, drops) == pytest.approx(lr)
