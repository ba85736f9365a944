"""Run agents as plain processes of this machine: quick, nothing to install, little isolation.

Each program gets its own session, a clean environment (PATH, LANG, HOME, TMPDIR and what it is
given), no stdin, a log file and resource limits. It can read what this user can read and reach the
network: use it for agents and tasks you would run in your own shell. docs/runtimes.md says what is
kept apart and what is not.

Invariant I3 in small: what was started is written to ``<mark>.started`` before it is waited for, so
that after ``kill -9`` of this process the next one ends the orphans (`reap`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

import msgspec

from tugline.errors import ConfigError, SandboxError, UsageError
from tugline.sandbox import files as beneath
from tugline.sandbox.base import MAX_READ_BYTES, Content, Exit, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.exec.output import MOST_MB, Output
from tugline.sandbox.exec.processes import MARK, Started, end, finish, records, start_time
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.pausable_timeout import PausableTimeout, enforce_timeout
from tugline.sandbox.workspace.cache import WorkspaceCache
from tugline.sandbox.workspace.mounts import unmount_all
from tugline.sandbox.workspace.overlay import OverlayWorkspace

_RECORD = ".started"
_ENDERS = 32


class Local(Runtime):
    """Boxes that are folders, programs that are children of this process.

    `cpu_s` is processor time of each single process, `file_mb` the largest file it may write,
    `open_files` how many it may hold open, `output_mb` the largest log. `grace_s` lies between
    SIGTERM and SIGKILL; `bases_gb` bounds the cache of workspaces.
    """

    def __init__(
        self,
        *,
        cpu_s: int = 3600,
        file_mb: int = 512,
        open_files: int = 4096,
        grace_s: float = 2.0,
        output_mb: int = MOST_MB,
        bases_gb: float = 50.0,
    ) -> None:
        given = {"cpu_s": cpu_s, "file_mb": file_mb, "open_files": open_files}
        for name, value in (given | {"output_mb": output_mb}).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"runtime 'local': {name} is {value!r}, must be a whole number from 1"
                raise ConfigError(msg)
        self._limits = f"ulimit -c 0; ulimit -t {cpu_s}; ulimit -f {file_mb * 2048}"
        # A lower limit than asked for may already be in force; that one stays then.
        self._limits += f'; ulimit -n {open_files} 2>/dev/null; exec "$@"'
        self._grace_s = grace_s
        self._most = output_mb << 20
        self._bases = WorkspaceCache(most_gb=bases_gb)
        # Many agents may ignore SIGTERM at once; nothing else must wait for a thread meanwhile.
        self._enders = ThreadPoolExecutor(_ENDERS, thread_name_prefix="tugline-end")

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[LocalSandbox]:
        """A box under `directory` with its files in its workdir; leaving it deletes nothing."""
        spec = spec or SandboxSpec()
        _check(spec)
        async with self._bases.open(spec.workspace) as base:
            layer = OverlayWorkspace(Path.cwd() / directory, base, spec.files, spec.snapshot)
            box = LocalSandbox(
                Path.cwd() / directory, layer, self._limits, self._grace_s, self._enders, self._most
            )
            try:
                await finish(asyncio.create_task(asyncio.to_thread(box.make)))
                yield box
            finally:
                await finish(asyncio.create_task(asyncio.to_thread(layer.unmount)))

    def reap(self, directory: Path) -> int:
        """End what a killed process left running in boxes under `directory`."""
        count = 0
        for record in records(directory, _RECORD):
            with contextlib.suppress(msgspec.DecodeError):
                count += end(msgspec.json.decode(record.read_bytes(), type=Started), grace_s=0.0)
                record.unlink(missing_ok=True)
        return count + unmount_all(directory)

    def check_available(self) -> str | None:
        """Nothing: there is always this machine."""
        return None

    def list_weaknesses(self) -> Sequence[str]:
        """What docs/runtimes.md says at length."""
        return (
            "files of this user can be read and changed",
            "processes of this user can be seen and ended",
            "the network is open",
            "memory and the number of processes have no bound",
        )


class LocalSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    workdir: Path
    home: Path

    def __init__(
        self,
        directory: Path,
        layer: OverlayWorkspace,
        limits: str,
        grace_s: float,
        enders: ThreadPoolExecutor,
        most: int,
    ) -> None:
        self.workdir = layer.work
        self.home = directory / "home"
        self.logs = directory / "logs"
        self._tmp = directory / "tmp"
        self._directory = directory
        self._workspace = layer
        self._limits = limits
        self._grace_s = grace_s
        self._enders = enders
        self._most = most

    def make(self) -> None:
        """Make the folders; a workdir with something in it is an error, not a head start."""
        with beneath.faults(f"cannot make {self._directory}"):
            for folder in (self.home, self.logs, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
        self._workspace.make()
        self._workspace.mount()

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Put `files` under `root`."""
        await asyncio.to_thread(beneath.put, Path(root), files)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """A regular file's bytes."""
        own = {PurePosixPath(root): root for root in (self.workdir, self.home)}
        folder, below = beneath.placed(path, own)
        return await asyncio.to_thread(beneath.get, folder, below, max_bytes)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """What differs from what it was opened with."""
        return await asyncio.to_thread(self._workspace.diff, limits)

    async def snapshot(self, to: Path) -> None:
        """Copy what was done to the workdir."""
        await asyncio.to_thread(self._workspace.snapshot, to)

    async def expose(self, url: str) -> str:
        """The same: this machine's network is the programs' own."""
        return url

    def read_folder_state(self) -> object:
        """What cannot stay the same when its folders are changed or replaced."""
        found = []
        for folder in (self.workdir, self.home):
            stat = folder.lstat()
            found.append((stat.st_dev, stat.st_ino, stat.st_ctime_ns, sorted(folder.iterdir())))
        return found

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run `argv` in the workdir; on timeout, cancellation or its end, all of it is ended."""
        began = time.monotonic()
        started = Started(pid=0, start=None, mark=secrets.token_hex(16))
        await asyncio.to_thread(self._remember, started)
        output = Output(self.logs / f"{log_name}.log", self._most)
        process: asyncio.subprocess.Process | None = None
        timed_out = False
        try:
            process = await self._spawn(argv, env, started.mark, output)
            started = Started(process.pid, start_time(process.pid), started.mark)
            await asyncio.to_thread(self._remember, started)
            async with enforce_timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await finish(asyncio.create_task(self._end(process, started, output)))
        code = process.returncode if process and process.returncode is not None else 0
        return Exit(code, timed_out, time.monotonic() - began)

    async def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], mark: str, output: Output
    ) -> asyncio.subprocess.Process:
        read, write = os.pipe()
        try:
            os.set_blocking(read, False)
            output.open(read)
            output.follow()
            return await asyncio.create_subprocess_exec(
                *("sh", "-c", self._limits, "sh", *argv),
                cwd=self.workdir,
                env={**self._environment(), **env, MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            msg = f"cannot start {argv[0]!r} in {self.workdir}: {error}"
            raise SandboxError(msg) from error
        finally:
            os.close(write)

    async def _end(
        self, process: asyncio.subprocess.Process | None, started: Started, output: Output
    ) -> None:
        """Without a process, cancelled while it was being made, the mark finds what there is."""
        ending = partial(end, started, grace_s=self._grace_s)
        await asyncio.get_running_loop().run_in_executor(self._enders, ending)
        if process is not None:
            await process.wait()
        await output.finish()
        self._record(started).unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "/bin")])
        lang = os.environ.get("LANG", "C.UTF-8")
        return {"PATH": path, "LANG": lang, "HOME": str(self.home), "TMPDIR": str(self._tmp)}

    def _record(self, started: Started) -> Path:
        return self._directory / f"{started.mark}{_RECORD}"

    def _remember(self, started: Started) -> None:
        """Once before the program starts, by its mark alone, and once after."""
        record = self._record(started)
        part = record.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(started))
            part.replace(record)
        except OSError as error:
            msg = f"cannot write {record}: {error.strerror}"
            raise SandboxError(msg) from error


def _check(spec: SandboxSpec) -> None:
    """Raises `UsageError` for what only a sandbox can give."""
    workspace = spec.workspace
    for name in ("image", "build", "path"):
        value = getattr(workspace, name)
        if value is not None:
            other = "container" if name != "path" else "bubblewrap"
            msg = f"runtime 'local' cannot give workspace.{name} ({value!r}); take {other!r}"
            raise UsageError(msg)
    for mount in spec.mounts:
        there = mount.optional and Path(mount.target).exists()
        if mount.source != mount.target and not there:
            what = mount.source or "a folder of its own"
            msg = f"runtime 'local' cannot show {what} at {mount.target}; take 'bubblewrap'"
            raise UsageError(msg)
