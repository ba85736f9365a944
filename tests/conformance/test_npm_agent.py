"""The example of a program from npm, with the real program."""

import json
import os
from pathlib import Path

import pytest

from support.commands import TUGLINE, run_program

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "npm_agent"


def test_the_example_passes_every_check() -> None:
    """Continue's CLI is installed, started and checked as the example's README says."""
    path = os.pathsep.join(filter(None, (str(EXAMPLE), os.getenv("PYTHONPATH"))))
    done = run_program(
        *(TUGLINE, "harness", "check", "continue_cli:ContinueCli"),
        *("--tool", "Bash", "--runtime", "local", "--json"),
        env={**os.environ, "PYTHONPATH": path},
        timeout=600,
    )
    (result,) = json.loads(done.stdout)["results"]
    assert (done.returncode, set(result["checks"].values())) == (0, {"pass"}), result
