"""nbtools: train PyTorch models in notebooks without wasting the GPU, with a measured receipt.

import nbtools as nb
from nbtools.tasks import captcha

pack = captcha.pack(nb.stage("drive:datasets/captcha.tar"))
run = nb.fit(captcha, pack, nb.advise(captcha, pack), run="runs/captcha", keep="drive:runs/captcha")
run.summary(), run.receipt, nb.evaluate(run, pack)
"""

import os

if os.name == "nt":
    raise ImportError("nbtools needs Linux or macOS: on Windows use WSL")

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler else writes lines of its own into every output

from nbtools.data import Pack, cached, kept, pack, stage
from nbtools.disk import VERSION
from nbtools.errors import NbtoolsError
from nbtools.fit import fit
from nbtools.launch import launch, watch
from nbtools.live import Panel
from nbtools.measure import Advice, Gpu, advise, gpus, lr_sweep
from nbtools.run import Run, compare, evaluate, runs, validate
from nbtools.train import History, Plan, Record, Task, TrainState, classify, knob, regress, train

__version__ = VERSION

__all__ = ["Advice", "Gpu", "History", "NbtoolsError", "Pack", "Panel", "Plan", "Record", "Run", "Task", "TrainState"]
__all__ += ["advise", "cached", "classify", "compare", "evaluate", "fit", "gpus", "kept", "knob", "launch", "lr_sweep"]
__all__ += ["pack", "regress", "runs", "stage", "train", "validate", "watch"]
