"""``tugline bench``: measure a part on this machine, with the benchmarks of the source checkout.

Benchmarks are programs of their own beside the package, because they bring stub engines and load
generators that no installation needs; this command finds one and runs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tugline.errors import UsageError

_PROGRAMS = {"gateway": "run.py"}


def bench(
    part: Annotated[str, typer.Argument(help="What to measure: gateway.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer calls: rougher figures, in a minute or two.")
    ] = False,
) -> None:
    """Measure what a part costs, next to the least that any proxy in Python must."""
    if part not in _PROGRAMS:
        msg = f"there is no benchmark of {part!r}; it must be one of {', '.join(_PROGRAMS)}"
        raise UsageError(msg)
    program = Path(__file__).parents[3] / "benchmarks" / part / _PROGRAMS[part]
    if not program.is_file():
        msg = (
            f"the benchmark of the {part} is not at {program}: "
            "it comes with the source, not with the package; run this in a checkout"
        )
        raise UsageError(msg)
    asked = {"--json": as_json, "--quick": quick}
    options = [option for option, given in asked.items() if given]
    done = subprocess.run([sys.executable, str(program), *options], check=False)
    if done.returncode:
        raise typer.Exit(1)
