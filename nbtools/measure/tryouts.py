"""`nb.checkup`: what of nbtools works on this machine, tried on small demo data, and how fast it is there.

A part yields attempts; each becomes a row, also where it raises. What trains is compared with float32 on the CPU, the
reference of all tests.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nbtools.data import Draws, Pack, gather, on, phase, work
from nbtools.errors import MissingExtra, NbtoolsError
from nbtools.measure.advisor import advise
from nbtools.measure.batch import Trial, line
from nbtools.measure.check import Arithmetic, check
from nbtools.measure.checkup import DIFFERS, ENDED, FAILS, MISSING, NOT_HERE, WORKS, Checkup, Row, home, of_here, save
from nbtools.measure.examples import BATCH, CPU, EXAMPLES, STEPS, Bench, NotHere, limited, task_of
from nbtools.measure.profile import AGREES
from nbtools.measure.receipt import receipt
from nbtools.measure.stepper import Stepper, untouched
from nbtools.measure.trials import apart
from nbtools.table import number, percent, plural, size, timing
from nbtools.train import TrainState, checkpoint, train, train_step
from nbtools.train import device as devices

CTC = ("captcha lines", "hwdb")  # it reads lengths on the host, which no graph repeats
EXTRAS = {
    "captcha": "demo captchas",
    "rapidfuzz": "error rates of texts",
    "scipy": "boundaries of segments",
    "pynvml": "the state of NVIDIA GPUs",
    "gdown": "links to Google Drive",
    "torchvision": "features of filmed signs",
    "onnx": "export to ONNX",
    "onnxruntime": "the comparison of an exported ONNX file",
}
CLOSE = 1e-3  # of a value in float32 on another device, or in another order
PREDICTED = 0.1  # of a step's memory, by which its prediction may be wrong
DRAWN = 137_433_884_549_124  # the sum of 64,000 random numbers, on any device
TARGET, CAPTCHAS, MOST_EPOCHS = 0.95, 6000, 20  # share of captchas to be read whole, images, and epochs for it


@dataclass(frozen=True)
class Found:
    """The result of a trial. ok: whether it is as it should be; figures: what was measured, for programs."""

    ok: bool
    text: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """A trial of a part: what is tried, and how. task, lever: whose settings it speaks for or against."""

    what: str
    act: Callable[[], Found]
    task: str = ""
    lever: dict[str, Any] = field(default_factory=dict)


def checkup(path: str | Path | None = None, again: bool = False, parts: Collection[str] = ()) -> Checkup:
    """Try what nbtools does on this machine: precisions, networks, feeds, memory, resume, compilation, and on a GPU the
    speed of each task. Takes two minutes on a CPU, eight on a GPU.

    Results are kept in the cache, where `nb.advise` reads them; what has worked on this machine with these versions is
    not tried again, nor what ended the process, unless `again`. path: a JSON file to write them to as well. parts:
    names in PARTS; (): all. Raises NbtoolsError for another name, DiskError where a file cannot be written.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise NbtoolsError(f"parts must be some of {', '.join(PARTS)}, got {unknown[0]!r}")
    found, chosen = of_here(), [part for part in PARTS if part in parts or not parts]
    known = {(row.part, row.what): row for row in found.rows if row.part not in chosen or not again}
    with tempfile.TemporaryDirectory() as folder, work("checking this machine", **{p: PARTS[p][1] for p in chosen}):
        bench = Bench(Path(folder), devices.pick())
        for part in chosen:
            phase(part)
            for attempt in PARTS[part][0](bench):
                key = (part, attempt.what)
                if key in known and (known[key].result == WORKS or known[key].text == ENDED):
                    continue
                if attempt.lever.get("graph"):  # a recording that fails may end this process: for the next call
                    ended = Row(part, attempt.what, FAILS, ENDED, 0.0, attempt.task, attempt.lever)
                    save(home(), with_rows(found, known | {key: ended}))
                try:
                    known[key] = tried(part, attempt)
                finally:
                    found = with_rows(found, known)
                    save(home(), found)
    if path is not None:
        save(Path(path), found)
    return found


def with_rows(found: Checkup, known: dict[tuple[str, str], Row]) -> Checkup:
    """A check-up with these rows, in the order of the parts."""
    return dataclasses.replace(found, rows=tuple(sorted(known.values(), key=lambda row: [*PARTS].index(row.part))))


def tried(part: str, attempt: Attempt) -> Row:
    """Try it. Whatever it raises is its result."""
    start = perf_counter()
    try:
        found = attempt.act()
        result, text, figures = WORKS if found.ok else DIFFERS, found.text, found.figures
    except NotHere as why:
        result, text, figures = NOT_HERE, str(why), {}
    except MissingExtra as error:
        result, text, figures = MISSING, str(error), {}
    except Exception as error:  # a check-up reports what fails
        result, text, figures = FAILS, ": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:200], {}
    return Row(part, attempt.what, result, text, perf_counter() - start, attempt.task, attempt.lever, figures)


def agreed(losses: Sequence[float], reference: Sequence[float], most: float, of: str) -> Found:
    far = apart(losses, reference)
    within = f"within {percent(far, 2)} of {of}; allowed {percent(most, 1)}" if far else f"equal to {of}"
    return Found(far <= most, f"losses {within}", {"difference": far})


# -- the parts


def packages(bench: Bench) -> Iterator[Attempt]:
    """Versions, NVML, formats of numbers, and what is installed."""

    def nvml() -> Found:
        bench.need(f"NVML: {found.gpus.missing}", bool(found.gpus))
        names = {f.name for gpu in found.gpus for f in dataclasses.fields(gpu) if getattr(gpu, f.name) is None}
        return Found(True, f"{plural(len(found.gpus), 'GPU')}; not reported: {', '.join(sorted(names)) or 'nothing'}")

    def products(each: Arithmetic) -> Found:
        _, here, measured = each.row()
        if each.flops is None:
            raise NotHere(here)
        return Found(True, f"{here}; {measured} GFLOP/s", {"flops": each.flops})

    def present(name: str) -> Found:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"for {EXTRAS[name]}: pip install {'nvidia-ml-py' if name == 'pynvml' else name}")
        return Found(True, EXTRAS[name])

    found = check({})
    for what, text in found.rows():
        if text is not None and what != "AMP":
            yield Attempt(what, partial(Found, True, text))
    yield Attempt("NVML", nvml)
    for each in found.arithmetic:
        yield Attempt(f"products in {each.name}", partial(products, each))
    for name in EXTRAS:
        yield Attempt(name, partial(present, name))


def numbers(bench: Bench) -> Iterator[Attempt]:
    """Random numbers and augmented batches, on the CPU and on the device."""

    def drawn() -> Found:
        bits = Draws(1, 2, torch.arange(1000, device=bench.device)).bits((64,))
        return Found(int(bits.sum()) == DRAWN, "64,000 numbers; their sum as everywhere")

    def batch(name: str) -> Found:
        bench.need("a device other than the CPU", bench.device != CPU)
        case = bench.case(name)
        raw, far = gather(case.pack, case.pack.ids("train")[:BATCH]), 0.0
        plan = case.plan.replace(**{f.name: 1.0 for f in dataclasses.fields(case.plan) if f.name == "augment"})
        here, there = (
            case.task.batch(some, plan, Draws(1, 0, some["id"])) for some in (on(CPU, raw), on(bench.device, raw))
        )
        for key, tensor in here.items():
            far = max(far, float((tensor.double() - there[key].cpu().double()).abs().max()))
        return Found(far <= CLOSE, f"largest difference {number(far)}; allowed {CLOSE}", {"difference": far})

    yield Attempt("random numbers", drawn)
    for name in bench.each(bench.device != CPU):
        yield Attempt(f"batch of {name}", partial(batch, name))


def training(bench: Bench) -> Iterator[Attempt]:
    """Each network in each precision."""

    def act(name: str, network: str, amp: str) -> Found:
        case, reference = bench.case(name, network), bench.reference(name, network)
        if bench.device == CPU and amp == "off":
            text = f"loss {number(reference[0])} → {number(reference[-1])} in {case.steps} steps"
            return Found(all(map(math.isfinite, reference)), text)
        return agreed(case.losses(bench.device, amp=amp), reference, AGREES, "float32 on the CPU")

    precisions = ["off", "bf16", "fp16"] if bench.cuda else ["off", devices.reduced(bench.device)]
    for name in EXAMPLES:
        for network in bench.networks(name):
            for amp in dict.fromkeys(precisions):
                what = f"{name}{'' if network == 'auto' else f', {network}'}, {'float32' if amp == 'off' else amp}"
                yield Attempt(
                    what, partial(act, name, network, amp), EXAMPLES[name][0], {} if amp == "off" else {"amp": amp}
                )


def waits(bench: Bench) -> Iterator[Attempt]:
    """That no step waits for the GPU."""

    def act(name: str) -> Found:
        bench.need("CUDA", bench.cuda)
        case = bench.case(name)
        with untouched(bench.device):
            stepper = Stepper(case.task, case.pack, case.plan, bench.device).warm_up(5)
            ready = list(islice(stepper.batches, 5))
            torch.cuda.set_sync_debug_mode("error")
            try:
                for raw in ready:
                    stepper.step(raw)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return Found(True, "5 steps without a wait")

    for name in bench.each(bench.cuda):
        yield Attempt(name, partial(act, name))


def feeds(bench: Bench) -> Iterator[Attempt]:
    """Streamed batches, with evaluations in between, train as resident ones."""

    def act(name: str, feed: str) -> Found:
        case = bench.case(name)
        streamed, _ = case.run(bench.device, evaluating=True, feed=feed, workers=1)
        return agreed(streamed, bench.whole(name)[0], CLOSE, "those of the resident feed")

    for name in EXAMPLES:
        yield Attempt(f"{name}, streamed", partial(act, name, "streamed"), EXAMPLES[name][0], {"feed": "streamed"})
    yield Attempt("hwdb, a worker process", partial(act, "hwdb", "workers"))


def resuming(bench: Bench) -> Iterator[Attempt]:
    """A run that is saved, loaded and continued ends where one without interruption does."""

    def act(name: str) -> Found:
        case = bench.case(name)
        _, ended = bench.whole(name)
        with untouched(bench.device), tempfile.TemporaryDirectory(dir=bench.folder) as folder:
            first, second = (TrainState(case.task, case.pack, case.plan, bench.device) for _ in range(2))
            for record in train(case.task, first, case.pack):
                if record.kind == "epoch":
                    break
            checkpoint.save(Path(folder), first, rows=0)
            checkpoint.load(Path(folder), second)
            for _ in train(case.task, second, case.pack):
                continue
        pairs = zip(second.model.state_dict().values(), ended.model.state_dict().values(), strict=True)
        far = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
        exact = "the same bits" if far == 0 else f"weights differ by {number(far)} at most"
        return Found(far <= (0 if bench.device == CPU else CLOSE), f"{exact} after {plural(ended.step, 'step')}")

    for name in EXAMPLES:
        yield Attempt(name, partial(act, name))


def remembering(bench: Bench) -> Iterator[Attempt]:
    """The predicted memory of a step, and a batch that does not fit."""

    def predicted(name: str) -> Found:
        case, sizes = bench.case(name), (4, 8, 24)
        with untouched(bench.device):
            trial = Trial(case.task, case.pack, case.plan, bench.device)
            trial.largest(4)
            low, middle, high = (trial.memory(n)[0] or 0 for n in sizes)
        far = abs(line((4, low), (8, middle), 24) / max(high, 1) - 1)
        text = f"batch {sizes[-1]} takes {size(high)}, predicted within {percent(far, 1)}; allowed {percent(PREDICTED)}"
        return Found(far <= PREDICTED, text, {"bytes": high, "difference": far})

    def halved(name: str) -> Found:
        bench.need("CUDA or Linux, where memory can be limited", bench.cuda or sys.platform == "linux")
        case = bench.case(name)
        with untouched(bench.device):
            trial = Trial(case.task, case.pack, case.plan, bench.device)
            few, many = (trial.memory(n)[0] or 0 for n in (2, 32))
            more = (many - few) // 2
            del trial
        if bench.cuda:
            return Found(*short_of_memory(name, case.pack.folder, more))
        call = f"print(short_of_memory({name!r}, {str(case.pack.folder)!r}, {more}))"  # the limit is a process's
        command = [sys.executable, "-c", f"from nbtools.measure.tryouts import short_of_memory; {call}"]
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=paths, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1])
        return Found(*ast.literal_eval(done.stdout))

    for name in EXAMPLES:
        yield Attempt(f"{name}, predicted", partial(predicted, name))
    yield Attempt("a batch that does not fit", partial(halved, "segment"))


def short_of_memory(name: str, folder: str | Path, more: int) -> tuple[bool, str]:
    """A step of 32 samples with so many more bytes than a step of 2 left: (whether its batch was halved, what came)."""
    device, task, pack = devices.pick(), task_of(name), Pack.open(folder)
    plan = advise(task, pack, measure=False).plan.replace(batch_size=32, micro_batch_size=None, amp="off", ema=None)
    with untouched(device):
        state, ids = TrainState(task, pack, plan, device), pack.ids("train")[:32]
        raw = on(device, gather(pack, ids))
        train_step(state, {key: tensor[:2] for key, tensor in raw.items()}, len(ids))  # loads kernels, makes moments
        with limited(device, more):
            train_step(state, raw, len(ids))
    return bool(state.events), state.events[0] if state.events else f"{size(more)} were enough"


def compiling(bench: Bench) -> Iterator[Attempt]:
    """torch.compile and CUDA graphs train to the losses of eager mode."""

    def compiled(name: str) -> Found:
        case = bench.case(name)
        try:
            losses = case.losses(bench.device, compile=True)
        finally:
            torch.compiler.reset()
        return agreed(losses, case.losses(bench.device), AGREES, "eager mode")

    def replayed(name: str) -> Found:
        bench.need("CUDA", bench.cuda)
        case = bench.case(name)
        with untouched(bench.device):
            stepper = Stepper(case.task, case.pack, case.plan.replace(graph=True), bench.device, learning=True)
            losses, graphs = [stepper.mean_loss() for _ in range(STEPS)], stepper.state.graphs
        if graphs is None or not graphs.replayed:
            raise NbtoolsError((graphs and graphs.off) or f"no shape came often enough in {STEPS} steps")
        found = agreed(losses, case.losses(bench.device), AGREES, "eager mode")
        return dataclasses.replace(found, text=f"{found.text}; {graphs.replayed} of {STEPS} steps replayed")

    for name in bench.each(bench.cuda):  # a CPU compiles for a minute
        yield Attempt(f"{name}, compile", partial(compiled, name), EXAMPLES[name][0], {"compile": True})
    for name in bench.each(bench.cuda):
        if name not in CTC:
            yield Attempt(f"{name}, graph", partial(replayed, name), EXAMPLES[name][0], {"graph": True})


def repeating(bench: Bench) -> Iterator[Attempt]:
    """Plan.deterministic repeats its losses, bit for bit."""

    def act(name: str) -> Found:
        first, second = (bench.case(name).losses(bench.device, deterministic=True) for _ in range(2))
        return Found(first == second, f"losses of {len(first)} steps within {percent(apart(first, second), 2)}")

    for name in bench.each(bench.cuda):  # on a CPU `resuming` has shown the same bits of each
        yield Attempt(name, partial(act, name))


def speed(bench: Bench) -> Iterator[Attempt]:
    """On a GPU: advice and receipt of each task, and the time to read captchas."""

    def measured(name: str) -> Found:
        bench.need("CUDA", bench.cuda)
        case = bench.case(name)
        advice = advise(case.task, case.pack, seconds=6.0)
        made = receipt(case.task, case.pack, advice.plan, seconds=0.5)
        profile = advice.profile
        shares = "" if profile is None else f"; kernels take {percent(profile.device)} of a step"
        figures = {"ratio": made.ratio, "samples_per_s": made.after.samples_per_s}
        figures |= {} if profile is None else {"device": profile.device, "ceiling_ratio": profile.ceiling_ratio}
        return Found(True, f"{made.caption()}{shares}", figures)

    def to_target() -> Found:
        bench.need("CUDA", bench.cuda)
        task, folder = task_of("captcha"), bench.folder / "target"
        pack = task.pack(task.demo(folder / "raw", CAPTCHAS), into=folder / "pack", progress=False)
        plan = advise(task, pack, measure=False).plan.replace(epochs=MOST_EPOCHS, eval_every=1)
        with untouched(bench.device):
            state, start, share = TrainState(task, pack, plan, bench.device), perf_counter(), 0.0
            for record in train(task, state, pack):
                share = max(share, record.values.get("val_whole_accuracy", 0.0))
                if share >= TARGET:
                    break
        took = perf_counter() - start
        text = f"{percent(share, 1)} of captchas read whole after {timing(took)}, epoch {state.epoch}"
        return Found(share >= TARGET, text, {"seconds": took, "share": share})

    for name in bench.each(bench.cuda):
        yield Attempt(name, partial(measured, name))
    if bench.cuda:
        yield Attempt(f"captcha to {percent(TARGET)}", to_target)


PARTS: dict[str, tuple[Callable[[Bench], Iterator[Attempt]], float]] = {
    "packages": (packages, 1),
    "numbers": (numbers, 1),
    "training": (training, 15),
    "waits": (waits, 1),
    "feeds": (feeds, 15),
    "resume": (resuming, 8),
    "memory": (remembering, 12),
    "compile": (compiling, 40),
    "deterministic": (repeating, 2),
    "speed": (speed, 1),
}
"""Name → (its attempts, seconds expected on a CPU)."""
