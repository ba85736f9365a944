"""See that there is bubblewrap, for `make test`; without it the tests of sandboxes are skipped."""

from __future__ import annotations

import shutil
import sys

from debian import install


def main() -> None:
    """Done at once where it is on the PATH, or where there are no sandboxes of this kind."""
    if shutil.which("bwrap") or sys.platform != "linux":
        return
    print("bubblewrap: installing it with apt-get ...", file=sys.stderr, flush=True)
    reason = install(["bubblewrap"])
    if reason:
        print(f"bubblewrap: its tests are skipped; install it yourself; {reason}", file=sys.stderr)


main()
