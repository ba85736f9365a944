"""Check for a Chromium, for `make test-browser`; install it for root on Debian or Ubuntu."""

from __future__ import annotations

import shutil
import sys

from debian import install

NAMES = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Install Chromium unless a browser is on the PATH."""
    if any(map(shutil.which, NAMES)):
        return
    print("browser: installing chromium with apt-get ...", file=sys.stderr, flush=True)
    reason = install(["chromium"])
    if reason:
        sys.exit(f"browser: install one of {', '.join(NAMES)} yourself; {reason}")


main()
