"""The three issues of `examples/swe_gym`, tried in containers of their own.

`tasksets/test_swe_example.py` runs them in sandboxes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import run_command
from containers import DEBIAN, podman
from swe_toy import make, tasks, written
from tugline.datasets.base import Solution
from tugline.datasets.swe import SweTaskSet
from tugline.rollout.parts import Parts
from tugline.rollout.task_validation import validate_task
from tugline.sandbox.base import SandboxSpec
from tugline.types import PluginSpec, Task

__all__ = ["podman"]
pytestmark = pytest.mark.timeout(300)


class Toy:
    """The repository, its rows as tasks, and where to try them."""

    def __init__(self, folder: Path, parts: Parts, runtime: PluginSpec, **options: Any) -> None:
        self.folder, self.parts, self.runtime, self.tried = folder, parts, runtime, 0
        self.rows = make(folder)
        self.options = {"path": str(folder / "rows.jsonl"), **options}
        self.tasks: list[Task] = tasks(
            SweTaskSet(**self.options), runtime=msgspec.to_builtins(runtime)
        )

    def validated(self) -> dict[str, tuple[str, float, float]]:
        """What `tugline task validate` says: state, and what solution and nothing earned."""
        file = self.folder / "tasks.json"
        shell = {"name": "shell", "options": {"command": "true"}}
        template = {"harness": shell, "runtime": msgspec.to_builtins(self.runtime)}
        taskset = {"name": "swe", "options": self.options}
        file.write_text(json.dumps({"taskset": taskset, "template": template}))
        done = run_command("task", "validate", file, "--json", timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return {one["task"]: (one["state"], one["reference"], one["empty"]) for one in lines}

    async def earns(self, task: Task, solution: Solution) -> float | None:
        """What some work earns."""
        self.tried += 1
        proof = await validate_task(task, solution, self.folder / str(self.tried), self.parts)
        assert proof.failure is None, proof.reason
        return proof.reward

    async def says(self, task: Task, command: str) -> str:
        """What a program prints where the agent would be."""
        self.tried += 1
        runtime = self.parts.runtime(self.runtime)
        place = SandboxSpec(workspace=task.workspace)
        async with runtime.open(self.folder / str(self.tried), place) as sandbox:
            await sandbox.run(("sh", "-c", command), env={}, timeout_s=30, log_name="said")
            return (sandbox.logs / "said.log").read_text()

    async def check(self) -> None:
        """Gold 1, empty 0, and no later history where the agent is."""
        fine = dict.fromkeys((task.id for task in self.tasks), ("fine", 1.0, 0.0))
        assert self.validated() == fine
        titles = [row["problem_statement"].partition("\n")[0] for row in self.rows]
        for number, task in enumerate(self.tasks):
            git = "git -c safe.directory=*"
            said = await self.says(
                task, f"{git} log --all --reflog --format=%s; {git} fsck --unreachable --no-reflogs"
            )
            assert "Start" in said
            assert not [title for title in titles[number:] if title in said]
            assert "unreachable" not in said


@pytest.fixture
def parts() -> Parts:
    """What makes runtimes and evaluators."""
    return Parts()


def built(name: str, context: Path, lines: str) -> None:
    """Make an image of Debian's."""
    (context / "Dockerfile").write_text(f"FROM {DEBIAN}\nWORKDIR /testbed\n{lines}")
    argv = ["podman", "--runtime", "runc", "build", "-q", "--isolation=chroot", "-t", name]
    done = subprocess.run([*argv, str(context)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def images(tmp_path: Path, podman: str) -> Iterator[str]:  # noqa: ARG001 - it has Debian's image
    """An image for each instance, with its checkout in /testbed and all later history."""
    prefix = f"localhost/tugline/swe-{tmp_path.parent.name}"
    made = []
    for row in make(tmp_path / "context"):
        made.append(f"{prefix}:{row['instance_id']}")
        checkout = f"RUN git -c safe.directory=* checkout -q {row['base_commit']}\n"
        built(made[-1], tmp_path / "context", f"COPY larder /testbed\n{checkout}")
    yield f"{prefix}:{{instance_id}}"
    subprocess.run(["podman", "rmi", "-f", *made], capture_output=True, check=False)


@pytest.mark.podman
async def test_in_containers(tmp_path: Path, parts: Parts, images: str, podman: str) -> None:
    """With images as the public data sets have them: the repository lies in the image."""
    runtime = PluginSpec("container", {"engine": podman, "memory_mb": 512})
    await Toy(tmp_path, parts, runtime, images=images).check()


@pytest.fixture
def r2e(tmp_path: Path, podman: str) -> Iterator[dict[str, str]]:  # noqa: ARG001 - as above
    """A row of R2E's kind, with its image: tests lie beside the repository."""
    name, context = f"localhost/tugline/r2e-{tmp_path.parent.name}", tmp_path / "context"
    make(context)
    (context / "larder" / "run_tests.sh").write_text("python3 -m pytest -rA r2e_tests\n")
    (context / "test_1.py").write_text(
        "import larder.quantity\n\n\nclass TestParse:\n    def test_mixed(self):\n"
        "        assert larder.quantity.parse('1 1/2 kg') == (1.5, 'kg')\n"
    )
    before = "RUN git -c safe.directory=* checkout -q HEAD~3 && rm -rf tests\n"
    built(name, context, f"COPY larder /testbed\nCOPY test_1.py /r2e_tests/\n{before}")
    yield {
        "repo_name": "larder",
        "docker_image": name,
        "commit_hash": "0123456789abcdef",
        "problem_statement": "[ISSUE]mixed numbers[/ISSUE]",
        "expected_output_json": json.dumps({"TestParse.test_mixed": "PASSED"}),
    }
    subprocess.run(["podman", "rmi", "-f", name], capture_output=True, check=False)


@pytest.mark.podman
async def test_tests_in_an_image_are_not_the_agents_to_see(
    tmp_path: Path, parts: Parts, r2e: dict[str, str], podman: str
) -> None:
    """A row of R2E: the agent's box has their folder empty, and the evaluator's has not."""
    runtime = PluginSpec("container", {"engine": podman, "memory_mb": 512})
    toy = Toy(tmp_path, parts, runtime)
    taskset = SweTaskSet(path=written(tmp_path / "r2e.jsonl", r2e))
    (task,) = tasks(taskset, runtime=msgspec.to_builtins(runtime))
    peek = Solution(argv=("sh", "-c", "test -d /r2e_tests && ! test -e /r2e_tests/test_1.py"))
    proof = await validate_task(task, peek, tmp_path / "peek", parts)
    assert (proof.reward, proof.failure) == (0.0, None), proof.reason
    assert "solution" not in proof.reason
    gold = Solution(home={"p": toy.rows[0]["patch"]}, argv=("sh", "-c", "git apply $HOME/p"))
    assert await toy.earns(task, gold) == 1.0
    forged = {"run_tests.sh": "echo PASSED r2e_tests/test_1.py::TestParse::test_mixed\n"}
    assert await toy.earns(task, Solution(changes=forged)) == 0.0
