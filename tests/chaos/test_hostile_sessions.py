"""Sessions that fail in every way a task can choose, beside honest ones on the same node."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import HERE, Fleet, until

DONE_S = 150.0
HONEST = 20
LOOP_S = 2.0
AGENT = (HERE / "agent.py").read_text()
DAMAGE = """
import glob, os
session = os.environ["OPENAI_BASE_URL"].rstrip("/").split("/")[-2]
for path in glob.glob(os.path.join(sys.argv[1], "**", session + ".*.rec"), recursive=True):
    with open(path, "r+b") as file:
        file.seek(30)
        file.write(b"damage")
"""
LOOP = {"command": ["python3", "-c", "while True: pass"], "format": "tap", "timeout_s": LOOP_S}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def make_task(name: str, samples: int, **changes: Any) -> dict[str, Any]:
    """A task whose agent makes two model calls."""
    return {
        "id": name,
        "instruction": json.dumps({"turns": 2, "pause_s": 0.2}),
        "harness": {"name": "shell", "options": {"command": ["python3", "agent.py"]}},
        "evaluator": {"name": "session_completed"},
        "runtime": {"name": "bubblewrap"},
        "files": {"agent.py": AGENT},
        "samples": samples,
        **changes,
    }


def make_hostile(folder: Path) -> list[dict[str, Any]]:
    """Twenty sessions whose failures look like those of a node."""
    damage = ["python3", "agent.py", str(folder)]
    nowhere = {"engine": "unix:///nonesuch.sock", "image": "x"}
    out_of_order = {"name": "support.failing_plugins:OutOfOrder"}
    ending = {"name": "support.failing_plugins:Ending", "options": {"by": "cancellation"}}
    return [
        make_task("impossible-limit", 4, limits={"init_s": 0.001}),
        make_task("endless-loop", 4, evaluator={"name": "tests", "options": LOOP}),
        make_task(
            "damaged-recording",
            3,
            runtime={"name": "local"},
            harness={"name": "shell", "options": {"command": damage}},
            files={"agent.py": AGENT + DAMAGE},
        ),
        make_task("odd-report", 1, evaluator={"name": "support.failing_plugins:Unencodable"}),
        make_task("ending-evaluator", 1, evaluator=ending),
        make_task("no-container-engine", 2, runtime={"name": "container", "options": nowhere}),
        make_task("broken-builder", 3, builder={"name": "support.failing_plugins:Broken"}),
        make_task("broken-harness", 2, harness=out_of_order),
    ]


def make_honest() -> list[dict[str, Any]]:
    """Tasks with tests that pass."""
    check = "test -s answer.txt && echo 'ok 1 - answered'; echo 1..1"
    options = {"command": ["sh", "-c", check], "format": "tap"}
    evaluator = {"name": "tests", "options": options}
    return [make_task(f"honest-{number}", 1, evaluator=evaluator) for number in range(HONEST)]


@contextlib.contextmanager
def launched(folder: Path) -> Iterator[Fleet]:
    """A fleet with one node of ten slots."""
    with contextlib.closing(Fleet(folder / "run", slots=10)) as fleet:
        fleet.launch(nodes=1)
        yield fleet


def test_hostile_sessions_cost_honest_ones_nothing(tmp_path: Path) -> None:
    """Honest sessions complete at the first attempt, and hostile ones end.

    Endless loops have verdicts; neither they nor honest sessions are run again.

    It is one scenario, since all sessions must run at the same time.
    """
    with launched(tmp_path) as fleet:
        api, faults = fleet.api(), set()
        began = time.monotonic()
        for task in (*make_hostile(fleet.folder), *make_honest()):
            api.post("/v1/tasks", task)

        def read_results() -> dict[str, Any]:
            faults.update(node["fault"] for node in api.get("/v1/nodes"))
            return {each["session"]: each for each in api.get("/v1/results?limit=1000")["items"]}

        def count(*names: str) -> int:
            return sum(name.rpartition("-")[0].startswith(names) for name in read_results())

        until(lambda: count("honest") == HONEST, "the honest sessions", DONE_S)
        seconds = time.monotonic() - began
        ended = ("endless-loop", "damaged-recording", "odd", "ending", "broken-builder")
        until(lambda: count(*ended) == 12, "the hostile sessions", DONE_S)
        results = read_results()
        events = api.get("/v1/events?limit=1000")
        kinds = Counter(event["kind"] for event in events)
        requeued = {event["session"] for event in events if event["kind"] == "session.requeued"}
        assert not fleet.unexpected_exits
    honest = [each for name, each in results.items() if name.startswith("honest")]
    ends = [(each["status"], each["attempt"], each["reward"]) for each in honest]
    assert ends == [("completed", 0, 1.0)] * HONEST
    assert faults == {""}
    assert kinds["node.blocked"] == 0
    assert not [name for name in requeued if name.startswith(("honest", "endless"))]
    loops = [each for name, each in results.items() if name.startswith("endless")]
    assert [(each["status"], each["reward"]) for each in loops] == [("completed", 0.0)] * 4
    causes = {
        name.rpartition("-")[0]: (each["failure"] or {}).get("cause")
        for name, each in results.items()
    }
    assert causes["damaged-recording"] == "recording"
    assert causes["broken-builder"] == "recording"
    assert causes["ending-evaluator"] == "evaluator"
    assert results["odd-report-0"]["reward"] == 1.0  # its report is made plain
    assert seconds < DONE_S


def test_endless_loops_have_verdicts_on_overloaded_processors(tmp_path: Path) -> None:
    """Ten loops on ten slots are evaluated once each, in at most about four times their limit."""
    loops = make_task("loop", 10, evaluator={"name": "tests", "options": LOOP})
    with launched(tmp_path) as fleet:
        fleet.api().post("/v1/tasks", loops)
        done = lambda: fleet.api().get("/v1/status")["tasks_open"] == 0  # noqa: E731
        until(done, "ten verdicts", DONE_S)
        results = fleet.api().get("/v1/results?limit=1000")["items"]
        events = fleet.api().get("/v1/events?limit=1000")
    assert [(each["status"], each["reward"]) for each in results] == [("completed", 0.0)] * 10
    assert not [event for event in events if event["kind"] == "session.requeued"]
    for result in results:
        assert result["seconds"]["eval"] < 4 * LOOP_S + 20.0
