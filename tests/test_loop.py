"""The loop: one generator, exact sums, and the field's own results."""

import copy
import json
import math
import types
from typing import Any

import pytest
import torch
import toy
from torch import nn

import nbtools as nb
from nbtools.errors import PlanError, TrainError
from nbtools.train import Diverged, TrainState, train
from nbtools.train.evaluation import evaluate
from nbtools.train.optimizer import OPTIMIZERS


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


def task_with(**changes) -> Any:
    """The toy task with some of its names replaced."""
    return types.SimpleNamespace(**{**vars(toy), **changes})


def losses(state, pack, task: Any = toy):
    return [r.values["loss"] for r in train(task, state, pack) if r.kind == "step" and r.values]


def weights(state):
    return torch.cat([p.detach().flatten() for p in state.model.parameters()])


def test_training_lowers_the_loss_and_equals_a_plain_loop(tmp_path, pack):
    plan = toy.PLAN.replace(epochs=2, noise=0.0, dropout=0.0, schedule="constant", optimizer="adam", betas=(0.8, 0.9))
    state = TrainState(toy, pack, plan)
    model = copy.deepcopy(state.model)
    order = []
    spied = task_with(
        batch=lambda raw, plan, draws: (draws and order.append(raw["id"]), toy.batch(raw, plan, draws))[1]
    )
    for record in train(spied, state, pack):
        assert record.epoch < 2
    optimizer = torch.optim.Adam(model.parameters(), plan.lr, betas=plan.betas, fused=True)
    x, label = torch.from_numpy(pack.arrays["x"]), torch.from_numpy(pack.arrays["label"])[:, 0]
    model.train()
    for ids in order:
        loss = nn.functional.cross_entropy(model({"x": x[ids]}), label[ids])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm or 0.0)
        optimizer.step()
    assert len(order) == state.step > 0
    assert torch.allclose(weights(state), torch.cat([p.flatten() for p in model.parameters()]), atol=1e-6)


def test_one_batch_overfits(tmp_path):
    pack = toy.make_pack(tmp_path, count=24)
    state = TrainState(toy, pack, toy.PLAN.replace(epochs=200, batch_size=12, dropout=0.0, noise=0.0, hidden=64))
    last = losses(state, pack)[-1]
    assert last < 0.05


def test_micro_batches_give_the_gradient_of_the_whole_batch(pack):
    plan = toy.PLAN.replace(epochs=1, dropout=0.0)
    net = toy.Net(16, 0.0)
    frozen = nn.Sequential(net.layers[0], net.layers[2], net.layers[4])  # BatchNorm sees micro-batches: leave it out
    task = task_with(model=lambda card, plan: Plain(copy.deepcopy(frozen)))
    whole = TrainState(task, pack, plan)
    losses(whole, pack, task)
    for micro in (1, 3, 5, 16):
        parts = TrainState(task, pack, plan.replace(micro_batch_size=micro))
        losses(parts, pack, task)
        assert torch.allclose(weights(whole), weights(parts), atol=2e-6), f"micro batch {micro}"


@pytest.mark.parametrize(("batch_size", "micro"), [(9, 2), (3, 2), (5, 4), (2, 3)])
def test_no_micro_batch_is_a_single_sample_unless_asked_for(pack, batch_size, micro):
    sizes = []
    task = task_with(batch=lambda raw, plan, draws: (sizes.append(len(raw["id"])), toy.batch(raw, plan, draws))[1])
    plan = toy.PLAN.replace(epochs=1, batch_size=batch_size)
    state = TrainState(task, pack, plan)
    state.recovery.micro = micro
    next(train(task, state, pack))
    assert sum(sizes) == batch_size
    assert min(sizes) > 1


class Plain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, batch):
        return self.layers(batch["x"])


def test_accumulation_divides_by_the_true_count_of_the_window(pack):
    """Micro-batches with unequal numbers of counted items: the mean over items, not the mean of means."""

    def weighted(model, batch, plan):
        each = nn.functional.cross_entropy(model(batch), batch["label"], reduction="none")
        counted = batch["label"] > 0  # some micro-batches count few, or none
        return (each * counted).sum(), counted.sum()

    frozen = nn.Sequential(nn.Linear(8, 4))
    task = task_with(model=lambda card, plan: Plain(copy.deepcopy(frozen)), loss=weighted)
    plan = toy.PLAN.replace(epochs=1, clip_norm=None, optimizer="sgd", weight_decay=0.0)
    whole, parts = TrainState(task, pack, plan), TrainState(task, pack, plan.replace(micro_batch_size=2))
    a, b = losses(whole, pack, task), losses(parts, pack, task)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-6)
    assert a == pytest.approx(b, abs=1e-5)


def test_a_batch_in_which_nothing_counts_is_loss_zero_and_not_nan(pack):
    def ignoring(model, batch, plan):
        return model(batch).sum() * 0.0, torch.zeros((), dtype=torch.int64)

    state = TrainState(task_with(loss=ignoring), pack, toy.PLAN.replace(epochs=1))
    assert set(losses(state, pack, task_with(loss=ignoring))) == {0.0}
    assert torch.isfinite(weights(state)).all()


def test_evaluation_is_exact_whatever_the_batch_size(pack):
    state = TrainState(toy, pack, toy.PLAN)
    found = [evaluate(toy, state.model, pack, toy.PLAN.replace(batch_size=n), "val") for n in (1, 7, 16, 100)]
    for other in found[1:]:
        assert other["accuracy"] == found[0]["accuracy"]
        assert other["loss"] == pytest.approx(found[0]["loss"], abs=1e-6)


def test_scoring_counts_samples_and_not_batches(pack):
    """SYSTEMS §2: the guide's test script counted batches but scored one sample of each."""
    seen = []
    spied = task_with(metrics=lambda outputs, batch: (seen.append(len(outputs)), toy.metrics(outputs, batch))[1])
    state = TrainState(toy, pack, toy.PLAN)
    values = evaluate(spied, state.model, pack, toy.PLAN.replace(batch_size=7), "test")
    assert sum(seen) == len(pack.ids("test")) > 7
    slow = [toy.forward_one(state.model, pack, i) == int(pack.sample(i)["label"][0]) for i in pack.ids("test")]
    assert values["accuracy"] == pytest.approx(sum(slow) / len(slow))


def test_train_mode_returns_after_evaluation_and_validation_is_not_augmented(pack):
    modes, augmented = [], []

    def batch(raw, plan, draws):
        augmented.append(draws is not None)
        return toy.batch(raw, plan, draws)

    def loss(model, batch, plan):
        modes.append(model.training if isinstance(model, nn.Module) else "evaluation")
        return toy.loss(model, batch, plan)

    task = task_with(batch=batch, loss=loss)
    state = TrainState(task, pack, toy.PLAN.replace(epochs=2))
    kinds = [record.kind for record in train(task, state, pack)]
    assert kinds.count("epoch") == 2
    assert "evaluating" in kinds
    assert set(modes) == {True, "evaluation"}
    assert augmented == [mode is True for mode in modes]


def test_a_step_reads_nothing_from_the_device_but_on_log_steps(pack, monkeypatch):
    """SYSTEMS §2 and §5: `.item()` every step. Counted at the tensor's own conversions."""
    reads = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, real=real: (reads.append(1), real(t))[1])
    state = TrainState(toy, pack, toy.PLAN.replace(epochs=1, batch_size=4))
    quiet = logs = 0
    for record in train(toy, state, pack):
        if record.kind == "step" and not record.values:
            quiet += 1
            assert not reads, "a step without values read a tensor"
        logs += record.kind == "step" and bool(record.values)
        reads.clear()
    assert quiet > 20
    assert logs >= 5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_entry_of_the_table_is_an_optimizer_of_the_plan_fused_and_with_its_buffers(pack, optimizer):
    state = TrainState(toy, pack, toy.PLAN.replace(optimizer=optimizer, weight_decay=0.01))
    assert type(state.optimizer) is OPTIMIZERS[optimizer].kind
    assert state.optimizer.defaults["fused"]
    made = {id(p): set(buffers) for p, buffers in state.optimizer.state.items()}
    next(train(toy, state, pack))
    assert made == {id(p): set(buffers) for p, buffers in state.optimizer.state.items()}, "all made before the first"
    assert all(math.isfinite(x) for x in losses(state, pack))


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_to_about_the_same_loss(pack, amp):
    plain = TrainState(toy, pack, toy.PLAN)
    mixed = TrainState(toy, pack, toy.PLAN.replace(amp=amp))
    seen = set()
    mixed.network.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    assert losses(mixed, pack)[-1] == pytest.approx(losses(plain, pack)[-1], rel=0.1)
    assert seen == {torch.bfloat16 if amp == "bf16" else torch.float16}
    assert (mixed.scaler is not None) == (amp == "fp16")
    if mixed.scaler is not None:  # SYSTEMS §2: a CUDA-only scaler was given the device where its scale belongs
        assert mixed.scaler._device == mixed.device.type
        assert mixed.scaler.get_scale() > 1


def test_autocast_and_no_grad_do_not_leak_into_the_code_between_steps(pack):
    state = TrainState(toy, pack, toy.PLAN.replace(amp="bf16", epochs=1))
    for _ in train(toy, state, pack):
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()


@pytest.mark.usefixtures("fp16_on_cpu")
def test_a_step_that_fp16_refuses_does_not_advance_the_schedule(pack):
    plan = toy.PLAN.replace(amp="fp16", epochs=1)
    state = TrainState(toy, pack, plan)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # overflows at once, then finds its scale
    list(train(toy, state, pack))
    assert 0 < state.position.skipped < state.samples
    assert torch.isfinite(weights(state)).all()


def test_out_of_memory_halves_the_micro_batch_and_keeps_batch_lr_and_result(pack):
    def hungry(model, batch, plan):
        if isinstance(model, nn.Module) and len(batch["x"]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return toy.loss(model, batch, plan)

    task = task_with(loss=hungry, model=lambda card, plan: Plain(nn.Sequential(nn.Linear(8, 4))))
    plan = toy.PLAN.replace(epochs=1)
    state = TrainState(task, pack, plan)
    records = list(train(task, state, pack))
    told = [r.values["what"] for r in records if r.kind == "event"]
    assert told == [
        "out of memory: micro batch 16 → 8; effective batch and lr unchanged",
        "out of memory: micro batch 8 → 4; effective batch and lr unchanged",
    ]
    assert state.recovery.micro == 4
    assert state.plan == plan
    easy = task_with(model=task.model)
    same = TrainState(easy, pack, plan.replace(micro_batch_size=4))
    losses(same, pack, easy)
    assert torch.equal(weights(same), weights(state))


def test_out_of_memory_with_one_sample_is_an_error_and_not_a_loop(pack):
    def starving(model, batch, plan):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    state = TrainState(task_with(loss=starving), pack, toy.PLAN)
    with pytest.raises(TrainError, match="out of memory with one sample at a time"):
        list(train(task_with(loss=starving), state, pack))


def test_out_of_memory_in_evaluation_takes_the_batch_in_halves(pack):
    def hungry(most):
        def loss(model, batch, plan):
            if not isinstance(model, nn.Module) and len(batch["x"]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return toy.loss(model, batch, plan)

        return task_with(loss=loss)

    state = TrainState(toy, pack, toy.PLAN)
    halved, whole = (evaluate(task, state.model, pack, toy.PLAN, "val") for task in (hungry(5), task_with()))
    assert halved == pytest.approx(whole, abs=1e-6)
    with pytest.raises(TrainError, match="out of memory evaluating one sample"):
        evaluate(hungry(0), state.model, pack, toy.PLAN, "val")


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("resumed", [False, True])
def test_sgd_whose_first_steps_overflow_in_fp16_begins_without_momentum(pack, resumed):
    plan = toy.PLAN.replace(amp="fp16", optimizer="sgd", epochs=1)
    state = TrainState(toy, pack, plan)
    if resumed:  # from before the first step, by a version that saved no momenta
        saved = {k: v for k, v in state.tensors().items() if not k.startswith("optimizer.")}
        state.load(saved, json.loads(json.dumps(state.facts())))
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    assert len(state.optimizer.state) == len(state.parameters)
    for _ in train(toy, state, pack):
        if state.position.skipped == state.samples:
            assert all(not buffer["momentum_buffer"].any() for buffer in state.optimizer.state.values())
    assert 0 < state.position.skipped < state.samples
    assert all(torch.isfinite(p).all() for p in state.parameters)


@pytest.mark.usefixtures("fp16_on_cpu")
def test_fp16_finds_its_scale_where_each_step_is_checked(pack):
    """Gradients that overflow are the scaler's business and no reason to give up; a lost loss is."""
    state = TrainState(task_with(loss=nan_once(5)), pack, toy.PLAN.replace(amp="fp16", epochs=1))
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    state.recovery.careful_until = 100
    told = [r.values["what"] for r in train(state.task, state, pack) if r.kind == "event"]
    assert [what.split(":")[0] for what in told] == ["step 5 left out"]
    assert 0 < state.position.skipped < state.samples
    assert not state.lost()


def nan_once(step):
    calls = []

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        calls.append(torch.is_grad_enabled())
        return (total * float("nan") if sum(calls) == step and calls[-1] else total), count

    return loss


def test_a_loss_lost_after_the_last_log_step_of_an_epoch_does_not_end_the_epoch(pack):
    plan = toy.PLAN.replace(batch_size=5, epochs=1)
    steps = [r for r in train(toy, TrainState(toy, pack, plan), pack) if r.kind == "step"]
    assert not steps[-1].values
    task = task_with(loss=nan_once(len(steps)))
    state = TrainState(task, pack, plan)
    with pytest.raises(Diverged, match="lost in steps"):
        list(train(task, state, pack))
    assert state.epoch == 0


def test_a_first_evaluation_that_is_no_number_is_not_the_best_for_ever(pack):
    calls = []

    def metrics(outputs, batch):
        calls.append(1)
        return {"accuracy": (float("nan") if len(calls) == 1 else len(outputs), len(outputs))}

    state = TrainState(task_with(metrics=metrics), pack, toy.PLAN.replace(epochs=2))
    list(train(state.task, state, pack))
    assert state.best.value == 1.0


def test_a_best_that_names_no_metric_is_said_so(pack):
    task = task_with(BEST="acc")
    with pytest.raises(TrainError, match="BEST is 'acc', and its metrics are loss, accuracy"):
        list(train(task, TrainState(task, pack, toy.PLAN), pack))


def test_a_lost_loss_is_an_error_that_names_the_steps(pack):
    state = TrainState(task_with(loss=nan_from(20)), pack, toy.PLAN)
    with pytest.raises(Diverged, match=r"nan in steps \d+ to \d+") as caught:
        list(train(task_with(loss=nan_from(20)), state, pack))
    assert caught.value.steps[0] <= 20 <= caught.value.steps[1]


def nan_from(step):
    calls = []

    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        calls.append(isinstance(model, nn.Module))
        return (total * float("nan") if sum(calls) >= step and calls[-1] else total), count

    return loss


def test_the_moving_average_is_what_is_evaluated(pack):
    state = TrainState(toy, pack, toy.PLAN.replace(ema=0.9))
    shadow = torch.zeros(0)
    for record in train(toy, state, pack):
        if record.kind == "step":
            now = weights(state).clone()
            shadow = now if state.step == 1 else shadow * 0.9 + now * 0.1
    average = torch.cat([p.flatten() for p in state.evaluated.parameters()])
    assert state.evaluated is not state.model
    assert torch.allclose(average, shadow, atol=1e-5)


@pytest.mark.full  # a minute of compilation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_channels_last_and_compile_keep_the_loss(tmp_path, pack):
    plan = toy.PLAN.replace(epochs=1, dropout=0.0)  # the compiler draws its dropout from numbers of its own
    expected = losses(TrainState(toy, pack, plan), pack)
    found = losses(TrainState(toy, pack, plan.replace(channels_last=True, compile=True)), pack)
    assert found == pytest.approx(expected, rel=1e-4)


def test_knobs_turned_while_it_trains_act_at_the_next_step_and_leave_a_row(pack):
    state = TrainState(toy, pack, toy.PLAN.replace(epochs=2, schedule="constant"))
    changes, seen = [], []
    for record in train(toy, state, pack):
        if record.kind == "change":
            changes.append(record.values["what"])
        if record.kind == "step":
            seen.append(state.optimizer.param_groups[0]["lr"])
            if state.step == 5:
                state.plan = state.plan.replace(lr=0.005, weight_decay=0.1, amp="bf16")
    assert changes == ["lr 0.01 → 0.005, weight_decay 0 → 0.1, amp off → bf16"]
    assert seen[4] == 0.01
    assert seen[5] == 0.005
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize("kind", ["evaluating", "epoch"])
def test_a_knob_turned_between_epochs_acts_too(pack, kind):
    state = TrainState(toy, pack, toy.PLAN)
    changes = []
    for record in train(toy, state, pack):
        if record.kind == kind and record.epoch == 0 and state.plan is toy.PLAN:
            state.plan = state.plan.replace(weight_decay=0.1, amp="fp16", batch_size=9)
        if record.kind == "change":
            changes.append(record.values["what"])
    assert changes == ["batch_size 16 → 9, weight_decay 0 → 0.1, amp off → fp16"]
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert state.scaler is not None


@pytest.mark.parametrize("knobs", [{"optimizer": "sgd"}, {"hidden": 3}, {"seed": 1}, {"feed": "streamed"}])
def test_a_knob_that_cannot_change_is_refused_by_name_and_changes_nothing(pack, knobs):
    state = TrainState(toy, pack, toy.PLAN)
    steps = train(toy, state, pack)
    next(steps)
    state.plan = state.plan.replace(**knobs)
    with pytest.raises(TrainError, match=f"Plan.{next(iter(knobs))} cannot change in a started run"):
        next(steps)
    assert state.plan == toy.PLAN


@pytest.mark.parametrize("ragged", [False, True])
def test_after_any_changes_of_batch_size_every_sample_still_comes_once_an_epoch(tmp_path, ragged):
    pack = toy.make_pack(tmp_path, ragged=ragged)
    ids = []
    task = task_with(
        batch=lambda raw, plan, draws: (draws and ids.append(raw["id"].tolist()), toy.batch(raw, plan, draws))[1]
    )
    state = TrainState(task, pack, toy.PLAN.replace(epochs=3))
    sizes = {2: 5, 3: 30, 6: 7, 12: 64, 14: 3}
    for record in train(task, state, pack):
        if record.kind == "step" and state.step in sizes:
            state.plan = state.plan.replace(batch_size=sizes[state.step])
    wanted = sorted(pack.ids("train").tolist())
    flat = [i for batch in ids for i in batch]
    assert len(flat) == 3 * len(wanted)
    for epoch in range(3):
        assert sorted(flat[epoch * len(wanted) : (epoch + 1) * len(wanted)]) == wanted
    assert {len(batch) for batch in ids} >= {16, 5, 30, 7, 64, 3}


def test_early_stop_and_plateau_follow_the_metric(pack):
    flat = task_with(metrics=lambda outputs, batch: {"accuracy": (1, 2)})
    plan = toy.PLAN.replace(epochs=50, schedule="plateau", patience=2, early_stop=5)
    state = TrainState(flat, pack, plan)
    epochs = [r for r in train(flat, state, pack) if r.kind == "epoch"]
    assert len(epochs) == 6
    assert state.stopped == "early stop: accuracy did not improve in 5 evaluations"
    assert [e.values["lr"] for e in epochs] == pytest.approx([0.01, 0.01, 0.01, 0.001, 0.001, 0.0001])


def test_evaluation_comes_every_n_epochs_and_at_the_last(pack):
    state = TrainState(toy, pack, toy.PLAN.replace(epochs=5, eval_every=2))
    evaluated = [r.epoch for r in train(toy, state, pack) if r.kind == "epoch" and "val_loss" in r.values]
    assert evaluated == [1, 3, 4]


def test_bad_sizes_are_refused_before_the_first_step(tmp_path, pack):
    with pytest.raises(
        TrainError, match=r"batch_size 5000 is larger than the train split \(\d+ samples\); set it to at most"
    ):
        list(train(toy, TrainState(toy, pack, toy.PLAN.replace(batch_size=5000)), pack))
    single = toy.make_pack(tmp_path / "one", count=1)
    with pytest.raises(TrainError, match=r"train split has [01] sample\(s\), training needs at least 2"):
        list(train(toy, TrainState(toy, single, toy.PLAN.replace(batch_size=1)), single))


def test_a_network_without_anything_to_learn_is_refused(pack):
    task = task_with(model=lambda card, plan: toy.Net(4, 0.0).requires_grad_(False))
    with pytest.raises(TrainError, match="Net has no parameter that requires a gradient"):
        TrainState(task, pack, toy.PLAN)


def test_what_the_device_cannot_do_is_refused(pack):
    with pytest.raises(TrainError, match=r"Plan.graph replays CUDA graphs, and this device is cpu"):
        TrainState(toy, pack, toy.PLAN.replace(graph=True), device="cpu")


def test_making_a_state_leaves_the_callers_random_numbers_alone(pack):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    TrainState(toy, pack, toy.PLAN)
    assert torch.equal(before, torch.get_rng_state())


def test_the_public_names_are_there():
    for name in ("gpus", "stage", "advise", "Panel", "fit", "evaluate", "TrainState", "train", "Run", "Pack", "Plan"):
        assert hasattr(nb, name), name
    assert issubclass(PlanError, nb.NbtoolsError)
