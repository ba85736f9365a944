"""Progress of long work: a live line on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from rich.console import Console

from tugline.launch.progress import SessionProgress, WorkProgress, format_rate, format_seconds
from tugline.trainers.progress import VisibleProgress


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


def make_console(*, terminal: bool = False, width: int = 200) -> Console:
    """Create a console that writes to memory; colours follow the environment."""
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)


def read(console: Console) -> str:
    """Return what was written."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_have_count_rate_and_time_left() -> None:
    """In a file, a line comes every ten seconds, then ever more rarely; the last has the time."""
    clock = Clock()
    console = make_console()
    with WorkProgress(console, "tasks", 100, title="checking", clock=clock) as progress:
        for _ in range(100):
            clock.now += 5.0
            progress.advance()
    lines = read(console).splitlines()
    assert lines[0] == "checking: 2 of 100 tasks, 12.0/min, 8 min left"
    assert lines[-1] == "checking: 100 of 100 tasks, 8 min"
    times = [int(line.split()[1]) * 5 for line in lines]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:-1] == sorted(pauses[:-1])
    assert (pauses[0], max(pauses)) == (10, 50)


def test_a_line_also_comes_while_nothing_ends() -> None:
    """Work that takes long shows that it is still running."""
    clock = Clock()
    console = make_console()
    progress = WorkProgress(console, "sessions", 2, clock=clock)
    progress.print_if_due()
    clock.now += 30.0
    progress.print_if_due()
    progress.print_if_due()
    progress.begin("loading the model")
    clock.now += 11.0
    progress.print_if_due()
    assert read(console).splitlines() == ["0 of 2 sessions, 30 s", "loading the model: 11 s"]


def test_short_work_prints_nothing_in_a_file() -> None:
    """Nobody waits for it, so there is nothing to say."""
    clock = Clock()
    console = make_console()
    with WorkProgress(console, "recordings", 3, clock=clock) as progress:
        for _ in range(3):
            clock.now += 1.0
            progress.advance()
    assert read(console) == ""


def test_results_of_an_earlier_run_do_not_change_the_rate() -> None:
    """Of 90 sessions, 60 had a result before: the other 30 take 10 s each."""
    clock = Clock()
    console = make_console()
    progress = SessionProgress(console, 90, clock=clock)
    for number in range(60):
        progress.add(f"old-{number}", 1.0, "", new=False)
    for number in range(3):
        clock.now += 10.0
        progress.add(f"new-{number}", 0.0, "")
    assert progress.bar.describe().plain == (
        "63 of 90 sessions, 6.0/min, 4 min left, mean reward 0.952, 60 of 63 passed"
    )


def test_a_terminal_has_one_live_line_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is redrawn in place and replaced by the last one; failures are red."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    clock = Clock()
    console = make_console(terminal=True, width=60)
    with SessionProgress(console, 4, clock=clock).bar as bar:
        clock.now += 30.0
        bar.update(2)
        bar._live.refresh()
    drawn = read(console)
    assert "━" in drawn
    assert "2 of 4 sessions, 4.0/min, 30 s left"[:30] in drawn
    assert "\x1b[2K" in drawn  # the live line is erased
    failed = SessionProgress(console, 1)
    failed.add("a", None, "the harness failed")
    console.print(failed.bar.describe())
    assert "\x1b[31m, 1 failed" in read(console)


def test_colours_are_off_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR leaves the bar without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = make_console(terminal=True)
    with WorkProgress(console, "sessions", 4) as bar:
        bar.update(2)
        bar._live.refresh()
    assert "━" in read(console)
    assert not re.search(r"\x1b\[[\d;]*3\dm|\x1b\[38;", read(console))


def test_work_follows_work_on_the_same_line() -> None:
    """A phase with a new title begins anew; the same title goes on."""
    clock = Clock()
    progress = WorkProgress(make_console(), clock=clock)
    for done in (1, 2):
        clock.now += 2.0
        progress.set_phase("reading", "sessions", 4)
        progress.update(done)
    assert progress.describe().plain == "reading: 2 of 4 sessions, 1.0/s, 2 s left"
    progress.set_phase("writing", "sessions", 2)
    assert progress.describe().plain == "writing: 0 of 2 sessions"


def test_a_training_run_has_the_time_left_by_its_last_steps() -> None:
    """Within a step its sessions are counted; a held-out evaluation runs beside them."""
    clock = Clock()
    shown = VisibleProgress(make_console(), clock=clock)
    shown.start(10, 4)
    shown.count_sessions("step 5", 0, 8)
    assert shown.estimate_s() is None
    for step in (5, 6):
        clock.now += 60.0
        shown.count_sessions(f"step {step}", 8, 8)
        shown.finish_step()
    shown.count_sessions("step 7", 2, 8)
    shown.count_sessions("held out, step 6", 3, 64)
    clock.now += 30.0
    shown.count_sessions("step 7", 4, 8)
    text = shown.line.describe().plain
    assert text.startswith("step 7: 4 of 8 sessions, 4.0/min, 60 s left")
    assert text.endswith("held out, step 6: 3 of 64, run: 6 of 10 steps, 4 min left")
    shown.count_sessions("step 7", 8, 8)
    assert shown.line.describe().plain.startswith("held out, step 6: 3 of 64 sessions")


def test_a_time_limit_bounds_the_time_left() -> None:
    """A run that must end earlier ends earlier; an estimate is never negative."""
    clock = Clock()
    shown = VisibleProgress(make_console(), clock=clock)
    shown.start(100, 0, limit_s=90.0)
    clock.now += 60.0
    shown.finish_step()
    assert shown.estimate_s() == pytest.approx(30.0)
    clock.now += 60.0
    assert shown.estimate_s() == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (90, "90 s"), (121, "2 min"), (7300, "2 h"), (2e6, "23 d")]
)
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    """The largest unit of which there are at least two."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(1234.0, "1,234/s"), (2.5, "2.5/s"), (0.5, "30.0/min"), (0.01, "36.0/h")]
)
def test_rates_have_the_unit_of_at_least_one(rate: float, text: str) -> None:
    """A slow rate is not 0 per second."""
    assert format_rate(rate) == text
