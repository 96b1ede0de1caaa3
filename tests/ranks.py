"""Real processes for tests of several ranks: forked from a server that has imported torch once, met over gloo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from contextlib import chdir
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

CONTEXT = multiprocessing.get_context("forkserver")
LIBRARIES = ["torch._dynamo", "torch.nn.parallel", "torch.distributed.optim", "hypothesis", "pytest"]
CONTEXT.set_forkserver_preload([*LIBRARIES, "nbtools", "toy"])
TIMEOUT = 60.0


def together(
    world: int, act: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, lost: int | None = None, **env: str
) -> list[Any]:
    """What `act(*args)` returns in each of `world` processes that find what torchrun would have set; act: a function of
    a module. lost: a rank that is not waited for. Raises AssertionError with the traceback of the first that fails, or
    where they do not end in time; none of them is left behind."""
    with chdir(Path(__file__).parents[1]):  # elsewhere a folder called nbtools, such as the cache, may be imported
        forkserver.ensure_running()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the port is the system's choice
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world), **env}
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (_, end) in enumerate(pipes):
        own = {**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(CONTEXT.Process(target=run, args=(end, own, act, args), name=f"rank {rank}"))
        processes[-1].start()
        end.close()
    try:
        return gathered({rank: mine for rank, (mine, _) in enumerate(pipes) if rank != lost}, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def in_turn(*calls: tuple[Callable[..., Any], *tuple[Any, ...]]) -> list[Any]:
    """What several functions return, each called with what follows it, in the same processes: `together(2, in_turn,
    (act, 1), (act, 2))`."""
    return [act(*args) for act, *args in calls]


def gathered(pipes: dict[int, Connection], timeout: float) -> list[Any]:
    found, end = {}, monotonic() + timeout
    while left := {rank: pipe for rank, pipe in pipes.items() if rank not in found}:
        ready = wait(left.values(), max(end - monotonic(), 0))
        assert ready, f"no answer from rank {', '.join(map(str, left))} in {timeout:g} s"
        for rank in (rank for rank, pipe in left.items() if pipe in ready):
            try:
                found[rank], trouble = pickle.loads(left[rank].recv_bytes())
            except EOFError:
                trouble = "it was killed"
            assert not trouble, f"rank {rank}: {trouble}"
    return [found[rank] for rank in pipes]


def run(end: Connection, env: dict[str, str], act: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", NBTOOLS_DEVICE="cpu")
    torch.set_num_threads(1)
    gc.freeze()  # else each collection looks through all of torch
    try:
        result = act(*args), ""
    except BaseException:
        result = None, traceback.format_exc()
    end.send_bytes(pickle.dumps(result))
