"""See that there is a Chromium, for `make test-browser`; root on Debian or Ubuntu gets one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")


def install() -> str:
    """Install it with apt; returns why that was not possible, empty if it was."""
    if os.geteuid() != 0:
        return "only root may install it"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    for step in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
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


def main() -> None:
    """Done at once where a browser is on the PATH."""
    if any(map(shutil.which, NAMES)):
        return
    print("browser: installing chromium with apt-get ...", file=sys.stderr, flush=True)
    why = install()
    if why:
        sys.exit(f"browser: install one of {', '.join(NAMES)} yourself; {why}")


main()
