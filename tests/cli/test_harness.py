"""``tugline harness``: what it lists, and its mistakes at the door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tugline.plugins import BUILT_IN

TUGLINE = Path(sys.executable).with_name("tugline")


def tugline(*options: str) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    command = [TUGLINE, "harness", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_harness_is_listed_with_its_version() -> None:
    """Names, pinned versions, and the dialects that are checked."""
    done = tugline("list")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:] if line.strip()}
    assert set(rows) >= set(BUILT_IN["harness"])
    assert "0.169.0" in rows["codex"]
    assert "openai_responses" in rows["codex"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["check"], "give the name of one harness, or --all"),
        (["check", "pi", "--all"], "give the name of one harness, or --all"),
        (["check", "shell"], "harness 'shell' cannot be checked; these can: codex, claude_code"),
        (["install", "shell"], "there is nothing to install"),
        (["install", "pie"], "unknown harness 'pie'; did you mean 'pi'?"),
        (["check", "pi", "--engine", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["check", "pi", "--keep", "/dev/null/x"], "choose another --keep"),
    ],
)
def test_mistakes_are_told_in_one_line(options: list[str], line: str) -> None:
    """No traceback, nothing on stdout, an exit code that is not 0."""
    done = tugline(*options)
    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    assert line in done.stderr.splitlines()[-1]
