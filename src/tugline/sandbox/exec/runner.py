"""One shell per sandbox that runs one program after another: a start costs milliseconds, once.

The shell is PID 1 of a sandbox of whatever kind and needs nothing there but ``/bin/sh`` and
``/proc``. A folder of this machine, which the sandbox sees read-only at `INSIDE`, holds the script,
the named pipes ``ask`` and ``told`` and, for each program, ``<n>.sh`` and the pipe ``<n>.out``.
Whoever makes the sandbox starts ``sh /run/tugline/runner`` in it, as PID 1.

The programs are hostile. Every message carries a key that only the shell's memory holds, and the
pipes' names are gone before the first program starts, so no program can end another one's run or
order one. After each program the shell kills whatever is left in the sandbox before it says so.
Nothing here waits for a program's good will: when the shell is gone its end of ``told`` is closed,
and when this process is gone the shell's ``ask`` is at its end, so it ends and the sandbox with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import Exit
from tugline.sandbox.exec.output import MOST_MB, Output
from tugline.sandbox.exec.processes import finish
from tugline.sandbox.files import faults
from tugline.sandbox.pausable_timeout import PausableTimeout, enforce_timeout

INSIDE = "/run/tugline"
"""Where the sandbox sees the control folder."""
ARGV = ("/bin/sh", f"{INSIDE}/runner")
"""What a sandbox is started with."""
KILLED = -9
"""The exit code of a program that went with its sandbox."""

_SCRIPT = r"""
[ $$ = 1 ] || exit 70
c=${0%/*}
exec 5<>"$c/ask" 6<>"$c/told" </dev/null >/dev/null 2>&1
exec 3<"$c/ask" 4>"$c/told" 5<&- 6<&-
read -r key <&3 || exit 71
echo "ready 0 0 $key" >&4
while read -r said n <&3; do
  [ "$said" = "$key" ] || continue
  ( . "$c/$n.sh" ) >"$c/$n.out" 2>&1 3<&- 4>&-
  echo "ended $n $? $key" >&4
  kill -9 -1
  while set -- /proc/[0-9]*; [ $# -gt 1 ]; do (:) & wait; kill -9 -1; done
  echo "clean $n 0 $key" >&4
done
"""
# A pipe that is opened for one direction waits for who opens the other; opened for both before, it
# does not, so that a shell whose host has died meanwhile reads the end at once.
# A program's orphans are children of PID 1: each `wait` takes in the dead ones, so that they do
# not count against the limit of processes. If none can be made for it the shell ends, and all with
# it; the exit code has been told by then.

_START_S = 20.0
_CLEAN_S = 10.0
_PAUSE_S = 0.05
_LONGEST = 256
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNALS = range(129, 193)


class Gone(SandboxError):
    """The sandbox ended while a program ran in it, and not because its time was over."""


class Runner:
    """The host's side of one sandbox's shell.

    `kill` ends the sandbox with all that is in it and returns when nothing is left; it may be
    called for one that has ended. After that this runner is not `alive`, and another is needed.
    """

    def __init__(
        self, control: Path, kill: Callable[[], Awaitable[None]], *, most: int = MOST_MB << 20
    ) -> None:
        self._control = control
        self._kill = kill
        self._most = most
        self._key = secrets.token_hex(16)
        self._asked = 0
        self._ask = self._told = -1
        self._rest = b""
        self._awaited: dict[tuple[str, int], asyncio.Future[int]] = {}
        self.alive = False

    def prepare(self) -> None:
        """Make the control folder, before the sandbox is started. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._control)
        with faults(f"cannot make {self._control}"):
            self._control.mkdir(parents=True, mode=0o755)
            (self._control / "runner").write_text(_SCRIPT)
            self._ask = _pipe(self._control / "ask", os.O_RDWR)
            self._told = _pipe(self._control / "told", os.O_RDONLY)
        os.write(self._ask, f"{self._key}\n".encode())

    async def ready(
        self, over: asyncio.Future[Any] | None = None, *, limit_s: float = _START_S
    ) -> None:
        """Wait until the shell runs. Raises `SandboxError` if it ends or takes too long.

        `over` is done when the sandbox is known to have ended, also if its shell never began.
        """
        self._listen()
        if over is not None:
            over.add_done_callback(lambda _: self._lost())
        try:
            async with asyncio.timeout(limit_s):
                await self._expect("ready", 0)
        except TimeoutError as error:
            msg = f"the sandbox did not start within {limit_s:.0f} s"
            raise SandboxError(msg) from error
        self.alive = True
        await asyncio.to_thread(self._unlink, "ask", "told")

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: PurePath,
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Run one program to its end or that of its time; the sandbox is killed in the latter case.

        Programs start with the environment of the shell and `env`. Codes that a shell gives for
        signals are told as signals. Raises `Gone`.
        """
        self._asked += 1
        number, began = self._asked, time.monotonic()
        script = program(argv, env, cwd)
        output = Output(log, self._most)
        ended, clean = self._expect("ended", number), self._expect("clean", number)
        timed_out, code, asked = False, KILLED, False
        try:
            placing = asyncio.to_thread(self._place, number, script, output)
            await finish(asyncio.create_task(placing))
            output.follow()
            asked = True
            os.write(self._ask, f"{self._key} {number}\n".encode())
            async with enforce_timeout(timeout_s):
                code = await ended
            with contextlib.suppress(TimeoutError, Gone):
                await asyncio.wait_for(clean, _CLEAN_S)
        except TimeoutError:
            timed_out = True
        finally:
            well = [_went_well(awaited) for awaited in (ended, clean)]
            left = asked and not all(well)
            await finish(asyncio.create_task(self._clear(number, output, kill=left)))
        code = 128 - code if code in _SIGNALS else code
        return Exit(code, timed_out, time.monotonic() - began)

    def close(self) -> None:
        """Close this side, which ends a shell that still runs; once is enough."""
        self.alive = False
        if self._told >= 0:
            with contextlib.suppress(RuntimeError):  # no event loop: `ready` was not called
                asyncio.get_running_loop().remove_reader(self._told)
        for descriptor in (self._ask, self._told):
            if descriptor >= 0:
                os.close(descriptor)
        self._ask = self._told = -1

    async def _clear(self, number: int, output: Output, *, kill: bool) -> None:
        if kill:
            self.alive = False
            await self._kill()
        try:
            await output.finish()
        finally:
            await asyncio.to_thread(self._unlink, f"{number}.sh", f"{number}.out")

    def _place(self, number: int, script: bytes, output: Output) -> None:
        with faults(f"cannot write to {self._control} and its log"):
            (self._control / f"{number}.sh").write_bytes(script)
            output.open(_pipe(self._control / f"{number}.out", os.O_RDWR))

    def _unlink(self, *names: str) -> None:
        for name in names:
            (self._control / name).unlink(missing_ok=True)

    def _expect(self, word: str, number: int) -> asyncio.Future[int]:
        awaited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._awaited[word, number] = awaited
        awaited.add_done_callback(lambda _: self._awaited.pop((word, number), None))
        return awaited

    def _hear(self) -> bool:
        """Take in what was told; whether there may be more."""
        try:
            data = os.read(self._told, 4096) if self._told >= 0 else b""
        except BlockingIOError:
            return False
        if not data:
            self._lose()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        understood = [self._understand(line) for line in lines]
        if not all(understood) or len(self._rest) > _LONGEST:
            self._rest = b""
            self._pause()
        return True

    def _understand(self, line: bytes) -> bool:
        """Whether the shell said it; nobody else knows the key."""
        word, number, code, key = [*line.decode(errors="replace").split(" "), *[""] * 4][:4]
        if key != self._key:
            return False
        awaited = self._awaited.get((word, int(number)))
        if awaited is not None and not awaited.done():
            awaited.set_result(int(code))
        return True

    def _pause(self) -> None:
        """Somebody writes rubbish into the pipe: listen again a little later."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._told)
        loop.call_later(_PAUSE_S, self._listen)

    def _listen(self) -> None:
        if self._told >= 0:
            asyncio.get_running_loop().add_reader(self._told, self._hear)

    def _lost(self) -> None:
        """The sandbox has ended; its last words may still be in the pipe."""
        while self._hear():
            pass
        self._lose()

    def _lose(self) -> None:
        self.alive = False
        if self._told >= 0:
            asyncio.get_running_loop().remove_reader(self._told)
        for awaited in list(self._awaited.values()):
            if not awaited.done():
                awaited.set_exception(Gone("the sandbox ended by itself"))


def program(argv: Sequence[str], env: Mapping[str, str], cwd: PurePath) -> bytes:
    """The script that becomes `argv`. Raises `UsageError` for what no program can be given."""
    odd = [f"{name}={value}" for name, value in env.items() if not _NAME.fullmatch(name)]
    words = ["env", *odd, *argv] if odd else argv
    lines = [f"cd {shlex.quote(str(cwd))} || exit 126", "unset OLDPWD"]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in env.items() if _NAME.fullmatch(k)]
    lines += ["echo 1000 2>/dev/null >/proc/self/oom_score_adj"]
    lines += [f"exec {' '.join(map(shlex.quote, words))}", ""]
    try:
        script = os.fsencode("\n".join(lines))
    except UnicodeEncodeError as error:
        msg = f"the command or its environment is not text that a program can be given: {error}"
        raise UsageError(msg) from error
    if b"\0" in script:
        msg = f"the command {argv[0]!r} or its environment holds a NUL byte"
        raise UsageError(msg)
    return script


def _went_well(awaited: asyncio.Future[int]) -> bool:
    if awaited.cancel():
        return False
    return not awaited.cancelled() and awaited.exception() is None


def _pipe(path: Path, how: int) -> int:
    os.mkfifo(path)
    path.chmod(0o666)
    return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC)
