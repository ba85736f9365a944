"""Sandboxes and session outcomes for tests of evaluators."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from support.tasks import make_task
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.patch import FileChange, Patch
from tugline.sandbox.base import Content, Exit, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.local import LocalRuntime
from tugline.types import Task, Workspace

DONE = Exit(0, timed_out=False, seconds=1.0)


def make_task_with_files(
    files: Mapping[str, str] | None = None, workspace: Workspace | None = None
) -> Task:
    """A task with these files."""
    given = {"files": dict(files or {}), "workspace": workspace or Workspace()}
    return make_task("t", instruction="Mend the bill.", **given)


def make_change(content: str | bytes | FileChange | None) -> FileChange | None:
    """The content of a file in a patch."""
    if content is None or isinstance(content, FileChange):
        return content
    return FileChange(content.encode() if isinstance(content, str) else content)


def make_patch(files: Mapping[str, str | FileChange | None]) -> Patch:
    """A patch of files."""
    return Patch({path: make_change(content) for path, content in files.items()})


class Judge:
    """Evaluates patches of a task in sandboxes that begin with the files `base`.

    They are opened with `spec` by `runtime`, by default the local one.
    """

    def __init__(
        self,
        folder: Path,
        given: Task,
        base: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        runtime: Runtime | None = None,
        spec: SandboxSpec | None = None,
    ) -> None:
        self.folder, self.task, self.base = folder, given, dict(base or {})
        self.timeout_s = timeout_s
        self.runtime, self.spec = runtime or LocalRuntime(), spec
        self.opened = 0

    @contextlib.asynccontextmanager
    async def open_sandbox(self, files: Mapping[str, Content]) -> AsyncIterator[Sandbox]:
        """A numbered sandbox."""
        self.opened += 1
        async with self.runtime.open(self.folder / str(self.opened), self.spec) as sandbox:
            await sandbox.put(sandbox.workdir, self.base)
            await sandbox.put(sandbox.workdir, files)
            yield sandbox

    def outcome(self, files: Mapping[str, str | FileChange | None] | None = None) -> SessionOutcome:
        """The outcome of a session with this patch."""
        return SessionOutcome(
            self.task, make_patch(files or {}), self.open_sandbox, self.timeout_s, exit=DONE
        )

    async def __call__(
        self, evaluator: Evaluator, files: Mapping[str, str | FileChange | None] | None = None
    ) -> Verdict:
        """The verdict on a patch."""
        return await evaluator.evaluate(self.outcome(files))
