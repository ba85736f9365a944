"""Background tasks: none of them ends silently."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import tugline
from tugline import log
from tugline.aio import run_beside

SOURCE = Path(tugline.__file__).parent
AWAITED = {
    "aio.py": "awaited where it is started",
    "evaluators/tests.py": "awaited where it is started",
    "gateway/completion.py": "its error ends the answers that read it",
    "launch/local.py": "`follow` raises its error",
    "log.py": "`start_task` itself",
    "node/app.py": "awaited where it is started",
    "node/session_runner.py": "awaited by the runner, which records its failure",
    "rollout/parts.py": "its error is raised by `open`",
    "sandbox/container_images.py": "awaited where it is started",
    "sandbox/host.py": "`run` raises its error",
    "sandbox/network.py": "one connection, which it closes",
    "sandbox/processes.py": "awaited where it is started, or by all that share it",
    "server/http/route.py": "awaited where it is started",
    "trainers/loop.py": "`_finish_evaluation` awaits it",
    "web/serve.py": "awaited when the block ends",
}
"""Files that start tasks without `log.start_task`, and where their errors are raised."""


def starts_tasks(file: Path) -> bool:
    """Whether a file starts tasks of asyncio itself."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in {"create_task", "ensure_future"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "asyncio"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def test_every_task_has_someone_who_learns_of_its_end() -> None:
    """Tasks that nobody awaits are started by `log.start_task`."""
    found = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if starts_tasks(file)}
    assert found == AWAITED.keys()


async def test_work_that_dies_beside_a_block_is_logged_and_raised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is logged while the block still runs, and raised at its end."""
    log.configure()
    died = asyncio.Event()

    async def die() -> None:
        died.set()
        raise LookupError("gone")

    async def work() -> None:
        async with run_beside(die()):
            await died.wait()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            output = capsys.readouterr().err
            assert "background task failed" in output
            assert "LookupError" in output

    with pytest.raises(LookupError, match="gone"):
        await work()
