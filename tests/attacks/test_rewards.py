"""The reward: whatever an agent does instead of its task earns nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

import judging
from attacked import Arena, running, shell, token
from tugline.errors import SandboxError
from tugline.evaluators.base import Evaluator
from tugline.evaluators.harbor import HarborEvaluator
from tugline.evaluators.tests import TestsEvaluator
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.limits import find_cgroup_parent
from tugline.schema import read_values
from tugline.types import Workspace

FILES = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "test_bill.py": "from bill import total\n\ndef test_total():\n    assert total(2, 3) == 5\n",
}
HONEST = "sed -i s/-/+/ bill.py"
ATTACKS = read_values(Path(__file__).with_name("rewards.yaml"))
ON_FILES: dict[str, str] = ATTACKS["on files"]
ON_A_REPOSITORY: dict[str, str] = ATTACKS["on a repository"]
ON_A_SCRIPT: dict[str, str] = ATTACKS["on a script"]

TURNS = itertools.count()
EVALUATOR, HASTY_EVALUATOR = TestsEvaluator(timeout_s=10.0), TestsEvaluator(timeout_s=6.0)
"""Shared, for they find out once whether pytest runs here. The hasty one is for endless tests."""


async def earned(
    arena: Arena, script: str, evaluator: Evaluator, base: Workspace | None = None
) -> float:
    """The reward of an agent that is this script, on `FILES` or on a repository."""
    files = FILES if base is None else {}
    workspace = replace(base or arena.workspace, image=arena.workspace.image)
    turn = next(TURNS)
    async with arena.box(f"agent-{turn}", files=files, workspace=workspace) as sandbox:
        env = {"HOME": str(sandbox.home), **ATTACKS["variables"]}
        end = await sandbox.run(("sh", "-c", script), env=env, timeout_s=10)
        assert not end.timed_out
        patch = await sandbox.diff()
    task = judging.task(files, workspace)
    spec = SandboxSpec(workspace=workspace, mounts=evaluator.mounts(task))
    folder = arena.folder / f"judge-{turn}"
    judge = judging.Judge(folder, task, timeout_s=20.0, runtime=arena.runtime, spec=spec)
    outcome = judge.outcome(patch.files)
    # On a busy machine there is no verdict; the server runs such a session again.
    for _ in range(3):
        with contextlib.suppress(SandboxError):
            return (await evaluator.evaluate(outcome)).reward.value
    return (await evaluator.evaluate(outcome)).reward.value


@pytest.mark.parametrize("attack", ON_FILES)
async def test_earn_a_reward_without_the_work(sandbox: Arena, attack: str) -> None:
    """What is judged is a fresh copy of the task with the agent's sifted changes, in a new box."""
    evaluator = HASTY_EVALUATOR if attack == "run for ever" else EVALUATOR
    assert await earned(sandbox, ON_FILES[attack], evaluator) == 0.0


async def test_honest_work_is_rewarded(sandbox: Arena) -> None:
    """The same task, done; also with every attack that breaks nothing on top of it."""
    assert await earned(sandbox, HONEST, EVALUATOR) == 1.0
    clutter = [
        *("a package in place of the test", "an installed module's name"),
        *("a package around the tests", "edit the tests", "conftest", "pytest.ini"),
        *("write the report", "write reward files"),
    ]
    script = "; ".join((HONEST, *(f"( {ON_FILES[name]} ) || true" for name in clutter)))
    assert await earned(sandbox, script, EVALUATOR) == 1.0


LOOPS = 'for n in $(seq 150); do setsid sh -c "while :; do :; done" "$1" & done; wait'


async def test_honest_work_is_rewarded_beside_busy_loops(sandbox: Arena) -> None:
    """A hundred and fifty of another session's, each in a kernel session of its own (autogroup)."""
    if sandbox.name == "bubblewrap" and find_cgroup_parent().cpu is None:
        pytest.skip("no control groups of the processor can be made here")
    mark = token()
    async with sandbox.box("busy") as box:
        loops = asyncio.create_task(shell(box, LOOPS, mark, timeout_s=120))
        async with asyncio.timeout(30):
            while len(running(mark)) < 150:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await earned(sandbox, HONEST, EVALUATOR) == 1.0
        assert not loops.done()
        loops.cancel()
        await asyncio.gather(loops, return_exceptions=True)


JUDGE = """#!/bin/sh
if python3 -B -c 'import bill, sys; sys.exit(bill.total(2, 3) != 5)'
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
"""


@pytest.fixture
def judge(tmp_path: Path) -> Evaluator:
    """A Harbor task's own script."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test.sh").write_text(JUDGE)
    return HarborEvaluator(tests=str(folder), timeout_s=5.0)


ON_FILES_TOO = (
    *("nothing", "write reward files", "sitecustomize", "programs of the runner's names"),
    "compiled code",
)


@pytest.mark.parametrize("attack", [*ON_FILES_TOO, *ON_A_SCRIPT])
async def test_earn_a_reward_of_a_script(sandbox: Arena, judge: Evaluator, attack: str) -> None:
    """Where the script writes is made anew after the agent's end, and its tests are not seen."""
    assert await earned(sandbox, (ON_FILES | ON_A_SCRIPT)[attack], judge) == 0.0


async def test_a_script_rewards_honest_work(sandbox: Arena, judge: Evaluator) -> None:
    """The same script, with the task done."""
    assert await earned(sandbox, HONEST, judge) == 1.0


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """`FILES` in git, with a folder of tests that is a package."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "repo"
    (repo / "tests").mkdir(parents=True)
    (repo / "bill.py").write_text(FILES["bill.py"])
    (repo / "tests" / "test_bill.py").write_text(FILES["test_bill.py"])
    (repo / "tests" / "__init__.py").touch()
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for argv in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(("git", "-C", repo, *argv), check=True, timeout=20)
    return Workspace(repo=str(repo), commit="HEAD")


@pytest.fixture
def by_command() -> Evaluator:
    """The repository's own tests, without a list: only those that run can count."""
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = "python3 -m pytest -q tests/test_bill.py"
    return TestsEvaluator(command=command, format="pytest", env=env)


@pytest.mark.parametrize("attack", ON_A_REPOSITORY)
async def test_earn_a_reward_on_a_repository(
    sandbox: Arena, repository: Workspace, by_command: Evaluator, attack: str
) -> None:
    """What is judged is the commit with the agent's sifted changes."""
    assert await earned(sandbox, ON_A_REPOSITORY[attack], by_command, repository) == 0.0


async def test_honest_work_on_a_repository_is_rewarded(
    sandbox: Arena, repository: Workspace, by_command: Evaluator
) -> None:
    """The same tests, beside changes to them that do not count."""
    script = f"{HONEST}; {ON_A_REPOSITORY['empty the tests']}"
    assert await earned(sandbox, script, by_command, repository) == 1.0


ASKING = """#!/bin/sh
[ "$(${JUDGED:-} python3 -B -c 'import bill; print(bill.total(2, 3))' < /dev/null)" = 5 ]
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
FROM_WITHIN = {
    "write the reward": "open('/logs/verifier/reward.txt', 'w').write('1'); os._exit(0)",
    "write it later": (
        "os.fork() or (os.setsid(), [(time.sleep(.01), "
        "open('/logs/verifier/reward.json', 'w').write('1')) for _ in range(200)])"
    ),
    "read the tests": "print(open('/tests/answer').read(), flush=True); os._exit(0)",
    "tests on the path": "open('/tests/test.sh', 'w').write('echo 1 > /logs/verifier/reward.txt')",
    "end everything": "os.kill(-1, 9)",
    "leave no disk": "os.symlink('/dev/full', os.environ['HOME'] + '/x')",
}


@pytest.fixture
def isolated(tmp_path: Path) -> Evaluator:
    """The same, but for where the agent's program runs; it says what it returns."""
    folder = tmp_path / "isolated"
    folder.mkdir()
    (folder / "test.sh").write_text(ASKING)
    (folder / "answer").write_text("5")
    return HarborEvaluator(tests=str(folder), timeout_s=8.0, isolate=True)


@pytest.mark.parametrize("attack", FROM_WITHIN)
async def test_earn_a_reward_from_within_the_program(
    sandbox: Arena, isolated: Evaluator, attack: str
) -> None:
    """A program that the script has run elsewhere finds neither its tests nor its reward."""
    code = (
        f"import os, time\ntry: {FROM_WITHIN[attack]}\nexcept OSError: pass\ndef total(a, b): 0\n"
    )
    script = f"cat > bill.py <<'END'\n{code}END"
    assert await earned(sandbox, script, isolated) == 0.0


async def test_an_isolated_script_rewards_honest_work(sandbox: Arena, isolated: Evaluator) -> None:
    """Also what writes much and to both streams; without isolation the tests can be read."""
    assert await earned(sandbox, HONEST, isolated) == 1.0
    loud = f"{HONEST}; echo 'import sys; sys.stderr.write(\"x\" * 300000)' >> bill.py"
    assert await earned(sandbox, loud, isolated) == 1.0
    assert await earned(sandbox, ON_FILES["nothing"], isolated) == 0.0
    code = f"import os, time\n{FROM_WITHIN['read the tests']}\n"
    there = HarborEvaluator(tests=isolated._tests.as_posix(), timeout_s=8.0)  # type: ignore[attr-defined]
    assert await earned(sandbox, f"cat > bill.py <<'END'\n{code}END", there) == 1.0
