"""Choose the long suites that a change needs; `suites.toml` has them and their folders."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RECENT_S = 4 * 3600
"""Age of the commit that a change is compared with, before the one that is tested."""


class Suite(NamedTuple):
    """A long suite, which `make test-NAME` runs."""

    name: str
    minutes: float
    """Usual time of its core."""
    folders: tuple[str, ...]


class Table(NamedTuple):
    """Contents of `suites.toml`."""

    suites: tuple[Suite, ...]
    every: tuple[str, ...]
    """Files and folders that need all suites."""
    fast: tuple[str, ...]
    """Those that need none: `make test` has all of their tests."""
    always_s: float
    """Usual time of the suites that always run."""
    usual_s: float
    limit_s: float
    stop_s: float


class Choice(NamedTuple):
    """A suite to run, and why."""

    suite: Suite
    reason: str
    by_rotation: bool = False


class Selection(NamedTuple):
    """The chosen suites, and what the change was compared with."""

    compared: str
    choices: list[Choice]


def read_table(path: Path) -> Table:
    """Read the table of suites."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    return Table(
        suites=tuple(
            Suite(name, suite["minutes"], tuple(suite["folders"]))
            for name, suite in values["suites"].items()
        ),
        every=tuple(values["every"]),
        fast=tuple(values["fast"]),
        always_s=values["always_minutes"] * 60,
        usual_s=values["usual_minutes"] * 60,
        limit_s=values["limit_minutes"] * 60,
        stop_s=values["stop_minutes"] * 60,
    )


# --------------------------------------------------------------------------- what has changed
def run_git(root: Path, *arguments: str) -> str | None:
    """Return the output of git, None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def find_base(root: Path, named: str) -> str | None:
    """Return the commit that the change is compared with, None if there is none.

    It is `named` unless that is empty, else the newest commit that is four hours older than HEAD.
    Only first parents count: an old commit of a branch is new where it is merged.
    """
    if named:
        found = run_git(root, "rev-parse", "--verify", "--quiet", f"{named}^{{commit}}")
    else:
        committed = run_git(root, "show", "--no-patch", "--format=%ct", "HEAD") or "0"
        before = f"--before={int(committed) - RECENT_S}"
        found = run_git(root, "rev-list", "--first-parent", "--max-count=1", before, "HEAD")
    return (found or "").strip() or None


def list_changes(root: Path, base: str) -> list[str] | None:
    """Return the files that differ from `base`, deleted and moved ones too; None if git fails."""
    listed = run_git(root, "diff", "--name-only", "--no-renames", "-z", base, "--")
    return None if listed is None else [name for name in listed.split("\0") if name]


# --------------------------------------------------------------------------- which suites
def is_in(file: str, folders: Sequence[str]) -> bool:
    """Whether a file is one of `folders` or inside of one."""
    return any(file == folder or file.startswith(f"{folder}/") for folder in folders)


def choose(table: Table, changes: Sequence[str] | None, commit: str) -> list[Choice]:
    """Choose the suites that the changes need (None: all), and one of the rest by rotation."""
    if changes is None:
        return [Choice(suite, "it is unknown what has changed") for suite in table.suites]
    choices: list[Choice] = []
    rest: list[Suite] = []
    for suite in table.suites:
        folders = (*table.every, *suite.folders)
        first = next((file for file in changes if is_in(file, folders)), None)
        if first is None:
            rest.append(suite)
        else:
            choices.append(Choice(suite, f"{first} has changed"))
    if rest:
        turn = rest[int(commit, 16) % len(rest)]
        choices.append(Choice(turn, "its turn by the commit's hash", by_rotation=True))
    return choices


def select_suites(root: Path, table: Table, named: str) -> Selection:
    """Choose the suites of the commit that is checked out in `root`."""
    base = find_base(root, named)
    changes = list_changes(root, base) if base else None
    commit = (run_git(root, "rev-parse", "HEAD") or "0").strip()
    if changes is not None:
        compared = f"{len(changes)} files differ from {base}"
    elif named:
        compared = f"TUGLINE_CI_BASE is {named!r}, which is no commit of this clone"
    else:
        compared = "this clone has no commit that is four hours older"
    return Selection(compared, choose(table, changes, commit))
