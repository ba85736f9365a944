"""Start programs, copy their output to a log, and kill every process that they left behind.

A process group does not contain all of them: an agent's shell tool starts commands in sessions of
their own. So every program also has a random mark in its environment, which its children inherit.
A mark is never reused, so a process with a recycled pid is never killed; a group is only trusted
while its leader is the process that was started. A process that clears its environment *and* leaves
its session escapes; see docs/runtimes.md.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from tugline import log
from tugline.errors import DiskFull, SandboxError

_PROBE_S = 20.0
T = TypeVar("T")

MARK = "TUGLINE_SANDBOX"
"""Name of the environment variable that holds the mark."""

_CHUNK = 1 << 16
_CHUNKS_PER_COPY = 16
_WIDE_PIPE = 1 << 20
_DISCARD_PAUSE_S = 0.005
_EXEC_LOOKS = 50
_EXEC_PAUSE_S = 0.002
_KILL_S = 2.0
_KILL_PAUSE_S = 0.01
_HANG_S = 60.0
_KERNEL_PID = 2
"""Parent of the kernel's own threads, which have no environment."""


class ProgramRecord(msgspec.Struct, frozen=True):
    """Record of a program on disk, by which a later process can kill it."""

    pid: int
    """Process id, also of its process group and session; 0 while it is being started."""
    start: float | None
    """See `start_time`."""
    mark: str


class ChildProcess:
    """A running program whose exit completes the future `ended`.

    Create it on the event loop's thread: a sandbox with ``--die-with-parent`` dies with the thread
    that started it.
    """

    def __init__(self, argv: Sequence[str], *, descriptors: Sequence[int] = ()) -> None:
        """Start a program with no stdin; `read_output` reads its output. Raises `OSError`."""
        self._output = os.memfd_create("output")
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._output)
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=descriptors,
                start_new_session=True,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pid = self._process.pid
            self._pidfd = os.pidfd_open(self.pid)  # there may be too many open files
            undo.pop_all()
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._pidfd, self._on_exit, loop)

    async def end(self) -> None:
        """Kill the program if it still runs, and drop its output; `SandboxError` if it hangs."""
        self._process.kill()
        _, hanging = await asyncio.wait([self.ended], timeout=_HANG_S)
        if hanging:
            raise SandboxError(f"the sandbox of process {self.pid} cannot be killed")
        os.close(self._output)

    def read_output(self) -> str:
        """Return the last 500 bytes of its output."""
        size = os.fstat(self._output).st_size
        return os.pread(self._output, 500, max(0, size - 500)).decode(errors="replace").strip()

    def _on_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(self._process.wait())


class OutputLog:
    """Appends the output of a pipe to the file `log`, up to `max_bytes`.

    A program must neither fill the disk nor block: output past the limit is read and discarded,
    slowly enough to use little processor time. Threads read and write.
    """

    def __init__(self, log: Path, max_bytes: int) -> None:
        self._log = log
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._error: OSError | None = None
        self._source = self._file = -1
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None

    def open(self, source: int) -> None:
        """Open the log for `source`, a non-blocking descriptor that this object will close."""
        self._source = source
        self._file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def start(self) -> None:
        """Start a task that copies."""
        self._task = log.start_task(self._follow(), "copy-output")

    async def finish(self) -> None:
        """Copy the last output of a program that has ended. Raises `DiskFull`."""
        task = self._task
        self._task = None  # its frames refer to this object
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await asyncio.to_thread(self._close)
        if self._error is not None and self._error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(f"cannot write {self._log}: {self._error.strerror}")

    async def _follow(self) -> None:
        while True:
            await wait_readable(self._source)
            if not await asyncio.to_thread(self._copy):
                return
            if self._left < 0:
                await asyncio.sleep(_DISCARD_PAUSE_S)

    def _copy(self) -> bool:
        """Copy a few chunks; return whether more may come."""
        with self._lock, contextlib.suppress(BlockingIOError):
            for _ in range(_CHUNKS_PER_COPY):
                data = os.read(self._source, _CHUNK)
                if not data:
                    return False
                self._write(data)
        return True

    def _write(self, data: bytes) -> None:
        if self._left < 0:
            return
        output = data[: self._left]
        self._left -= len(data)
        if self._left < 0:
            output += f"\n[output after {self._max_bytes} bytes is left out]\n".encode()
            with contextlib.suppress(OSError):  # the kernel limits the pipe pages of a user
                fcntl.fcntl(self._source, fcntl.F_SETPIPE_SZ, _WIDE_PIPE)
        try:
            os.write(self._file, output)
        except OSError as error:
            self._error = error
            self._left = -1

    def _close(self) -> None:
        """Copy what is left in the pipe, whose writers are all dead, and close the files."""
        if self._source >= 0:
            self._copy()
        with self._lock:
            close_all(self._source, self._file)


def close_all(*descriptors: int) -> None:
    """Close file descriptors; -1 stands for one that is not open."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


async def wait_readable(descriptor: int) -> None:
    """Wait until `descriptor` has data or its other end is closed."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


class SharedTasks:
    """Tasks by key, shared by all waiting callers; a cancelled caller does not cancel the task."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the task of `key`; start it if none is running."""
        task = self._tasks.get(key)
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._forget, key))
        await asyncio.shield(task)

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # asyncio warns about one that no caller retrieves
        if self._tasks.get(key) is task:
            del self._tasks[key]


async def run_command(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[int, str, str]:
    """Run a program of this machine; return its exit code, stdout and stderr.

    Its process group is killed when the time is up or the caller is cancelled. Raises
    `TimeoutError` and `FileNotFoundError`.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    return process.returncode or 0, out.decode(errors="replace"), errors.decode(errors="replace")


def find_records(directory: Path, suffix: str, type_: type[T]) -> Iterator[tuple[Path, T]]:
    """Yield path and content of records with `suffix` in the sandboxes at or below `directory`.

    A folder that holds ``home`` and ``logs`` is a sandbox; its subfolders are not searched, because
    they belong to its programs. Damaged records are skipped.
    """
    stack = [os.fspath(directory)]
    while stack:
        with contextlib.suppress(OSError):
            entries = list(os.scandir(stack.pop()))
            for entry in entries:
                if entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False):
                    path = Path(entry.path)
                    with contextlib.suppress(OSError, msgspec.DecodeError):
                        yield path, msgspec.json.decode(path.read_bytes(), type=type_)
            if not {"home", "logs"} <= {entry.name for entry in entries}:
                stack += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def start_time(pid: int) -> float | None:
    """Return the seconds from boot to the start of process `pid`; None if it does not exist."""
    try:
        return float(round(psutil.Process(pid).create_time() - psutil.boot_time(), 2))
    except psutil.Error:
        return None


def end_program(record: ProgramRecord) -> int:
    """Kill a program's remaining processes; return their number. Blocks until none is left."""
    killed: set[int] = set()
    give_up_at = time.monotonic() + _KILL_S
    while (members := list(_members(record))) and time.monotonic() < give_up_at:
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.kill()
            killed.add(process.pid)
        time.sleep(_KILL_PAUSE_S)
    return len(killed)


def _members(record: ProgramRecord) -> Iterator[psutil.Process]:
    """Yield live processes that have the mark or are in the program's group or session."""
    group_trusted = record.start is not None and start_time(record.pid) in {None, record.start}
    for process in psutil.process_iter():
        pid = process.pid
        with contextlib.suppress(psutil.Error, OSError):
            in_group = group_trusted and record.pid in {os.getpgid(pid), os.getsid(pid)}
            if in_group:
                in_group = (start_time(pid) or 0.0) >= (record.start or 0.0)
            marked = in_group or _environ(process, record.start or 0.0).get(MARK) == record.mark
            alive = marked and process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
            if alive and pid != os.getpid():
                yield process


def _environ(process: psutil.Process, since: float) -> dict[str, str]:
    """Return a process's environment; if empty, wait: the process may be in an `exec`."""
    for _ in range(_EXEC_LOOKS):
        environ: dict[str, str] = process.environ()
        if environ or process.cmdline() or (start_time(process.pid) or 0.0) < since:
            break
        if process.status() == psutil.STATUS_ZOMBIE or process.ppid() == _KERNEL_PID:
            break
        time.sleep(_EXEC_PAUSE_S)
    return environ


def try_command(argv: Sequence[str], descriptors: Sequence[int] = ()) -> str:
    """Run a command and return its error output; empty if it succeeds. Blocks."""
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=_PROBE_S, check=False, pass_fds=descriptors
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    output = done.stderr.decode(errors="replace").strip()[-300:]
    return (output or f"exit status {done.returncode}") if done.returncode else ""
