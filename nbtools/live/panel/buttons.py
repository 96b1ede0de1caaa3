"""Pause, Stop, Evaluate now, Save now, What limits it?, Back to best, Undo: buttons that send
requests and show them as pending until the run has answered; and the change that a verdict proposes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nbtools.live.control import Wishes
from nbtools.live.panel import form

WORDS = {
    "pause": ("Pause", "pause", "Stop stepping after this step; the run stays in memory until Resume"),
    "stop": ("Stop", "stop", "Finish the step, save a checkpoint and return the run; running the cell again goes on"),
    "evaluate": ("Evaluate now", "check", "Evaluate the validation split after this step, then train on"),
    "save": ("Save now", "save", "Write a checkpoint after this step, then train on"),
    "profile": ("What limits it?", "search", "Measure for some seconds what a step consists of, then train on"),
    "best": ("Back to best", "history", "Go back to the best checkpoint and train on from there with these settings"),
    "undo": ("Undo", "undo", "Take back the last change of settings"),
}
"""action → label, icon (a name that Font Awesome 4 to 6 know), what it does."""
RESUME = ("Resume", "play", "Go on with the very next step")
NO_RUN = "no run is under way: nb.fit starts one"

HEARD = {
    "stop": "stopping after this step: saving, then the run is returned …",
    "evaluate": "evaluating after this step …",
    "save": "saving after this step …",
    "profile": "measuring what a step consists of, for some seconds …",
    "best": "going back to the best checkpoint after this step …",
    "undo": "undoing the last change after this step …",
}
PAUSED = "paused between two steps: change what you like, then Resume"
PAUSING = "pausing after this step …"
SLOW = 1.0  # seconds a step; from here on the panel says beforehand that clicks are read when it ends


class Buttons:
    """The buttons of one panel. wishes: those of the run under way, None where there is none. asked: a change of the
    plan that waits for the end of this step. able: whether there is anything to do for an action. pace: seconds that a
    step takes. unread: whether the run, in another process, has yet to read the requests."""

    def __init__(self) -> None:
        self.wishes: Wishes | None = None
        self.asked = ""
        self.able: Callable[[str], bool] = lambda _: True
        self.pace, self.unread = 0.0, False
        self.made = {action: form.button("", partial(self.click, action)) for action in WORDS}
        self.heard = form.markup()
        self.view = form.bar([*self.made.values(), self.heard])
        self.show()

    def click(self, action: str) -> None:
        if self.wishes is None:
            return
        self.wishes.do("resume" if action == "pause" and self.wishes.paused else action)
        self.show()

    def show(self) -> None:
        """What the wishes say; setting what is set already sends nothing."""
        wishes = self.wishes or Wishes()
        said = [sentence for action, sentence in HEARD.items() if getattr(wishes, action)]
        if wishes.paused and not wishes.stop:
            said.insert(0, PAUSING if self.unread else PAUSED)
        if self.asked:
            said.append(f"after this step: {self.asked}")
        if not said and self.wishes and self.pace >= SLOW:
            said.append(f"a step takes {self.pace:.0f} s; requests are read when it ends")
        self.heard.value = form.styled(form.HELP, " · ".join(said))
        for action, made in self.made.items():
            resume = action == "pause" and wishes.paused
            made.description, made.icon, what = RESUME if resume else WORDS[action]
            made.button_style = "primary" if resume else ""
            made.tooltip = what if self.wishes else f"{what} ({NO_RUN})"
            heard = action in HEARD and getattr(wishes, action)
            made.disabled = self.wishes is None or wishes.stop or heard or not self.able(action)


class Proposal:
    """What a plan is bound by, and a button that makes the one change most worth making."""

    def __init__(self, take: Callable[[], None]):
        self.said, self.button = form.markup(), form.button("", take, "Takes effect at the next step", "arrow-right")
        self.view = form.bar([self.said, self.button])
        self.show("", "")

    def show(self, sentence: str, change: str) -> None:
        """change: what the button would do; no button without."""
        self.said.value = form.styled(form.HELP, sentence)
        self.view.layout.display = "flex" if sentence else "none"
        self.button.description = change
        self.button.layout.display = "inline-block" if change else "none"
