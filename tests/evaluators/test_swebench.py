"""Rewards of SWE rows, with scripts that run in local sandboxes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support import evaluation
from support.sandbox import WITH_PYTHON, Driver
from tugline.errors import EvaluatorError
from tugline.evaluators.base import Verdict
from tugline.evaluators.script import parse_apart
from tugline.evaluators.swebench import _GRADE, SweBenchEvaluator

FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add, sub\n",
}
SCRIPT = Path(__file__).with_name("swe_eval.sh").read_text()
PYTEST = "python3 -m pytest -rA -p no:cacheprovider --rootdir=. tests/test_calc.py"
ALONE = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
"""Our own plug-ins take seconds to import."""
REAL = SCRIPT.replace('python3 -B "$HOME/run.py"', f"{ALONE} {PYTEST}")
GOOD = {"calc.py": FILES["calc.py"].replace("a - b", "a + b", 1)}
HALF = {"calc.py": FILES["calc.py"].replace("a - b", "3", 1)}
BROKE = {"calc.py": FILES["calc.py"].replace("a - b", "a + b")}
ROW: dict[str, Any] = {
    "instance": "calc__calc-1",
    "eval_script": SCRIPT,
    "log_parser": "parse_log_pytest",
    "fail_to_pass": ["tests/test_calc.py::test_add", "tests/test_calc.py::test_add_again"],
    "pass_to_pass": ["tests/test_calc.py::test_sub"],
    "protected_files": ["tests/test_calc.py"],
    "timeout_s": 30,
}


class Judge(evaluation.Judge):
    """Evaluates patches of FILES in sandboxes."""

    async def evaluate(self, files: Mapping[str, str | None], **options: Any) -> Verdict:
        """Evaluate a patch."""
        return await self(SweBenchEvaluator(**{**ROW, **options}), files)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """A judge with a folder of its own."""
    return Judge(tmp_path, evaluation.make_task_with_files(), FILES, timeout_s=40)


@pytest.mark.parametrize(
    ("work", "options", "value", "parts"),
    [
        (GOOD, {"eval_script": REAL}, 1.0, (1.0, 1.0, 1.0)),
        (HALF, {}, 0.0, (0.0, 0.5, 1.0)),
        (HALF, {"partial": True}, 0.5, (0.0, 0.5, 1.0)),
        # A patch that breaks tests that passed earns nothing.
        (BROKE, {"partial": True}, 0.0, (0.0, 1.0, 0.0)),
    ],
    ids=["all, by pytest", "half", "half, partial", "broken, partial"],
)
async def test_a_patch_that_resolves_the_issue_earns_1(
    judge: Judge, work: dict[str, str], options: dict[str, Any], value: float, parts: object
) -> None:
    """Other patches earn 0, or with `partial` the share of `fail_to_pass`, in one sandbox."""
    verdict = await judge.evaluate(work, **options)
    assert verdict.reward.value == value, verdict.report["log"]
    assert tuple(verdict.reward.parts.values()) == parts
    assert judge.opened == 1


async def test_failed_tests_are_reported(judge: Judge) -> None:
    """The report lists the failed tests, with the diff."""
    report = (await judge.evaluate(HALF)).report
    assert "+    return 3" in report["diff"]
    lists = {"FAIL_TO_PASS": ["tests/test_calc.py::test_add_again"], "PASS_TO_PASS": []}
    assert (report["failed"], report["failures"]) == (lists, 1)


FORGED = 'print("PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_sub")\n'
HOSTILE: dict[str, dict[str, str | None]] = {
    "nothing": {},
    "edits the tests": {"tests/test_calc.py": "def test_add(): pass\n"},
    "exits with code 0": {"calc.py": "import os\nos._exit(0)\n"},
    "does not compile": {"calc.py": "def add(\n"},
    "prints results and fails": {"calc.py": f"{FORGED}raise SystemExit(3)\n"},
    "prints an end and a code": {
        "calc.py": f'{FORGED}print(">>>>> End Test Output\\n>>>>> Test Exit Code: 0")\n1 / 0\n'
    },
    "prints that its patch failed": {
        "calc.py": 'print(">>>>> Patch Apply Failed")\n' + FILES["calc.py"]
    },
    "ends the script": {"calc.py": "import os\nos.kill(os.getppid(), 9)\n"},
    "prints binary data": {
        "calc.py": "import os\nos.write(1, b'\\xff\\xfe\\x00PASSED\\r\\n')\n" + FILES["calc.py"]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_patches_earn_nothing(name: str, judge: Judge) -> None:
    """Hostile patches earn 0 and are no errors."""
    verdict = await judge.evaluate(HOSTILE[name])
    assert verdict.reward.value == 0.0, verdict.report


async def test_an_endless_loop_earns_nothing(judge: Judge) -> None:
    """A time-out after the start of the tests is no error."""
    verdict = await judge.evaluate({"calc.py": "while True: pass\n"}, timeout_s=4.0)
    assert (verdict.reward.value, verdict.report["timed_out"]) == (0.0, True)


async def test_editable_and_protected_change_the_rules(judge: Judge) -> None:
    """`editable` allows what pytest's patterns refuse; `protected` refuses more."""
    work = {**GOOD, "setup.cfg": "[metadata]\nname = calc\n"}
    assert "setup.cfg" in (await judge.evaluate(work)).report["refused"]
    assert (await judge.evaluate(work, editable=["setup.cfg"])).report["refused"] == {}
    assert list((await judge.evaluate(GOOD, protected=["*.py"])).report["refused"]) == ["calc.py"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "mkdir",
            "echo no such commit; exit 1;",
            r"(?s)calc-1: the tests did not start, even.*no s",
        ),
        # A time-out before the agent's code ran.
        ("mkdir", "sleep 100;", "did not start"),
        ("python3 -B", "no-such-runner", "gave no result, even without the agent's work"),
    ],
    ids=["fails", "hangs", "has no result"],
)
async def test_a_script_that_fails_without_the_work_is_an_error(
    judge: Judge, old: str, new: str, message: str
) -> None:
    """A failed script is run again without the agent's changes to tell whose fault it is."""
    with pytest.raises(EvaluatorError, match=message):
        await judge.evaluate(GOOD, eval_script=SCRIPT.replace(old, new), timeout_s=4.0)
    assert judge.opened == 2


async def test_work_that_keeps_the_tests_from_starting_earns_nothing(judge: Judge) -> None:
    """A script that first builds or runs broken code of the agent earns 0."""
    script = SCRIPT.replace("mkdir -p tests", "mkdir -p tests; python3 calc.py || exit 1")
    verdict = await judge.evaluate({"calc.py": "1 / 0\n"}, eval_script=script)
    assert verdict.reward.value == 0.0
    assert judge.opened == 2


FAKE = "def test_add(): pass\ntest_add_again = test_sub = test_add\n"
SHADOWS = (
    *("test_calc.py", "test_calc/__init__.py", "tests/test_calc/__init__.py"),
    *("tests/test_calc.abi3.so", "src/test_calc.py", "tests/test_calc.pyc", "conftest.py"),
)


@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
async def test_files_that_shadow_a_test_are_refused(driver: Driver, tmp_path: Path) -> None:
    """Modules, packages and extensions named as a test are refused, also beside right work.

    The row's script imports from the top before it imports from the tests.
    """
    given = {"timeout_s": 40, "runtime": driver.runtime, "spec": driver.spec()}
    judge = Judge(tmp_path, evaluation.make_task_with_files(), FILES, **given)
    shadows = dict.fromkeys(SHADOWS, FAKE)
    assert (await judge.evaluate(shadows)).reward.value == 0.0
    verdict = await judge.evaluate({**shadows, **GOOD})
    assert verdict.reward.value == 1.0
    assert verdict.report["refused"].keys() == shadows.keys()


async def test_an_unknown_parser_is_an_error(judge: Judge) -> None:
    """The error lists the known parsers."""
    with pytest.raises(
        EvaluatorError, match=r"log_parser is 'pytest', must be one of.*parse_log_dja"
    ):
        await judge.evaluate(GOOD, log_parser="pytest")


async def test_long_logs_are_truncated(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is cut in the middle; the results at its end are read."""
    monkeypatch.setattr(SweBenchEvaluator, "max_log", 40_000)
    monkeypatch.setattr(SweBenchEvaluator, "log_end", 10_000)
    verdict = await judge.evaluate({"calc.py": GOOD["calc.py"] + "print('x' * 100_000)\n"})
    assert verdict.reward.value == 1.0


async def test_a_slow_parser_is_killed(judge: Judge) -> None:
    """A line of blanks takes SymPy's parser minutes; other evaluations go on meanwhile."""
    row = {**ROW, "log_parser": "parse_log_sympy"}
    good = SweBenchEvaluator(**ROW)
    assert (await judge(good, GOOD)).reward.value == 1.0
    evaluator = SweBenchEvaluator(**row)
    evaluator.parse_s = 1
    evaluator._proven = True
    blanks = {"calc.py": GOOD["calc.py"] + "print(' ' * 200_000)\n"}
    verdict, honest = await asyncio.gather(judge(evaluator, blanks), judge(good, GOOD))
    assert (verdict.reward.value, verdict.report["has_result"]) == (0.0, False)
    assert honest.reward.value == 1.0


async def test_parsing_a_log_imports_no_clients() -> None:
    """Parsing needs no clients of Docker and data sets, whose import takes seconds."""
    code = _GRADE + "\njson.dump(sorted(sys.modules), open(path + '.out', 'w'))\n"
    run = SweBenchEvaluator(**ROW)._make_spec()
    names = msgspec.json.decode(await parse_apart(code, b"", asdict(run)))
    assert "swebench.harness.grading" in names
    assert not {"docker", "datasets", "requests"} & set(names)


async def test_a_missing_package_is_reported_with_its_extra(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is an error of the evaluator."""
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    with pytest.raises(EvaluatorError, match=r"pip install 'tugline\[swe\]' on every node"):
        await judge.evaluate(GOOD)
