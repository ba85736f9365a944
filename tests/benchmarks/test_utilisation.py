"""The benchmark of a node's use of an engine: its ideal is computed right, its node really runs."""

from benchmarks.conftest import Measure

SMALL = """
import json
import uvloop
from run import Case, ideal, on_node

few, many = (ideal(Case(sessions=320, slots=slots)) for slots in (36, 52))
seen = uvloop.run(on_node(Case(sessions=64)))
print(json.dumps({"few": few, "many": many, "busy": seen.busy, "sessions": seen.sessions}))
"""


def test_a_small_run(measure: Measure) -> None:
    """52 agents keep 32 slots full if they are always ready, 36 cannot; the node gets near."""
    report = measure("utilisation", "-c", SMALL)
    assert 0.99 < report["many"] <= 1.0
    assert 0.6 < report["few"] < 0.85
    assert 0.3 < report["busy"] <= 1.0
    assert report["sessions"] == 64
