"""Show an agent's changes as a unified diff."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping

from tugline.evaluators.base import SessionOutcome
from tugline.sandbox.base import Sandbox
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.types import Workspace

_MAX_CHARACTERS = 1 << 20
_MAX_FILES = 100
"""Files of a workspace whose old text is read."""
_MAX_FILE_BYTES = 256 << 10


def has_base(workspace: Workspace) -> bool:
    """Return whether there are files besides those that a task brings along."""
    return any((workspace.image, workspace.build, workspace.repo, workspace.folder))


async def diff_work(outcome: SessionOutcome, sandbox: Sandbox | None) -> str:
    """Return the diff of an agent's work; `sandbox` has the workspace as it was, if any."""
    before = dict(outcome.task.files)
    if sandbox is not None and has_base(outcome.task.workspace):
        for path in [path for path in outcome.patch.files if path not in before][:_MAX_FILES]:
            data = await sandbox.get(sandbox.workdir / path, max_bytes=_MAX_FILE_BYTES)
            if data is not None:
                before[path] = data.decode(errors="replace")
    return await asyncio.to_thread(format_patch, before, outcome.patch)


def format_patch(before: Mapping[str, str], patch: Patch, limits: PatchLimits | None = None) -> str:
    """Return a unified diff of a patch, followed by its notes."""
    limits = limits or PatchLimits()
    parts: list[str] = []
    size = 0
    for path, change in sorted(patch.files.items()):
        text = "" if change is None else change.text
        if text is None:
            parts.append(f"{path}: not text\n")
            continue
        if size > _MAX_CHARACTERS:
            parts.append(f"{path}: not shown, there is too much before it\n")
            continue
        old = before.get(path, "").splitlines(keepends=True)
        new = text.splitlines(keepends=True)
        if max(len(old), len(new)) > limits.diff_lines:
            parts.append(f"{path}: {len(old)} lines became {len(new)}; too long to show\n")
            continue
        names = (
            "/dev/null" if path not in before else f"a/{path}",
            "/dev/null" if change is None else f"b/{path}",
        )
        diff = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(old, new, *names)
        )
        parts.append(diff)
        size += len(diff)
    return "".join(parts) + "".join(f"# {note}\n" for note in patch.notes)
