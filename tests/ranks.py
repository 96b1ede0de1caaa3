"""Processes for tests of several ranks: forked from a server that has imported torch once, met over gloo."""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import chdir
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from nbtools.live import draw

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", "hypothesis", "pytest", "nbtools", "toy"])


def together(world: int, act: Callable[..., Any], *args: Any, lost: int | None = None, **env: str) -> list[Any]:
    """What `act(*args)` returns in each of `world` processes that find what torchrun would have set; act: a function of
    a module. lost: a rank that is not waited for. Raises AssertionError with the traceback of one that fails, or where
    none ends for a minute; none of them is left behind."""
    with chdir(Path(__file__).parents[1]):  # elsewhere a folder called nbtools, such as the cache, may be imported
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the port is the system's choice
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world), **env}
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
    given = [(pipes[i][1], {**meet, "RANK": str(i), "LOCAL_RANK": str(i)}, act, args) for i in range(world)]
    processes = [CONTEXT.Process(target=run, args=each) for each in given]
    try:
        for process in processes:
            process.start()
        ends = [pipes[rank][0] for rank in range(world) if rank != lost]
        assert all(end.poll(60.0) for end in ends), "no answer in a minute"
        found = [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not any(trouble for _, trouble in found), "\n".join(trouble for _, trouble in found)
    return [result for result, _ in found]


def in_turn(*calls: tuple[Callable[..., Any], *tuple[Any, ...]]) -> list[Any]:
    """What several functions return, each called with what follows it, in the same processes."""
    return [act(*args) for act, *args in calls]


def run(end: Any, env: dict[str, str], act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env, TORCHELASTIC_USE_AGENT_STORE="True", NBTOOLS_DEVICE="cpu")
    torch.set_num_threads(1)
    draw.png = lambda *_: b"\x89PNG"  # a run's picture takes longer than its training
    gc.freeze()  # else each collection looks through all of torch
    try:
        end.send((act(*args), ""))
    except BaseException:
        end.send((None, traceback.format_exc()))
