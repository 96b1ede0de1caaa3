"""The guides' programs in nbtools' words: `python -m nbtools guide main.py -m hctr -d DIR -b 64` shows our command and
runs it.

PROGRAMS has a row for each: the command that it is here, and a table of what becomes of its options. Such a rule is
text: ours, then after `#` what there is to say about it, or after `!` why it is refused. `{}` is the option's value,
`{1}` and `{2}` are its parts before and after a comma; a rule without any takes no value. A mapping has a rule for each
value, "," for lists, and "" for all others.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

from nbtools.data import Card, Column
from nbtools.errors import NbtoolsError
from nbtools.train import device

Rule = str | Mapping[str, str]

SEVERAL = "--processes {n} # the first GPUs; CUDA_VISIBLE_DEVICES={} before python names them"
ALL = "--processes {gpus} # a process for each GPU of this machine: {gpus}"
AMP = "--amp {amp} # bf16 where the device has it, else fp16"
FIRST_GPU = "# the first GPU, which is the default"
GPU = {"0": FIRST_GPU, ",": SEVERAL, "": "! write CUDA_VISIBLE_DEVICES={} before python to train on that GPU"}
NO_WORKERS = "# a pack needs no workers"
NOTHING = "# nothing to choose here"
PARTS = "--accumulate {} # --batch-size is what an update sees, --micro-batch-size what is in memory at once"
PINNED = "# always, where batches are copied to a GPU"
RESUMED = "--run {} # a run folder of nbtools: training continues where it stopped"
WORKERS = {
    "0": NO_WORKERS,
    "": "--feed workers --workers {} # they read raw files; without both options a pack is read",
}

PORT = {"": "# free ports are found"}
LAUNCH = {  # what stands before a program
    "CUDA_VISIBLE_DEVICES": GPU,
    "MASTER_PORT MASTER_ADDR --master_port --master-port --master_addr --master-addr": PORT,
    "--nproc_per_node --nproc-per-node --num_processes -np": {"gpu": ALL, "auto": ALL, "": "--processes {}"},
    "--nnodes --num_machines": {
        "1": NOTHING,
        "": "! docs/several.md says how several machines train; on this one: {ours}",
    },
}
HWDB = {
    "-m --model-type": {"hctr": "--network hctr --height 128"},
    "-d --data": "--data {}",
    "-b --batch-size": "--batch-size {}",
    "-lr --learning-rate": "--lr {}",
    "-j --workers": WORKERS,
    "-ep --epochs": "--epochs {}",
    "-mm --momentum": "--betas {},0.999",
    "-wd --weight-decay": "--weight-decay {}",
    "-pf --print-freq": {"": "# the bar and the picture follow every step"},
    "-vf --val-freq": {"": "# --eval-every counts epochs"},
    "-re --resume": RESUMED,
    "-te --test": "! python -m nbtools evaluate hwdb --data DIR --run FOLDER tests a run",
    "--gpu": GPU,
    "--multiprocessing-distributed": ALL,
}
CAPTCHA = {  # set in the scripts' text; here as KEY=VALUE
    "num_epochs": "--epochs {}",
    "batch_size": "--batch-size {}",
    "learning_rate base_learning_rate": "--lr {}",
    "warmup_epochs": "--warmup-epochs {}",
    "weight_decay": "--weight-decay {}",
    "num_workers": WORKERS,
    "accumulation_steps": PARTS,
}
SIGN = {  # options with the same name here are passed on
    "--model": {
        "transformer": "--network transformer --run runs/transformer",
        "iv3_gru": "--network gru --run runs/gru",
    },
    "--keypoints-train --features-train": "--data {}",
    "--keypoints-val --features-val": "--val {}",
    "--labels-train-csv": "--labels {}",
    "--labels-val-csv": "--labels-val {}",
    "--num-gloss": "--glosses {}",
    "--num-cat": "--categories {}",
    "--feature-key": {"X": "--feature-key X --kp-key none", "": "--feature-key {}"},
    "--batch-size": "--batch-size {}",
    "--auto-batch-size": "--batch-size auto # measured before anything is loaded",
    "--gradient-accumulation-steps": PARTS,
    "--grad-clip": "--clip-norm {}",
    "--scheduler": {"plateau": "--schedule plateau", "cosine": "--schedule cosine"},
    "--scheduler-patience": "--patience {}",
    "--amp": AMP,
    "--compile-model": "--compile",
    "--num-workers": WORKERS,
    "--auto-workers": NO_WORKERS + "; --feed workers --workers auto measures how many raw files need",
    "--pin-memory": PINNED,
    "--enable-parallel": ALL,
    "--resume": RESUMED,
    "--log-csv": {"": "# history.csv in the run's folder has its columns"},
    "--smoke-test": "--smoke-test # on demo clips, which have classes of their own",
    "--no-pretrained-backbone": "# clips hold ready-made features, which python -m nbtools features sign makes",
}
SEGMENT = {  # a config's names, as KEY=VALUE or in a file
    "im_root": "--data {}",
    "train_im_anns val_im_anns": {"": "# lists in the folder of --data give labels and splits"},
    "respth": "--run {}",
    "model_type": {"bisenetv2": "--network bisenetv2"},
    "n_cats class_num": {"": "# classes.txt, or the ids in the labels, say which classes there are"},
    "num_aux_heads": {"4": "# the default", "0": "--aux-weight 0"},
    "lr_start": "--lr {}",
    "weight_decay": "--weight-decay {}",
    "warmup_iters": {"": "# --warmup-epochs counts epochs"},
    "max_iter": {"": "# --epochs is max_iter × batch size / training images"},
    "scales": "--scale-low {1} --scale-high {2}",
    "cropsize crop_size": "--crop {1} # crops are square",
    "eval_crop": "--eval-window {1} # windows are square",
    "eval_scales": "--eval-scales {}",
    "ims_per_gpu": "--batch-size {}",
    "eval_ims_per_gpu": {"": NOTHING},
    "use_sync_bn": {"true": "--sync-batchnorm", "false": "--no-sync-batchnorm"},
    "gradient_accumulation_steps": PARTS,
    "use_fp16": {"true": AMP, "false": "--amp off"},
    "num_workers": WORKERS,
    "prefetch_factor": "--prefetch {}",
    "pin_memory": {"": PINNED},
    "persistent_workers": {"": "# always, with --feed workers"},
    "cudnn.deterministic": {"true": "--deterministic", "false": "# the default"},
    "cudnn.benchmark": {"": "# on where few shapes occur, unless --deterministic"},
}
ASSUMED = ("sign", "segment")  # of their samples the guides name no number
DATA = {  # cards of the guides' data sets, as far as plans depend on them
    "captcha": Card("captcha", [], {"layout": "fixed"}, {}, {"train": 40_024, "val": 5_003, "test": 5_003}),
    "hwdb": Card("hwdb", [], {"height": 128}, {}, {"train": 30_000}),
    "sign": Card(
        "sign", [str(gloss) for gloss in range(105)], {}, {"x": Column("ragged", "float32", (156,))}, {"train": 1_000}
    ),
    "segment": Card("segment", [], {"size": (384, 384)}, {}, {"train": 1_000}),
}
BEFORE = "--from baseline --feed auto"  # the program's own settings, but from a pack
CAPTCHA_RUN = "train captcha --data dataset --run runs/captcha"
EACH, GPUS = "--each", "--processes 3"  # the program's batch is that of each GPU, not of all; as many as in the guide

PROGRAMS: dict[str, tuple[str, Mapping[str, Rule]]] = {
    "main": (f"train hwdb --run runs/hwdb {BEFORE} --amp {{amp}} --epochs 10 --batch-size 8", HWDB),
    "train_optimized": ("train hwdb --run runs/hwdb --from guide --feed auto --network hctr --height 128", HWDB),
    "preprocess_all_hwdb": (
        "pack hwdb --height 128",
        {"--drive_root": "{}", "--output_dir": "--into {}", "--workers --use_local_storage": {"": NOTHING}},
    ),
    "check_gpu": ("gpus", {}),
    "captcha_train": (f"{CAPTCHA_RUN} {BEFORE} {EACH} --batch-size 128 --amp {{amp}}", CAPTCHA),
    "captcha_train_a100_optimized": (f"{CAPTCHA_RUN}_optimized --from guide --feed auto {GPUS}", CAPTCHA),
    "captcha_train_a100_ultra_optimized": (
        f"{CAPTCHA_RUN}_large --from guide-large --feed auto {EACH} --batch-size 1024 --lr 0.0006 {GPUS}",
        CAPTCHA,
    ),
    "captcha_test": ("evaluate captcha --data dataset --run runs/captcha", {}),
    "train": (f"train sign --run runs/sign {BEFORE} --batch-size 32", SIGN),
    "validate_npz": ("validate sign", {}),
    "train_amp": (f"train segment --run runs/segment {BEFORE} {EACH} --batch-size 32", SEGMENT),
}
CONFIG, CONFIGS = "train_amp", (".py", ".yaml", ".yml", ".json")  # the program of such files
SETTING = re.compile(r"""^\s*["']?([\w.]+)["']?[ \t]*[=:][ \t]*(?!dict\b|{)([^\s#][^#\n]*?),?[ \t]*(?:#.*)?$""", re.M)
FOREIGN = (".pt", ".pth", ".pkl", ".tar")  # checkpoints of other programs


@dataclass
class Translation:
    """A guide's command as ours. ours: option → its words, and under "" the command. notes: what there is to say about
    single options. refused: why it cannot run."""

    ours: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """What follows `python -m nbtools`."""
        return [word for option, words in self.ours.items() for word in ([option] if option else []) + words]

    def __str__(self) -> str:
        return shlex.join(["python", "-m", "nbtools", *self.words])

    def add(self, rule: Rule, name: str, value: str = "") -> None:
        """Ours for an option of that name, and what its rule says about it. Raises NbtoolsError for a value without
        one."""
        text, _, about = chosen(rule, name, value).replace("! ", "#!").partition("#")
        amp = device.reduced(device.pick()) if "{amp}" in text else ""
        parts, option = value.split(","), ""
        known = {"amp": amp, "n": len(parts), "gpus": max(1, gpus()), "ours": "{ours}"}
        for word in text.split():
            if word.startswith("--"):
                option, self.ours[word] = word, []
            else:
                self.ours.setdefault(option, []).append(word.format(value, *parts * 2, **known))
        if about:
            notes = self.refused if about[0] == "!" else self.notes
            notes.append(f"{name} {value}".strip() + f": {about.strip('! ').format(value, *parts * 2, **known)}")

    def read(self, words: Sequence[str], table: Mapping[str, Rule], program: str) -> list[str]:
        """Add the options among the words; returns the other words. Raises NbtoolsError for an option without its
        value."""
        reader = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
        rules, typed = named(table), []
        for name, rule in rules.items():
            how: dict[str, Any] = {} if takes_value(rule) else {"action": "store_const", "const": ""}
            flag = name if name.startswith("-") else f"--{name}"
            reader.add_argument(flag, dest=name, default=argparse.SUPPRESS, **how)
        for word in words:
            name, equals, value = word.removeprefix("torch.backends.").partition("=")
            setting = equals and name in rules and not name.startswith("-")
            typed += [f"--{name}", plain(value)] if setting else [word]
        try:
            found, others = reader.parse_known_args(typed)
        except argparse.ArgumentError as error:
            raise NbtoolsError(f"{program}.py: {error}") from None
        for name, value in vars(found).items():  # as they were typed
            self.add(rules[name], name, value)
        return others

    def pass_on(self, words: Sequence[str], program: str) -> None:
        """Add options of ours, or all words for a program without options; our command checks them. Raises NbtoolsError
        for what is neither."""
        option, table = "", PROGRAMS[program][1]
        for word in words:
            if word.startswith("--"):
                option, equals, value = word.partition("=")
                self.ours[option] = [value] if equals else []
            elif not word.startswith("-") and (option or not table):
                self.ours[option].append(word)
            else:
                raise NbtoolsError(f"{program}.py takes no {word}{nearest(word.partition('=')[0], named(table))}")

    def finish(self) -> None:
        """Make batch and micro-batch of accumulation, and of the batch of each GPU. Raises NbtoolsError for what cannot
        run here."""
        steps, asked = (self.ours.pop(option, ["1"])[0] for option in ("--accumulate", "--processes"))
        each = self.ours.pop(EACH, None) is not None
        times = asked if each else "1"
        batch = self.ours.get("--batch-size", ["none"])[0]
        if batch != "auto" and (steps, times) != ("1", "1"):
            if not (batch.isdecimal() and steps.isdecimal() and times.isdecimal()):
                rule = "batch size, accumulation and processes must be whole numbers"
                raise NbtoolsError(f"{rule}, got {batch}, {steps} and {times}; name them all")
            self.ours["--batch-size"] = [str(int(batch) * int(steps) * int(times))]
            self.ours["--micro-batch-size"] = [batch]
        self.spread(asked, each)
        run = self.ours.get("--run", [""])[0]
        if run.endswith(FOREIGN):
            self.refused.append(f"{run}: another program's checkpoint; nbtools resumes its own run folders only")
        if self.refused:
            raise NbtoolsError(self.refused[0].replace("{ours}", str(self)))

    def spread(self, asked: str, each: bool) -> None:
        """Add the processes that this machine has GPUs for; without a GPU, those that were asked for. each: the
        program's workers are those of each GPU, not of all."""
        if not asked.isdecimal():  # which our command refuses
            self.ours["--processes"] = [asked]
            return
        count = min(int(asked), gpus() or int(asked))
        if count < int(asked):
            self.notes.append(f"{asked} GPUs there, {gpus()} here: the effective batch, and with it lr, stays the same")
        if count > 1 and self.ours[""][0] == "train":
            self.ours["--processes"] = [str(count)]
            self.notes += [] if gpus() else [f"without a GPU: {count} processes on this CPU, through gloo"]
            workers = self.ours.get("--workers", ["auto"])[0]
            if not each and workers.isdecimal():
                self.ours["--workers"] = [str(-(-int(workers) // count))]
        if "--sync-batchnorm" in self.ours and (count == 1 or not gpus()):
            del self.ours["--sync-batchnorm"]
            self.notes.append(
                "use_sync_bn: of one process, or of several on a CPU, each has the statistics of its part"
            )


def gpus() -> int:
    """How many GPUs a run may use here; 0: it trains on the CPU, in any number of processes."""
    return {"cuda": torch.cuda.device_count(), "cpu": 0}.get(device.pick().type, 1)


def translate(words: Sequence[str]) -> Translation:
    """A guide's command line, or its settings as KEY=VALUE, as our command; our own options may follow. Raises
    NbtoolsError for an option that neither has, for what cannot run here, and where no program is named."""
    at, program = program_in(words)
    command, table = PROGRAMS[program]
    found, rest = Translation(), words[at + 1 :]
    found.add(command, f"{program}.py")
    found.read(words[: max(at, 0)], LAUNCH, program)
    found.pass_on(found.read([*with_files(rest)] if program == CONFIG else rest, table, program), program)
    found.finish()
    return found


def program_in(words: Sequence[str]) -> tuple[int, str]:
    """(its place, its name): `training/train.py`, `-m training.train`; place -1 for settings alone."""
    for at, word in enumerate(words):
        module = at > 0 and words[at - 1] == "-m"
        name = word.rpartition(".")[2] if module else PureWindowsPath(word).stem
        if name in PROGRAMS and (module or word.endswith(".py")):
            return at, name
    if any(word.partition("=")[0] in named(SEGMENT) or word.endswith(CONFIGS) for word in words):
        return -1, CONFIG
    known, came = ", ".join(f"{name}.py" for name in PROGRAMS), repr(shlex.join(words)) if words else "nothing"
    raise NbtoolsError(f"name a program of a guide, got {came}: {known}, or settings as KEY=VALUE")


def with_files(words: Sequence[str]) -> Iterator[str]:
    """The words, a config file as its settings. Raises NbtoolsError for a file of anything else."""
    for word in words:
        path = Path(word.removeprefix("--config="))
        if path.suffix not in CONFIGS:
            yield from () if word == "--config" else (word,)
            continue
        settings = SETTING.findall(path.read_text("utf-8")) if path.is_file() else []
        if not {name for name, _ in settings} & named(SEGMENT).keys():
            raise NbtoolsError(f"{path} is neither a program of a guide nor a file with settings of its config")
        yield from (f"{name}={value}" for name, value in settings)


def plain(text: str) -> str:
    """The text of a Python value: `'a'` → a, `[0.5, 2.]` → 0.5,2.0."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def answer(words: Sequence[str], task: str, known: Collection[str]) -> str:
    """One sentence about words that our command cannot read: what an option of a guide is here, that of the task first,
    else the nearest that there is; "" if there is nothing to say. known: our command's options."""
    rules, notes = {}, []
    for command, table in sorted(PROGRAMS.values(), key=lambda row: row[0].split()[1:2] == [task]):
        rules |= named(table) if command.startswith("train") else {}
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        rule = rules.get(name) if equals or word.startswith("-") else None
        if rule is not None and not (name in known and takes_value(rule)):
            here = Translation()
            value = value or ("…" if after.startswith("-") else after)
            here.add(rule, name, value if takes_value(rule) else "")
            here.ours.pop("--accumulate", None)
            if not here.ours:
                notes += here.notes + here.refused
                continue
            here.ours = {option: words for option, words in here.ours.items() if option in known}
            notes.append(f"{name} is {' '.join(here.words)} here" if here.ours else f"no option {name}")
        elif word.startswith("-") and name not in known:
            notes.append(f"no option {name}{nearest(name, [*known, *rules])}")
    return "; ".join(notes)


def named(table: Mapping[str, Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in table.items() for name in names.split()}


def takes_value(rule: Rule) -> bool:
    return not isinstance(rule, str) or re.search(r"{\d?}", rule) is not None


def chosen(rule: Rule, name: str, value: str) -> str:
    """The rule for a value. Raises NbtoolsError naming those that there are."""
    if isinstance(rule, str):
        return rule
    for key in (value, value.lower(), "," if "," in value else "", ""):
        if key in rule:
            return rule[key]
    raise NbtoolsError(f"{name} must be {' or '.join(rule)}, got {value!r}")


def nearest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]}?" if close else ""
