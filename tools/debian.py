"""Install programs for tests that pip does not have, with apt as root on Debian or Ubuntu."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence


def install(packages: Sequence[str]) -> str:
    """Install packages; return the reason if that is not possible, else an empty string."""
    if os.geteuid() != 0:
        return "only root may install it"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    for step in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-q", *step],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if done.returncode != 0:
            return " ".join(done.stderr.split())[-400:] or f"apt-get {step[0]} failed"
    return ""
