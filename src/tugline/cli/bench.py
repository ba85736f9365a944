"""``tugline bench``: run a benchmark of the source checkout on this machine.

Benchmarks are separate programs beside the package, with stub engines and load generators that no
installation needs.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tugline.errors import UsageError


def bench(part: str, *options: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Measure what a part costs, next to the least that it could.

    Args:
        part: What to measure: gateway, trajectories, builders, server, cluster (up to a thousand
            nodes), console, utilisation, runtimes, hostile (one agent against the
            others) or learn (what several agents learn, in hours).
        options: Options of the benchmark, such as --quick and --json.
    """
    programs = Path(__file__).parents[3] / "benchmarks"
    program = programs / part / "run.py"
    if not programs.is_dir():
        msg = f"{program} is missing: benchmarks come with the source; run this in a checkout"
        raise UsageError(msg)
    if not program.is_file():
        known = ", ".join(sorted(each.parent.name for each in programs.glob("*/run.py")))
        raise UsageError(f"there is no benchmark of {part!r}; it must be one of {known}")
    done = subprocess.run([sys.executable, str(program), *options], check=False)
    if done.returncode:
        sys.exit(2 if done.returncode == 2 else 1)
