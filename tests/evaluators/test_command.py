"""The evaluator `tests` with a command of the task's own, run by real programs in local boxes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from containers import podman
from judging import Judge, task
from sandboxes import WITH_PYTHON, Driver, driver
from tugline.errors import EvaluatorError
from tugline.evaluators.tests import TestsEvaluator
from tugline.sandbox.patch import FileChange
from tugline.types import Workspace

__all__ = ["driver", "podman"]

BILL = "def total(a, b):\n    return a - b\n"
GOOD = {"bill.py": "def total(a, b):\n    return a + b\n"}
TEST = (
    "import unittest\nfrom bill import total\n\nclass Bill(unittest.TestCase):\n"
    "    def test_total(self):\n        self.assertEqual(total(1, 2), 3)\n"
    "    def test_zero(self):\n        self.assertEqual(total(0, 0), 0)\n"
)
TOTAL, ZERO = "test_bill.py::Bill::test_total", "test_bill.py::Bill::test_zero"
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Our own plug-ins take seconds to import."""
JUNIT: dict[str, Any] = {
    "command": ["python3", "-m", "pytest", "-p", "no:cacheprovider", "--junitxml={report}"],
    "format": "junit",
    "env": ALONE,
}
PYTEST: dict[str, Any] = {
    "command": ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-q"],
    "format": "pytest",
    "env": {**ALONE, "PYTEST_ADDOPTS": "-p no:faulthandler"},
}
SAYS = "printf 'ok 1 - a\\nnot ok 2 - b\\n1..2\\n'"


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A task on a repository with a test of its own."""
    base = {"bill.py": BILL, "test_bill.py": TEST}
    return Judge(tmp_path, task(workspace=Workspace(folder="/srv/shop")), base)


@pytest.mark.parametrize("options", [JUNIT, PYTEST], ids=["junit", "pytest"])
async def test_right_and_wrong_work_are_told_apart(judge: Judge, options: dict[str, Any]) -> None:
    """What the runner says of each expected test makes the reward, its parts and the report."""
    tests = TestsEvaluator(**options, fail_to_pass=[TOTAL], pass_to_pass=[ZERO])
    verdict = await judge(tests, GOOD)
    assert verdict.reward.value == 1.0, verdict.report
    assert verdict.reward.parts == {
        "passed": 2.0,
        "total": 2.0,
        "fail_to_pass": 1.0,
        "pass_to_pass": 1.0,
    }
    assert verdict.report["reason"] == "passed"
    assert "-    return a - b" in verdict.report["diff"]
    verdict = await judge(tests, {})
    assert (verdict.reward.value, verdict.reward.parts["fail_to_pass"]) == (0.0, 0.0)
    assert verdict.reward.parts["pass_to_pass"] == 1.0
    assert list(verdict.report["failed"]) == [TOTAL]


async def test_every_run_of_pytest_counts(judge: Judge) -> None:
    """One command may run it several times: no report is lost, and of one test the worse counts."""
    judge.base["test_more.py"] = "def test_more():\n    pass\n"
    run = "python3 -m pytest -q -p no:cacheprovider"
    mend = "sed -i 's/a - b/a + b/' bill.py"
    tests = TestsEvaluator(
        command=f"{run}; {mend}; {run} test_bill.py",
        format="pytest",
        expected=[TOTAL, ZERO, "test_more.py::test_more"],
        env=ALONE,
    )
    verdict = await judge(tests)
    assert (list(verdict.report["failed"]), verdict.report["missing"]) == ([TOTAL], [])
    assert verdict.reward.parts == {"passed": 2.0, "total": 3.0}


async def test_credit_may_be_partial(judge: Judge) -> None:
    """With `partial`, the reward is the share of expected tests that came true."""
    verdict = await judge(TestsEvaluator(**PYTEST, expected=[TOTAL, ZERO], partial=True))
    assert verdict.reward.value == 0.5


async def test_without_a_list_all_must_pass(judge: Judge) -> None:
    """Then the exit code counts as well."""
    assert (await judge(TestsEvaluator(**PYTEST), GOOD)).reward.value == 1.0
    verdict = await judge(TestsEvaluator(**PYTEST))
    assert (verdict.reward.value, verdict.report["total"]) == (0.0, 2)
    lies = TestsEvaluator(command="printf 'ok 1 - a\\n1..1\\n'; exit 3", format="tap")
    verdict = await judge(lies)
    assert verdict.report["reason"] == "no test is reported to have failed, but exit code 3"


async def test_files_are_laid_over_last(judge: Judge) -> None:
    """Neither the patch nor what `setup` runs of it can change a hidden test."""
    patch = {
        "setup.sh": "echo 'raise SystemExit(0)' > test_hidden.py; mkdir -p sub; ln -s / sub/x\n",
        "test_hidden.py": "",
    }
    tests = TestsEvaluator(
        **PYTEST,
        setup=["sh", "setup.sh"],
        files={"test_hidden.py": TEST, "sub/x/deep.py": "raise SystemExit\n"},
        expected=[f"test_hidden.py::Bill::test_{name}" for name in ("total", "zero")],
    )
    verdict = await judge(tests, {**patch, **GOOD})
    assert verdict.reward.value == 1.0, verdict.report
    assert verdict.report["refused"] == {"test_hidden.py": "belongs to the tests"}
    assert (await judge(tests, patch)).reward.value == 0.0


@pytest.mark.parametrize(
    "files",
    [
        {
            "test_bill.py": "import unittest\nclass Bill(unittest.TestCase):\n"
            "    def test_total(self): pass\n    def test_zero(self): pass\n"
        },
        {"pytest/__init__.py": "", "pytest/__main__.py": "print('x')\n"},
        {"sitecustomize.py": "import os\nos._exit(0)\n"},
        {"bill.py": "import os\nos._exit(0)\n"},
        {"bill.py": f"print('{TOTAL} PASSED')\nprint('2 passed in 0.1s')\n" + BILL},
        {"test_bill.py": FileChange(b"/dev/null", link=True)},
    ],
    ids=["edits tests", "shadows", "sitecustomize", "exits", "prints results", "links tests away"],
)
async def test_cheating_does_not_pay(judge: Judge, files: dict[str, str]) -> None:
    """Whatever is done to the tests or their runner, unsolved is not rewarded."""
    verdict = await judge(TestsEvaluator(**PYTEST, expected=[TOTAL, ZERO]), files)
    assert verdict.reward.value == 0.0, verdict.report


async def test_the_report_is_where_nobody_could_put_one_before(judge: Judge) -> None:
    """A report that the agent left is refused or gone; one that is not written is none."""
    xml = '<testsuites><testcase classname="a" name="b"/></testsuites>'
    options: dict[str, Any] = {"format": "junit", "expected": ["a::b"]}
    tests = TestsEvaluator(command="true", report="out/report.xml", **options)
    verdict = await judge(tests, {"out/report.xml": xml})
    assert (verdict.reward.value, verdict.report["missing"]) == (0.0, ["a::b"])
    assert verdict.report["refused"] == {"out/report.xml": "belongs to the tests"}
    writes = TestsEvaluator(
        command=f"mkdir -p out; echo '{xml}' > out/report.xml", report="out/report.xml", **options
    )
    assert (await judge(writes)).reward.value == 1.0
    hidden = TestsEvaluator(
        command=f"echo '{xml}' > \"$REPORT\"", env={"REPORT": "{report}"}, **options
    )
    assert (await judge(hidden)).reward.value == 1.0


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("kill -9 $$", "ended by signal 9"),
        ("exit 1", "no test is reported to have failed, but exit code 1"),
        ("exit 0", "passed"),
    ],
)
async def test_a_report_must_agree_with_its_runners_end(
    judge: Judge, end: str, reason: str
) -> None:
    """Programs that rewrite a report cannot change how the runner ends, except by killing it."""
    xml = '<testsuites><testcase classname="a" name="b"/></testsuites>'
    for partial in (False, True):
        tests = TestsEvaluator(
            command=f"echo '{xml}' > {{report}}; {end}",
            format="junit",
            expected=["a::b"],
            partial=partial,
        )
        verdict = await judge(tests)
        assert verdict.report["reason"] == reason
        assert verdict.reward.value == float(reason == "passed")


async def test_what_is_built_is_built_from_sources(judge: Judge) -> None:
    """Outputs that the agent adds are older than every source, and its changes are newer."""
    judge.base["Makefile"] = "out/t: t.sh\n\tmkdir -p out\n\tcp t.sh out/t\n"
    judge.base["t.sh"] = "echo 'not ok 1 - a'; echo 1..1\n"
    forged = {"out/t": "echo 'ok 1 - a'; echo 1..1\n"}
    tests = TestsEvaluator(command="make -s && sh out/t", format="tap", expected=["a"])
    assert (await judge(tests, forged)).reward.value == 0.0
    work = {**forged, "t.sh": forged["out/t"]}
    assert (await judge(tests, work)).reward.value == 1.0


async def test_an_output_that_was_there_before_is_not_newer_than_its_source(judge: Judge) -> None:
    """One that the agent replaces, and that is no text, is older than every source, too."""
    judge.base["Makefile"] = "out/t: t.sh\n\tmkdir -p out\n\tcp t.sh out/t\n"
    judge.base["t.sh"] = judge.base["out/t"] = "echo 'not ok 1 - a'; echo 1..1\n"
    right = "echo 'ok 1 - a'; echo 1..1\n"
    forged = FileChange(right.encode() + b"exit\n\x7fELF\xff\xfe")
    tests = TestsEvaluator(
        command="make -s && sh out/t", format="tap", expected=["a"], editable=["out/"]
    )
    assert (await judge(tests, {"out/t": forged})).reward.value == 0.0
    assert (await judge(tests, {"out/t": forged, "t.sh": right})).reward.value == 1.0


LIE = "echo 'ok 1 - a'; echo 1..1"
RUNNERS = {
    "prove": ("prove -v t", {".proverc": '--exec "sh lie.sh"\n', "lie.sh": LIE}),
    "make": ("make -s test", {"GNUmakefile": f"test:\n\t@{LIE}\n"}),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
async def test_a_runner_obeys_no_settings_of_the_agents(
    driver: Driver, tmp_path: Path, runner: str
) -> None:
    """They are refused beside honest work, too; where a task lets them in, they earn all."""
    command, lies = RUNNERS[runner]
    if shutil.which(runner) is None:
        pytest.skip(f"{runner} is not installed")
    base = {
        "Makefile": "test:\n\t@sh t/a.t\n",
        "sum.sh": "echo $(($1 - $2))\n",
        "t/a.t": "#!/bin/sh\nif [ $(sh sum.sh 2 3) = 5 ]; then echo 'ok 1 - a'\n"
        "else echo 'not ok 1 - a'; fi\necho 1..1\n",
    }
    given = task(workspace=Workspace(folder="/srv/shop"))
    spec = driver.spec(mounts=driver.host_programs)
    judge = Judge(tmp_path, given, base, runtime=driver.runtime, spec=spec)
    tests = TestsEvaluator(command=command, format="tap", expected=["a"])
    honest = {"sum.sh": "echo $(($1 + $2))\n"}
    assert (await judge(tests, lies)).reward.value == 0.0
    assert (await judge(tests, {**lies, **honest})).reward.value == 1.0
    lax = TestsEvaluator(command=command, format="tap", expected=["a"], editable=[*lies])
    assert (await judge(lax, lies)).reward.value == 1.0


async def test_settings_that_tools_read_by_themselves_are_refused(judge: Judge) -> None:
    """Hidden files above all: a runner of any language looks for some."""
    files = {
        **dict.fromkeys((".proverc", ".nycrc", ".yarnrc.yml", ".pnp.cjs", ".config/x.toml"), ""),
        **dict.fromkeys(("GNUmakefile", "bunfig.toml", "tsconfig.json", "build/t"), ""),
        "work.json": "",
    }
    refused = (await judge(TestsEvaluator(command=SAYS, format="tap"), files)).report["refused"]
    assert files.keys() - refused.keys() == {"work.json"}


async def test_a_task_may_allow_what_is_protected(judge: Judge) -> None:
    """`editable` takes a pattern out, `protected` adds one."""
    files = {"setup.cfg": "", "bill.lock": ""}
    assert list((await judge(TestsEvaluator(**PYTEST), files)).report["refused"]) == ["setup.cfg"]
    tests = TestsEvaluator(**PYTEST, editable=["setup.cfg"], protected=["*.lock"])
    assert list((await judge(tests, files)).report["refused"]) == ["bill.lock"]


async def test_an_endless_loop_is_a_nought(judge: Judge) -> None:
    """Also in `setup`; the reason says which."""
    verdict = await judge(TestsEvaluator(command="sleep 60", format="tap", timeout_s=0.5))
    assert (verdict.reward.value, verdict.report["timed_out"]) == (0.0, True)
    assert "out of time" in verdict.report["reason"]
    verdict = await judge(
        TestsEvaluator(command="true", setup="sleep 60", format="tap", timeout_s=0.5)
    )
    assert verdict.report["reason"] == "setup was out of time"


async def test_a_command_that_cannot_run_is_no_verdict(judge: Judge) -> None:
    """Nobody is charged for a missing program, or for a set-up that never works."""
    with pytest.raises(EvaluatorError, match="command ends with exit code 127 also without"):
        await judge(TestsEvaluator(command="no-such-program", format="tap"))
    with pytest.raises(EvaluatorError, match="setup ends with exit code 3 also without the agent"):
        await judge(TestsEvaluator(command="true", setup="echo broken; exit 3", format="tap"))


async def test_a_command_that_the_agent_broke_is_a_nought(judge: Judge) -> None:
    """If it runs without the agent's changes, what happened is their doing."""
    judge.base["run.sh"] = SAYS
    verdict = await judge(TestsEvaluator(command="sh run.sh", format="tap"), {"run.sh": "exit 127"})
    assert verdict.reward.value == 0.0
    assert verdict.report["reason"] == "no test was reported (exit 127)"
    judge.base["make.sh"] = "true"
    verdict = await judge(
        TestsEvaluator(command=SAYS, setup="sh make.sh", format="tap"), {"make.sh": "exit 1"}
    )
    assert (verdict.reward.value, verdict.report["reason"]) == (0.0, "setup ended with exit code 1")


async def test_a_gigabyte_of_output_is_survived(judge: Judge) -> None:
    """Only so much of a log is read; the results that come too late are missing."""
    loud = "head -c 150000000 /dev/zero | tr '\\0' 'x'; echo; " + SAYS
    verdict = await asyncio.wait_for(judge(TestsEvaluator(command=loud, format="tap")), 60)
    assert verdict.reward.value == 0.0
