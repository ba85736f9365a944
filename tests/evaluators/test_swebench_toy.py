"""The issues of `examples/swe_gym` in containers.

`tasksets/test_swe_example.py` runs them in sandboxes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.commands import run_program
from support.containers import DEBIAN
from support.sandbox import read_log, run_shell
from support.swe_repository import make_repository, tasks, write_rows
from tugline.datasets.base import Solution
from tugline.datasets.swe import SweTaskSet
from tugline.rollout.parts import Parts
from tugline.rollout.task_validation import validate_task
from tugline.sandbox.base import SandboxSpec
from tugline.types import Task

pytestmark = pytest.mark.timeout(300)


async def find_reward(folder: Path, task: Task, solution: Solution) -> float | None:
    """The reward of a solution."""
    validation = await validate_task(task, solution, folder, Parts())
    assert validation.failure is None, validation.reason
    return validation.reward


def build(name: str, context: Path, lines: str) -> None:
    """Build an image on Debian's."""
    (context / "Dockerfile").write_text(f"FROM {DEBIAN}\nWORKDIR /testbed\n{lines}")
    argv = ("podman", "--runtime", "runc", "build", "-q", "--isolation=chroot", "-t", name)
    done = run_program(*argv, context)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def images(tmp_path: Path, podman: str) -> Iterator[str]:  # noqa: ARG001 - it has Debian's image
    """An image of each instance, with its checkout in /testbed and all later history."""
    prefix = f"localhost/tugline/swe-{tmp_path.parent.name}"
    made = []
    for row in make_repository(tmp_path / "context"):
        made.append(f"{prefix}:{row['instance_id']}")
        checkout = f"RUN git -c safe.directory=* checkout -q {row['base_commit']}\n"
        build(made[-1], tmp_path / "context", f"COPY larder /testbed\n{checkout}")
    yield f"{prefix}:{{instance_id}}"
    run_program("podman", "rmi", "-f", *made)


@pytest.fixture
def runtime(podman: str) -> dict[str, Any]:
    """The runtime of a task file."""
    return {"name": "container", "options": {"engine": podman, "memory_mb": 512}}


LOG = "git -c safe.directory=* log --all --reflog --format=%s"
FSCK = "git -c safe.directory=* fsck --unreachable --no-reflogs"


@pytest.mark.podman
async def test_the_toy_is_solved_in_containers(
    tmp_path: Path, images: str, runtime: dict[str, Any]
) -> None:
    """The reference patch earns 1, no patch 0; the agent has no later history.

    The repository is in the image, as in public data sets.
    """
    titles = [row["problem_statement"].partition("\n")[0] for row in make_repository(tmp_path)]
    taskset = SweTaskSet(path=str(tmp_path / "rows.jsonl"), images=images)
    for number, task in enumerate(tasks(taskset, runtime=runtime)):
        gold = taskset.solution(task)
        assert gold is not None
        assert await find_reward(tmp_path / f"gold-{number}", task, gold) == 1.0
        assert await find_reward(tmp_path / f"empty-{number}", task, Solution()) == 0.0
        spec = SandboxSpec(workspace=task.workspace)
        async with Parts().runtime(task.runtime).open(tmp_path / f"{number}", spec) as sandbox:
            await run_shell(sandbox, f"{LOG}; {FSCK}")
            output = read_log(sandbox)
        assert "Start" in output
        assert not [title for title in titles[number:] if title in output]
        assert "unreachable" not in output


@pytest.fixture
def r2e(tmp_path: Path, podman: str) -> Iterator[dict[str, str]]:  # noqa: ARG001 - as above
    """A row of R2E, and its image with tests beside the repository."""
    name, context = f"localhost/tugline/r2e-{tmp_path.parent.name}", tmp_path / "context"
    make_repository(context)
    (context / "larder" / "run_tests.sh").write_text("python3 -m pytest -rA r2e_tests\n")
    (context / "test_1.py").write_text(
        "import larder.quantity\n\n\nclass TestParse:\n    def test_mixed(self):\n"
        "        assert larder.quantity.parse('1 1/2 kg') == (1.5, 'kg')\n"
    )
    before = "RUN git -c safe.directory=* checkout -q HEAD~4 && rm -rf tests\n"
    build(name, context, f"COPY larder /testbed\nCOPY test_1.py /r2e_tests/\n{before}")
    yield {
        "repo_name": "larder",
        "docker_image": name,
        "commit_hash": "0123456789abcdef",
        "problem_statement": "[ISSUE]mixed numbers[/ISSUE]",
        "expected_output_json": json.dumps({"TestParse.test_mixed": "PASSED"}),
    }
    run_program("podman", "rmi", "-f", name)


@pytest.mark.podman
async def test_tests_in_an_image_are_hidden_from_the_agent(
    tmp_path: Path, r2e: dict[str, str], runtime: dict[str, Any]
) -> None:
    """The tests of R2E are missing in the agent's sandbox, but not in the evaluator's."""
    taskset = SweTaskSet(path=write_rows(tmp_path / "r2e.jsonl", r2e))
    (task,) = tasks(taskset, runtime=runtime)
    peek = Solution(argv=("sh", "-c", "test -d /r2e_tests && ! test -e /r2e_tests/test_1.py"))
    validation = await validate_task(task, peek, tmp_path / "peek", Parts())
    assert (validation.reward, validation.failure) == (0.0, None), validation.reason
    assert "solution" not in validation.reason
    patch = make_repository(tmp_path)[0]["patch"]
    gold = Solution(home={"p": patch}, argv=("sh", "-c", "git apply $HOME/p"))
    assert await find_reward(tmp_path / "gold", task, gold) == 1.0
    forged = {"run_tests.sh": "echo PASSED r2e_tests/test_1.py::TestParse::test_mixed\n"}
    assert await find_reward(tmp_path / "forged", task, Solution(changes=forged)) == 0.0
