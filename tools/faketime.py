"""See that there is libfaketime, for `make test-chaos`; without it one test is skipped."""

from __future__ import annotations

import sys
from pathlib import Path

from debian import install


def main() -> None:
    """Done at once where it is there, or where there is no such library."""
    if sys.platform != "linux" or any(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")):
        return
    print("faketime: installing it with apt-get ...", file=sys.stderr, flush=True)
    if reason := install(["libfaketime"]):
        print(f"faketime: one test is skipped; libfaketime: {reason}", file=sys.stderr)


main()
