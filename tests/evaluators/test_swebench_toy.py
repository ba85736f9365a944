"""The three issues of `examples/swe_gym`, tried in a sandbox and in containers of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from containers import podman
from swe_toy import WRONG, make, tasks
from tugline.node.parts import Parts
from tugline.node.proof import prove
from tugline.runtimes.base import Place
from tugline.tasksets.base import Solution
from tugline.tasksets.swe import Swe
from tugline.types import Part, Task

__all__ = ["podman"]
TUGLINE = Path(sys.executable).with_name("tugline")


class Toy:
    """The repository, its rows as tasks, and where to try them."""

    def __init__(self, folder: Path, parts: Parts, runtime: Part, **options: Any) -> None:
        self.folder, self.parts, self.runtime, self.tried = folder, parts, runtime, 0
        self.rows = make(folder)
        self.options = {"path": str(folder / "rows.jsonl"), **options}
        self.tasks: list[Task] = tasks(Swe(**self.options), runtime=msgspec.to_builtins(runtime))

    def validated(self) -> dict[str, tuple[str, float, float]]:
        """What `tugline tasks validate` says: state, and what solution and nothing earned."""
        file = self.folder / "tasks.json"
        shell = {"name": "shell", "options": {"command": "true"}}
        template = {"harness": shell, "runtime": msgspec.to_builtins(self.runtime)}
        taskset = {"name": "swe", "options": self.options}
        file.write_text(json.dumps({"taskset": taskset, "template": template}))
        done = subprocess.run(
            [TUGLINE, "tasks", "validate", file, "--json"],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return {one["task"]: (one["state"], one["reference"], one["empty"]) for one in lines}

    async def earns(self, task: Task, solution: Solution) -> float | None:
        """What some work earns."""
        self.tried += 1
        proof = await prove(task, solution, self.folder / str(self.tried), self.parts)
        assert proof.failure is None, proof.why
        return proof.reward

    async def says(self, task: Task, command: str) -> str:
        """What a program prints where the agent would be."""
        self.tried += 1
        runtime = self.parts.runtime(self.runtime)
        place = Place(workspace=task.workspace)
        async with runtime.open(self.folder / str(self.tried), place) as box:
            await box.run(("sh", "-c", command), env={}, timeout_s=30, log_name="said")
            return (box.logs / "said.log").read_text()

    async def check(self) -> None:
        """Gold 1, empty 0, wrong 0, tests edited 0, for each; and no later history."""
        fine = dict.fromkeys((task.id for task in self.tasks), ("fine", 1.0, 0.0))
        assert self.validated() == fine
        for task, row in zip(self.tasks, self.rows, strict=True):
            assert await self.earns(task, Solution(changes=WRONG[task.id])) == 0.0
            test, _, name = task.evaluator.options["fail_to_pass"][0].partition("::")
            easy = Solution(changes={test: f"def {name}():\n    pass\n", "conftest.py": "x = 1\n"})
            assert await self.earns(task, easy) == 0.0
            later = [
                one["base_commit"] for one in self.rows if one["base_commit"] != row["base_commit"]
            ]
            said = await self.says(
                task,
                "git -c safe.directory=* rev-parse HEAD; git -c safe.directory=* log --all"
                " --reflog --format=%s; git -c safe.directory=* fsck --unreachable --no-reflogs; "
                f"git -c safe.directory=* cat-file -t {later[-1]}",
            )
            assert row["base_commit"] in said
            assert row["problem_statement"].partition("\n")[0] not in said
            assert "unreachable" not in said


@pytest.fixture
def parts() -> Parts:
    """What makes runtimes and evaluators."""
    return Parts()


async def test_in_a_sandbox(tmp_path: Path, parts: Parts) -> None:
    """Without images: files from the repository, programs of this machine."""
    runtime = Part("bubblewrap")
    if why := parts.runtime(runtime).unavailable():
        pytest.skip(why)
    await Toy(tmp_path, parts, runtime, repos="{repo}").check()


@pytest.fixture
def images(tmp_path: Path, podman: str) -> Iterator[str]:  # noqa: ARG001 - it has Debian's image
    """An image for each instance, with its checkout in /testbed and all later history."""
    prefix = f"localhost/tugline/swe-{tmp_path.name[-8:].lower().strip('_-')}"
    made = []
    for row in make(tmp_path / "context"):
        name = f"{prefix}:{row['instance_id']}"
        dockerfile = tmp_path / "context" / "Dockerfile"
        dockerfile.write_text(
            "FROM localhost/tugline/debian:12\nCOPY larder /testbed\nWORKDIR /testbed\n"
            f"RUN git -c safe.directory=* checkout -q {row['base_commit']}\n"
        )
        argv = ["podman", "--runtime", "runc", "build", "-q", "--isolation=chroot", "-t", name]
        done = subprocess.run(
            [*argv, str(tmp_path / "context")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        made.append(name)
    yield f"{prefix}:{{instance_id}}"
    subprocess.run(["podman", "rmi", "-f", *made], capture_output=True, check=False)


@pytest.mark.podman
async def test_in_containers(tmp_path: Path, parts: Parts, images: str, podman: str) -> None:
    """With images as the public data sets have them: the repository lies in the image."""
    runtime = Part("container", {"engine": podman, "memory_mb": 512})
    await Toy(tmp_path, parts, runtime, images=images).check()
