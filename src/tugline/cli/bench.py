"""``tugline bench``: run a benchmark of the source checkout on this machine.

Benchmarks are separate programs beside the package, with stub engines and load generators that no
installation needs.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tugline.errors import UsageError

_TAKES = {
    "gateway": ("--json", "--quick"),
    "trajectories": ("--json", "--quick"),
    "builders": ("--json", "--sessions"),
    "server": ("--json", "--quick", "--store"),
    "utilisation": ("--json", "--quick"),
    "runtimes": ("--json", "--quick"),
}
"""Benchmarks with the options that each accepts."""


def bench(
    part: Annotated[str, typer.Argument(help=f"What to measure: {', '.join(_TAKES)}.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer calls: rougher figures, in a minute or two.")
    ] = False,
    sessions: Annotated[
        Path | None,
        typer.Option(help="builders: the recorded sessions of this folder, not new ones."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="server: where it keeps its tasks, sqlite or postgres.")
    ] = None,
) -> None:
    """Measure what a part costs, next to the least that it could."""
    if part not in _TAKES:
        msg = f"there is no benchmark of {part!r}; it must be one of {', '.join(_TAKES)}"
        raise UsageError(msg)
    given = {"--json": as_json, "--quick": quick, "--sessions": sessions, "--store": store}
    chosen = [option for option, value in given.items() if value]
    for option in chosen:
        if option not in _TAKES[part]:
            known = ", ".join(_TAKES[part])
            msg = f"the benchmark of the {part} has no option {option}; it takes {known}"
            raise UsageError(msg)
    program = Path(__file__).parents[3] / "benchmarks" / part / "run.py"
    if not program.is_file():
        msg = (
            f"the benchmark of the {part} is not at {program}: "
            "it comes with the source, not with the package; run this in a checkout"
        )
        raise UsageError(msg)
    if sessions is not None:
        chosen.append(str(sessions))
    if store is not None:
        chosen.append(store)
    done = subprocess.run([sys.executable, str(program), *chosen], check=False)
    if done.returncode:
        raise typer.Exit(2 if done.returncode == 2 else 1)
