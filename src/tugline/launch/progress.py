"""Progress of sessions for people: a bar on a terminal, lines in files and notebooks."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tugline.types import is_pass

_REPORT_EVERY_S = 10.0
"""Seconds between two lines of progress, without a terminal."""


def make_bar(console: Console) -> Progress:
    """Create a progress bar with count, summary and time; it is shown only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[summary]}"),
        console=console,
        disable=not console.is_terminal,
    )


class SessionProgress:
    """Progress of sessions, as a bar or, without a terminal, as lines."""

    def __init__(self, console: Console, total: int) -> None:
        self.first_failure = ""
        self.bar = make_bar(console)
        self._line = self.bar.add_task("sessions", total=total, summary="")
        self._rewards: dict[str, float | None] = {}
        self._rewarded = 0
        self._passed = 0
        self._sum = 0.0
        self._failed = 0
        self._reported = 0.0

    def add(self, session: str, reward: float | None, failure: str) -> None:
        """Count a result; `failure` is empty for a session that did not fail."""
        self._count(self._rewards.get(session), -1)  # an earlier result of the session
        self._rewards[session] = reward
        self._count(reward, 1)
        self._failed += bool(failure)
        self.first_failure = self.first_failure or (failure and f"{session}: {failure}")
        done = len(self._rewards)
        summary = self.summarize()
        now = time.monotonic()
        self.bar.update(self._line, completed=done, summary=summary)
        total = self.bar.tasks[0].total
        due = now - self._reported >= _REPORT_EVERY_S or done == total
        if due and not self.bar.console.is_terminal:
            self._reported = now
            self.bar.console.print(f"{done} of {total:.0f} sessions, {summary}")

    def _count(self, reward: float | None, times: int) -> None:
        if reward is not None:
            self._rewarded += times
            self._passed += times * is_pass(reward)
            self._sum += times * reward

    def summarize(self) -> str:
        """Return the mean reward and the numbers of passed and failed sessions as text."""
        passed = f"{self._passed} of {self._rewarded} passed"
        mean = self._sum / max(1, self._rewarded)
        text = f"mean reward {mean:.3g}, {passed}" if self._rewarded else "no reward"
        return f"{text}, {self._failed} failed" if self._failed else text
