"""``tugline bench``: the cost of components.

Benchmarks are programs outside of the package: they include stub engines and load generators,
which an installation does not need.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tugline.errors import UsageError


def bench(part: str, *options: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Measure the cost of a component and its lower bound.

    Args:
        part: Component to measure: gateway, trajectories, builders, server, cluster (up to a
            thousand nodes), console, utilisation, runtimes, hostile (one agent against the
            others), sessions (memory of a node over its sessions) or learn (training of
            several agents, takes hours).
        options: Options of the benchmark, such as --quick and --json.
    """
    programs = Path(__file__).parents[3] / "benchmarks"
    program = programs / part / "run.py"
    if not programs.is_dir():
        raise UsageError(f"{program} is missing: benchmarks are only in a checkout")
    if not program.is_file():
        known = ", ".join(sorted(each.parent.name for each in programs.glob("*/run.py")))
        raise UsageError(f"unknown benchmark {part!r}; it must be one of {known}")
    done = subprocess.run([sys.executable, str(program), *options], check=False)
    if done.returncode:
        sys.exit(2 if done.returncode == 2 else 1)
