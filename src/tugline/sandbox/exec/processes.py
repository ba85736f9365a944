"""Find and end every process that a program left behind, wherever it went.

A process group is not enough: an agent's shell tool starts commands in sessions of their own. So
every program also carries a random mark in its environment, which its children inherit and which
can be read in ``/proc``. A mark is never reused, so a process that merely got a recycled number is
never hit; a group is only trusted while its leader is the process that was started.

Without ``/proc`` (macOS) only the process group is ended and orphans of a killed parent stay.
A process that clears its environment *and* leaves its session escapes; see docs/runtimes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

MARK = "TUGLINE_BOX"
"""Name of the environment variable that holds the mark."""

_PROC = Path("/proc")


class Started(msgspec.Struct, frozen=True):
    """What is written down about a program so that a later process can end it."""

    pid: int
    """Also its process group and session; 0 while it is being started."""
    start: int | None
    """Clock ticks after boot at which it started; None where that cannot be read."""
    mark: str


class Child:
    """A program of ours, and its end as a future. Made on the event loop's own thread.

    There: a sandbox that is to die with its parent dies with the thread that made it.
    """

    def __init__(self, argv: Sequence[str], *, descriptors: Sequence[int] = ()) -> None:
        """Start it, with nothing to read and what it says for `said`. Raises `OSError`."""
        self._said = os.memfd_create("said")
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError:
            os.close(self._said)
            raise
        self.pid = self._process.pid
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        try:
            self._watched = os.pidfd_open(self.pid)
        except OSError:  # too many open files
            self._process.kill()
            self._process.wait()
            os.close(self._said)
            raise
        loop.add_reader(self._watched, self._over, loop)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()

    def said(self) -> str:
        """The end of what it wrote; of use when it went wrong."""
        size = os.fstat(self._said).st_size
        return os.pread(self._said, 500, max(0, size - 500)).decode(errors="replace").strip()

    def close(self) -> None:
        """Forget it; it has ended."""
        os.close(self._said)

    def _over(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._watched)
        os.close(self._watched)
        self.ended.set_result(self._process.wait())


def records(directory: Path, ending: str) -> Iterator[Path]:
    """Files of that name in boxes at or below `directory`, none of which a program can have made.

    What holds ``home`` and ``logs`` is a box; the folders in it belong to its programs.
    """
    stack = [os.fspath(directory)]
    while stack:
        with contextlib.suppress(OSError):
            entries = list(os.scandir(stack.pop()))
            for entry in entries:
                if entry.name.endswith(ending) and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
            if not {"home", "logs"} <= {entry.name for entry in entries}:
                stack += [one.path for one in entries if one.is_dir(follow_symlinks=False)]


async def finish(task: asyncio.Task[T]) -> T:
    """Wait for `task` even while being cancelled, then let the cancellation go on."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    result = task.result()
    if cancelled:
        raise asyncio.CancelledError
    return result


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks after boot; None if it is gone or cannot be read."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def end(started: Started, *, grace_s: float) -> int:
    """SIGTERM, after `grace_s` SIGKILL, to all that remains of `started`; returns how many it was.

    Blocks for up to `grace_s` and a little more; returns at once when nothing is left.
    """
    hit: set[int] = set()
    kill_at = time.monotonic() + grace_s
    give_up_at = kill_at + 2.0
    pause = 0.01
    while members := _members(started):
        now = time.monotonic()
        if now > give_up_at:
            break
        for pid in members:
            if now >= kill_at:
                _send(pid, signal.SIGKILL)
            elif pid not in hit:
                _send(pid, signal.SIGTERM)
        hit |= members
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    return len(hit)


def _members(started: Started) -> set[int]:
    if not _PROC.is_dir():
        if started.pid:
            with contextlib.suppress(OSError):
                os.killpg(started.pid, signal.SIGKILL)
        return set()
    mark = f"{MARK}={started.mark}".encode()
    leader = start_time(started.pid)
    ours = leader is None or leader == started.start
    found = set()
    for entry in os.scandir(_PROC):
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX" or pid == os.getpid():
            continue
        in_group = ours and str(started.pid) in (fields[2], fields[3])
        if (in_group and _not_before(fields, started)) or mark in _environment(pid):
            found.add(pid)
    return found


def _not_before(fields: list[str], started: Started) -> bool:
    return started.start is not None and int(fields[19]) >= started.start


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the third on: state, parent, group, session ..."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
