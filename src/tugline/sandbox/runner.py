"""Run programs through one shell per sandbox, which takes a few milliseconds for each.

The shell is process 1 of the sandbox and needs only ``/bin/sh`` and ``/proc``. A folder of this
machine, mounted read-only at `CONTROL`, holds the script, the named pipes ``requests`` and
``replies`` and, for each program, ``<n>.sh`` and the pipe ``<n>.out``. A driver creates the sandbox
with `ARGV` as process 1.

The programs are hostile. Every message carries a key that only the shell's memory holds, and the
names of the pipes are removed before the first program starts, so no program can start another one
or report its end. After each program the shell kills all other processes of the sandbox before it
reports. No program has to cooperate: if the shell dies, its end of ``replies`` is closed; if this
process dies, the shell reads end-of-file from ``requests`` and exits, which ends the sandbox.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tugline.aio import PausableTimeout, enforce_timeout, finish
from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import Exit
from tugline.sandbox.files import translate_errors
from tugline.sandbox.processes import OutputLog, close_all

CONTROL = "/run/tugline"
"""Path of the control folder in the sandbox."""
ARGV = ("/bin/sh", f"{CONTROL}/runner")
"""Command line of a sandbox's process 1."""
KILLED = -9
"""Exit code of a program that was killed with its sandbox."""

_GUARD = Path(__file__).with_name("guard.sh").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("runner.sh").read_text(encoding="utf-8")
_START_S = 20.0
_CLEAN_S = 10.0
_GARBAGE_PAUSE_S = 0.05
_MAX_LINE = 256
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNAL_CODES = range(129, 193)


class SandboxEnded(SandboxError):
    """The sandbox ended while a program ran in it, not because of a timeout."""


@dataclass(eq=False)
class Runner:
    """Client of one sandbox's shell, on the host.

    `kill` is called with this runner. It must kill all processes of the sandbox, which may have
    ended already, and return when none is left. The runner is not `alive` any more then, and the
    next program needs a new one.
    """

    control: Path
    kill: Callable[["Runner"], Awaitable[None]]
    max_log_bytes: int

    def __post_init__(self) -> None:
        self._key = secrets.token_hex(16)
        self._count = 0
        self._requests = self._replies = -1
        self._partial_line = b""
        self._expected: dict[tuple[str, int], asyncio.Future[int]] = {}
        self.alive = False

    def prepare(self) -> None:
        """Create the control folder, before the sandbox is started. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.control)
        with translate_errors(f"cannot make {self.control}"):
            self.control.mkdir(parents=True, mode=0o755)
            (self.control / "runner").write_text(_SCRIPT)
            self._requests = _make_pipe(self.control / "requests", os.O_RDWR)
            self._replies = _make_pipe(self.control / "replies", os.O_RDONLY)
        os.write(self._requests, f"{self._key}\n".encode())

    async def wait_ready(self, ended: asyncio.Future[Any] | None = None) -> None:
        """Wait until the shell runs. Raises `SandboxError` if it ends or takes too long.

        `ended` completes when the sandbox has ended, even if its shell never started.
        """
        self._listen()
        if ended is not None:
            ended.add_done_callback(lambda _: self._on_sandbox_end())
        try:
            async with asyncio.timeout(_START_S):
                await self._expect("ready", 0)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not start within {_START_S:.0f} s") from error
        self.alive = True
        await asyncio.to_thread(self._close_pipes)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: PurePath,
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Run one program until it ends or times out; a timeout kills the whole sandbox.

        `env` is added to the shell's environment. Exit codes 129 to 192, by which a shell reports
        signals, become negative signal numbers. Raises `SandboxEnded`.
        """
        self._count += 1
        number = self._count
        began = time.monotonic()
        script = program_script(argv, env, cwd)
        output = OutputLog(log, self.max_log_bytes)
        ended = self._expect("ended", number)
        clean = self._expect("clean", number)
        timed_out = False
        code = KILLED
        requested = False
        try:
            await finish(asyncio.to_thread(self._write_program, number, script, output))
            output.start()
            requested = True
            await self._request(number, ended)
            with contextlib.suppress(TimeoutError):
                async with enforce_timeout(timeout_s):
                    await asyncio.wait([ended])
            # If this process was suspended, the program's end may be reported but not read yet.
            self._read_replies()
            timed_out = not ended.done()
            seconds = time.monotonic() - began
            if not timed_out:
                code = ended.result()
                with contextlib.suppress(TimeoutError, SandboxEnded):
                    await asyncio.wait_for(clean, _CLEAN_S)
        finally:
            reported = [_has_result(future) for future in (ended, clean)]
            await finish(self._clear(number, output, kill=requested and not all(reported)))
        code = 128 - code if code in _SIGNAL_CODES else code
        return Exit(code, timed_out, seconds)

    def close(self) -> None:
        """Close the pipes, which ends a shell that still runs; may be called twice."""
        self.alive = False
        if self._replies >= 0:
            with contextlib.suppress(RuntimeError):  # no event loop: the shell was not waited for
                asyncio.get_running_loop().remove_reader(self._replies)
        close_all(self._requests, self._replies)
        self._requests = self._replies = -1

    async def _clear(self, number: int, output: OutputLog, *, kill: bool) -> None:
        if kill:
            self.alive = False
            await self.kill(self)
        try:
            await output.finish()
        finally:
            await asyncio.to_thread(self._unlink, f"{number}.sh", f"{number}.out")

    async def _request(self, number: int, ended: asyncio.Future[int]) -> None:
        """Request a program as soon as the pipe has space: an earlier one may have filled it."""
        while not ended.done():
            with contextlib.suppress(BlockingIOError):
                os.write(self._requests, f"\n{self._key} {number}\n".encode())
                return
            await asyncio.sleep(_GARBAGE_PAUSE_S)

    def _close_pipes(self) -> None:
        """Keep programs that are not root from opening the pipes, by name or in ``/proc``."""
        for name in ("requests", "replies"):
            (self.control / name).chmod(0)
        self._unlink("requests", "replies")

    def _write_program(self, number: int, script: bytes, output: OutputLog) -> None:
        with translate_errors(f"cannot write to {self.control} and its log"):
            (self.control / f"{number}.sh").write_bytes(script)
            output.open(_make_pipe(self.control / f"{number}.out", os.O_RDWR))

    def _unlink(self, *names: str) -> None:
        for name in names:
            (self.control / name).unlink(missing_ok=True)

    def _expect(self, event: str, number: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._expected[event, number] = future
        future.add_done_callback(lambda _: self._expected.pop((event, number), None))
        return future

    def _read_replies(self) -> bool:
        """Process the shell's output; return whether there may be more."""
        try:
            data = os.read(self._replies, 4096) if self._replies >= 0 else b""
        except BlockingIOError:
            return False
        if not data:
            self._on_shell_end()
            return False
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        valid = [self._process_reply(line) for line in lines if line]
        if not all(valid) or len(self._partial_line) > _MAX_LINE:
            self._partial_line = b""
            self._pause()
        return True

    def _process_reply(self, line: bytes) -> bool:
        """Process a line; return whether it has the key, which only the shell knows."""
        event, number, code, key = [*line.decode(errors="replace").split(" "), *[""] * 4][:4]
        if key != self._key:
            return False
        for each in {event, "ended"}:  # the "ended" message may have been lost
            future = self._expected.get((each, int(number)))
            if future is not None and not future.done():
                future.set_result(int(code))
        return True

    def _pause(self) -> None:
        """Stop reading for a short time, because a program writes garbage into the pipe."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._replies)
        loop.call_later(_GARBAGE_PAUSE_S, self._listen)

    def _listen(self) -> None:
        if self._replies >= 0:
            asyncio.get_running_loop().add_reader(self._replies, self._read_replies)

    def _on_sandbox_end(self) -> None:
        """Read the shell's last messages, which may still be in the pipe."""
        while self._read_replies():
            pass
        self._on_shell_end()

    def _on_shell_end(self) -> None:
        self.alive = False
        if self._replies >= 0:
            asyncio.get_running_loop().remove_reader(self._replies)
        for future in list(self._expected.values()):
            if not future.done():
                future.set_exception(SandboxEnded("the sandbox ended unexpectedly"))


class Guard:
    """Kills process 1 of a sandbox when this process dies, whatever files programs hold open."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def watch(self, pid: int) -> None:
        """Start the guard of process `pid`, a process id of the host."""
        self._process = await asyncio.create_subprocess_exec(
            *("sh", "-c", _GUARD, str(pid)), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )

    async def end(self) -> None:
        """Kill process 1, if it still runs, and the guard with it."""
        if self._process is not None:
            await self._process.communicate(b"")
            self._process = None


def program_script(argv: Sequence[str], env: Mapping[str, str], cwd: PurePath) -> bytes:
    """Return a script that executes `argv`. Raises `UsageError` for unusable arguments."""
    odd = [f"{name}={value}" for name, value in env.items() if not _NAME.fullmatch(name)]
    command = ["env", *odd, *argv] if odd else argv
    lines = [f"cd {shlex.quote(str(cwd))} || exit 126", "unset OLDPWD"]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in env.items() if _NAME.fullmatch(k)]
    lines += ["echo 1000 2>/dev/null >/proc/self/oom_score_adj"]
    lines += [f"exec {' '.join(map(shlex.quote, command))}", ""]
    try:
        script = os.fsencode("\n".join(lines))
    except UnicodeEncodeError as error:
        msg = f"the command or its environment cannot be encoded: {error}"
        raise UsageError(msg) from error
    if b"\0" in script:
        raise UsageError(f"the command {argv[0]!r} or its environment contains a NUL byte")
    return script


def _has_result(future: asyncio.Future[int]) -> bool:
    if future.cancel():
        return False
    return not future.cancelled() and future.exception() is None


def _make_pipe(path: Path, mode: int) -> int:
    os.mkfifo(path)
    path.chmod(0o666)
    return os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC)
