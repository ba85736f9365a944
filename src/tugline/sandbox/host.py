"""Base classes of the built-in runtimes, which run programs on this machine.

A driver implements starting and killing its sandboxes. Everything else is here: folders, files,
diffs, port forwards, limits, shutdown, and the cache of workspaces.
"""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from tugline.aio import PausableTimeout, finish
from tugline.errors import SandboxError, TuglineError, UsageError
from tugline.patch import Patch
from tugline.sandbox import base, files
from tugline.sandbox.cache import Fill, WorkspaceCache
from tugline.sandbox.limits import (
    Cgroup,
    OomKills,
    ProgramLimits,
    SandboxCgroup,
    lower_priority,
    reap_cgroups,
    set_rlimits,
)
from tugline.sandbox.network import AllowList, PortForwards
from tugline.sandbox.overlay import OverlayWorkspace, unmount_all
from tugline.sandbox.patch import PatchLimits
from tugline.sandbox.repos import end_history
from tugline.sandbox.resource_monitor import ResourceMonitor, credit_waits
from tugline.sandbox.runner import Guard, Runner
from tugline.types import Cause, Workspace


class Layout(NamedTuple):
    """The files of an isolated sandbox, and their paths inside it."""

    directory: Path
    spec: base.SandboxSpec
    lower: Path | None
    """Read-only base of the workdir; None for an empty one."""
    workdir: PurePosixPath
    has: Callable[[str], bool]
    """Whether a path exists in the sandbox without mounts; optional mounts there are skipped."""


class HostSandbox(base.Sandbox):
    """A sandbox whose files and logs are in `directory` on this machine."""

    def __init__(
        self, directory: Path, workspace: OverlayWorkspace, folders: Mapping[PurePosixPath, Path]
    ) -> None:
        self.logs = directory / "logs"
        self._directory = directory
        self._workspace = workspace
        self._folders = dict(folders)
        """Writable folders on this machine, by their paths in the sandbox."""
        self._in_use = asyncio.Lock()

    async def start(self) -> None:
        """Create the sandbox's folders. Raises `SandboxError` if the workdir is not empty."""
        # Run to its end even if cancelled: the state after an interruption would be unknown.
        await finish(asyncio.to_thread(self._create))

    async def aclose(self) -> None:
        """End its programs and remove temporary files, also after a failed `start`."""
        try:
            await self._stop()
        finally:
            await asyncio.to_thread(self._clean_up)

    def release(self) -> None:
        """Drop what refers back to the closed sandbox: nodes may never collect cycles."""

    async def put(self, root: PurePath, contents: Mapping[str, base.Content]) -> None:
        """Write files under the workdir or the home."""
        folders = await self._locate(root)
        folder = folders.get(PurePosixPath(root))
        if folder is None:
            known = " or ".join(map(str, folders))
            raise UsageError(f"files can be written below {known}, not below {root}")
        await asyncio.to_thread(files.write_files, folder, contents)

    async def get(self, path: PurePath, *, max_bytes: int = base.MAX_READ_BYTES) -> bytes | None:
        """Read a regular file."""
        folders = await self._locate(path)
        for parent in path.parents:  # the innermost wins
            if (folder := folders.get(PurePosixPath(parent))) is not None:
                rest = str(path.relative_to(parent))
                return await asyncio.to_thread(files.read_file, folder, rest, max_bytes)
        raise UsageError(f"{path} is not below {' or '.join(map(str, folders))}")

    async def read_states(self, paths: Iterable[str]) -> dict[str, object]:
        """Return the contents of files with their inodes and times of change."""
        folder = (await self._locate(self.workdir))[PurePosixPath(self.workdir)]
        return await asyncio.to_thread(files.read_states, folder, paths)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Stop the sandbox and return what changed in the workdir."""
        async with self._in_use:
            await self._stop()
            return await asyncio.to_thread(self._workspace.diff, limits)

    async def _locate(self, path: PurePath) -> Mapping[PurePosixPath, Path]:
        """Return the writable folders' paths on this machine; `path` is to be in one of them."""
        return self._folders

    async def _stop(self) -> None:
        """End all programs and port forwards."""

    def _create(self) -> None:
        """Create the folders. Blocks."""
        self._workspace.make()
        self._mount_workspace()
        with files.translate_errors(f"cannot make {self._directory}"):
            for folder in (self.logs, *self._folders.values()):
                folder.mkdir(parents=True, exist_ok=True)

    def _mount_workspace(self) -> None:
        self._workspace.mount()

    def _clean_up(self) -> None:
        """Unmount the workspace and remove temporary files. Blocks."""
        self._workspace.unmount()


class IsolatedSandbox(HostSandbox):
    """A sandbox in namespaces of its own, whose process 1 is the shell of a `Runner`.

    The whole sandbox is killed when a program exceeds its timeout or its limits, and restarted
    with the same files for the next program.
    """

    home = base.HOME

    def __init__(
        self,
        layout: Layout,
        limits: ProgramLimits,
        allow: AllowList | None,
        cgroup_parent: Cgroup | None,
    ) -> None:
        """Create a sandbox of `layout`, without starting it.

        Without a `cgroup_parent` the driver enforces `limits` itself. Without an `allow` list the
        sandbox uses the host's network.
        """
        directory, spec, lower, workdir, has = layout
        workspace = OverlayWorkspace(directory, lower, spec.files)
        mounts = [mount for mount in spec.mounts if not (mount.optional and has(mount.target))]
        writable = [mount.target for mount in mounts if mount.source is None]
        folders = {
            PurePosixPath("/tmp"): directory / "tmp",  # noqa: S108 - the sandbox's own
            base.HOME: directory / "home",
            workdir: workspace.work,
            **{PurePosixPath(path): directory / f"mounts/{n}" for n, path in enumerate(writable)},
        }
        super().__init__(directory, workspace, folders)
        self.workdir: PurePosixPath = workdir
        self._read_only = {PurePosixPath(m.target): m.source for m in mounts if m.source}
        self._limits = limits
        self._allow = allow
        self._forwards = PortForwards(allow)
        self._monitor = ResourceMonitor(
            limits.disk_mb, self._writable_folders, self._count_oom_kills, self._kill
        )
        self._cgroup_parent = cgroup_parent
        self._own_cgroup = SandboxCgroup(cgroup_parent or Cgroup(), directory)
        self._cgroup = self._own_cgroup.group
        """Control group with the memory and processor accounting; its fields may be None."""
        self._limiting: asyncio.Future[None] | None = None
        """Task that sets the limits during the start: moving a process into a group is slow."""
        self._runner: Runner | None = None
        self._guard = Guard()
        """For drivers whose sandboxes would outlive this process."""
        self._pid = 0
        """Host's process id of the sandbox's process 1; 0 while it does not run."""
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Create the sandbox's folders and start it."""
        await super().start()
        await self._ensure_started()

    def release(self) -> None:
        """See `HostSandbox.release`."""
        self._monitor.close()
        self._runner = None

    async def expose(self, url: str) -> str:
        """Forward a port to the server at `url`, unless the sandbox uses the host's network."""
        await self._ensure_started()
        return url if self._allow is None else await self._forwards.add(self._pid, url)

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> base.Exit:
        """Run a program in the sandbox's shell, one at a time."""
        async with self._in_use:
            runner = await self._ensure_started()
            if self._limiting is not None:
                await asyncio.shield(self._limiting)
            program = partial(
                runner.run,
                argv,
                env={**self._forwards.env, **env},
                cwd=self.workdir,
                timeout_s=timeout_s,
                log=log,
            )
            async with credit_waits(self._cgroup, timeout_s):
                end = await self._run_monitored(program)
            if end.cause is Cause.AGENT_MEMORY:
                await self._stop()  # a full /dev/shm would also end the next program
            return end

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Stop the sandbox, drop its port forwards and return what changed in the workdir."""
        patch = await super().diff(limits)
        self._forwards = PortForwards(self._allow)
        return patch

    def _create(self) -> None:
        super()._create()
        self._directory.chmod(0o700)  # other users must not read the programs' environments
        self._own_cgroup.create(self._limits)

    def _clean_up(self) -> None:
        self._own_cgroup.remove()
        super()._clean_up()

    # ------------------------------------------------------------------ for the drivers
    @abstractmethod
    async def _start(self, runner: Runner) -> None:
        """Start the sandbox, set `_pid` and wait for its shell.

        `_kill_processes` must be able to kill a partly started sandbox, also after a cancellation.
        If the runner is not alive on return, `_start` is called again with a new one.
        """

    @abstractmethod
    async def _kill_processes(self) -> None:
        """Kill all processes of the sandbox, if it was started; return when none is left."""

    async def _run_monitored(self, program: Callable[[], Awaitable[base.Exit]]) -> base.Exit:
        return await self._monitor.run(program, self._pid)

    def _writable_folders(self) -> list[Path]:
        """Return the folders that count for the disk limit; of an overlay, its upper layer."""
        work = self._workspace.work
        return [self._workspace.own, *(path for path in self._folders.values() if path != work)]

    # ------------------------------------------------------------------ starting and stopping
    async def _ensure_started(self) -> Runner:
        async with self._starting:
            while self._runner is None or not self._runner.alive:
                await self._end()
                max_log_bytes = self._limits.output_mb << 20
                runner = Runner(self._directory / "control", self._kill, max_log_bytes)
                self._runner = runner
                await finish(asyncio.to_thread(runner.prepare))
                await self._start(runner)
                if not runner.alive:
                    continue
                if self._cgroup_parent is not None:
                    limiting = asyncio.to_thread(self._apply_limits, self._cgroup_parent)
                    self._limiting = asyncio.ensure_future(limiting)
                await self._forwards.move(self._pid)
            return self._runner

    def _count_oom_kills(self) -> OomKills:
        return self._cgroup.count_oom_kills()

    def _apply_limits(self, cgroup_parent: Cgroup) -> None:
        set_rlimits(self._pid, self._limits, cgroup_parent)
        lower_priority(self._pid)
        self._own_cgroup.add(self._pid)

    async def _kill(self, runner: Runner | None = None) -> None:
        """Kill the sandbox's processes, unless a runner other than `runner` was started since."""
        async with self._starting:
            if runner in {None, self._runner}:
                await self._kill_processes()

    async def _stop(self) -> None:
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        limiting = self._limiting
        self._limiting = None
        if limiting is not None:
            # Wait before the kill, after which the pid may be another process's.
            await asyncio.wait([limiting])
            limiting.exception()  # marked as retrieved: `run` raises it
        await self._kill_processes()
        await self._forwards.aclose()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._pid = 0


class HostRuntime(base.Runtime):
    """Opens sandboxes with workspaces from a cache of at most `cache_gb`."""

    def __init__(self, cache_gb: float) -> None:
        self._cache = WorkspaceCache(max_gb=cache_gb)

    def reap(self, directory: Path) -> int:
        """Remove the control groups and mounts that a killed process left under `directory`."""
        return reap_cgroups(directory) + unmount_all(directory)

    def check_available(self) -> str | None:
        """Return the error of `inspect`; None if it succeeds."""
        try:
            self.inspect()
        except SandboxError as error:
            return str(error)
        return None

    def inspect(self) -> Any:
        """Detect what the driver needs to know of this machine. Blocks. Raises `SandboxError`."""
        return None

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: base.SandboxSpec | None = None
    ) -> AsyncIterator[HostSandbox]:
        """Open a sandbox under `directory`; close it on exit, also when cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await self._create(Path.cwd() / directory, spec or base.SandboxSpec(), stack)
            try:
                await sandbox.start()
                yield sandbox
            finally:
                try:
                    await finish(sandbox.aclose())
                finally:
                    sandbox.release()

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Fill the caches; return the error of each workspace that failed."""
        errors = []
        for workspace in dict.fromkeys(workspaces):
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await self._prepare(workspace, stack)
            except TuglineError as error:
                errors.append(str(error))
        return errors

    @abstractmethod
    async def _create(
        self, directory: Path, spec: base.SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> HostSandbox:
        """Check `spec`, prepare its workspace and return a sandbox that is not started yet."""

    async def _prepare(self, workspace: Workspace, stack: contextlib.AsyncExitStack) -> Any:
        """Open the base of a workspace until `stack` is closed: a folder, by default."""
        return await stack.enter_async_context(self._cache.open(workspace))

    async def _hold_copy(
        self, stack: contextlib.AsyncExitStack, key: str, copy: Fill, commit: str | None, what: str
    ) -> Path:
        """Open a cached copy of an image's folder; with a `commit`, see `end_history`."""

        async def fill(into: Path) -> None:
            await copy(into)
            if commit is not None:
                await end_history(into, commit, what)

        return await stack.enter_async_context(self._cache.entry(key, fill, what))


def resolve_workdir(workspace: Workspace, default: PurePosixPath = base.WORKDIR) -> PurePosixPath:
    """Return the workspace's path in the sandbox. Raises `UsageError` for an unusable path."""
    workdir = PurePosixPath(workspace.path) if workspace.path else default
    usable = workdir.is_absolute() and ".." not in workdir.parts
    if not usable or workdir in {base.HOME, *base.HOME.parents}:
        msg = f"workspace.path is {str(workdir)!r}, must be an absolute folder, not {base.HOME}"
        raise UsageError(msg)
    return workdir
