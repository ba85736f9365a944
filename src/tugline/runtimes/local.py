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
from pathlib import Path, PurePath

import msgspec

from tugline.errors import ConfigError, RuntimeFault
from tugline.runtimes import files as beneath
from tugline.runtimes.base import MOST, Content, Exit, Place
from tugline.runtimes.clock import Clock, limit
from tugline.runtimes.patch import Caps, Patch, compare
from tugline.runtimes.processes import MARK, Started, end, finish, start_time

_RECORD = ".started"
_ENDERS = 32


class Local:
    """Boxes that are folders, programs that are children of this process.

    `cpu_s` is processor time of each single process, `file_mb` the largest file it may write,
    `open_files` how many it may hold open. `grace_s` lies between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        *,
        cpu_s: int = 3600,
        file_mb: int = 512,
        open_files: int = 4096,
        grace_s: float = 2.0,
    ) -> None:
        for name, value in (("cpu_s", cpu_s), ("file_mb", file_mb), ("open_files", open_files)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"runtime 'local': {name} is {value!r}, must be a whole number from 1"
                raise ConfigError(msg)
        self._limits = f"ulimit -c 0; ulimit -t {cpu_s}; ulimit -f {file_mb * 2048}"
        # A lower limit than asked for may already be in force; that one stays then.
        self._limits += f'; ulimit -n {open_files} 2>/dev/null; exec "$@"'
        self._grace_s = grace_s
        # Many agents may ignore SIGTERM at once; nothing else must wait for a thread meanwhile.
        self._enders = ThreadPoolExecutor(_ENDERS, thread_name_prefix="tugline-end")

    @contextlib.asynccontextmanager
    async def open(self, directory: Path, place: Place | None = None) -> AsyncIterator[LocalBox]:
        """A box under `directory` with its files in its workdir; leaving it deletes nothing."""
        place = place or Place()
        box = LocalBox(
            Path.cwd() / directory, self._limits, self._grace_s, self._enders, dict(place.files)
        )
        await asyncio.to_thread(box.make)
        await box.put(box.workdir, place.files)
        yield box

    def reap(self, directory: Path) -> int:
        """End what a killed process left running in boxes under `directory`."""
        count = 0
        for record in directory.rglob(f"*{_RECORD}"):
            # A file of that name which we did not write is an agent's, and none of our business.
            with contextlib.suppress(msgspec.DecodeError):
                count += end(msgspec.json.decode(record.read_bytes(), type=Started), grace_s=0.0)
                record.unlink(missing_ok=True)
        return count

    def unavailable(self) -> str | None:
        """Nothing: there is always this machine."""
        return None

    def weaknesses(self) -> Sequence[str]:
        """What docs/runtimes.md says at length."""
        return (
            "files of this user can be read and changed",
            "the network is open",
            "memory and the number of processes have no bound",
        )


class LocalBox:
    """See `tugline.runtimes.base.Box`."""

    def __init__(
        self,
        directory: Path,
        limits: str,
        grace_s: float,
        enders: ThreadPoolExecutor,
        files: Mapping[str, str],
    ) -> None:
        self._files = files
        self.workdir = directory / "work"
        self.home = directory / "home"
        self.logs = directory / "logs"
        self._tmp = directory / "tmp"
        self._directory = directory
        self._limits = limits
        self._grace_s = grace_s
        self._enders = enders

    def make(self) -> None:
        """Make the folders; a workdir with something in it is an error, not a head start."""
        try:
            for folder in (self.workdir, self.home, self.logs, self._tmp):
                folder.mkdir(parents=True, exist_ok=True)
            used = any(self.workdir.iterdir())
        except OSError as error:
            msg = f"cannot make {error.filename}: {error.strerror}"
            raise RuntimeFault(msg) from error
        if used:
            msg = f"{self.workdir} is not empty; each session needs a folder of its own"
            raise RuntimeFault(msg)

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Put `files` under `root`."""
        await asyncio.to_thread(beneath.put, Path(root), files)

    async def get(self, path: PurePath, *, most: int = MOST) -> bytes | None:
        """A regular file's bytes."""
        return await asyncio.to_thread(_read, Path(path), most)

    async def changes(self, caps: Caps | None = None) -> Patch:
        """What differs from the files it was opened with."""
        return await asyncio.to_thread(compare, self._files, self.workdir, caps)

    async def reach(self, url: str) -> str:
        """The same: this machine's network is the programs' own."""
        return url

    def look(self) -> object:
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
        timeout_s: float | Clock,
        log_name: str = "agent",
    ) -> Exit:
        """Run `argv` in the workdir; on timeout, cancellation or its end, all of it is ended."""
        began = time.monotonic()
        started = Started(pid=0, start=None, mark=secrets.token_hex(16))
        await asyncio.to_thread(self._remember, started)
        process: asyncio.subprocess.Process | None = None
        timed_out = False
        try:
            process = await self._spawn(argv, env, started.mark, log_name)
            started = Started(process.pid, start_time(process.pid), started.mark)
            await asyncio.to_thread(self._remember, started)
            async with limit(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await finish(asyncio.create_task(self._end(process, started)))
        code = process.returncode if process and process.returncode is not None else 0
        return Exit(code, timed_out, time.monotonic() - began)

    async def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], mark: str, log_name: str
    ) -> asyncio.subprocess.Process:
        try:
            with (self.logs / f"{log_name}.log").open("ab") as log:
                return await asyncio.create_subprocess_exec(
                    *("sh", "-c", self._limits, "sh", *argv),
                    cwd=self.workdir,
                    env={**self._environment(), **env, MARK: mark},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            msg = f"cannot start {argv[0]!r} in {self.workdir}: {error}"
            raise RuntimeFault(msg) from error

    async def _end(self, process: asyncio.subprocess.Process | None, started: Started) -> None:
        """Without a process, cancelled while it was being made, the mark finds what there is."""
        ending = partial(end, started, grace_s=self._grace_s)
        await asyncio.get_running_loop().run_in_executor(self._enders, ending)
        if process is not None:
            await process.wait()
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
            raise RuntimeFault(msg) from error


def _read(path: Path, most: int) -> bytes | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        data = file.read(most + 1)
        return data if len(data) <= most else None
    return None
