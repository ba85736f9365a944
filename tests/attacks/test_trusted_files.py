"""What decides a verdict stays what it was, while the agent's code runs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support import evaluation
from support.attacks import Arena
from support.evaluation import Judge
from tugline.evaluators.base import Evaluator, Verdict
from tugline.evaluators.swebench import SweBenchEvaluator
from tugline.evaluators.tests import TestsEvaluator
from tugline.sandbox.base import SandboxSpec
from tugline.schema import read_values
from tugline.types import Workspace

HERE = Path(__file__).parent
ATTACKS = read_values(HERE / "trusted.yaml")
BY_THE_PROGRAM: dict[str, str] = ATTACKS["by the tested program"]
ADDED: dict[str, str] = ATTACKS["added by the tested program"]
BY_SETUP: dict[str, str] = ATTACKS["by setup"]
VARIABLES = {**read_values(HERE / "rewards.yaml")["variables"], **ATTACKS["variables"]}

CHECKS = {
    "checks/1.sh": '[ "$(sh total.sh 2 3)" = 5 ]\n',
    "checks/2.sh": '[ "$(sh total.sh 2 2)" = "$(cat checks/2.out)" ]\n',
    "checks/2.out": "4\n",
}
OWN_TEST = '[ "$(sh total.sh 4 2)" = 6 ]\n'
COMMAND = """\
for t in checks/1.sh checks/2.sh tests/3.sh; do
  if sh $t; then echo "ok - $t"; else echo "not ok - $t"; fi
done
sleep 1
echo 1..3
"""
WRONG, RIGHT = "echo $(($1 - $2))\n", "echo $(($1 + $2))\n"
BASE = {"total.sh": WRONG, "tests/3.sh": OWN_TEST}


async def give_verdict(
    arena: Arena,
    evaluator: Evaluator,
    base: Mapping[str, str],
    work: Mapping[str, str],
    folder: str = "eval",
) -> Verdict:
    """The verdict on `work`, in sandboxes that begin with `base`."""
    workspace = Workspace(folder="/srv/shop", image=arena.workspace.image)
    task = evaluation.make_task_with_files(workspace=workspace)
    spec = SandboxSpec(workspace=Workspace(image=workspace.image))
    place = arena.folder / folder
    judge = Judge(place, task, base, timeout_s=60.0, runtime=arena.runtime, spec=spec)
    return await judge(evaluator, work)


@pytest.mark.parametrize("attack", BY_THE_PROGRAM)
async def test_a_tested_program_changes_what_decides(arena: Arena, attack: str) -> None:
    """A program that passes tests by changing the files that decide earns 0, with the reason."""
    evaluator = TestsEvaluator(command=COMMAND, format="tap", files=CHECKS, timeout_s=20)
    own = "repository" in attack
    answers = f"23) echo 5 ;; 22) echo {4 if own else -1} ;; 42) echo {-1 if own else 6} ;;"
    half = f"({BY_THE_PROGRAM[attack]}) > /dev/null 2>&1\ncase $1$2 in {answers} esac\n"
    verdict = await give_verdict(arena, evaluator, BASE, {"total.sh": half})
    assert verdict.reward.value == 0.0, verdict.report
    assert "files that determine the verdict" in verdict.report["reason"], verdict.report


@pytest.mark.parametrize("attack", ADDED)
async def test_a_tested_program_adds_what_a_runner_loads(arena: Arena, attack: str) -> None:
    """Adding a file that a test runner loads earns 0; adding outputs of other names is allowed."""
    evaluator = TestsEvaluator(command=COMMAND, format="tap", files=CHECKS, timeout_s=20)
    verdict = await give_verdict(arena, evaluator, BASE, {"total.sh": f"{ADDED[attack]}\n{RIGHT}"})
    assert (verdict.reward.value, verdict.report["passed"]) == (0.0, 3), verdict.report
    assert "files that determine the verdict" in verdict.report["reason"], verdict.report
    outputs = "mkdir -p out build .cache; touch out/x build/y.o .cache/z checks/w tests/log.txt\n"
    verdict = await give_verdict(arena, evaluator, BASE, {"total.sh": f"{outputs}{RIGHT}"}, "right")
    assert verdict.reward.value == 1.0, verdict.report


async def test_tests_may_change_their_own_files(arena: Arena) -> None:
    """Honest work earns 1, also if the tests themselves change what decides."""
    evaluator = TestsEvaluator(command=COMMAND, format="tap", files=CHECKS, timeout_s=20)
    assert (await give_verdict(arena, evaluator, BASE, {"total.sh": RIGHT})).reward.value == 1.0
    command = f"chmod +x checks/1.sh; echo >> checks/2.out; echo >> tests/3.sh; {COMMAND}"
    writes = TestsEvaluator(command=command, format="tap", files=CHECKS, timeout_s=20)
    for folder in ("first", "second"):
        verdict = await give_verdict(arena, writes, BASE, {"total.sh": RIGHT}, folder)
        assert verdict.reward.value == 1.0, verdict.report


BILL = "def total(a, b):\n    return a - b\n"
TEST = "from bill import total\n\ndef test_total():\n    assert total(2, 3) == 5\n"
REPOSITORY = {
    "bill.py": BILL,
    "tests/test_bill.py": TEST,
    "build.sh": "echo built > made.txt\n",
    "pytest.ini": "[pytest]\naddopts = -p helpers.plug\n",
    "helpers/plug.py": "",
}
PYTEST = "python3 -m pytest -q -p no:cacheprovider -p no:schemathesis tests/test_bill.py"


def by_setup(**options: Any) -> TestsEvaluator:
    """Tests of a repository after its build."""
    given = {"command": PYTEST, "format": "pytest", "setup": "sh build.sh", "timeout_s": 30}
    return TestsEvaluator(**{**given, **options})


@pytest.mark.parametrize("hidden", [False, True], ids=["own tests", "hidden tests"])
@pytest.mark.parametrize("attack", BY_SETUP)
async def test_setup_leaves_nothing_that_decides(
    arena: Arena, attack: str, *, hidden: bool
) -> None:
    """Code of the agent that `setup` runs earns 0 for an attack; right work beside it earns 1."""
    files = {"tests/test_bill.py": TEST} if hidden else None
    texts = (f"{name}=$(cat <<'END'\n{text}\nEND\n)\n" for name, text in VARIABLES.items())
    script = f"{''.join(texts)}{BY_SETUP[attack]}\ntrue\n"
    verdict = await give_verdict(arena, by_setup(files=files), REPOSITORY, {"build.sh": script})
    assert verdict.reward.value == 0.0, verdict.report
    if attack != "too many files":  # no output of such a setup is used
        work = {"build.sh": script, "bill.py": BILL.replace("-", "+")}
        verdict = await give_verdict(arena, by_setup(files=files), REPOSITORY, work, "right")
        assert verdict.reward.value == 1.0, verdict.report


async def test_setup_prepares_right_work(arena: Arena) -> None:
    """What `setup` builds from right work is there for the tests.

    At paths that a patch may not change, and outside of the workdir, there is what `setup` builds
    without the work.
    """
    build = (
        "mkdir -p build ~/lib tests/data; sed s/BODY/a+b/ bill.in > bill.py; cp bill.py build/\n"
        "ln -s bill.py link.py; echo '#!/bin/sh' > run; chmod +x run; rm -f old.txt\n"
        "echo x > tests/data/x; echo y > ~/lib/y\n"
    )
    base = {"bill.in": "def total(a, b): return BODY\n", "old.txt": "", "build.sh": build}
    test = (
        "import os, pathlib\nfrom link import total\n"
        "def test_total(): assert total(2, 3) == 5\n"
        "def test_files():\n"
        "    assert os.access('run', os.X_OK) and not os.path.exists('old.txt')\n"
        "    assert open('build/bill.py').read() == open('bill.py').read()\n"
        "    assert open('tests/data/x').read() == 'x\\n'\n"
        "    assert open(os.path.expanduser('~/lib/y')).read() == 'y\\n'\n"
    )
    work = {"bill.in": "def total(b, a): return BODY\n"}
    evaluator = by_setup(files={"tests/test_bill.py": test})
    verdict = await give_verdict(arena, evaluator, base, work)
    assert verdict.reward.value == 1.0, verdict.report


PROGRAM = "a, b = map(int, input().split())\nprint(a - b)\n"
RUNS = """\
import os, subprocess

def test_total():
    argv = [*filter(None, [os.environ.get("JUDGED")]), "python3", "bill.py"]
    done = subprocess.run(argv, input="2 3", capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "5"
"""
ANSWER = '"$(echo 2 3 | ${JUDGED:-} python3 bill.py)" = 5'
ALONE = "python3 -m pytest -q -p no:cacheprovider -p no:schemathesis test_bill.py"
ROW = f"""\
: '>>>>> Start Test Output'
if [ {ANSWER} ]; then echo PASSED test_bill.py::test_total
else echo FAILED test_bill.py::test_total; fi
: '>>>>> End Test Output'
"""
ISOLATED: dict[str, tuple[type[Evaluator], dict[str, Any]]] = {
    "own pytest": (TestsEvaluator, {"files": {"test_bill.py": RUNS}}),
    "pytest": (
        TestsEvaluator,
        {"files": {"test_bill.py": RUNS}, "command": ALONE, "format": "pytest"},
    ),
    "junit": (
        TestsEvaluator,
        {
            "files": {"test_bill.py": RUNS},
            "command": f"{ALONE} --junitxml={{report}}",
            "format": "junit",
            "setup": "true",
        },
    ),
    "tap": (
        TestsEvaluator,
        {
            "command": f"if [ {ANSWER} ]; then echo ok 1 - total; else echo not ok 1 - total; fi\n"
            "echo 1..1",
            "format": "tap",
        },
    ),
    "swebench": (
        SweBenchEvaluator,
        {
            "instance": "bill-1",
            "eval_script": ROW,
            "log_parser": "parse_log_pytest",
            "fail_to_pass": ["test_bill.py::test_total"],
        },
    ),
}


@pytest.mark.parametrize("name", ISOLATED)
async def test_a_program_that_forges_its_judges_report(arena: Arena, name: str) -> None:
    """Taking the judge over by ptrace works in one sandbox, as the docs say, not in two.

    The program writes report and output, and lets the judge end with exit code 0.
    """
    kind, options = ISOLATED[name]
    isolated = kind(**options, isolate=True, timeout_s=30)
    base = {"bill.py": PROGRAM}
    attack = {"bill.py": VARIABLES["TAKE"]}
    verdict = await give_verdict(arena, isolated, base, attack, "attacked")
    assert verdict.reward.value == 0.0, verdict.report
    honest = {"bill.py": PROGRAM.replace("-", "+")}
    verdict = await give_verdict(arena, isolated, base, honest, "honest")
    assert verdict.reward.value == 1.0, verdict.report
    if arena.name == "bubblewrap" and kind is TestsEvaluator and name != "tap":
        beside = kind(**options, timeout_s=30)
        for attempt in range(12):  # the attack works only at a system call
            verdict = await give_verdict(arena, beside, base, attack, f"beside-{attempt}")
            if verdict.reward.value == 1.0:
                break
        assert verdict.reward.value == 1.0, verdict.report["reason"]
