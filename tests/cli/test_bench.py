"""``tugline bench``: options are passed on, and an installation has no benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Run
from support.commands import TUGLINE, run_program
from tugline.cli import bench


def test_an_option_of_another_benchmark_is_refused() -> None:
    """The error is that of the benchmark which lacks the option."""
    done = run_program(TUGLINE, "bench", "gateway", "--sessions", "runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("arguments: --sessions runs\n")


def test_an_installation_has_no_benchmarks(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of an installation without benchmarks names the missing file."""
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "lib/src/tugline/cli/bench.py"))
    done = run_here("bench", "gateway")
    assert (done.returncode, "only in a checkout" in done.stderr) == (2, True)
    assert str(tmp_path / "lib" / "benchmarks" / "gateway" / "run.py") in done.stderr
