"""Git, as somebody who has a name uses it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org")
_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull}


def git(folder: Path, *arguments: str, code: int = 0) -> str:
    """What git says in a folder."""
    done = subprocess.run(
        ["git", *_WHO, *arguments],
        cwd=folder,
        env={**os.environ, **_CONFIG},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.strip()
