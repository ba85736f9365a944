"""The evaluator `tests`, with our own pytest and with commands, with real programs.

Attacks on rewards are in `attacks/test_rewards.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.evaluation import Judge, make_task_with_files
from support.sandbox import WITH_PYTHON, Driver
from tugline.errors import EvaluatorError, SandboxError
from tugline.evaluators.own_pytest import find_tests
from tugline.evaluators.tests import TestsEvaluator
from tugline.patch import FileChange
from tugline.sandbox.base import Exit
from tugline.sandbox.local import LocalSandbox
from tugline.types import Workspace

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
OWN: dict[str, Any] = {"files": {"test_bill.py": TEST}}
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
XML = '<testsuites><testcase classname="a" name="b"/></testsuites>'
OLD = {"bill.py": BILL, "test_bill.py": TEST}


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A task on a repository with a test of its own."""
    return Judge(tmp_path, make_task_with_files(workspace=Workspace(folder="/srv/shop")), OLD)


@pytest.fixture
def with_files(tmp_path: Path) -> Judge:
    """The same files, as those of the task."""
    return Judge(tmp_path, make_task_with_files(OLD))


@pytest.mark.parametrize("options", [OWN, JUNIT, PYTEST], ids=["own", "junit", "pytest"])
async def test_expected_tests_make_the_reward(judge: Judge, options: dict[str, Any]) -> None:
    """Reward, parts and report depend on the expected tests; `partial` rewards a share of them."""
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
    assert (await judge(TestsEvaluator(**options, expected=[ZERO]))).reward.value == 1.0
    partial = TestsEvaluator(**options, expected=[TOTAL, ZERO], partial=True)
    assert (await judge(partial)).reward.value == 0.5


async def test_hidden_tests_run_beside_those_of_the_task(with_files: Judge) -> None:
    """All hidden tests and all tests of the task must pass."""
    hidden = "import bill\ndef test_five():\n    assert bill.total(2, 3) == 5\n"
    tests = TestsEvaluator(files={"hidden/test_more.py": hidden})
    verdict = await with_files(tests, {**GOOD, "tests/data.json": ""})
    assert verdict.reward.parts == {"passed": 3.0, "total": 3.0}
    assert verdict.report["refused"] == {"tests/data.json": "is protected (tests/)"}


async def test_files_of_any_name_are_there_for_the_tests(judge: Judge) -> None:
    """Names may have a line break, a tab or a backslash; the report has each on one line."""
    work = {"a\nb": "1", "c\td": "2", "e\\f": "3", "\x1b[2J": "4"}
    look = 'cat "$(printf "a\\nb")" "$(printf "c\\td")" "e\\f" "$(printf "\\033[2J")"'
    command = f"[ $({look}) = 1234 ] && printf 'ok 1 - a\\n1..1\\n'"
    for options in ({}, {"setup": "true"}):
        verdict = await judge(TestsEvaluator(command=command, format="tap", **options), work)
        assert verdict.reward.value == 1.0, verdict.report
        assert verdict.report["refused"] == {}
        assert "a/\x1b" not in verdict.report["diff"]


async def test_folders_are_as_the_agent_left_them(judge: Judge) -> None:
    """Empty folders are made, and removed ones are removed, also with a setup."""
    judge.base["gone/x"] = ""
    work = {"made/in": FileChange(b"", folder=True), "gone": None, "gone/x": None}
    command = "[ -d made/in ] && ! [ -e gone ] && printf 'ok 1 - a\\n1..1\\n'"
    for options in ({}, {"setup": "true"}):
        verdict = await judge(TestsEvaluator(command=command, format="tap", **options), work)
        assert verdict.reward.value == 1.0, verdict.report
        assert "made/in: an empty folder\n" in verdict.report["diff"]


async def test_removed_files_are_removed_for_the_tests(judge: Judge) -> None:
    """Files of the repository that the agent removed are removed, too."""
    judge.base["gone"] = ""
    gone = TestsEvaluator(command="! [ -e gone ] && printf 'ok 1 - a\\n1..1\\n'", format="tap")
    assert (await judge(gone, {"gone": None})).reward.value == 1.0


async def test_every_run_of_pytest_counts(judge: Judge) -> None:
    """If a command runs pytest several times, each report is read; a test's worst result counts."""
    judge.base["test_more.py"] = "def test_more():\n    pass\n"
    run = "python3 -m pytest -q -p no:cacheprovider"
    fix = "sed -i 's/a - b/a + b/' bill.py"
    tests = TestsEvaluator(
        command=f"{run}; {fix}; {run} test_bill.py",
        format="pytest",
        expected=[TOTAL, ZERO, "test_more.py::test_more"],
        env=ALONE,
    )
    verdict = await judge(tests)
    assert (list(verdict.report["failed"]), verdict.report["missing"]) == ([TOTAL], [])
    assert verdict.reward.parts == {"passed": 2.0, "total": 3.0}


async def test_without_expected_tests_all_must_pass(judge: Judge) -> None:
    """If no tests are named, the exit code counts as well."""
    assert (await judge(TestsEvaluator(**PYTEST), GOOD)).reward.value == 1.0
    verdict = await judge(TestsEvaluator(**PYTEST))
    assert (verdict.reward.value, verdict.report["total"]) == (0.0, 2)
    tests = TestsEvaluator(command="printf 'ok 1 - a\\n1..1\\n'; exit 3", format="tap")
    verdict = await judge(tests)
    assert verdict.report["reason"] == "no test was reported as failed, but the exit code is 3"


async def test_hidden_files_replace_the_agents(judge: Judge) -> None:
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
    assert verdict.report["refused"] == {"test_hidden.py": "is a file of the tests"}
    assert (await judge(tests, patch)).reward.value == 0.0


async def test_a_report_of_the_agent_is_not_read(judge: Judge) -> None:
    """A forged report is refused or removed; without a new report there is no result."""
    options: dict[str, Any] = {"format": "junit", "expected": ["a::b"]}
    tests = TestsEvaluator(command="true", report="out/report.xml", **options)
    verdict = await judge(tests, {"out/report.xml": XML})
    assert (verdict.reward.value, verdict.report["missing"]) == (0.0, ["a::b"])
    assert verdict.report["refused"] == {"out/report.xml": "is a file of the tests"}
    writes = TestsEvaluator(
        command=f"mkdir -p out; echo '{XML}' > out/report.xml", report="out/report.xml", **options
    )
    assert (await judge(writes)).reward.value == 1.0
    hidden = TestsEvaluator(
        command=f"echo '{XML}' > \"$REPORT\"", env={"REPORT": "{report}"}, **options
    )
    assert (await judge(hidden)).reward.value == 1.0


REWRITES = """import atexit, glob, os, signal, time
atexit.register(time.sleep, 2)  # the runner writes the report, and has yet to end
runner, until = os.getpid(), time.monotonic() + 20
if os.fork() == 0:
    os.setsid()
    while time.monotonic() < until:
        for path in glob.glob(os.path.expanduser("~/*.report")):
            if open(path).read().endswith("</testsuites>"):
                os.kill(runner, signal.SIGSTOP)
                case = '<testcase classname="test_bill.Bill" name="test_%s"/>'
                cases = case % "total" + case % "zero"
                open(path, "w").write(f"<testsuites>{cases}</testsuites>")
                os.kill(runner, signal.SIGNAL)
                os._exit(0)
    os._exit(0)
def total(a, b): return a - b
"""


@pytest.mark.parametrize(
    ("signal", "reason"),
    [
        ("SIGCONT", "no test was reported as failed, but the exit code is 1"),
        ("SIGKILL", "ended by signal 9"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
async def test_a_rewritten_report_must_agree_with_the_exit_code(
    driver: Driver, tmp_path: Path, signal: str, reason: str, *, partial: bool
) -> None:
    """A process of the agent stops the runner, rewrites the report, and continues or kills it."""
    judge = Judge(tmp_path, make_task_with_files(OLD), runtime=driver.runtime, spec=driver.spec())
    tests = TestsEvaluator(timeout_s=60, expected=[TOTAL, ZERO], partial=partial)
    verdict = await judge(tests, {"bill.py": REWRITES.replace("SIGNAL", signal)})
    assert (verdict.reward.value, verdict.report["reason"]) == (0.0, reason)
    assert (await judge(tests, GOOD)).reward.value == 1.0


async def test_build_outputs_are_older_than_their_sources(judge: Judge) -> None:
    """A binary that the agent replaces is older than its source, so the tool rebuilds it."""
    judge.base["Makefile"] = "out/t: t.sh\n\tmkdir -p out\n\tcp t.sh out/t\n"
    judge.base["t.sh"] = judge.base["out/t"] = "echo 'not ok 1 - a'; echo 1..1\n"
    right = "echo 'ok 1 - a'; echo 1..1\n"
    forged = FileChange(right.encode() + b"exit\n\x7fELF\xff\xfe")
    tests = TestsEvaluator(
        command="make -s && sh out/t", format="tap", expected=["a"], editable=["out/"]
    )
    assert (await judge(tests, {"out/t": forged})).reward.value == 0.0
    assert (await judge(tests, {"out/t": forged, "t.sh": right})).reward.value == 1.0


OPTIONS = (["--help"], ["-"], ["--reference=t.sh"], ["-d", "-t", "--", "(", "!", "= ;", "-a/x"])
"""Names of files that programs might take for options."""


@pytest.mark.parametrize("driver", WITH_PYTHON[1:], indirect=True)
@pytest.mark.parametrize("names", OPTIONS, ids=" ".join)
async def test_names_of_files_are_no_options(
    driver: Driver, tmp_path: Path, names: list[str]
) -> None:
    """A forged build output stays old beside a file of any name, which changes no verdict."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    base = {"Makefile": "out/t: t.sh\n\tmkdir -p out\n\tcp t.sh out/t\n", "t.sh": "false\n"}
    spec = driver.spec(mounts=driver.host_programs)
    given = make_task_with_files(workspace=Workspace(folder="/srv/shop"))
    judge = Judge(tmp_path, given, base, runtime=driver.runtime, spec=spec)
    forged = dict.fromkeys([*names, "out/t"], FORGED)
    command = "make -s out/t && sh out/t"
    tests = TestsEvaluator(command=command, format="tap", editable=["out/", *names])
    verdict = await judge(tests, forged)
    assert (verdict.reward.value, verdict.report["refused"]) == (0.0, {})
    assert (await judge(tests, {**forged, "t.sh": FORGED})).reward.value == 1.0


@pytest.mark.parametrize(
    "path", ["a.test.js", "calc_test.go", "spec/a_spec.rb", "BillTest.php", "test/ATest.java"]
)
async def test_junit_protects_tests_of_all_languages(judge: Judge, path: str) -> None:
    """A forged test is refused, and right work beside it earns the reward."""
    judge.base[path] = judge.base["work"] = "exit 1\n"
    command = (
        f"cp work {path}.ran && sh {path}.ran && sh {path}; [ $? = 1 ] && echo '{XML}' > r.xml"
    )
    tests = TestsEvaluator(command=command, format="junit", report="r.xml", editable=["r.xml"])
    verdict = await judge(tests, {path: "exit 0\n", "work": "exit 0\n"})
    assert (verdict.reward.value, list(verdict.report["refused"])) == (1.0, [path])


async def test_files_that_cannot_be_dated_give_no_verdict(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to make files old is an error that quotes its output."""
    monkeypatch.setattr("tugline.evaluators.script._MAKE_OLD", "echo broken; exit 3")
    with pytest.raises(SandboxError, match=r"cannot be prepared .*broken"):
        await judge(TestsEvaluator(**PYTEST), {"new.py": ""})


FORGED = "echo 'ok 1 - a'; echo 1..1"
RUNNERS = {
    "prove": ("prove -v t", {".proverc": '--exec "sh fake.sh"\n', "fake.sh": FORGED}),
    "make": ("make -s test", {"GNUmakefile": f"test:\n\t@{FORGED}\n"}),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
async def test_settings_of_the_agent_are_refused(
    driver: Driver, tmp_path: Path, runner: str
) -> None:
    """Settings beside right work are refused, too; if a task allows them, the work earns 1."""
    command, settings = RUNNERS[runner]
    if shutil.which(runner) is None:
        pytest.skip(f"{runner} is not installed")
    base = {
        "Makefile": "test:\n\t@sh t/a.t\n",
        "sum.sh": "echo $(($1 - $2))\n",
        "t/a.t": "#!/bin/sh\nif [ $(sh sum.sh 2 3) = 5 ]; then echo 'ok 1 - a'\n"
        "else echo 'not ok 1 - a'; fi\necho 1..1\n",
    }
    given = make_task_with_files(workspace=Workspace(folder="/srv/shop"))
    spec = driver.spec(mounts=driver.host_programs)
    judge = Judge(tmp_path, given, base, runtime=driver.runtime, spec=spec)
    tests = TestsEvaluator(command=command, format="tap", expected=["a"])
    honest = {"sum.sh": "echo $(($1 + $2))\n"}
    assert (await judge(tests, settings)).reward.value == 0.0
    assert (await judge(tests, {**settings, **honest})).reward.value == 1.0
    lax = TestsEvaluator(command=command, format="tap", expected=["a"], editable=[*settings])
    assert (await judge(lax, settings)).reward.value == 1.0


async def test_a_task_may_change_what_is_protected(judge: Judge) -> None:
    """`editable` removes a pattern, `protected` adds one."""
    files = {"setup.cfg": "", "bill.lock": ""}
    assert list((await judge(TestsEvaluator(**PYTEST), files)).report["refused"]) == ["setup.cfg"]
    tests = TestsEvaluator(**PYTEST, editable=["setup.cfg"], protected=["*.lock"])
    assert list((await judge(tests, files)).report["refused"]) == ["bill.lock"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (OWN, "time limit reached after "),
        ({"command": "sleep 60", "format": "tap"}, "time limit reached after "),
        ({"command": "true", "setup": "sleep 60", "format": "tap"}, "setup reached its time limit"),
    ],
    ids=["own", "command", "setup"],
)
async def test_an_endless_loop_earns_nothing(
    judge: Judge, options: dict[str, Any], reason: str
) -> None:
    """The reward of an endless loop is 0, and the report has the reason."""
    tests = TestsEvaluator(**options, timeout_s=0.7)
    verdict = await judge(tests, {"bill.py": "while True: pass\n"})
    assert (verdict.reward.value, verdict.report["timed_out"]) == (0.0, True)
    assert verdict.report["reason"].startswith(reason)


async def test_waits_for_a_processor_extend_an_evaluation(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits are not charged to the evaluation; after four times as long the reward is 0."""
    run, waits = LocalSandbox.run, [0.5]

    async def wait_for_a_processor(
        self: LocalSandbox, argv: Sequence[str], *, timeout_s: Any, **how: Any
    ) -> Exit:
        work = asyncio.create_task(run(self, argv, timeout_s=timeout_s, **how))
        while not (await asyncio.wait({work}, timeout=0.1))[0]:
            timeout_s.credit(waits[0])
        return await work

    monkeypatch.setattr(LocalSandbox, "run", wait_for_a_processor)
    slow = TestsEvaluator(command=["sleep", "1.5"], format="tap", timeout_s=0.8)
    judge.timeout_s = 1.0
    verdict = await judge(slow)
    assert not verdict.report["timed_out"]
    began = time.monotonic()
    judge.timeout_s = 60.0
    endless = TestsEvaluator(command=["sleep", "60"], format="tap", timeout_s=0.5)
    verdict = await judge(endless)
    assert (verdict.reward.value, verdict.report["timed_out"]) == (0.0, True)
    assert 1.9 < time.monotonic() - began < 10.0


async def test_no_pytest_is_no_verdict(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A sandbox without pytest is an error, not a reward of 0."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'No module named pytest' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(EvaluatorError, match="No module named pytest"):
        await judge(TestsEvaluator(**OWN), GOOD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "no-such-program"}, "command ends with exit code 127 even without"),
        (
            {"command": "true", "setup": "echo broken; exit 3"},
            "setup ends with exit code 3 even without the agent's changes: broken",
        ),
    ],
    ids=["command", "setup"],
)
async def test_a_command_that_cannot_run_is_no_verdict(
    judge: Judge, options: dict[str, Any], message: str
) -> None:
    """A program that is missing, or a set-up that never works, is an error."""
    with pytest.raises(EvaluatorError, match=message):
        await judge(TestsEvaluator(**options, format="tap"))


@pytest.mark.parametrize(
    ("options", "script", "reason"),
    [
        (
            {"command": "sh run.sh", "editable": ["run.sh"]},
            "exit 127",
            "no test was reported (exit 127)",
        ),
        ({"command": SAYS, "setup": "sh run.sh"}, "exit 1", "setup ended with exit code 1"),
    ],
    ids=["command", "setup"],
)
async def test_a_command_that_the_agent_broke_earns_nothing(
    judge: Judge, options: dict[str, Any], script: str, reason: str
) -> None:
    """A command that works without the agent's changes, but not with them, earns 0."""
    judge.base["run.sh"] = SAYS
    verdict = await judge(TestsEvaluator(**options, format="tap"), {"run.sh": script})
    assert (verdict.reward.value, verdict.report["reason"]) == (0.0, reason)


async def test_a_script_that_the_command_names_is_not_changed(judge: Judge) -> None:
    """The script of the command is protected unless the task declares it as the work."""
    judge.base["run.sh"] = "printf 'not ok 1 - a\\n1..1\\n'; exit 1"
    passing = {"run.sh": "printf 'ok 1 - a\\n1..1\\n'"}
    verdict = await judge(TestsEvaluator(command="sh ./run.sh", format="tap"), passing)
    assert verdict.reward.value == 0.0
    assert verdict.report["refused"] == {"run.sh": "is protected (named in the command)"}
    lax = TestsEvaluator(command="sh ./run.sh", format="tap", editable=["run.sh"])
    assert (await judge(lax, passing)).reward.value == 1.0


async def test_large_output_is_truncated(judge: Judge) -> None:
    """Results after the part of the log that is read are missing."""
    loud = "head -c 150000000 /dev/zero | tr '\\0' 'x'; echo; " + SAYS
    verdict = await asyncio.wait_for(judge(TestsEvaluator(command=loud, format="tap")), 60)
    assert verdict.reward.value == 0.0


async def test_invalid_tests_are_no_verdict(with_files: Judge) -> None:
    """A task without tests, and a test file that is not Python, are errors."""
    with pytest.raises(EvaluatorError, match="not valid Python"):
        await with_files(TestsEvaluator(files={"test_x.py": "def ("}))
    with_files.task = make_task_with_files({"bill.py": BILL})
    with pytest.raises(EvaluatorError, match="no test functions"):
        await with_files(TestsEvaluator(files={"test_x.py": ""}))


def test_expected_names_match_what_pytest_reports() -> None:
    """Only functions and methods that pytest would collect have a name, as pytest reports it."""
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
