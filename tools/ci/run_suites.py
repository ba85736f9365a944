"""Run continuous integration: the suites that a change needs, within an hour.

`make test` and `make test-browser` always run; then the cores of the long suites that the change
touches, and that of one more by rotation. `suites.toml` has their folders and the time limits; a
suite that does not run is printed as ``NOT RUN``.

Failed tests run once more: those that then pass are printed as ``FLAKY``, the others as
``FAILED``. The last line is pytest's own.

    python tools/ci/run_suites.py [--plan]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from suites import Choice, Table, read_table, select_suites

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALWAYS = ("test", "test-browser")
CLOSING = re.compile(r"(?:=+ )?(?:no tests ran|\d+ \w+(?:, \d+ \w+)*) in [\d.]+s\b")
"""The last line of pytest."""
GRACE_S = 30.0
"""From the interrupt of a suite that takes too long to its end."""


@dataclass(frozen=True)
class Result:
    """Result of a suite."""

    target: str
    passed: bool
    seconds: float
    closing: str
    """Closing line of its last run of pytest, empty if there was none."""
    flaky: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass
class Report:
    """Results so far, and the suites that were left out, with the reason."""

    results: list[Result] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every suite has passed, if necessary in its second run."""
        return all(result.passed for result in self.results)

    def format(self, seconds: float) -> list[str]:
        """Return the lines of the report; the last one is that of the last failed suite, if any."""
        lines = [f"== {seconds / 60:.1f} minutes =="]
        lines += [f"{result.seconds / 60:6.1f}  make {result.target}" for result in self.results]
        lines += [f"NOT RUN {name}: {reason}" for name, reason in self.not_run.items()]
        flaky = [name for result in self.results for name in result.flaky]
        if flaky:
            lines.append("== passed at the second time; mend them, or see tests/flaky.md ==")
        lines += [f"FLAKY {name}" for name in flaky]
        lines += [f"FAILED {name}" for result in self.results for name in result.failed]
        deciding = [result for result in self.results if result.passed is self.passed]
        closing = [result.closing for result in deciding if result.closing]
        lines.append(closing[-1] if closing else f"== no tests ran in {seconds:.2f}s ==")
        return lines


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


# --------------------------------------------------------------------------- one suite
def stop(process: subprocess.Popen[str]) -> None:
    """Interrupt a process group, so that pytest reports what it did; then kill what remains."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE_S)


def run_make(root: Path, until: float, *arguments: str) -> tuple[bool, str]:
    """Run make and copy its output; return whether it succeeded, and pytest's closing line.

    It is stopped at the time `until` of the monotonic clock.
    """
    process = subprocess.Popen(
        ["make", "--no-print-directory", *arguments],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    closing = ""

    def copy() -> None:
        nonlocal closing
        with process.stdout as output:
            for line in output:
                print(line, end="", flush=True)
                if CLOSING.match(line):
                    closing = line.strip()

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    try:
        process.wait(max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        say(f"== make {arguments[0]}: stopped, the time is up ==")
    finally:
        if process.poll() is None:
            stop(process)
    copying.join(GRACE_S)  # a process that was left behind may keep the pipe open
    return process.returncode == 0, closing


def read_failures(cache: Path) -> set[str]:
    """Return the tests whose last run has failed."""
    try:
        return set(json.loads((cache / "v" / "cache" / "lastfailed").read_bytes()))
    except FileNotFoundError:
        return set()


def run_suite(root: Path, until: float, target: str, *arguments: str) -> Result:
    """Run a suite, and its failed tests once more if there is time."""
    began = time.monotonic()
    failed: set[str] = set()
    flaky: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="tugline-ci-") as folder:
        cache = f"-o cache_dir={folder}"
        passed, closing = run_make(root, until, target, *arguments, f"ARGS={cache}")
        if not passed:
            failed = read_failures(Path(folder)) or {f"make {target}: no test, see its output"}
        if failed and time.monotonic() < until:
            say(f"== make {target} failed: its failed tests again ==")
            again = f"ARGS={cache} --last-failed"
            passed, last = run_make(root, until, target, *arguments, again)
            closing = last or closing
            still = read_failures(Path(folder)) or (set() if passed else failed)
            flaky, failed = failed - still, still
    seconds = time.monotonic() - began
    return Result(target, passed, seconds, closing, tuple(sorted(flaky)), tuple(sorted(failed)))


# --------------------------------------------------------------------------- all suites
def run_suites(root: Path, table: Table, choices: Sequence[Choice], began: float) -> Report:
    """Run the suites that always run, and the chosen ones that fit into the time.

    Where the first ones take longer than usual, so will the others.
    """
    report = Report()
    chosen = {choice.suite for choice in choices}
    rest = [suite.name for suite in table.suites if suite not in chosen]
    report.not_run |= dict.fromkeys(rest, "nothing of its folders has changed")
    until = began + table.stop_s
    report.results += [run_suite(root, until, target) for target in ALWAYS]
    slowness = max(1.0, sum(result.seconds for result in report.results) / table.always_s)
    for suite, reason, by_rotation in choices:
        spent = time.monotonic() - began
        limit = table.usual_s if by_rotation else table.limit_s
        minutes = suite.minutes * slowness
        if spent + minutes * 60 > limit:
            report.not_run[suite.name] = (
                f"{reason}, but its {minutes:.0f} minutes do not fit into {limit / 60:.0f}, "
                f"{spent / 60:.0f} of which have passed"
            )
            continue
        say(f"== make test-{suite.name}, its core: {reason} ==")
        report.results.append(run_suite(root, until, f"test-{suite.name}", "CORE=1"))
    return report


def main() -> None:
    """Choose, run and report; exit with 1 if a suite has failed twice."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", action="store_true", help="only print what would run")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # whatever a test prints
    table = read_table(HERE / "suites.toml")
    selection = select_suites(ROOT, table, os.environ.get("TUGLINE_CI_BASE", ""))
    say(f"== {selection.compared} ==")
    for choice in selection.choices:
        say(f"make test-{choice.suite.name}: {choice.reason}")
    if options.plan:
        return
    report = run_suites(ROOT, table, selection.choices, began)
    for line in report.format(time.monotonic() - began):
        say(line)
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    main()
