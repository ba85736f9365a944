"""The command that finds and runs benchmarks says what is wrong when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "tugline"
PROGRAM = "from tugline.cli.app import main; main()"


def refused(*arguments: str, source: Path = PACKAGE.parent) -> str:
    """The last line on stderr of a command that exits with 2."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


def test_an_unknown_part_is_answered_with_the_known_ones() -> None:
    """A typing mistake costs one glance."""
    assert refused("gatway") == (
        "tugline: there is no benchmark of 'gatway'; "
        "it must be one of builders, cluster, console, gateway, hostile, learn, runtimes, server,"
        " trajectories, utilisation"
    )


def test_an_option_of_another_benchmark_is_refused() -> None:
    """What would have no effect is not passed over in silence."""
    assert refused("gateway", "--sessions", "runs").endswith("arguments: --sessions runs")


def test_an_installed_package_says_where_benchmarks_are(tmp_path: Path) -> None:
    """Outside a checkout the command names the file it looked for and what to do."""
    skipped = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(PACKAGE, tmp_path / "lib" / "src" / "tugline", ignore=skipped)
    line = refused("gateway", source=tmp_path / "lib" / "src")
    assert str(tmp_path / "lib" / "benchmarks" / "gateway" / "run.py") in line
    assert line.endswith("run this in a checkout")
