"""Kernels of three notebook stacks, a client that clicks as a frontend does, Jupyter servers of two generations."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parent.parent
NAMED = re.fullmatch(r"\.venv-(own-)?(.+)", Path(sys.prefix).name)
MINE = NAMED[2] if NAMED else "newest"
STACKS = {} if NAMED else {name: ROOT / f".venv-{name}" for name in ("colab", "ipykernel-7.3")}
STACKS[MINE] = Path(sys.prefix)
"""Virtual environments by the name of their list in tests/stacks; the last, MINE, runs the tests. Where that is not
.venv, there are no others: those over .venv have its Python and packages."""
IPYKERNEL_6 = ("colab", "oldest")
LIMIT = 120.0  # seconds that anything may take on a busy machine; only a defect waits as long


@dataclass
class Client:
    """One kernel, all that it published, and when."""

    stack: str
    manager: KernelManager
    client: BlockingKernelClient
    said: list[dict] = field(default_factory=list)
    replies: list[dict] = field(default_factory=list)

    def until(self, wanted: Callable[[dict], bool], say: str) -> dict:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=LIMIT)
            self.said.append(message)
            if wanted(message):
                return message
        raise AssertionError(f"nothing after {LIMIT} s: {say}; the last: {self.said[-3:]}")

    def idle(self, request: str) -> dict:
        """The end of a request, which may have come while another's was waited for: a subshell handles them beside."""
        wanted = [message for message in self.said if parent(message) == request and over(message)]
        return wanted[0] if wanted else self.until(lambda m: parent(m) == request and over(m), f"the end of {request}")

    def end(self, cell: str) -> None:
        """Waits for all that ends a cell, and until ipykernel 7.3 reads, and 6 does not abort, what follows."""
        self.idle(cell)
        status = self.reply(cell)["content"]["status"]
        while status != "ok":
            status = self.reply(self.client.execute("", silent=True))["content"]["status"]

    def printed(self, text: str) -> dict:
        return self.until(lambda m: text in m["content"].get("text", ""), f"“{text}”")

    def slide(self, slider: str, value: int, subshell: str | None = None) -> str:
        """What a frontend sends when the user moves a slider, until the kernel says that this is done."""
        data = {"method": "update", "state": {"value": value}, "buffer_paths": []}
        message = self.client.session.msg("comm_msg", {"comm_id": slider, "data": data})
        if subshell:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        self.idle(message["header"]["msg_id"])
        return message["header"]["msg_id"]

    def reply(self, request: str) -> dict:
        while not any(parent(message) == request for message in self.replies):
            self.replies.append(self.client.get_shell_msg(timeout=LIMIT))
        return next(message for message in self.replies if parent(message) == request)

    def slider(self) -> str:
        opened = [m["content"] for m in self.said if m["msg_type"] == "comm_open"]
        return [c["comm_id"] for c in opened if c["data"]["state"].get("_model_name") == "IntSliderModel"][-1]

    def own(self, kind: str, request: str) -> list[dict]:
        return [m["content"] for m in self.said if m["msg_type"] == kind and parent(m) == request]

    def text(self, request: str) -> str:
        return "".join(content["text"] for content in self.own("stream", request))

    def errors(self, request: str) -> list[str]:
        return [content["ename"] for content in self.own("error", request)]

    def states(self, request: str) -> list[str]:
        return [content["execution_state"] for content in self.own("status", request)]

    def run(self, code: str) -> str:
        request = self.client.execute(code)
        self.end(request)
        return self.text(request)


def parent(message: dict) -> str | None:
    return message["parent_header"].get("msg_id")


def over(message: dict) -> bool:
    return message["content"].get("execution_state") == "idle"


def python(stack: str) -> Path:
    """The interpreter of a stack; skips where another one runs the tests, and without it, but not in CI."""
    if stack not in STACKS:
        pytest.skip(f"the tests run on {MINE}")
    found = STACKS[stack] / "bin" / "python"
    if not found.exists():
        assert os.environ.get("CI") != "true", f"{found} is not there, and CI must test every stack: run make test"
        pytest.skip(f"no {found}; make test installs it")
    return found


@contextmanager
def started(stack: str, folder: Path, interpreter: Path | None = None, env: dict | None = None) -> Iterator[Client]:
    """A kernel of a stack, or of another interpreter, until the block ends; its complaints are in folder/stderr."""
    manager = KernelManager(connection_file=str(folder / "connection.json"), shutdown_wait_time=1)
    launch = [str(interpreter or python(stack)), "-Xfrozen_modules=off", "-m", "ipykernel_launcher"]
    launch += ["-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=launch, display_name=stack, language="python")
    with (folder / "stderr").open("w") as stderr:
        manager.start_kernel(cwd=str(folder), env=env or environment(folder), stderr=stderr)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=LIMIT)
        yield Client(stack, manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def until(seen: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """Wait for something true and return it; what: named when it never comes."""
    end = time.monotonic() + limit
    while not (found := seen()):
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.01)
    return found


@dataclass(frozen=True)
class Stack:
    """One generation of Jupyter. kernel: the virtual environment of server and kernel, by its name in `kernels`."""

    name: str
    kernel: str
    command: str


SERVE_LAB = """
-m jupyterlab --ServerApp.port={port} --ServerApp.port_retries=0 --ServerApp.root_dir={folder}
--IdentityProvider.token= --LabApp.expose_app_in_browser=True --LabApp.news_url=None
--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate
--ServerApp.jpserver_extensions=jupyter_lsp=False --ServerApp.jpserver_extensions=jupyterlab_jupytext=False
"""
SERVE_CLASSIC = """
-m notebook --NotebookApp.port={port} --NotebookApp.port_retries=0 --NotebookApp.notebook_dir={folder}
--NotebookApp.token=
"""
LAB, CLASSIC = Stack("lab", "newest", SERVE_LAB), Stack("classic", "colab", SERVE_CLASSIC)
SETTINGS = {  # of JupyterLab
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def environment(folder: Path) -> dict[str, str]:
    """Nobody's own settings, one thread, and this checkout with its tests' modules importable in kernels."""
    places = ("_CONFIG_DIR", "_DATA_DIR", "_RUNTIME_DIR", "LAB_SETTINGS_DIR", "LAB_WORKSPACES_DIR")
    return {
        **os.environ,
        **{f"JUPYTER{place}": str(folder / "jupyter" / place) for place in places},
        "IPYTHONDIR": str(folder / "ipython"),
        "NBTOOLS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


@contextmanager
def serving(stack: Stack, folder: Path) -> Iterator[str]:
    """A server whose notebooks lie in `folder`/work; yields its address. Its log stays in `folder`."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    for name, values in SETTINGS.items():
        path = folder / "jupyter" / "LAB_SETTINGS_DIR" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port, folder=work) for word in stack.command.split()]
    with (folder / "server.log").open("w") as log:
        command = [str(python(stack.kernel)), *words, "--no-browser", "--allow-root"]
        process = subprocess.Popen(command, env=environment(folder), cwd=work, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or answers(f"{address}/api"), f"{stack.name} answers")
        assert process.poll() is None, (folder / "server.log").read_text()
        yield address
    finally:
        process.terminate()  # its kernels go with it
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address, timeout=5):  # URLError is one
        return True
    return False


def write(path: Path, cells: Sequence[str]) -> Path:
    import nbformat  # three seconds, which other users of this module do without

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path
