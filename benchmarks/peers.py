"""One training in nbtools and its peers: what every program is given, and the programs as their users write them.

All are given the same samples, batches, augmentation, network, loss, optimizer, lr and evaluation. A program moves the
batches through them, evaluates after each epoch and keeps the best weights; the lines of its body are counted. `Meter`
sees all of them alike from outside: when each training batch arrived, how long it was waited for, and its loss.
"""

# Only `make bench` installs the peers:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

import nbtools as nb
from nbtools.data import Draws, Pack, Padding, batches_left, collate, in_order, lengths_of, on
from nbtools.train import Plan, Sums, bind, build, device
from nbtools.train.evaluation import scores
from nbtools.train.optimizer import build_optimizer
from nbtools.train.task import as_sum

Raw = dict[str, Tensor]
WARM = 3  # steps of a trial before it is timed: the first compile, and start workers


def best_metric(task: Any) -> tuple[str, float]:
    """The metric that chooses the best checkpoint, and -1 where lower is better."""
    return task.BEST.lstrip("-"), -1.0 if task.BEST.startswith("-") else 1.0


class Enough(Exception):
    """Raised in a program that has trained as long as its meter asks for."""


@dataclass
class Meter:
    """seconds: after which, from the end of the first WARM steps, Enough ends the program; steps: or after so many.
    arrivals: when each training batch reached the task; waited: seconds that a DataLoader had kept the loop waiting by
    then, and evaluated those of evaluations; losses: (sum, count) of each step; scores: of each evaluation, which ended
    at `ends`."""

    seconds: float = math.inf
    steps: float = math.inf
    arrivals: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    losses: list[tuple[Tensor, Any]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    wait: float = 0.0
    evaluating: float = 0.0

    def arrived(self) -> None:
        now = perf_counter()
        warm = self.arrivals[WARM] if len(self.arrivals) > WARM else now
        if len(self.arrivals) >= self.steps or now - warm > self.seconds:
            raise Enough
        for values, value in ((self.arrivals, now), (self.waited, self.wait), (self.evaluated, self.evaluating)):
            values.append(value)

    @contextmanager
    def watching(self, task: Any) -> Iterator[None]:
        """Inside, a training step of any program calls the task's `batch` and `loss` with this meter between."""
        batch, loss, fetch = task.batch, task.loss, _BaseDataLoaderIter.__next__

        def batch_seen(raw: Raw, plan: Any, draws: Draws | None) -> Any:
            if draws is not None:
                self.arrived()
            return batch(raw, plan, draws)

        def loss_seen(model: Any, given: Any, plan: Any) -> Any:
            pair = loss(model, given, plan)
            if torch.is_grad_enabled() and isinstance(model, nn.Module):  # else outputs that are tried before training
                self.losses.append((pair[0].detach(), pair[1]))
            return pair

        def fetch_timed(loader: Any) -> Any:
            start = perf_counter()
            try:
                return fetch(loader)
            finally:
                self.wait += perf_counter() - start

        task.batch, task.loss, _BaseDataLoaderIter.__next__ = batch_seen, loss_seen, fetch_timed
        try:
            yield
        finally:
            task.batch, task.loss, _BaseDataLoaderIter.__next__ = batch, loss, fetch


@dataclass(frozen=True)
class Levers:
    """What can be tuned in any framework without a change of what is learned."""

    workers: int = 0
    bf16: bool = False
    channels_last: bool = False
    compile: bool = False


class Batches(Sampler):
    """nbtools' batches of ids for the epoch that has come, as a `batch_sampler`: a DataLoader with workers begins its
    first pass twice, so passes do not tell the epoch."""

    def __init__(self, pack: Pack, plan: Plan):
        ids = pack.ids("train")
        lengths = lengths_of(pack, ids)
        self.of = lambda epoch: batches_left(ids, lengths, plan.seed, epoch, [[plan.batch_size, 0]])
        self.steps, self.trained = len(self.of(0)), 0

    @property
    def epoch(self) -> int:
        return self.trained // self.steps

    def __iter__(self) -> Iterator[list[int]]:
        return iter([ids.tolist() for ids in self.of(self.epoch)])

    def __len__(self) -> int:
        return self.steps


class Job:
    """What every program is given. source: the files; pack: made of them before, for the network and the splits."""

    def __init__(self, task: Any, pack: Pack, source: Path, plan: Plan, levers: Levers, meter: Meter):
        self.task, self.pack, self.source, self.plan, self.levers, self.meter = task, pack, source, plan, levers, meter
        self.bound, self.device, self.order = bind(task, pack.card), device.pick(), Batches(pack, plan)
        self.epochs, self.clip, self.bf16 = plan.epochs, plan.clip_norm, levers.bf16
        self.steps = len(self.order)  # of an epoch

    def loader(self, split: str = "train") -> DataLoader:
        """Over the source files, each sample decoded on demand."""
        workers, cuda, ids = self.levers.workers, self.device.type == "cuda", self.pack.ids(split)
        each = [batch.tolist() for batch in in_order(ids, lengths_of(self.pack, ids), self.plan.batch_size)]
        return DataLoader(
            self.pack.raw,
            batch_sampler=self.order if split == "train" else each,
            num_workers=workers,
            collate_fn=partial(collate, columns=self.pack.columns, padding=Padding(self.pack, self.plan)),
            pin_memory=cuda,
            persistent_workers=workers > 0,
            multiprocessing_context="forkserver" if workers and cuda else None,
            generator=torch.Generator(),  # its own: dropout sees the same numbers however the batches come
        )

    def build(self) -> nn.Module:
        return build(self.bound, self.pack.card, self.plan)

    def network(self) -> nn.Module:
        torch.manual_seed(self.plan.seed)
        net = self.build().to(self.device)
        if self.levers.channels_last:
            net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (torch's stub lacks it)
        if self.levers.compile:
            net.compile()
        return net

    def loss(self, net: Any, raw: Raw) -> Tensor:
        """The mean loss of a batch, which is augmented whole, on the device, in float32."""
        epoch, self.order.trained = self.order.epoch, self.order.trained + 1
        with torch.autocast(self.device.type, enabled=False):
            raw = on(self.device, raw)
            batch = self.bound.batch(raw, self.plan, Draws(self.plan.seed, epoch, raw["id"]))
            if self.levers.channels_last:
                nhwc = torch.channels_last
                batch = {k: v.contiguous(memory_format=nhwc) if v.dim() == 4 else v for k, v in batch.items()}
        total, count = as_sum(self.bound.loss(net, batch, self.plan), len(raw["id"]))
        return total / (count + (count == 0))

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(self.bound, net, self.plan.replace(graph=False))

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The plan's lr by step: that of the step's middle."""
        sizes = [np.array([len(ids) for ids in self.order.of(epoch)]) for epoch in range(self.epochs)]
        middles = [epoch + x for epoch, n in enumerate(sizes) for x in ((n.cumsum() - n / 2) / n.sum()).tolist()]

        def factor(step: int) -> float:
            return self.plan.lr_at(middles[min(step, len(middles) - 1)]) / self.plan.lr

        return LambdaLR(optimizer, [lambda step, s=g["lr_scale"]: s * factor(step) for g in optimizer.param_groups])

    @cached_property
    def val(self) -> DataLoader:
        return self.loader("val")

    def score(self, net: nn.Module) -> float:
        """The metric that chooses the best weights, over the validation split; larger is better."""
        plan, (metric, sign) = self.plan.while_training(), best_metric(self.bound)
        plan, sums = plan.replace(amp="bf16" if self.bf16 else "off"), Sums(self.device)
        for raw in self.val:
            sums.add(scores(self.bound, net, on(self.device, raw), plan))
        net.train()  # as Lightning's validation leaves it, which this stands for
        return sign * sums.read()[metric]

    def evaluate(self, net: nn.Module) -> float:
        """The score, whose time counts neither as training nor as waiting for data."""
        start, wait = perf_counter(), self.meter.wait
        self.meter.scores.append(self.score(net))
        self.meter.ends.append(perf_counter())
        self.meter.wait, self.meter.evaluating = wait, self.meter.evaluating + self.meter.ends[-1] - start
        return self.meter.scores[-1]

    WRITTEN: tuple[Callable[..., Any], ...] = ()  # the methods above that a user would write, whose lines count

    def nbtools(self, folder: Path) -> None:
        pack = self.task.pack(self.source, into=folder / "pack", progress=False)
        nb.fit(self.task, pack, self.plan, folder / "run", receipt=False, progress=False)


# -- the programs, as their users write them: the lines of each body are counted


def nbtools(job: Job, folder: Path) -> None:
    job.nbtools(folder)


def guide(job: Job, folder: Path) -> None:
    """No program of a user: the plan of a guide, whose samples nbtools' loop decodes one by one."""
    nb.fit(job.task, job.pack, job.plan, folder / "run", receipt=False, progress=False)


def pytorch(job: Job, folder: Path) -> None:
    net, loader, best = job.network(), job.loader(), -math.inf
    optimizer = job.optimizer(net)
    schedule = job.schedule(optimizer)
    for _ in range(job.epochs):
        net.train()
        for raw in loader:
            optimizer.zero_grad()
            with torch.autocast(job.device.type, torch.bfloat16, enabled=job.bf16):
                loss = job.loss(net, raw)
            loss.backward()
            if job.clip:
                nn.utils.clip_grad_norm_(net.parameters(), job.clip)
            optimizer.step()
            schedule.step()
        score = job.evaluate(net)
        if score > best:
            best = score
            torch.save(net.state_dict(), folder / "best.pt")


def accelerate(job: Job, folder: Path) -> None:
    from accelerate import Accelerator

    runner, best = Accelerator(mixed_precision="bf16" if job.bf16 else "no", cpu=job.device.type == "cpu"), -math.inf
    network = job.network()
    net, optimizer, loader = runner.prepare(network, job.optimizer(network), job.loader())
    schedule = job.schedule(optimizer.optimizer)
    for _ in range(job.epochs):
        net.train()
        for raw in loader:
            optimizer.zero_grad()
            with runner.autocast():
                loss = job.loss(net, raw)
            runner.backward(loss)
            if job.clip:
                runner.clip_grad_norm_(net.parameters(), job.clip)
            optimizer.step()
            schedule.step()
        score = job.evaluate(net)
        if score > best:
            best = score
            runner.save(runner.get_state_dict(net), folder / "best.pt")


def lightning(job: Job, folder: Path) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.network()

        def training_step(self, raw: Raw, i: int) -> Tensor:
            return job.loss(self.net, raw)

        def on_train_epoch_end(self) -> None:
            self.log("score", job.evaluate(self.net))

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer(self.net)
            return [optimizer], [{"scheduler": job.schedule(optimizer), "interval": "step"}]

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # gradient_clip_val= raises with a fused optimizer in mixed precision, though bf16 scales no gradient
            if job.clip:
                nn.utils.clip_grad_norm_(self.net.parameters(), job.clip)

    best = ModelCheckpoint(folder, monitor="score", mode="max", save_weights_only=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    precision = "bf16-mixed" if job.bf16 else "32-true"
    trainer = Trainer(
        accelerator=job.device.type, devices=1, precision=precision, max_epochs=job.epochs, callbacks=[best], **quiet
    )
    trainer.fit(Module(), job.loader())


def transformers(job: Job, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Runner(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return job.loader()

        def compute_loss(self, model: nn.Module, inputs: Raw, **_: Any) -> Tensor:
            return job.loss(model, inputs)

        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            found = {"eval_score": job.evaluate(network)}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

        def save_model(self, output_dir: str, *_: Any, **__: Any) -> None:  # its safetensors refuse channels_last
            Path(output_dir).mkdir()
            torch.save(network.state_dict(), Path(output_dir) / "model.pt")

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=job.epochs,
        max_grad_norm=job.clip or 0,
        bf16=job.bf16,
        use_cpu=job.device.type == "cpu",
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="score",
        save_only_model=True,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # reads the loss in every step
        report_to="none",
        disable_tqdm=True,
    )
    network = job.network()
    optimizer = job.optimizer(network)
    Runner(network, arguments, eval_dataset=[0], optimizers=(optimizer, job.schedule(optimizer))).train()


def fastai(job: Job, folder: Path) -> None:
    from fastai.callback.core import Callback, CancelValidException
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    class Network(nn.Module):  # fastai's MixedPrecision is for CUDA only
        def __init__(self) -> None:
            super().__init__()
            self.net = job.network()

        def forward(self, raw: Raw) -> Tensor:
            with torch.autocast(job.device.type, torch.bfloat16, enabled=job.bf16):
                return job.loss(self.net, raw)

    class Follow(Callback):
        def before_fit(self) -> None:
            self.schedule, self.best = job.schedule(self.opt.opt), -math.inf

        def after_step(self) -> None:
            self.schedule.step()

        def before_validate(self) -> None:
            score = job.evaluate(self.model.net)
            if score > self.best:
                self.best = score
                self.learn.save("best", with_opt=False)
            raise CancelValidException

    network, loader = Network(), job.loader()
    loader.collate_fn = lambda samples, collate=loader.collate_fn: (collate(samples), torch.zeros(1))
    optimizer = OptimWrapper(opt=job.optimizer(network.net))
    data = DataLoaders(loader, [], path=folder, device=job.device)
    callbacks = [Follow(), *([GradientClip(job.clip)] if job.clip else [])]
    learner = Learner(data, network, lambda loss, _: loss, opt_func=lambda *_, **__: optimizer, cbs=callbacks)
    with learner.no_bar(), learner.no_logging():
        learner.fit(job.epochs, job.plan.lr)


Program = Callable[[Job, Path], None]
PROGRAMS: dict[str, tuple[Program, str]] = {
    "nbtools": (nbtools, "nbtools"),
    "guide": (guide, "nbtools"),
    "pytorch": (pytorch, "torch"),
    "lightning": (lightning, "lightning.pytorch"),
    "accelerate": (accelerate, "accelerate"),
    "transformers": (transformers, "transformers.trainer"),
    "fastai": (fastai, "fastai.learner"),
}
"""name → (program, the module whose import takes its time)."""
OURS = ("nbtools", "guide")  # those that nbtools' loop trains


def package_of(name: str) -> str:
    return PROGRAMS[name][1].partition(".")[0]


def run(name: str, job: Job, folder: Path) -> None:
    """A program in a process that may have run others: Accelerate keeps the first one's precision."""
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    PROGRAMS[name][0](job, folder)


def lines(name: str, job: type[Job]) -> int:
    """What a user writes: lines of the bodies that are not empty; the repository's are written as ruff formats them."""
    parts = [job.nbtools] if name == "nbtools" else [PROGRAMS[name][0], *job.WRITTEN]
    return sum(bool(line.strip()) for part in parts for line in inspect.getsource(part).splitlines()[1:])
