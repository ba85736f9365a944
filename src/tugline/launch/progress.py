"""Progress of long work: a live line on a terminal, lines now and then in files and notebooks.

The line has a bar, the count, the rate and the time left by the mean rate since the start. In a
file, lines become rarer the longer the work takes. Colours follow the terminal and NO_COLOR.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tugline.types import is_pass

_FIRST_S = 10.0
"""Seconds until the first line without a terminal; shorter work has none on the way."""
_LAST_S = 300.0
"""Longest time between two lines without a terminal."""
_SHARE = 0.1
"""Time between two lines as a share of the time of the work so far."""
_TICK_S = 1.0
_REFRESHES = 4
"""Refreshes of the live line per second."""
_BAR = 24
"""Width of the bar in columns."""
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def format_seconds(seconds: float) -> str:
    """Format a duration in its largest unit, such as ``38 s``; a negative one as 0."""
    seconds = max(0.0, seconds)
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_rate(per_s: float) -> str:
    """Format a rate in the unit in which it is at least 1, such as ``3.2/min``."""
    if per_s >= 1:
        return f"{per_s:,.1f}/s" if per_s < 10 else f"{per_s:,.0f}/s"
    return f"{60 * per_s:.1f}/min" if 60 * per_s >= 1 else f"{3600 * per_s:.1f}/h"


class WorkProgress:
    """Progress of one piece of work after the other; a context manager that shows it.

    A piece has a `title`, and its parts are counted in `unit`, such as ``sessions``; `total` is
    None while the number of parts is not known, and `unit` is empty for work without parts.
    """

    def __init__(
        self,
        console: Console,
        unit: str = "",
        total: int | None = None,
        *,
        title: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.summary: str | Text = ""
        """Text at the end of the line."""
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._spinner = Spinner("dots")
        self.begin(title, unit, total)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES,
            transient=True,
        )

    def begin(self, title: str, unit: str = "", total: int | None = None, done: int = 0) -> None:
        """Begin another piece of work, of which `done` parts were done before."""
        with self._lock:
            self._title = title
            self._unit = unit
            self._total = total
            self._done = self._first = done
            self._began = self._printed = self._clock()

    def set_phase(self, title: str, unit: str, total: int, done: int = 0) -> None:
        """Begin another piece of work, unless it is the one that is shown."""
        if (title, unit) != (self._title, self._unit):
            self.begin(title, unit, total, done)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the number of parts that are done, and that of all parts if it has changed."""
        with self._lock:
            self._done = done
            self._total = self._total if total is None else total
        self.print_if_due()

    def advance(self, *, new: bool = True) -> None:
        """Count a part; one that is not `new` was done before this work began."""
        with self._lock:
            self._first += not new
        self.update(self._done + 1)

    def describe(self) -> Text:
        """Return title, count, rate, time left and summary as a line."""
        counted = f"{self._done:,}" if self._total is None else f"{self._done:,} of {self._total:,}"
        parts = [f"{counted} {self._unit}"] if self._unit else []
        known = ", ".join([*parts, *self._estimate()])
        text = Text(": ".join(part for part in (self._title, known) if part))
        return text.append(", ").append(self.summary) if self.summary else text

    def print_if_due(self) -> None:
        """Without a terminal, print the line if the last one is some time ago."""
        if self.console.is_interactive:
            return
        with self._lock:
            now = self._clock()
            pause_s = min(max(_SHARE * (now - self._began), _FIRST_S), _LAST_S)
            if now - self._printed >= pause_s and not self._is_done:
                self._printed = now
                self.console.print(self.describe(), soft_wrap=True)

    def __enter__(self) -> Self:
        if self.console.is_interactive:
            self._live.start(refresh=True)
        else:
            threading.Thread(target=self._tick, name="progress", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._live.stop()
        counted = self._done > self._first or (self._is_done and kind is None)
        if counted and (self.summary or self._clock() - self._began >= _FIRST_S):
            self.console.print(self.describe(), soft_wrap=True)

    @property
    def _is_done(self) -> bool:
        return self._total is not None and self._done >= self._total

    def _tick(self) -> None:
        """Print lines also while no part is finished."""
        while not self._closed.wait(_TICK_S):
            self.print_if_due()

    def _estimate(self) -> list[str]:
        """Return the rate and the time left; the time so far while no part is finished."""
        spent_s = self._clock() - self._began
        fresh = self._done - self._first
        if self._is_done or not (fresh and spent_s):
            return [format_seconds(spent_s)] if spent_s >= 1 else []
        rate = fresh / spent_s
        if self._total is None:
            return [format_rate(rate)]
        return [format_rate(rate), f"{format_seconds((self._total - self._done) / rate)} left"]

    def _render(self) -> RenderableType:
        """Return the live line: a bar, or a spinner for work without a known number of parts."""
        with self._lock:
            line = Table.grid(padding=(0, 1))
            line.add_column(no_wrap=True)
            line.add_column(no_wrap=True, overflow="ellipsis")
            bar = ProgressBar(self._total, self._done, width=_BAR) if self._total else self._spinner
            line.add_row(bar, self.describe())
            return line


class SessionProgress:
    """Progress of sessions with their rewards and failures."""

    def __init__(
        self, console: Console, total: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.first_failure = ""
        self.bar = WorkProgress(console, "sessions", total, clock=clock)
        """Context manager that shows the progress."""
        self._rewards: dict[str, float | None] = {}
        self._rewarded = 0
        self._passed = 0
        self._sum = 0.0
        self._failed = 0

    def add(self, session: str, reward: float | None, failure: str, *, new: bool = True) -> None:
        """Count a result; `failure` is empty for a session that did not fail.

        One that is not `new` was there before; the rate is that of the new ones.
        """
        known = session in self._rewards
        self._count(self._rewards.get(session), -1)  # an earlier result of the session
        self._rewards[session] = reward
        self._count(reward, 1)
        self._failed += bool(failure)
        self.first_failure = self.first_failure or (failure and f"{session}: {failure}")
        self.bar.summary = self.summarize()
        if not known:
            self.bar.advance(new=new)

    def _count(self, reward: float | None, times: int) -> None:
        if reward is not None:
            self._rewarded += times
            self._passed += times * is_pass(reward)
            self._sum += times * reward

    def summarize(self) -> Text:
        """Return the mean reward and the numbers of passed and failed sessions."""
        mean = self._sum / max(1, self._rewarded)
        passed = f"mean reward {mean:.3g}, {self._passed} of {self._rewarded} passed"
        text = Text(passed if self._rewarded else "no reward")
        return text.append(f", {self._failed} failed", "red") if self._failed else text
