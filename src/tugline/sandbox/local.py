"""Run agents as plain processes of this machine: fast, nothing to install, little isolation.

Each program gets its own session, a clean environment (PATH, LANG, HOME, TMPDIR and the caller's
variables), no stdin, a log file and resource limits. It can read this user's files and use the
network: run only agents and tasks that you would run in your own shell. docs/runtimes.md lists what
is isolated and what is not.

Each program has a record, ``<mark>.started``, by which the next process ends its orphans if this
process is killed (`reap`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from tugline.aio import PausableTimeout, enforce_timeout, finish
from tugline.errors import SandboxError, UsageError
from tugline.sandbox import files, processes
from tugline.sandbox.base import Exit, SandboxSpec, refuse_fields
from tugline.sandbox.host import HostRuntime, HostSandbox
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.sandbox.processes import OutputLog, ProgramRecord
from tugline.schema import PositiveFloat, PositiveInt

_RECORD = ".started"


class LocalRuntime(HostRuntime):
    """Opens sandboxes that are folders, whose programs are children of this process.

    Limits of each process: `cpu_s` of processor time, `file_mb` of the largest file that it writes,
    and `open_files`. `output_mb` limits a log, `cache_gb` the cache of workspaces.
    """

    def __init__(
        self,
        *,
        cpu_s: PositiveInt = 3600,
        file_mb: PositiveInt = 512,
        open_files: PositiveInt = 4096,
        output_mb: PositiveInt = 64,
        cache_gb: PositiveFloat = 50.0,
    ) -> None:
        super().__init__(cache_gb)
        self.ulimits = f"ulimit -c 0; ulimit -t {cpu_s}; ulimit -f {file_mb * 2048}"
        # A lower limit that is already in force stays.
        self.ulimits += f'; ulimit -n {open_files} 2>/dev/null; exec "$@"'
        self.max_log_bytes = output_mb << 20

    async def _create(
        self, directory: Path, spec: SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> LocalSandbox:
        _check(spec)
        base = await self._prepare(spec.workspace, stack)
        workspace = OverlayWorkspace(directory, base, spec.files)
        return LocalSandbox(directory, workspace, self)

    def check_spec(self, spec: SandboxSpec) -> None:
        """Raise `UsageError` for fields of the workspace that this runtime does not support."""
        _check(spec)

    def reap(self, directory: Path) -> int:
        """End programs that a killed process left running in sandboxes under `directory`."""
        count = 0
        for path, record in processes.find_records(directory, _RECORD, ProgramRecord):
            count += processes.end_program(record)
            path.unlink(missing_ok=True)
        return count + super().reap(directory)

    def list_weaknesses(self) -> Sequence[str]:
        """Return the missing isolation, which docs/runtimes.md explains."""
        return (
            "all files of this user can be read and changed",
            "all processes of this user can be seen and killed",
            "the network is open",
            "memory and the number of processes are not limited",
        )


class LocalSandbox(HostSandbox):
    """A folder on this machine; see `tugline.sandbox.base.Sandbox`."""

    workdir: Path
    home: Path

    def __init__(self, directory: Path, workspace: OverlayWorkspace, runtime: LocalRuntime) -> None:
        self.workdir = workspace.work
        self.home = directory / "home"
        self._tmp = directory / "tmp"
        writable = (self.workdir, self.home, self._tmp)
        super().__init__(directory, workspace, {PurePosixPath(path): path for path in writable})
        self._runtime = runtime

    async def expose(self, url: str) -> str:
        """Return `url`: programs use this machine's network."""
        return url

    def read_folder_state(self) -> object:
        """Return a value that changes when its folders are changed or replaced."""
        state = []
        for folder in (self.workdir, self.home):
            stat = folder.lstat()
            state.append((stat.st_dev, stat.st_ino, stat.st_ctime_ns, sorted(folder.iterdir())))
        return state

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Run `argv` in the workdir; afterwards, also when cancelled, kill what it started."""
        began = time.monotonic()
        record = ProgramRecord(pid=0, start=None, mark=secrets.token_hex(16))
        await asyncio.to_thread(self._write_record, record)
        output = OutputLog(log, self._runtime.max_log_bytes)
        process: asyncio.subprocess.Process | None = None
        timed_out = False
        try:
            process = await self._spawn(argv, env, record.mark, output)
            record = ProgramRecord(process.pid, processes.start_time(process.pid), record.mark)
            await asyncio.to_thread(self._write_record, record)
            async with enforce_timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await finish(self._end(process, record, output))
        code = process.returncode if process and process.returncode is not None else 0
        return Exit(code, timed_out, time.monotonic() - began)

    async def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], mark: str, output: OutputLog
    ) -> asyncio.subprocess.Process:
        read, write = os.pipe()
        try:
            os.set_blocking(read, False)
            output.open(read)
            output.start()
            return await asyncio.create_subprocess_exec(
                *("sh", "-c", self._runtime.ulimits, "sh", *argv),
                cwd=self.workdir,
                env={**self._environment(), **env, processes.MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise SandboxError(f"cannot start {argv[0]!r} in {self.workdir}: {error}") from error
        finally:
            os.close(write)

    async def _end(
        self, process: asyncio.subprocess.Process | None, record: ProgramRecord, output: OutputLog
    ) -> None:
        """Kill the program, found by its mark if the start was cancelled (`process` is None)."""
        await asyncio.to_thread(processes.end_program, record)
        if process is not None:
            await process.wait()
        await output.finish()
        self._record_path(record).unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "/bin")])
        lang = os.environ.get("LANG", "C.UTF-8")
        return {"PATH": path, "LANG": lang, "HOME": str(self.home), "TMPDIR": str(self._tmp)}

    def _record_path(self, record: ProgramRecord) -> Path:
        return self._directory / f"{record.mark}{_RECORD}"

    def _write_record(self, record: ProgramRecord) -> None:
        """Write the record: before the start with only the mark, and again after the start."""
        files.replace_file(self._record_path(record), msgspec.json.encode(record))


def _check(spec: SandboxSpec) -> None:
    """Raise `UsageError` for fields and mounts that need an isolated sandbox."""
    other = {"image": "container", "build": "container", "path": "bubblewrap"}
    refuse_fields("local", spec.workspace, **other)
    for mount in spec.mounts:
        skipped = mount.optional and Path(mount.target).exists()
        if mount.source != mount.target and not skipped:
            what = mount.source or "a new folder"
            msg = f"runtime 'local' cannot mount {what} at {mount.target}; use 'bubblewrap'"
            raise UsageError(msg)
