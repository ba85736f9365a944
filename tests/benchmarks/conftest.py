"""Benchmarks are programs: each runs in a process of its own and prints one JSON object."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"
Measure = Callable[..., Any]


@pytest.fixture(scope="session")
def measure() -> Measure:
    """Run Python with these arguments in a benchmark's folder; returns what it printed last."""

    def run(name: str, *arguments: str, timeout: float = 110) -> Any:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=ROOT / name, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
