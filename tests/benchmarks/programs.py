"""Benchmarks are programs: each runs in a process of its own and prints one JSON object."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "benchmarks"


def measure(name: str, *arguments: str | Path, timeout: float = 110) -> Any:
    """Run Python with these arguments in a benchmark's folder; returns what it printed last."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT / name, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
