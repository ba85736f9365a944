"""Continuous integration: which suites a change needs, and honest results of them."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_suites
import suites
from suites import Choice, Suite, Table

ROOT = Path(__file__).resolve().parents[2]
DAY = 24 * 3600
NOW = 1_800_000_000
Commit = Callable[..., str]
REAL = suites.read_table(ROOT / "tools" / "ci" / "suites.toml")
TABLE = Table(
    suites=(
        Suite("red", 5, ("src/red", "tests/red.py")),
        Suite("green", 5, ("src/green",)),
        Suite("blue", 5, ("src/blue",)),
    ),
    every=("constraints.txt",),
    fast=("src/white",),
    always_s=1200.0,
    usual_s=900.0,
    limit_s=1800.0,
    stop_s=3600.0,
)


def git(folder: Path, *arguments: str, at: int = NOW) -> str:
    """Run git, with a fixed author and time."""
    identity = {f"GIT_{who}_{what}": "tester" for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")}  # fmt: skip
    dates = {f"GIT_{who}_DATE": f"@{at} +0000" for who in ("AUTHOR", "COMMITTER")}
    env = {**os.environ, **identity, **dates, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """An empty repository."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    return folder


@pytest.fixture
def commit(clone: Path) -> Commit:
    """Change a file, commit at a time, return the commit."""

    def make(file: str, at: int = NOW) -> str:
        path = clone / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as opened:
            opened.write(f"{at}\n")
        git(clone, "add", "--all")
        git(clone, "commit", "-q", "-m", f"Change {file}", at=at)
        return git(clone, "rev-parse", "HEAD")

    return make


def chosen(clone: Path, named: str = "") -> list[str]:
    """Names of the chosen suites, without that by rotation."""
    selection = suites.select_suites(clone, TABLE, named)
    return [choice.suite.name for choice in selection.choices if not choice.by_rotation]


# --------------------------------------------------------------------------- the base
def test_the_base_is_the_newest_commit_of_four_hours_ago(clone: Path, commit: Commit) -> None:
    """Changes of the last four hours before the tested commit count, no others."""
    commit("src/red/a.py", NOW - DAY)
    old = commit("src/green/a.py", NOW - 4 * 3600 - 1)
    commit("src/blue/a.py", NOW - 4 * 3600 + 1)
    commit("README.md", NOW)
    assert suites.find_base(clone, "") == old
    assert chosen(clone) == ["blue"]


def test_a_late_run_chooses_as_an_early_one(clone: Path, commit: Commit) -> None:
    """The age of commits is relative to the tested commit, not to the clock."""
    commit("README.md", NOW - 9 * DAY)
    commit("src/red/a.py", NOW - 8 * DAY)
    assert chosen(clone) == ["red"]


def test_a_named_base_takes_precedence(clone: Path, commit: Commit) -> None:
    """`TUGLINE_CI_BASE` may be a branch, and an old commit."""
    first = commit("README.md", NOW - 3 * DAY)
    commit("src/red/a.py", NOW - 2 * DAY)
    commit("src/green/a.py", NOW)
    git(clone, "branch", "release", first)
    assert chosen(clone) == ["green"]
    assert chosen(clone, "release") == ["red", "green"]


def test_what_an_old_branch_brings_is_new_to_the_merge(clone: Path, commit: Commit) -> None:
    """A commit of yesterday counts if it was merged a minute ago."""
    start = commit("README.md", NOW - 2 * DAY)
    commit("README.md", NOW - DAY)
    git(clone, "checkout", "-q", "-b", "feature", start)
    commit("src/red/a.py", NOW - DAY + 60)
    git(clone, "checkout", "-q", "main")
    git(clone, "merge", "-q", "--no-ff", "-m", "Merge", "feature", at=NOW)
    assert chosen(clone) == ["red"]


@pytest.mark.parametrize("named", ["", "no-such-branch"])
def test_without_a_base_everything_is_needed(clone: Path, commit: Commit, named: str) -> None:
    """A shallow or a new clone has no old commit."""
    commit("README.md", NOW - 60)
    commit("README.md", NOW)
    assert chosen(clone, named) == ["red", "green", "blue"]


def test_a_shallow_clone_needs_everything(clone: Path, commit: Commit, tmp_path: Path) -> None:
    """A shallow clone lacks the old commit that the whole history has, so every suite runs."""
    commit("README.md", NOW - DAY)
    commit("README.md", NOW)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{clone}", str(shallow))
    assert chosen(clone) == []
    assert chosen(shallow) == ["red", "green", "blue"]


def test_outside_of_a_repository_everything_is_needed(tmp_path: Path) -> None:
    """An archive of the sources has no history, so that every suite runs."""
    assert chosen(tmp_path) == ["red", "green", "blue"]


# --------------------------------------------------------------------------- the suites
def test_moved_and_deleted_files_count(clone: Path, commit: Commit) -> None:
    """A suite is needed by the old place of a file, too."""
    commit("src/red/a.py", NOW - DAY)
    commit("src/green/b.py", NOW - DAY)
    git(clone, "mv", "src/red/a.py", "a.py")
    git(clone, "rm", "-q", "src/green/b.py")
    git(clone, "commit", "-q", "-m", "Move", at=NOW)
    assert chosen(clone) == ["red", "green"]


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ("tests/red.py", ["red"]),
        ("src/redder/a.py", []),
        ("constraints.txt", ["red", "green", "blue"]),
        ("docs/constraints.txt", []),
    ],
)
def test_folders_are_whole_names(changed: str, needed: list[str]) -> None:
    """A folder matches the files inside of it, and a file only itself."""
    choices = suites.choose(TABLE, [changed], "0")
    assert [choice.suite.name for choice in choices if not choice.by_rotation] == needed


def test_one_more_runs_by_rotation() -> None:
    """The hash decides between the suites that the change does not need, evenly."""
    turns = [suites.choose(TABLE, ["src/red/a.py"], f"{n:040x}")[-1] for n in range(4)]
    assert [turn.suite.name for turn in turns] == ["green", "blue", "green", "blue"]
    assert all(turn.by_rotation for turn in turns)
    assert [c.suite.name for c in suites.choose(TABLE, [], "2")] == ["blue"]
    whole = suites.choose(TABLE, ["constraints.txt"], "1")
    assert [choice.by_rotation for choice in whole] == [False] * 3


# --------------------------------------------------------------------------- runs
TARGETS = "test test-browser test-red test-green test-blue"
MAKEFILE = f"""
export PYTEST_DISABLE_PLUGIN_AUTOLOAD = 1
{TARGETS}:
\t@echo "$@ $(CORE)" >> ran
\t@if [ -f $@.sh ]; then sh $@.sh; fi
\t@if [ -f $@.py ]; then {sys.executable} -m pytest $@.py $(ARGS); fi
"""
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): raise ValueError\n"
ONCE = """
from pathlib import Path

def test_fails_once():
    known = Path("known").exists()
    Path("known").touch()
    assert known
"""
HANGS = """
from pathlib import Path
from threading import Event

def test_hangs():
    Path("began").touch()
    Event().wait()
"""
RED, GREEN, BLUE = (Choice(suite, "it is a test") for suite in TABLE.suites)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Suites of which the last long one has a test."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test-blue.py").write_text(PASSES)
    return tmp_path


def run(checkout: Path, *choices: Choice, spent_s: float = 0.0) -> tuple[bool, list[str]]:
    """Run the suites, some time after the beginning; whether they passed, and the report."""
    report = run_suites.run_suites(checkout, TABLE, choices, time.monotonic() - spent_s)
    return report.passed, report.format(62.0)


def without_times(lines: list[str]) -> list[str]:
    """The lines that name tests and suites, and the last one."""
    named = [line for line in lines if line.startswith(("FLAKY", "FAILED", "NOT RUN"))]
    return [*named, re.sub(r"[\d.]+s", "1s", lines[-1].strip("= "))]


def test_what_did_not_run_is_printed(checkout: Path) -> None:
    """Suites that did not run are printed with the reason; the last line is pytest's."""
    (checkout / "test-green.py").write_text(PASSES)
    passed, lines = run(checkout, GREEN)
    assert (checkout / "ran").read_text().split("\n") == [
        "test ",
        "test-browser ",
        "test-green 1",
        "",
    ]
    assert (passed, without_times(lines)) == (
        True,
        [
            "NOT RUN red: nothing of its folders has changed",
            "NOT RUN blue: nothing of its folders has changed",
            "1 passed in 1s",
        ],
    )


def test_a_test_that_passes_at_the_second_time_is_flaky(checkout: Path) -> None:
    """Only the failed test runs again, and it does not fail the run."""
    (checkout / "test-red.py").write_text(PASSES + ONCE)
    passed, lines = run(checkout, RED, GREEN, BLUE)
    assert (passed, without_times(lines)) == (
        True,
        ["FLAKY test-red.py::test_fails_once", "1 passed in 1s"],
    )
    assert (checkout / "ran").read_text().count("test-red") == 2


def test_a_test_that_fails_twice_fails_the_run(checkout: Path) -> None:
    """The other suites run all the same; the last line is of the suite that failed."""
    (checkout / "test-browser.py").write_text(PASSES + FAILS + ONCE)
    passed, lines = run(checkout, RED, GREEN, BLUE)
    assert (passed, without_times(lines)) == (
        False,
        [
            "FLAKY test-browser.py::test_fails_once",
            "FAILED test-browser.py::test_fails",
            "1 failed, 1 passed, 1 deselected in 1s",
        ],
    )
    assert "test-blue" in (checkout / "ran").read_text()


@pytest.mark.parametrize(
    ("tests", "last"),
    [("", "no tests ran in 1s"), ("import nothing_of_that_name", "1 error in 1s")],
)
def test_a_suite_without_tests_has_failed(checkout: Path, tests: str, last: str) -> None:
    """Exit code 5 of pytest, and a file that cannot be imported, fail the suite."""
    (checkout / "test-red.py").write_text(tests)
    passed, lines = run(checkout, RED, GREEN, BLUE)
    assert not passed
    assert sum(line.startswith("FAILED ") for line in lines) == 1
    assert without_times(lines)[-1] == last


@pytest.mark.parametrize(
    ("script", "passes", "line"),
    [
        ("exit 1", False, "FAILED make test: no test, see its output"),
        (
            "[ -f tried ] || { touch tried; exit 1; }",
            True,
            "FLAKY make test: no test, see its output",
        ),
    ],
)
def test_a_failure_besides_the_tests_counts(
    checkout: Path, script: str, line: str, *, passes: bool
) -> None:
    """A failed check of the code, or a failed installation, fails the run."""
    (checkout / "test.sh").write_text(script)
    passed, lines = run(checkout, RED, GREEN, BLUE)
    assert (passed, without_times(lines)[0]) == (passes, line)
    assert "passed in" in lines[-1] or not passes


def test_a_run_without_any_closing_line_has_its_own(checkout: Path) -> None:
    """The line is the one that pytest would print."""
    for target in ("test", "test-browser"):
        (checkout / f"{target}.sh").write_text("exit 1")
    passed, lines = run(checkout)
    assert (passed, lines[-1]) == (False, "== no tests ran in 62.00s ==")


@pytest.mark.parametrize(
    ("spent_s", "by_rotation", "fits"),
    [(1400, False, True), (1600, False, False), (500, True, True), (700, True, False)],
)
def test_a_suite_begins_only_if_it_will_end_in_time(
    checkout: Path, spent_s: float, *, by_rotation: bool, fits: bool
) -> None:
    """A suite that the change needs has more time than the one by rotation."""
    choice = GREEN._replace(by_rotation=by_rotation)
    passed, lines = run(checkout, choice, spent_s=spent_s)
    ran = "test-green" in (checkout / "ran").read_text()
    left_out = [
        line for line in lines if line.startswith("NOT RUN green: it is a test, but its 5 ")
    ]
    assert (passed, ran, len(left_out)) == (True, fits, not fits)


def test_fewer_suites_begin_on_a_slow_machine(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first suites took one and a half times as long, so will a chosen one."""
    real = run_suites.run_suite

    def slowly(*arguments: Any) -> run_suites.Result:
        return dataclasses.replace(real(*arguments), seconds=900.0)

    monkeypatch.setattr(run_suites, "run_suite", slowly)
    passed, lines = run(checkout, BLUE, spent_s=1400)
    assert passed
    assert any(line.startswith("NOT RUN blue: it is a test, but its 8 minutes") for line in lines)


def test_a_suite_that_hangs_is_stopped(checkout: Path) -> None:
    """The suite has failed, and pytest still prints its closing line."""
    (checkout / "test-red.py").write_text(PASSES + HANGS)
    until = time.monotonic() + 3.0
    result = run_suites.run_suite(checkout, until, "test-red")
    assert (checkout / "began").exists()
    assert (result.passed, result.failed) == (False, ("make test-red: no test, see its output",))
    assert "1 passed in" in result.closing


@pytest.mark.parametrize(("tests", "last"), [(PASSES, "1 passed"), (FAILS, "1 failed")])
def test_the_exit_status_is_honest(clone: Path, tests: str, last: str, tmp_path: Path) -> None:
    """The script in a bare clone exits as its suites do, with a Makefile of ours and no input."""
    for folder in (".ci", "tools/ci"):
        shutil.copytree(ROOT / folder, clone / folder)
    names = ["test", "test-browser", *(f"test-{suite.name}" for suite in REAL.suites)]
    (clone / "test-engines.py").write_text(PASSES)
    (clone / "test-chaos.py").write_text(tests)
    (clone / "Makefile").write_text(MAKEFILE.replace(TARGETS, " ".join(names)))
    (clone / "pytest.ini").write_text("[pytest]\n")
    git(clone, "add", "--all")
    git(clone, "commit", "-q", "-m", "All")
    git(tmp_path, "clone", "-q", "--bare", str(clone), "bare")
    git(tmp_path, "clone", "-q", "bare", "fresh")
    environment = {**os.environ, "PYTHON": sys.executable, "TUGLINE_CI_BASE": ""}
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path / "fresh",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    ran = (tmp_path / "fresh" / "ran").read_text()
    assert all(f"{name} " in ran for name in names), "an only commit needs every suite"
    assert done.returncode == (tests is FAILS), done.stdout
    assert re.fullmatch(rf"=+ {last} in [\d.]+s =+", done.stdout.splitlines()[-1])
