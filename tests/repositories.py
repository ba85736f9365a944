"""Git, as somebody who has a name uses it."""

from __future__ import annotations

import os
from pathlib import Path

from commands import run_program

_WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org")
_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull}


def git(folder: Path, *arguments: str, code: int = 0) -> str:
    """What git says in a folder."""
    done = run_program("git", *_WHO, *arguments, cwd=folder, env={**os.environ, **_CONFIG})
    assert done.returncode == code, done.stderr
    return done.stdout.strip()
