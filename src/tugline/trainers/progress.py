"""Progress of a training run: the sessions of its step, and the time left of all its steps."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rich.console import Console

from tugline.launch.progress import WorkProgress, format_seconds

_STEPS = 5
"""Number of last steps whose mean time gives the time left."""


class RunProgress:
    """Observer of a run; this one passes on messages and shows nothing else."""

    def __init__(self, report: Callable[[str], object] = lambda _text: None) -> None:
        self.report = report
        """Function that gets messages for people, each of one line."""

    def start(self, steps: int, done: int, limit_s: float | None = None) -> None:
        """Begin a run of `steps`, of which `done` are done; it ends after `limit_s` at the latest.

        Until then, only phases are shown.
        """

    def finish_step(self) -> None:
        """Count a step; its time is part of the estimate."""

    def begin_phase(self, name: str) -> None:
        """Begin work whose parts are not counted."""

    def count_sessions(self, name: str, done: int, total: int) -> None:
        """Set how many sessions of the step or evaluation `name` have ended."""

    def count_updates(self, done: int, total: int) -> None:
        """Set how many updates of the run are done, of a run without sessions."""


class TerminalProgress(RunProgress):
    """Shows a run on a console; `line` is the context manager that does it."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(partial(console.print, markup=False, soft_wrap=True))
        self.line = WorkProgress(console, clock=clock)
        self._clock = clock
        self._steps = 0
        self._done = 0
        self._end: float | None = None
        self._step_began = clock()
        self._spent: deque[float] = deque(maxlen=_STEPS)
        self._counts: dict[str, tuple[int, int]] = {}
        """Running sessions by step or evaluation; an evaluation runs beside the next step."""

    def start(self, steps: int, done: int, limit_s: float | None = None) -> None:
        """See `RunProgress`."""
        self._steps = steps
        self._done = done
        self._step_began = self._clock()
        self._end = None if limit_s is None else self._step_began + limit_s

    def finish_step(self) -> None:
        """See `RunProgress`."""
        now = self._clock()
        self._spent.append(now - self._step_began)
        self._step_began = now
        self._done += 1
        self._summarize()

    def begin_phase(self, name: str) -> None:
        """See `RunProgress`."""
        self.line.begin(name)
        self._summarize()

    def count_sessions(self, name: str, done: int, total: int) -> None:
        """See `RunProgress`."""
        self._counts[name] = (done, total)
        if done == total:
            del self._counts[name]
        shown = next(iter(self._counts), name)
        done, total = self._counts.get(shown, (done, total))
        self.line.set_phase(shown, "sessions", total, done)
        self._summarize()
        self.line.update(done, total)

    def count_updates(self, done: int, total: int) -> None:
        """See `RunProgress`."""
        self.line.set_phase("training", "updates", total, done)
        self.line.update(done)

    def estimate_s(self) -> float | None:
        """Return the time left by the mean of the last steps; None before the first has ended."""
        now = self._clock()
        left = [] if self._end is None else [self._end - now]
        if self._spent:
            mean_s = sum(self._spent) / len(self._spent)
            begun_s = min(now - self._step_began, mean_s)
            left.append(mean_s * (self._steps - self._done) - begun_s)
        return max(0.0, min(left)) if self._spent else None

    def _summarize(self) -> None:
        """Show the other sessions, the number of steps, and the time left of the run."""
        others = [f"{name}: {n} of {total}" for name, (n, total) in [*self._counts.items()][1:]]
        left_s = self.estimate_s()
        if self._steps:
            others.append(f"run: {self._done} of {self._steps} steps")
        if left_s and self._done < self._steps:
            others.append(f"{format_seconds(left_s)} left")
        self.line.summary = ", ".join(others)
