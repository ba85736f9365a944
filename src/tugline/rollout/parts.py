"""Plug-ins and sandboxes of sessions.

A plug-in instance is created once for each name and options and shared by all sessions that use it
at the same time, so that a harness is installed once and an evaluator can cache verdicts.

The first sandboxes of an evaluation are prewarmed: opened empty while the agent runs, and filled
when the evaluator opens them. With a runtime that does not isolate sessions, an agent could write
to them, so a prewarmed sandbox that has changed is not used.
"""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from tugline import log
from tugline.errors import Invalid, SandboxError, TuglineError, UnknownPlugin, UsageError
from tugline.evaluators.base import Evaluator
from tugline.harnesses.base import Harness
from tugline.plugins import make, pack_options
from tugline.sandbox.base import Content, Mount, Runtime, Sandbox, SandboxSpec
from tugline.traces.base import Builder
from tugline.types import PluginSpec, Task

_log = log.get("node")
LOG_TAIL = 400
"""Characters of a program's output that a failure shows."""
_MAX_KEPT = 128
"""Number of instances that are kept; those in use may be more."""
_MAX_KEPT_BYTES = 4 << 20
"""Size of their options."""
P = TypeVar("P")


class Parts:
    """Plug-in instances by kind, name and options; tasks cannot name other classes.

    All sessions that use an instance at the same time share it. Beyond that, the last ones are
    kept, in a bounded amount: options hold the tests of tasks.

    Methods except `check` raise `UnknownPlugin` or `ConfigError` if creating a plug-in fails.
    """

    def __init__(self) -> None:
        self._in_use: WeakValueDictionary[bytes, Any] = WeakValueDictionary()
        self._recent: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        """Instances and the sizes of their options, the last one used at the end."""
        self._reported: set[str] = set()
        self._reporting = asyncio.Lock()

    def check(self, task: Task) -> None:
        """Create all plug-ins of `task`. Raises one `Invalid` for all that fail."""
        problems: list[Invalid] = []
        for kind in ("harness", "runtime", "evaluator", "builder"):
            try:
                getattr(self, kind)(getattr(task, kind))
            except UsageError as error:
                field = "name" if isinstance(error, UnknownPlugin) else "options"
                problems.append(Invalid(str(error), field=f"{kind}.{field}"))
        if not any(each.field.startswith("runtime") for each in problems):
            try:
                self.runtime(task.runtime).check_spec(SandboxSpec(workspace=task.workspace))
            except UsageError as error:
                problems.append(Invalid(str(error), field="workspace"))
        if problems:
            raise Invalid.combine(problems)

    def harness(self, spec: PluginSpec) -> Harness:
        """Return the harness of `spec`."""
        return self._make("harness", spec, Harness)

    def runtime(self, spec: PluginSpec) -> Runtime:
        """Return the runtime of `spec`."""
        return self._make("runtime", spec, Runtime)

    def evaluator(self, spec: PluginSpec) -> Evaluator:
        """Return the evaluator of `spec`."""
        return self._make("evaluator", spec, Evaluator)

    def builder(self, spec: PluginSpec) -> Builder:
        """Return the builder of `spec`."""
        return self._make("builder", spec, Builder)

    def check_available(self, tasks: Iterable[Task]) -> None:
        """Raise `UsageError` if the runtime of a task cannot be used on this machine. May block."""
        used = {self.runtime(task.runtime): task.runtime.name for task in tasks}
        for runtime, name in used.items():
            reason = runtime.check_available()
            if reason is not None:
                raise UsageError(f"runtime {name!r} cannot be used here: {reason}")

    def describe_weaknesses(self, spec: PluginSpec) -> str:
        """Return the gaps of a runtime's isolation on this machine as one line. May block."""
        return "; ".join(self.runtime(spec).list_weaknesses())

    async def report_weaknesses(self, spec: PluginSpec) -> None:
        """Log once, as one line, the gaps of a runtime's isolation on this machine."""
        async with self._reporting:
            if spec.name in self._reported:
                return
            try:
                gaps = await asyncio.to_thread(self.describe_weaknesses, spec)
            except TuglineError as error:  # opening a sandbox will raise it again
                _log.info("runtime cannot be inspected", runtime=spec.name, error=str(error))
                return
            self._reported.add(spec.name)
            if gaps:  # they are those of the machine: the line names no session
                about = {"runtime": spec.name, "weaknesses": gaps}
                Context().run(_log.warning, "agents are not fully isolated", **about)

    def _make(self, kind: str, spec: PluginSpec, contract: type[P]) -> P:
        options = pack_options(f"{kind} {spec.name!r}: options", spec.options)
        key = hashlib.sha256(f"{kind}\0{spec.name}\0".encode() + options).digest()
        instance: P | None = self._in_use.get(key)
        if instance is None:
            instance = self._in_use[key] = make(kind, spec, contract)
        self._recent[key] = instance, len(options)
        self._recent.move_to_end(key)
        while len(self._recent) > _MAX_KEPT or (
            len(self._recent) > 1 and self._kept_bytes > _MAX_KEPT_BYTES
        ):
            self._recent.popitem(last=False)
        return instance

    @property
    def _kept_bytes(self) -> int:
        return sum(size for _, size in self._recent.values())


# --------------------------------------------------------------------------- sandboxes
class TaskSandboxes:
    """Opens the sandboxes of one session of `task` below `directory`."""

    def __init__(self, task: Task, directory: Path, parts: Parts) -> None:
        self._task = task
        self._directory = directory
        self._runtime = parts.runtime(task.runtime)
        self._evaluator = parts.evaluator(task.evaluator)
        self._evaluations = 0

    def open_agent(self, mounts: tuple[Mount, ...]) -> AbstractAsyncContextManager[Sandbox]:
        """Open the agent's sandbox, with the task's files, `mounts` and the evaluator's mounts."""
        mounts += self._evaluator.agent_mounts(self._task)
        spec = SandboxSpec(workspace=self._task.workspace, files=self._task.files, mounts=mounts)
        return self._runtime.open(self._directory / "agent", spec)

    def open_evaluation(self) -> AbstractAsyncContextManager[Sandbox]:
        """Open a new sandbox for the evaluator, without the task's files."""
        self._evaluations += 1
        mounts = self._evaluator.mounts(self._task)
        spec = SandboxSpec(workspace=self._task.workspace, mounts=mounts)
        return self._runtime.open(self._directory / f"eval-{self._evaluations}", spec)


class PrewarmedSandboxes:
    """Opens sandboxes by `open_sandbox`; `prepare` opens the first ones in advance."""

    def __init__(self, open_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._open_sandbox = open_sandbox
        self._prepared: deque[_Prepared] = deque()

    def prepare(self, count: int) -> None:
        """Start tasks that open `count` sandboxes."""
        self._prepared.extend(_Prepared(self._open_sandbox) for _ in range(count))

    @contextlib.asynccontextmanager
    async def open(self, files: Mapping[str, Content]) -> AsyncIterator[Sandbox]:
        """Open a sandbox with `files`: a prewarmed one that is unchanged, or a new one."""
        prepared = self._prepared.popleft() if self._prepared else None
        try:
            sandbox = await prepared.take() if prepared is not None else None
            opening = self._open_sandbox() if sandbox is None else contextlib.nullcontext(sandbox)
            async with opening as opened:
                await opened.put(opened.workdir, files)
                yield opened
        finally:
            if prepared is not None:
                await prepared.aclose()

    async def aclose(self) -> None:
        """Close the prewarmed sandboxes that were not used."""
        while self._prepared:
            await self._prepared.popleft().aclose()


class _Prepared:
    """A sandbox that a task opens and holds."""

    def __init__(self, open_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._open_sandbox = open_sandbox
        self._ready: asyncio.Future[tuple[Sandbox, object]]
        self._ready = asyncio.get_running_loop().create_future()
        # Retrieve the exception: asyncio warns about one that is never retrieved.
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._release = asyncio.Event()
        self._holder = asyncio.create_task(self._hold())

    async def take(self) -> Sandbox | None:
        """Return the sandbox; None if it could not be opened or has changed since."""
        try:
            sandbox, opened = await asyncio.shield(self._ready)
        except (SandboxError, OSError, TimeoutError) as error:
            _log.info("no prewarmed sandbox", error=str(error))
            return None
        if await asyncio.to_thread(sandbox.read_folder_state) != opened:
            _log.warning("prewarmed sandbox changed before its use", workdir=str(sandbox.workdir))
            return None
        return sandbox

    async def aclose(self) -> None:
        """Close the sandbox."""
        self._release.set()
        if not self._ready.done():
            self._holder.cancel()
        await asyncio.wait({self._holder})
        # Both refer to an error, and its frames to this object.
        del self._holder
        del self._ready

    async def _hold(self) -> None:
        # An asynchronous context manager must be entered and exited by the same task.
        try:
            async with self._open_sandbox() as sandbox:
                state = await asyncio.to_thread(sandbox.read_folder_state)
                self._ready.set_result((sandbox, state))
                await self._release.wait()
        except Exception as error:  # noqa: BLE001 - raised by `open`, through `ready`
            if self._ready.done():
                _log.warning("prewarmed sandbox not closed", traceback=log.describe_error(error))
            else:
                self._ready.set_exception(error)
