"""``tugline harness``: what it lists, and its mistakes at the door."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from commands import run_command
from tugline.harnesses.install import install_dir, install_once
from tugline.plugins import BUILT_IN

tugline = partial(run_command, "harness")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path))


def test_every_harness_is_listed_with_its_version() -> None:
    """Names, pinned versions, and the dialects that are checked."""
    done = tugline("list")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:] if line.strip()}
    assert set(rows) >= set(BUILT_IN["harness"])
    assert "0.169.0" in rows["codex"]
    assert "openai_responses" in rows["codex"]


async def test_a_damaged_program_is_told() -> None:
    """What is installed is read again: a changed file makes it unsound, and the exit code 1."""

    async def fill(fresh: Path) -> None:
        (fresh / "program").write_text("right")

    for version in ("0.87.1", "0.90.0"):
        await install_once(install_dir() / f"pi-{version}", fill)
    (install_dir() / "pi-0.90.0" / "program").write_text("wrong")
    done = tugline("list", "--json")
    assert done.returncode == 1
    report = [one for one in json.loads(done.stdout)["harnesses"] if one["name"] == "pi"]
    assert [(one["version"], one["pinned"], one["sound"]) for one in report] == [
        ("0.87.1", True, True),
        ("0.90.0", False, False),
    ]
    assert report[0]["bytes"] == len("right")
    assert tugline("list").returncode == 1
    again = tugline("install", "pi", "--version", "0.90.0")
    assert (again.returncode, again.stdout) == (1, "")
    assert "pi 0.90.0 was changed: remove" in again.stderr
