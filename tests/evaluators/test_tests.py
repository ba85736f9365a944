from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import judging
from containers import podman
from sandboxes import WITH_PYTHON, Driver, driver
from tugline.errors import EvaluatorError, SandboxError
from tugline.evaluators.base import Verdict
from tugline.evaluators.tests import TestsEvaluator, find_tests
from tugline.sandbox.base import Exit
from tugline.sandbox.local import LocalSandbox
from tugline.types import Workspace

__all__ = ["driver", "podman"]

TASK = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "tests/test_bill.py": (
        "import pytest\nfrom bill import total\n\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_total(n):\n"
        "    assert total(n, 1) == n + 1\n\n"
        "class TestZero:\n    def test_zero(self):\n        assert total(0, 0) == 0\n"
    ),
}
GOOD = {"bill.py": "def total(a, b):\n    return a + b\n"}


class Judge(judging.Judge):
    """Evaluates patches of TASK in boxes under a folder."""

    async def __call__(
        self, files: Mapping[str, str | None], tests: TestsEvaluator | None = None
    ) -> Verdict:
        """The verdict on a patch."""
        return await super().__call__(tests or TestsEvaluator(timeout_s=60), files)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with a folder of its own."""
    return Judge(tmp_path, judging.task(TASK))


async def test_a_right_answer_gets_one(judge: Judge) -> None:
    """All expected tests ran and passed; the report says so and shows the change."""
    verdict = await judge(GOOD)
    assert verdict.reward.value == 1.0, verdict.report
    assert verdict.reward.parts == {"passed": 2.0, "total": 2.0}
    assert "+    return a + b" in verdict.report["diff"]
    assert verdict.report["missing"] == []


async def test_a_wrong_answer_gets_nought_and_a_reason(judge: Judge) -> None:
    """The failing test is named, what passed is counted."""
    verdict = await judge({})
    assert verdict.reward.value == 0.0
    assert verdict.reward.parts == {"passed": 1.0, "total": 2.0}
    assert list(verdict.report["failed"]) == ["tests.test_bill::test_total"]


FORCE = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\n"
    "def pytest_runtest_makereport(item, call):\n"
    "    out = yield\n    out.get_result().outcome = 'passed'\n"
)
FORGED = "import sys\ndef main(*_):\n    sys.exit(0)\nmain()\n"
HOSTILE: dict[str, dict[str, str | None]] = {
    "edits the tests": {"tests/test_bill.py": "def test_total(): pass\n"},
    "deletes the tests": {"tests/test_bill.py": None},
    "brings a package for them": {"tests/__init__.py": "import os\nos._exit(0)\n"},
    "puts a file in their folder's place": {"tests/test_bill.py": None, "tests": ""},
    "forces a pass by conftest": {"conftest.py": FORCE},
    "forces a pass by a deeper conftest": {"tests/conftest.py": FORCE},
    "exits early in the middle": {"bill.py": "def total(a, b):\n    import os; os._exit(0)\n"},
    "replaces pytest": {"pytest.py": FORGED},
    "deletes what is tested": {"bill.py": None},
    "breaks the tests' package": {"tests/__init__.py": "raise SystemExit(0)\n"},
}
"""Those that `attacks/test_rewards.py` does not try in a sandbox."""


@pytest.mark.parametrize("patch", HOSTILE.values(), ids=list(HOSTILE))
async def test_cheating_does_not_pay(judge: Judge, patch: Mapping[str, str | None]) -> None:
    """Whatever is done to the tests or to pytest, an unsolved task is not rewarded."""
    verdict = await judge(patch)
    assert verdict.reward.value == 0.0, verdict.report
    assert verdict.report["total"] == 2


@pytest.mark.parametrize(
    "name", ["edits the tests", "deletes the tests", "forces a pass by conftest", "replaces pytest"]
)
async def test_a_right_answer_counts_even_beside_a_cheat(judge: Judge, name: str) -> None:
    """Refused changes are named in the report and nothing more; the rest is judged as it is."""
    verdict = await judge({**HOSTILE[name], **GOOD})
    assert verdict.reward.value == 1.0, verdict.report
    assert list(verdict.report["refused"]) == list(HOSTILE[name])


async def test_an_endless_loop_is_a_nought(judge: Judge) -> None:
    """Time that the agent burns is its own fault, with the reason said."""
    tests = TestsEvaluator(timeout_s=1.0)
    verdict = await judge({"bill.py": "while True: pass\n"}, tests)
    assert verdict.reward.value == 0.0
    assert verdict.report["timed_out"]
    assert "out of time" in verdict.report["reason"]


async def test_a_busy_node_is_no_verdict(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others had the processors until the time was over, nobody knows what the work does."""
    run = LocalSandbox.run

    async def starve(self: LocalSandbox, *args: Any, **how: Any) -> Exit:
        end = await run(self, *args, **how)
        return msgspec.structs.replace(end, starved=end.timed_out)

    monkeypatch.setattr(LocalSandbox, "run", starve)
    with pytest.raises(SandboxError, match="no verdict on python3 after 1 s: other prog"):
        await judge({"bill.py": "while True: pass\n"}, TestsEvaluator(timeout_s=1.0))


async def test_no_pytest_is_no_verdict(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A runtime without pytest is not the agent's fault."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'No module named pytest' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(EvaluatorError, match="No module named pytest"):
        await judge(GOOD)


async def test_hidden_tests_decide(judge: Judge) -> None:
    """Tests that the agent never saw run with those of the task."""
    hidden = {
        "hidden/test_more.py": "import bill\ndef test_five():\n    assert bill.total(2, 3) == 5\n"
    }
    assert (await judge(GOOD, TestsEvaluator(files=hidden))).reward.parts["total"] == 3.0


async def test_only_the_tests_asked_for_must_pass(judge: Judge) -> None:
    """`expected` lets others fail, as in data sets that list what a fix should turn."""
    tests = TestsEvaluator(expected=["tests.test_bill.TestZero::test_zero"])
    assert (await judge({}, tests)).reward.value == 1.0
    tests = TestsEvaluator(expected=["tests.test_bill::test_total"])
    assert (await judge({}, tests)).reward.value == 0.0


async def test_wrong_settings_are_named(judge: Judge) -> None:
    """A task without tests and a test file that is no Python are errors, not noughts."""
    with pytest.raises(EvaluatorError, match="not valid Python"):
        await judge({}, TestsEvaluator(files={"test_x.py": "def ("}))
    judge.task = judging.task({"bill.py": TASK["bill.py"]})
    with pytest.raises(EvaluatorError, match="no test functions"):
        await judge({}, TestsEvaluator(files={"test_x.py": ""}))


def test_expected_names_match_what_pytest_reports() -> None:
    """Functions, async functions, classes by name and by base; nothing that is not collected."""
    source = (
        "import unittest\nasync def test_a(): ...\ndef helper_test(): ...\n"
        "@pytest.fixture\ndef test_data(): ...\n"
        "@pytest.fixture(scope='module')\ndef test_base(): ...\n"
        "class TestMade:\n    def __init__(self): ...\n    def test_d(self): ...\n"
        "class TestNot:\n    __test__ = False\n    def test_e(self): ...\n"
        "class Case(unittest.TestCase):\n    def test_b(self): ...\n    def tearDown(self): ...\n"
        "class Other:\n    def test_c(self): ...\n"
    )
    assert find_tests("d/test_m.py", source) == {"d.test_m::test_a", "d.test_m.Case::test_b"}


async def test_hidden_tests_judge_work_on_a_repository(tmp_path: Path) -> None:
    """With a base, only the patch and the tests are laid over it; the diff shows what it was."""
    base = {"bill.py": TASK["bill.py"], "gone.py": "raise SystemExit\n", "random.py": "SEED = 1\n"}
    judge = Judge(tmp_path, judging.task({}, Workspace(folder="/srv/base")), base)
    hidden = {
        "test_it.py": "import bill, pathlib\ndef test_it():\n    assert bill.total(1, 1) == 2\n"
        "    assert not pathlib.Path('gone.py').exists()\n"
    }
    verdict = await judge({**GOOD, "gone.py": None}, TestsEvaluator(files=hidden))
    assert verdict.reward.value == 1.0, verdict.report
    assert "-    return a - b" in verdict.report["diff"]
    # The repository has a module of that name; a new one may not come in place of json.
    verdict = await judge({"random.py": "SEED = 2\n", "json.py": ""}, TestsEvaluator(files=hidden))
    assert verdict.report["refused"] == {"json.py": "would be imported in place of json"}


REWRITES = """import glob, os, signal, time
runner, until = os.getpid(), time.monotonic() + 20
if os.fork() == 0:
    os.setsid()
    while time.monotonic() < until:
        for path in glob.glob(os.path.expanduser("~/*.report")):
            if open(path).read().endswith("</testsuites>"):
                os.kill(runner, signal.SIGSTOP)
                case = '<testcase classname="tests.test_bill%s" name="%s"/>'
                cases = [case % ("", "test_total[1]"), case % (".TestZero", "test_zero")]
                open(path, "w").write("<testsuites>" + "".join(cases) + "</testsuites>")
                os.kill(runner, signal.SIGNAL)
                os._exit(0)
    os._exit(0)
def total(a, b): return a - b
"""


@pytest.mark.parametrize(
    ("signal", "reason"),
    [
        ("SIGCONT", "no test is reported to have failed, but exit code 1"),
        ("SIGKILL", "ended by signal 9"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
async def test_a_report_that_is_rewritten_beside_the_runner_earns_nothing(
    driver: Driver, tmp_path: Path, signal: str, reason: str, *, partial: bool
) -> None:
    """A process of the agent's stops the runner, writes its report anew, and lets it end or dies.

    Also where names are given.
    """
    judge = Judge(tmp_path, judging.task(TASK), runtime=driver.runtime, spec=driver.spec())
    names = ["tests/test_bill.py::test_total", "tests/test_bill.py::TestZero::test_zero"]
    tests = TestsEvaluator(timeout_s=60, expected=names, partial=partial)
    # The runner writes the report, and has yet to end.
    late = "import atexit, time\natexit.register(time.sleep, 2)\n"
    code = late + REWRITES.replace("SIGNAL", signal)
    verdict = await judge({"bill.py": code}, tests)
    assert (verdict.reward.value, verdict.report["reason"]) == (0.0, reason)
    assert (await judge(GOOD, tests)).reward.value == 1.0
