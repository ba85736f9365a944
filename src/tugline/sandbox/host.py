"""Base classes of the built-in runtimes, which run programs on this machine.

A driver says how its sandboxes are started and killed. Everything else is here: folders, files,
diffs, port forwards, limits, the order of shutting down, and the cache of workspaces.
"""

import asyncio
import contextlib
import subprocess
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from tugline.errors import SandboxError, TuglineError, UsageError
from tugline.sandbox import base, files
from tugline.sandbox.cache import Fill, WorkspaceCache
from tugline.sandbox.limits import (
    Cgroup,
    OomKills,
    ProgramLimits,
    SandboxCgroup,
    is_starved,
    reap_cgroups,
    set_rlimits,
)
from tugline.sandbox.network import AllowList, PortForwards
from tugline.sandbox.overlay import OverlayWorkspace, unmount_all
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.processes import finish
from tugline.sandbox.repos import end_history
from tugline.sandbox.resource_monitor import ResourceMonitor
from tugline.sandbox.runner import Guard, Runner
from tugline.types import Cause, Workspace

_PROBE_S = 20.0


class Layout(NamedTuple):
    """The files of an isolated sandbox, and where its programs see them."""

    directory: Path
    spec: base.SandboxSpec
    lower: Path | None
    """The base of the workdir, which is not changed."""
    workdir: PurePosixPath
    has: Callable[[str], bool]
    """Whether its system has a path, where an optional mount is left out."""


class HostSandbox(base.Sandbox):
    """A sandbox whose files and logs are in `directory` on this machine."""

    def __init__(
        self, directory: Path, workspace: OverlayWorkspace, folders: Mapping[PurePosixPath, Path]
    ) -> None:
        self.logs = directory / "logs"
        self._directory = directory
        self._workspace = workspace
        self._folders = dict(folders)
        """Writable folders on this machine, by where programs see them."""
        self._in_use = asyncio.Lock()

    async def start(self) -> None:
        """Create its folders; a workdir with something in it is an error, not a head start."""
        # To its end also when cancelled: who gives up half-way cannot know what is there.
        await finish(asyncio.to_thread(self._create))

    async def aclose(self) -> None:
        """End its programs and remove what nobody reads any more; also after a failed `start`."""
        try:
            await self._stop()
        finally:
            await asyncio.to_thread(self._clean_up)

    async def put(self, root: PurePath, contents: Mapping[str, base.Content]) -> None:
        """Write files under the workdir or the home."""
        folders = await self._locate(root)
        folder = folders.get(PurePosixPath(root))
        if folder is None:
            known = " or ".join(map(str, folders))
            raise UsageError(f"files are put under {known}, not under {root}")
        await asyncio.to_thread(files.write_files, folder, contents)

    async def get(self, path: PurePath, *, max_bytes: int = base.MAX_READ_BYTES) -> bytes | None:
        """Read a regular file."""
        folders = await self._locate(path)
        for parent in path.parents:  # the innermost wins
            if (folder := folders.get(PurePosixPath(parent))) is not None:
                rest = str(path.relative_to(parent))
                return await asyncio.to_thread(files.read_file, folder, rest, max_bytes)
        raise UsageError(f"{path} is not below {' or '.join(map(str, folders))}")

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Stop the sandbox and return what changed in the workdir."""
        async with self._in_use:
            await self._stop()
            return await asyncio.to_thread(self._workspace.diff, limits)

    async def _locate(self, path: PurePath) -> Mapping[PurePosixPath, Path]:
        """Return the writable folders as they can be used from here; `path` is in one of them."""
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
        """Unmount and remove what nobody reads any more. Blocks."""
        self._workspace.unmount()


class IsolatedSandbox(HostSandbox):
    """A sandbox in namespaces of its own, whose process 1 is the shell of a `Runner`.

    It is killed as a whole when a program outlives its timeout or its limits, and started again
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
        """Without a `cgroup_parent` the driver enforces `limits` itself.

        Without an `allow` list the network is this machine's.
        """
        directory, spec, lower, workdir, has = layout
        workspace = OverlayWorkspace(directory, lower, spec.files)
        mounts = [one for one in spec.mounts if not (one.optional and has(one.target))]
        writable = [mount.target for mount in mounts if mount.source is None]
        folders = {
            PurePosixPath("/tmp"): directory / "tmp",  # noqa: S108 - its own
            base.HOME: directory / "home",
            workdir: workspace.work,
            **{PurePosixPath(to): directory / "mounts" / str(n) for n, to in enumerate(writable)},
        }
        super().__init__(directory, workspace, folders)
        self.workdir: PurePosixPath = workdir
        self._read_only = {PurePosixPath(one.target): one.source for one in mounts if one.source}
        self._limits = limits
        self._allow = allow
        self._forwards = PortForwards(allow)
        self._monitor = ResourceMonitor(
            limits.disk_mb, self._writable_folders, self._count_oom_kills, self._kill
        )
        self._cgroup_parent = cgroup_parent
        self._own_cgroup = SandboxCgroup(cgroup_parent or Cgroup(), directory)
        self._cgroup = self._own_cgroup.group
        """Where the kernel counts its memory, if anywhere."""
        self._cpu_time = (0.0, 0.0)
        """As it was before its processes were killed."""
        self._limiting: asyncio.Future[None] | None = None
        """Limits are set beside the start, because the kernel takes its time for a group."""
        self._runner: Runner | None = None
        self._guard = Guard()
        """For drivers whose sandboxes do not die with this process by themselves."""
        self._pid = 0
        """Its process 1, as this machine counts."""
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Create its folders and start it."""
        await super().start()
        await self._ensure_started()

    async def expose(self, url: str) -> str:
        """Forward a port to the server at `url`, unless the network is this machine's."""
        await self._ensure_started()
        return url if self._allow is None else await self._forwards.add(self._pid, url)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | base.PausableTimeout,
        log_name: str = "agent",
    ) -> base.Exit:
        """Run a program by the sandbox's shell, one at a time."""
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
                log=self.logs / f"{log_name}.log",
            )
            began_s, _ = await asyncio.to_thread(self._cgroup.read_cpu_time)
            end = await self._run_monitored(program)
            if end.timed_out:
                used_s, waited_s = self._cpu_time
                starved = is_starved(used_s - began_s, waited_s, end.seconds)
                end = msgspec.structs.replace(end, starved=starved)
            if end.cause is Cause.AGENT_MEMORY:
                await self._stop()  # with its /dev/shm, which would end the next program, too
            return end

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Stop the sandbox, forget its port forwards and return what changed in the workdir."""
        patch = await super().diff(limits)
        self._forwards = PortForwards(self._allow)
        return patch

    def _create(self) -> None:
        super()._create()
        self._directory.chmod(0o700)  # what programs are given is nobody else's business
        self._own_cgroup.create(self._limits)

    def _clean_up(self) -> None:
        self._own_cgroup.remove()
        super()._clean_up()

    # ------------------------------------------------------------------ for the drivers
    @abstractmethod
    async def _start(self, runner: Runner) -> None:
        """Start the sandbox, set `_pid` and wait for its shell.

        Whatever was begun must be found by `_kill_processes`, also if this is cancelled. A runner
        that is not alive on return is not used; this is called again with another one.
        """

    @abstractmethod
    async def _kill_processes(self) -> None:
        """Kill everything in the sandbox, if it was started; return when nothing is left."""

    async def _run_monitored(self, program: Callable[[], Awaitable[base.Exit]]) -> base.Exit:
        return await self._monitor.run(program, self._pid)

    def _writable_folders(self) -> list[Path]:
        """Folders that count for its disk limit; the workspace by its own layer."""
        work = self._workspace.work
        return [self._workspace.own, *(one for one in self._folders.values() if one != work)]

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
        self._own_cgroup.add(self._pid)

    async def _kill(self, runner: Runner | None = None) -> None:
        """Kill what is in it, unless another one than `runner` has been started by now."""
        async with self._starting:
            if runner in {None, self._runner}:
                self._cpu_time = await asyncio.to_thread(self._cgroup.read_cpu_time)
                await self._kill_processes()

    async def _stop(self) -> None:
        async with self._starting:
            await self._end()

    async def _end(self) -> None:
        limiting, self._limiting = self._limiting, None
        if limiting is not None:
            # Before the kill: a number that is free again may be another process's.
            await asyncio.wait([limiting])
            limiting.exception()  # a program that would have run has raised it
        await self._kill_processes()
        await self._forwards.aclose()
        if self._runner is not None:
            self._runner.close()
        self._runner, self._pid = None, 0


class HostRuntime(base.Runtime):
    """Opens sandboxes over workspaces from a cache of at most `cache_gb`."""

    def __init__(self, cache_gb: float) -> None:
        self._cache = WorkspaceCache(max_gb=cache_gb)

    def reap(self, directory: Path) -> int:
        """Remove the control groups and mounts that a killed process left under `directory`."""
        return reap_cgroups(directory) + unmount_all(directory)

    def check_available(self) -> str | None:
        """Return why `inspect` fails, if it does."""
        try:
            self.inspect()
        except SandboxError as error:
            return str(error)
        return None

    def inspect(self) -> Any:
        """Find out what this machine offers, if that matters. Blocks. Raises `SandboxError`."""
        return None

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: base.SandboxSpec | None = None
    ) -> AsyncIterator[HostSandbox]:
        """Open a sandbox under `directory` and close it on leaving, also when cancelled."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await self._create(Path.cwd() / directory, spec or base.SandboxSpec(), stack)
            try:
                await sandbox.start()
                yield sandbox
            finally:
                await finish(sandbox.aclose())

    async def prefetch(self, workspaces: Iterable[Workspace]) -> list[str]:
        """Fill the caches; return the errors of those that failed."""
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
        """Hold on `stack` what a workspace begins with: its base folder, by default."""
        return await stack.enter_async_context(self._cache.open(workspace))

    async def _hold_copy(
        self, stack: contextlib.AsyncExitStack, key: str, copy: Fill, commit: str | None, what: str
    ) -> Path:
        """Hold a folder out of an image, whose repository ends at `commit` if there is one."""

        async def fill(into: Path) -> None:
            await copy(into)
            if commit is not None:
                await end_history(into, commit, what)

        return await stack.enter_async_context(self._cache.entry(key, fill, what))


def try_command(argv: Sequence[str]) -> str:
    """Return what a command says that fails; nothing if it works. Blocks."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    output = done.stderr.decode(errors="replace").strip()[-300:]
    return (output or f"exit status {done.returncode}") if done.returncode else ""


def resolve_workdir(workspace: Workspace, default: PurePosixPath = base.WORKDIR) -> PurePosixPath:
    """Return where programs see the workspace. Raises `UsageError` for an unusable path."""
    workdir = PurePosixPath(workspace.path) if workspace.path else default
    if (
        not workdir.is_absolute()
        or ".." in workdir.parts
        or workdir in {base.HOME, *base.HOME.parents}
    ):
        msg = f"workspace.path is {str(workdir)!r}, must be an absolute folder, not {base.HOME}"
        raise UsageError(msg)
    return workdir
