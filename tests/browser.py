"""A notebook in a browser, in two generations of Jupyter; controls are found by what stands on or beside them."""

import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from jupyters import LIMIT, until
from playwright.sync_api import Browser, Locator, Page, ViewportSize, sync_playwright

from nbtools.train import checkpoint

WINDOW = ViewportSize(width=1200, height=1700)  # a whole run's cell at 100 % zoom, without scrolling
ACTED = """
window.acted = [];
for (const kind of ['click', 'change', 'keydown'])
    document.addEventListener(kind, () => window.acted.push(Date.now() / 1000), true);
"""
"""When the user did something that a widget may react to, in the order of doing."""


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path) as browser:
        yield browser


class Notebook:
    """A notebook in a page. at: the cell whose controls are looked for; errors: that scripts did not catch."""

    PROMPT = OUTPUT = CELL = PATH = LOADED = READY = RUN_ALL = RUN = INTERRUPT = SAVE = NO_KERNEL = BUSY = ""

    def __init__(self, browser: Browser, address: str, at: int = 0):
        self.address, self.at = address, at
        self.page: Page = browser.new_page(viewport=WINDOW)
        self.page.set_default_timeout(LIMIT * 1000)
        self.page.add_init_script(ACTED)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept())

    def open(self, name: str) -> None:
        self.page.goto(f"{self.address}/{self.PATH.format(name)}")
        self.page.wait_for_function(self.LOADED)

    def ready(self) -> None:
        self.page.wait_for_function(self.READY)

    def run_all(self) -> None:
        self.page.evaluate(self.RUN_ALL)

    def run(self, cell: int) -> None:
        self.page.evaluate(self.RUN, cell)

    def interrupt(self) -> None:
        self.page.evaluate(self.INTERRUPT)

    def prompt(self, cell: int) -> str:
        """`` before, `*` while, `3` after a cell ran."""
        return re.sub(r"[^\d*]", "", self.page.locator(self.PROMPT).nth(cell).inner_text())

    def wait_for_prompt(self, cell: int, pattern: str) -> None:
        until(lambda: re.fullmatch(pattern, self.prompt(cell)), f"prompt {pattern} of cell {cell}")

    def output(self, cell: int) -> Locator:
        return self.page.locator(self.CELL).nth(cell).locator(self.OUTPUT)

    def button(self, label: str, cell: int | None = None) -> Locator:
        output = self.output(self.at if cell is None else cell)
        return output.locator("button:visible").filter(has_text=re.compile(rf"^\s*{label}\s*$"))

    def row(self, setting: str) -> Locator:
        output, name = self.output(self.at), re.compile(rf"^{setting}( \(.*\))?$")
        knob = output.locator(".nbtools-knob:visible").filter(has=self.page.locator("b").filter(has_text=name))
        named = self.page.locator(".widget-html-content").filter(has_text=name)
        return knob.or_(output.locator(".nbtools-row:visible").filter(has=named)).first

    def line(self) -> str:
        return self.output(self.at).locator(".nbtools-line:visible").inner_text()

    def notice(self) -> str:
        return self.output(self.at).locator(".nbtools-lines:visible").inner_text()

    def frames(self) -> int:
        return self.output(self.at).locator("svg[role=img]").count()

    def place(self, label: str) -> float:
        return self.button(label).evaluate(
            """button => {
                const curves = button.closest('.nbtools-live').querySelector('.nbt-grid');
                return Math.round(curves.getBoundingClientRect().top - button.getBoundingClientRect().top);
            }"""
        )

    def point(self, chart: int) -> None:
        self.output(self.at).locator(".nbt-plot").nth(chart).hover()

    def pointed(self) -> list[str]:
        return self.output(self.at).evaluate(
            "output => [...output.querySelectorAll('.nbt-plot')].map(p => p.querySelector('.nbt-at')?.innerText ?? '')"
        )

    def acting(self, act: Callable[[], Any]) -> float:
        self.page.evaluate("window.acted.length = 0")
        act()
        return self.page.evaluate("window.acted[0]")

    def click(self, label: str) -> float:
        return self.acting(self.button(label).click)

    def type(self, setting: str, words: str) -> float:
        field = self.row(setting).locator("input[type=text]").first
        field.fill(words)
        return self.acting(lambda: field.press("Enter"))

    def choose(self, setting: str, option: str) -> float:
        field = self.row(setting).locator("select")
        return self.acting(lambda: field.select_option(option))

    def slide(self, setting: str, key: str) -> float:
        self.row(setting).locator(".noUi-handle, .ui-slider-handle").focus()
        return self.acting(lambda: self.page.keyboard.press(key))

    def shows(self, picture: Locator) -> bool:
        loaded = "image => image.complete && image.naturalWidth > 0 && image.getBoundingClientRect().height > 50"
        return picture.count() > 0 and picture.first.is_visible() and picture.first.evaluate(loaded)


class Lab(Notebook):
    CELL, OUTPUT, PROMPT = ".jp-CodeCell", ".jp-Cell-outputArea", ".jp-CodeCell .jp-InputPrompt"
    PATH, NO_KERNEL = "doc/tree/{}?reset", ".jp-Dialog button:has-text('No Kernel')"
    LOADED = "window.jupyterapp && window.jupyterapp.shell.currentWidget?.context?.isReady"
    READY = "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
    RUN_ALL = "void window.jupyterapp.commands.execute('notebook:run-all-cells')"
    RUN = """cell => {
        window.jupyterapp.shell.currentWidget.content.activeCellIndex = cell;
        window.jupyterapp.commands.execute('notebook:run-cell') }"""
    INTERRUPT = "void window.jupyterapp.commands.execute('notebook:interrupt-kernel')"
    SAVE, BUSY = "window.jupyterapp.commands.execute('docmanager:save')", "#jp-main-statusbar >> text=/Busy/"


class Classic(Notebook):
    CELL, OUTPUT, PROMPT = ".code_cell", ".output_wrapper", ".code_cell .input_prompt"
    PATH, NO_KERNEL = "notebooks/{}", ".modal.in button:has-text('Continue Without Kernel')"
    LOADED = "window.Jupyter && Jupyter.notebook && Jupyter.notebook._fully_loaded"
    READY = "Jupyter.notebook.kernel?.widget_manager && Jupyter.notebook.kernel.info_reply.protocol_version"
    RUN_ALL, RUN = "Jupyter.notebook.execute_all_cells()", "cell => Jupyter.notebook.execute_cells([cell])"
    INTERRUPT, SAVE = "Jupyter.notebook.kernel.interrupt()", "Jupyter.notebook.save_notebook()"
    BUSY = "#kernel_indicator_icon.kernel_busy_icon"

    def ready(self) -> None:
        """Also until it has asked the kernel for its widgets: then widgetsnbextension 3 renders all outputs again."""
        super().ready()
        self.page.evaluate("Jupyter.notebook.kernel.widget_manager._loadFromKernel()")


OPENED: dict[str, type[Notebook]] = {"lab": Lab, "classic": Classic}


def saved(notebook: Notebook, path: Path) -> dict[str, Any]:
    before = path.stat().st_mtime_ns
    notebook.page.evaluate(notebook.SAVE)
    until(lambda: path.stat().st_mtime_ns > before, "the saved notebook")
    return until(lambda: parsed(path), "a whole saved notebook")


def parsed(path: Path) -> dict[str, Any] | None:
    with suppress(ValueError):  # of a file that is being written
        return json.loads(path.read_text())


def text(notebook: dict[str, Any], cell: int) -> str:
    outputs = notebook["cells"][cell]["outputs"]
    return "\n".join("".join(o.get("text", "") or o.get("data", {}).get("text/plain", "")) for o in outputs)


class Log:
    def __init__(self, path: Path):
        self.path, self.place, self.rows = path, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open() as file:
                file.seek(self.place)
                lines = [line for line in file if line.endswith("\n")]
            self.place += sum(map(len, lines))
            self.rows += map(json.loads, lines)
        return self.rows

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.read() if row["training"]]

    def first(self, holds: Callable[[dict[str, Any]], bool], since: float) -> float:
        """When the first batch after a time came of which something holds; 0 where none came yet."""
        return next((row["time"] for row in self.read() if row["time"] > since and holds(row)), 0.0)

    def step(self) -> float:
        return statistics.median(b["time"] - a["time"] for a, b in pairwise(self.steps()))


class Person:
    """Interactions with a run under way, each followed until its effect is there.

    cell: the one that trains. run: the run's folder. waits: (seconds from click to effect, what); silences: of pauses.
    """

    def __init__(self, notebook: Notebook, cell: int, run: Path, log: Log):
        self.notebook, self.cell, self.run, self.log = notebook, cell, run, log
        self.waits: list[tuple[float, str]] = []
        self.silences: list[float] = []

    def turned(self, what: str, act: Callable[[], float], holds: Callable[[dict[str, Any]], bool]) -> None:
        clicked = act()
        self.waits.append((until(lambda: self.log.first(holds, clicked), what) - clicked, what))

    def now(self, knob: str) -> Any:
        return self.log.steps()[-1][knob]

    def put(self, way: Callable[[str, str], float], knob: str, words: str, value: Any) -> None:
        self.turned(f"{knob} = {words}", lambda: way(knob, words), lambda row: row[knob] == value)

    def paused(self) -> None:
        clicked = self.notebook.click("Pause")
        until(self.notebook.button("Resume").is_visible, "Resume")
        until(lambda: time.time() - self.log.steps()[-1]["time"] > 0.5, "a pause without steps")
        last = self.log.steps()[-1]["time"]
        self.waits.append((last - clicked, "Pause"))
        resumed = self.notebook.click("Resume")
        came = until(lambda: self.log.first(lambda row: row["training"], last), "steps after Resume")
        self.silences.append(came - last)
        self.waits.append((came - resumed, "Resume"))

    def evaluated(self) -> None:
        self.turned("Evaluate now", lambda: self.notebook.click("Evaluate now"), lambda row: not row["training"])
        done = self.log.read()[-1]["time"]
        until(lambda: self.log.first(lambda row: row["training"], done), "steps after an evaluation")

    def saved(self) -> None:
        before = self.notebook.line()
        clicked = self.notebook.click("Save now")
        said = until(lambda: (line := self.notebook.line()) != before and "saved at step" in line and line, "an answer")
        step = int(said.split("saved at step")[-1].split()[0])
        names = until(lambda: [n for n in checkpoint.names(self.run) if checkpoint.place(n)[1] == step], "its file")
        self.waits.append(((self.run / f"{names[0]}.safetensors").stat().st_mtime - clicked, "Save now"))

    def stopped(self) -> None:
        clicked = self.notebook.click("Stop")
        self.notebook.wait_for_prompt(self.cell, r"\d+")
        self.waits.append((self.log.steps()[-1]["time"] - clicked, "Stop"))

    def act(self, rounds: int) -> None:
        put, typed = self.put, self.notebook.type
        for turn in range(rounds):
            put(typed, "lr", f"{turn + 1}e-4", float(f"{turn + 1}e-4"))  # what the rules offer stays below 10× advised
            put(typed, *(("weight_decay", "0.001", 0.001), ("clip_norm", "0.5", 0.5))[turn])
            self.paused()
            put(typed, "batch_size", str(20 + 4 * turn), 20 + 4 * turn)
            self.saved() if turn else self.evaluated()
            put(self.notebook.choose, "amp", *(("bf16", "bf16"), ("off", "off"))[turn])
