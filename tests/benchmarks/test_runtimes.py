"""The benchmark of runtimes: its figures are of real boxes, and what is left is seen."""

from benchmarks.conftest import Measure

SMALL = """
import asyncio, json, subprocess, tempfile
from pathlib import Path
from run import leaks, rate, there, timed
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.local import LocalRuntime

async def main(root):
    runtime, spec = LocalRuntime(), SandboxSpec()
    one = await timed(runtime, root / "one", spec, 2)
    many = await rate(runtime, spec, root / "many", 2, 6)
    before = there(root, None)
    left = subprocess.Popen(["sleep", "30"])
    seen = there(root, None)["processes"] - before["processes"]
    left.kill(); left.wait()
    print(json.dumps([one, many, len(seen), seen == {str(left.pid)}]))

with tempfile.TemporaryDirectory() as root:
    asyncio.run(main(Path(root)))
"""


def test_a_small_run(measure: Measure) -> None:
    """Every part takes its time, sessions remove their folders, a process left over is counted."""
    one, many, seen, named = measure("runtimes", "-c", SMALL)
    assert one["all"] >= one["start"] + sum(one["execs"]) > 0
    assert len(one["execs"]) == 2
    assert many > 0
    assert (seen, named) == (1, True)
