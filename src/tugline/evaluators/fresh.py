"""What evaluators read of a box that they opened: its workspace as it was, and its logs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tugline.sandbox.base import Sandbox
from tugline.sandbox.patch import Patch
from tugline.types import Workspace

_TEXTS = 100
"""Files of a workspace that are read, to show what changed."""
_TEXT_BYTES = 256 << 10
_TAIL = 2000


def has_base(workspace: Workspace) -> bool:
    """Whether there are files besides those that a task brings along."""
    return any((workspace.image, workspace.build, workspace.repo, workspace.folder))


async def texts(box: Sandbox, patch: Patch, given: Mapping[str, str]) -> dict[str, str]:
    """What changed files said before: the task's own text, else the workspace's."""
    found = dict(given)
    for path in [path for path in patch.files if path not in given][:_TEXTS]:
        data = await box.get(box.workdir / path, max_bytes=_TEXT_BYTES)
        if data is not None:
            found[path] = data.decode(errors="replace")
    return found


async def tail(box: Sandbox, log_name: str, most: int = _TAIL) -> str:
    """The end of what a program wrote."""
    return await asyncio.to_thread(_tail, box, log_name, most)


def _tail(box: Sandbox, log_name: str, most: int) -> str:
    with (box.logs / f"{log_name}.log").open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - most))
        return log.read().decode(errors="replace")
