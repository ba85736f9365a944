"""Reward hacking: nothing but solving the task earns a reward."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from support import evaluation
from support.attacks import Arena, shell, token
from support.polling import until
from support.repositories import git
from support.sandbox import running
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
HERE = Path(__file__).parent
ATTACKS = read_values(HERE / "rewards.yaml")
ON_FILES: dict[str, str] = ATTACKS["on files"]
ON_A_REPOSITORY: dict[str, str] = ATTACKS["on a repository"]
ON_PYTEST: dict[str, str] = ATTACKS["on pytest in a script"]
ON_A_SCRIPT: dict[str, str] = ATTACKS["on a script"]
BY_THE_PROGRAM: dict[str, str] = ATTACKS["by the program"]

NUMBERS = itertools.count()
EVALUATOR, HASTY_EVALUATOR = TestsEvaluator(timeout_s=10.0), TestsEvaluator(timeout_s=6.0)
"""Shared, since they check once whether pytest runs here. The hasty one is for endless tests."""


async def earned(
    arena: Arena, script: str, evaluator: Evaluator, base: Workspace | None = None
) -> float:
    """The reward of an agent that runs this script on `FILES` or on a repository."""
    files = FILES if base is None else {}
    workspace = replace(base or arena.workspace, image=arena.workspace.image)
    number = next(NUMBERS)
    async with arena.open(f"agent-{number}", files=files, workspace=workspace) as sandbox:
        env = {"HOME": str(sandbox.home), **ATTACKS["variables"]}
        end = await sandbox.run(("sh", "-c", script), env=env, timeout_s=10)
        assert not end.timed_out
        patch = await sandbox.diff()
    task = evaluation.make_task_with_files(files, workspace)
    spec = SandboxSpec(workspace=workspace, mounts=evaluator.mounts(task))
    folder = arena.folder / f"evaluator-{number}"
    judge = evaluation.Judge(folder, task, timeout_s=20.0, runtime=arena.runtime, spec=spec)
    outcome = judge.outcome(patch.files)
    # On a busy machine there may be no verdict; the server would run the session again.
    for _ in range(3):
        with contextlib.suppress(SandboxError):
            return (await evaluator.evaluate(outcome)).reward.value
    return (await evaluator.evaluate(outcome)).reward.value


@pytest.mark.parametrize("attack", ON_FILES)
async def test_earn_a_reward_without_the_work(arena: Arena, attack: str) -> None:
    """An attack earns 0: a new sandbox evaluates the task's files and the filtered patch."""
    evaluator = HASTY_EVALUATOR if attack == "run for ever" else EVALUATOR
    assert await earned(arena, ON_FILES[attack], evaluator) == 0.0


async def test_honest_work_is_rewarded(arena: Arena) -> None:
    """A solved task earns 1, also beside every attack that breaks nothing."""
    assert await earned(arena, HONEST, EVALUATOR) == 1.0
    clutter = [
        *("a package in place of the test", "an installed module's name"),
        *("a package around the tests", "edit the tests", "conftest", "pytest.ini"),
        *("write the report", "write reward files", "an installed plug-in in other case"),
        "modules that the runner looks for",
    ]
    script = "; ".join((HONEST, *(f"( {ON_FILES[name]} ) || true" for name in clutter)))
    assert await earned(arena, script, EVALUATOR) == 1.0


LOOPS = 'for n in $(seq 150); do setsid sh -c "while :; do :; done" "$1" & done; wait'


async def test_honest_work_is_rewarded_beside_busy_loops(arena: Arena) -> None:
    """Another session's 150 loops, each in its own kernel session (autogroup), change nothing."""
    if arena.name == "bubblewrap" and find_cgroup_parent().cpu is None:
        pytest.skip("no control groups of the processor can be made here")
    mark = token()
    async with arena.open("busy") as sandbox:
        loops = asyncio.create_task(shell(sandbox, LOOPS, mark, timeout_s=120))
        await until(lambda: len(running(mark)) >= 150, 30)
        assert await earned(arena, HONEST, EVALUATOR) == 1.0
        assert not loops.done()
        loops.cancel()
        await asyncio.gather(loops, return_exceptions=True)


@pytest.fixture
def script() -> Evaluator:
    """The script of a Harbor task."""
    return HarborEvaluator(tests=str(HERE / "script"), timeout_s=5.0)


ON_FILES_TOO = (
    *("nothing", "write reward files", "sitecustomize", "programs of the runner's names"),
    "compiled code",
)


@pytest.mark.parametrize("attack", [*ON_FILES_TOO, *ON_A_SCRIPT])
async def test_earn_a_reward_of_a_script(arena: Arena, script: Evaluator, attack: str) -> None:
    """The script's folders are created after the agent's end, and its tests are not visible."""
    assert await earned(arena, (ON_FILES | ON_A_SCRIPT)[attack], script) == 0.0


async def test_a_script_rewards_honest_work(arena: Arena, script: Evaluator) -> None:
    """The script's reward of a solved task is 1."""
    assert await earned(arena, HONEST, script) == 1.0


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """`FILES` in git, with the tests in a package."""
    monkeypatch.setenv("TUGLINE_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "repo"
    (repo / "tests").mkdir(parents=True)
    (repo / "bill.py").write_text(FILES["bill.py"])
    (repo / "tests" / "test_bill.py").write_text(FILES["test_bill.py"])
    (repo / "tests" / "__init__.py").touch()
    (repo / "helpers").mkdir()
    for name in ("__init__.py", "plug.py"):
        (repo / "helpers" / name).touch()
    for argv in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        git(repo, *argv)
    return Workspace(repo=str(repo), commit="HEAD")


@pytest.fixture
def by_command() -> Evaluator:
    """The repository's own tests, by a command and without a list of expected tests."""
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = "python3 -m pytest -q tests/test_bill.py"
    return TestsEvaluator(command=command, format="pytest", env=env)


def script_of(folder: Path, command: str) -> Evaluator:
    """A Harbor script that rewards the success of a command."""
    (folder / "test.sh").write_text(f"{command}\necho $((!$?)) > /logs/verifier/reward.txt\n")
    return HarborEvaluator(tests=str(folder), timeout_s=15.0)


LOADED = ("an installed plug-in in other case", "modules that the runner looks for", "nothing")


@pytest.mark.parametrize("attack", LOADED)
async def test_loaded_before_the_tests(
    arena: Arena, repository: Workspace, tmp_path: Path, attack: str
) -> None:
    """`python3 -m pytest` loads the image's modules, in a command and in a Harbor script."""
    command = "python3 -m pytest -q -p no:cacheprovider -p no:schemathesis tests/test_bill.py"
    by_script = script_of(tmp_path, command)
    by_command = TestsEvaluator(command=command, format="pytest")
    for evaluator in (by_command, by_script):
        assert await earned(arena, ON_FILES[attack], evaluator, repository) == 0.0
        script = f"{HONEST}; {ON_FILES[attack]}"
        assert await earned(arena, script, evaluator, repository) == 1.0


@pytest.mark.parametrize("attack", ON_PYTEST)
async def test_settings_and_plugins_of_a_script_that_runs_pytest(
    arena: Arena, repository: Workspace, tmp_path: Path, attack: str
) -> None:
    """The repository's settings apply; the agent may change other parts of the same files."""
    command = "python3 -m pytest -q -p no:cacheprovider -p no:schemathesis -p helpers.plug tests"
    evaluator = script_of(tmp_path, command)
    assert await earned(arena, ON_PYTEST[attack], evaluator, repository) == 0.0
    adds = "printf '[project]\\nname = \"x\"\\n' > pyproject.toml; echo 'x = 1' > helpers/more.py"
    script = f"{HONEST}; {adds}; {ON_PYTEST[attack]}"
    assert await earned(arena, script, evaluator, repository) == 1.0


@pytest.mark.parametrize("attack", ON_A_REPOSITORY)
async def test_earn_a_reward_on_a_repository(
    arena: Arena, repository: Workspace, by_command: Evaluator, attack: str
) -> None:
    """An attack on a repository earns 0: the commit and the filtered patch are evaluated."""
    assert await earned(arena, ON_A_REPOSITORY[attack], by_command, repository) == 0.0


async def test_honest_work_on_a_repository_is_rewarded(
    arena: Arena, repository: Workspace, by_command: Evaluator
) -> None:
    """A solved task earns 1, beside changes to the tests that are not applied."""
    script = f"{HONEST}; {ON_A_REPOSITORY['empty the tests']}"
    assert await earned(arena, script, by_command, repository) == 1.0


ISOLATED = str(HERE / "isolated_script")
"""Its script reads what the agent's program prints."""


@pytest.fixture
def isolated() -> Evaluator:
    """A script that runs the agent's program in another sandbox."""
    return HarborEvaluator(tests=ISOLATED, timeout_s=8.0, isolate=True)


@pytest.mark.parametrize("attack", BY_THE_PROGRAM)
async def test_earn_a_reward_by_the_tested_program(
    arena: Arena, isolated: Evaluator, attack: str
) -> None:
    """An isolated program reaches neither the script's tests nor its reward."""
    attempt = f"import os, time\ntry: {BY_THE_PROGRAM[attack]}\nexcept OSError: pass\n"
    code = f"{attempt}def total(a, b): 0\n"
    script = f"cat > bill.py <<'END'\n{code}END"
    assert await earned(arena, script, isolated) == 0.0


async def test_an_isolated_script_rewards_honest_work(arena: Arena, isolated: Evaluator) -> None:
    """An isolated script rewards a right program, even if it prints much."""
    assert await earned(arena, HONEST, isolated) == 1.0
    loud = f"{HONEST}; echo 'import sys; sys.stderr.write(\"x\" * 300000)' >> bill.py"
    assert await earned(arena, loud, isolated) == 1.0
    assert await earned(arena, ON_FILES["nothing"], isolated) == 0.0
    code = f"import os, time\n{BY_THE_PROGRAM['read the tests']}\n"
    beside = HarborEvaluator(tests=ISOLATED, timeout_s=8.0)
    assert await earned(arena, f"cat > bill.py <<'END'\n{code}END", beside) == 1.0
