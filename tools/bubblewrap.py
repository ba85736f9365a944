"""Install bubblewrap if missing, for `make test`; without it the sandbox tests are skipped."""

from __future__ import annotations

import shutil
import sys

from debian import install


def main() -> None:
    """Install bubblewrap unless it is on the PATH or this system is not Linux."""
    if shutil.which("bwrap") or sys.platform != "linux":
        return
    print("bubblewrap: installing it with apt-get ...", file=sys.stderr, flush=True)
    reason = install(["bubblewrap"])
    if reason:
        print(f"bubblewrap: its tests are skipped ({reason}); install it yourself", file=sys.stderr)


main()
