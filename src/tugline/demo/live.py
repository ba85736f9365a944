"""Progress of the demo: a growing table on a terminal, plain lines elsewhere.

Everything goes to stderr, so ``--json`` on stdout stays clean. Without a terminal each finished
step is one line, and sessions within a step are reported every `QUIET_S` seconds.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live as Screen
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tugline.demo.metrics import Step

SHOWN = 12
"""Most recent steps shown in the table."""
QUIET_S = 10.0
"""Without a terminal, seconds between two lines about the same phase or step."""


class ProgressDisplay:
    """Shows a run of `total` steps; use as ``with Live(30) as live:``."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.total = total
        self._console = console or Console(stderr=True, highlight=False)
        self._screen: Screen | None = None
        self._steps: list[Step] = []
        self._phase = "starting"
        self._done, self._total = 0, 0
        self._since = self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._screen = Screen(
                get_renderable=self._render, console=self._console, refresh_per_second=4
            )
            self._screen.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._phase, self._total = ("stopped" if kind else "done"), 0
        if self._screen is not None:
            self._screen.stop()

    def phase(self, text: str) -> None:
        """Set the current activity, such as ``installing pi``."""
        self._phase, self._done, self._total = text, 0, 0
        self._since = time.monotonic()
        self._say(f"{text} ...")

    def sessions(self, done: int, total: int) -> None:
        """Report progress within the current phase or step."""
        self._done, self._total = done, total
        if time.monotonic() - self._printed >= QUIET_S:
            self._say(f"  {self._phase}: session {done} of {total}")

    def row(self, step: Step) -> None:
        """Add a finished training step."""
        self._steps.append(step)
        self._done, self._total = 0, 0
        self._since = time.monotonic()
        cells = (f"{name} {value}" for name, value in zip(_HEADS, self._cells(step), strict=True))
        self._say("  ".join(cells))

    @property
    def left_s(self) -> float:
        """Estimated seconds left, from the most recent steps."""
        recent = [one.seconds for one in self._steps[-5:]]
        return sum(recent) / len(recent) * (self.total - self._steps[-1].step) if recent else 0.0

    def _say(self, text: str) -> None:
        self._printed = time.monotonic()
        if self._screen is None:
            self._console.print(text, markup=False, soft_wrap=True)

    def _cells(self, step: Step) -> tuple[str, ...]:
        return (
            f"{step.step}/{self.total}",
            f"{step.reward:.3f}",
            f"{step.pass_rate:.0%}",
            f"{step.tokens:,}",
            f"{step.sessions_per_s:.1f}",
            f"{step.engine_busy:.0%}",
            str(step.updates),
            "-" if step.max_abs_dlogprob is None else f"{step.max_abs_dlogprob:.0e}",
        )

    def _render(self) -> Group:
        parts: list[Table | Text] = []
        if self._steps:
            table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
            for name in _HEADS:
                table.add_column(name, justify="right", no_wrap=True)
            for one in self._steps[-SHOWN:]:
                table.add_row(*self._cells(one))
            parts.append(table)
        parts.append(self._progress())
        return Group(*parts)

    def _progress(self) -> Table | Text:
        seconds = time.monotonic() - self._since
        left = f"about {self.left_s / 60:.0f} min left" if self.left_s >= 60 else ""
        if not self._total:
            return Text(f"{self._phase}  {seconds:.0f} s  {left}".rstrip(), style="bold")
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self._total, completed=self._done, width=30)
        line.add_row(
            Text(self._phase, style="bold"), bar, f"{self._done}/{self._total} sessions", left
        )
        return line


_HEADS = ("step", "reward", "pass", "tokens", "sess/s", "engine", "updates", "|dlogp|")
