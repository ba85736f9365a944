"""Evaluators on what real commands did in a sandbox, over a git repository."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from containers import DEBIAN, podman
from judging import DONE, task
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.evaluators.tests import TestsEvaluator
from tugline.evaluators.weighted import WeightedEvaluator
from tugline.sandbox.base import Content, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.sandbox.container import Container
from tugline.types import Workspace

RUNTIMES = [
    pytest.param("bubblewrap", id="bubblewrap"),
    pytest.param("container", id="container", marks=pytest.mark.podman),
]

__all__ = ["podman"]

Judged = Callable[[str, Evaluator], Awaitable[Verdict]]

TEST = (
    "import unittest\nfrom bill import total\n\nclass Bill(unittest.TestCase):\n"
    "    def test_total(self):\n        self.assertEqual(total(1, 2), 3)\n"
)
PYTEST: dict[str, Any] = {
    "command": "python3 -m pytest -q tests/test_bill.py",
    "format": "pytest",
    "env": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
}
NAME = "tests/test_bill.py::Bill::test_total"
RIGHT = "sed -i 's/a - b/a + b/' bill.py"


@pytest.fixture(params=RUNTIMES)
def judged(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Judged:
    """What an agent's command earns: ``judged(command, evaluator)``."""
    runtime: Runtime = Bubblewrap()
    image = None
    if request.param == "container":
        runtime, image = Container(engine=request.getfixturevalue("podman")), DEBIAN
    else:
        reason = runtime.check_available()
        if reason is not None:
            pytest.skip(reason)
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "repo"
    (repo / "tests").mkdir(parents=True)
    (repo / "bill.py").write_text("def total(a, b):\n    return a - b\n")
    (repo / "tests" / "test_bill.py").write_text(TEST)
    (repo / "tests" / "__init__.py").touch()
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for argv in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(("git", "-C", repo, *argv), check=True, timeout=20)
    given = task({}, Workspace(repo=str(repo), commit="HEAD", image=image))
    sandboxes: list[str] = []

    def opened() -> contextlib.AbstractAsyncContextManager[Sandbox]:
        sandboxes.append(str(len(sandboxes)))
        return runtime.open(tmp_path / sandboxes[-1], SandboxSpec(workspace=given.workspace))

    @contextlib.asynccontextmanager
    async def open_sandbox(files: Mapping[str, Content]) -> AsyncIterator[Sandbox]:
        async with opened() as sandbox:
            await sandbox.put(sandbox.workdir, files)
            yield sandbox

    async def judge(command: str, evaluator: Evaluator) -> Verdict:
        async with opened() as sandbox:
            end = await sandbox.run(("sh", "-ec", command), env={}, timeout_s=20.0)
            assert end.code == 0, (sandbox.logs / "agent.log").read_text()
            patch = await sandbox.diff()
        return await evaluator.evaluate(SessionOutcome(given, patch, open_sandbox, 30.0, exit=DONE))

    return judge


@pytest.mark.parametrize("expected", [None, [NAME]], ids=["all", "named"])
async def test_work_on_a_repository_is_judged(judged: Judged, expected: list[str] | None) -> None:
    """The commit, the agent's change and nothing else; the diff is that of the change."""
    tests = TestsEvaluator(**PYTEST, expected=expected)
    verdict = await judged(RIGHT, tests)
    assert verdict.reward.value == 1.0, verdict.report
    assert verdict.report["diff"].count("\n") == 6
    assert (await judged("touch new.py", tests)).reward.value == 0.0


CHEATS = {
    "empties the tests": "echo > tests/test_bill.py",
    "removes the tests": "rm -r tests",
    "replaces them by a link": "mv tests x; echo > x/test_bill.py; ln -s x tests",
    "replaces them by a file": "rm -r tests; touch tests",
    "adds a bill that is found first": "mkdir tests/bill; cp bill.py tests/bill/__init__.py",
    "leaves a compiled test": (
        "echo > t.py; python3 -c \"import py_compile as p; p.compile('t.py',"
        " 'tests/__pycache__/test_bill.cpython-311.pyc', 'tests/test_bill.py',"
        ' invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"'
    ),
    "brings its own pytest": "mkdir pytest; echo 'print(1)' > pytest/__main__.py",
    "hooks git": "mkdir -p .git/hooks; echo 'exit 0' > .git/hooks/post-checkout",
}


@pytest.mark.parametrize("command", CHEATS.values(), ids=list(CHEATS))
async def test_cheating_does_not_pay(judged: Judged, command: str) -> None:
    """Also without a list of tests, where only those that run can count."""
    verdict = await judged(command, TestsEvaluator(**PYTEST))
    assert verdict.reward.value == 0.0, verdict.report
    assert verdict.report["total"] == 1, verdict.report


async def test_parts_are_judged_in_boxes_of_their_own(judged: Judged) -> None:
    """What one evaluator makes of its sandbox, another one does not see."""
    command = "test ! -e done && touch done && printf 'ok 1 - clean\\n1..1\\n'"
    part = {"evaluator": {"name": "tests", "options": {"command": command, "format": "tap"}}}
    whole = {"evaluator": {"name": "tests", "options": PYTEST}, "weight": 3}
    verdict = await judged("true", WeightedEvaluator(parts={"a": part, "b": part, "tests": whole}))
    assert (verdict.reward.parts["a"], verdict.reward.parts["b"]) == (1.0, 1.0)
    assert verdict.reward.value == 0.4
