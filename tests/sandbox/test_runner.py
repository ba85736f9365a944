from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path, PurePosixPath

import pytest

from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import Exit, PausableTimeout
from tugline.sandbox.runner import ARGV, CONTROL, KILLED, Runner, SandboxEnded, program_script

if shutil.which("bwrap") is None:
    pytest.skip("no bwrap here: apt install bubblewrap", allow_module_level=True)


class Sandbox:
    """The least that a runner needs: namespaces around this machine's own files."""

    def __init__(self, folder: Path, shell: Sequence[str] = ("/bin/sh",)) -> None:
        self.folder = folder
        self.shell = shell
        self.runner = Runner(folder / "control", lambda _: self.kill(), max_log_bytes=1 << 20)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and its shell."""
        self.runner.prepare()
        self.process = await asyncio.create_subprocess_exec(
            *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *("--bind", self.folder, "/mnt", "--tmpfs", "/run"),
            *("--ro-bind", self.folder / "control", CONTROL),
            *("--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1"),
            *(*self.shell, *ARGV[1:]),
        )
        await self.runner.wait_ready(asyncio.ensure_future(self.process.wait()))

    async def kill(self) -> None:
        """End it."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def sh(self, script: str, timeout_s: float = 10.0, **env: str) -> Exit:
        """Run a script."""
        return await self.run(("sh", "-c", script), timeout_s, env)

    async def run(
        self,
        argv: Sequence[str],
        timeout_s: float | PausableTimeout = 10.0,
        env: dict[str, str] | None = None,
    ) -> Exit:
        """Run a program in the sandbox's folder."""
        return await self.runner.run(
            argv,
            env=env or {},
            cwd=PurePosixPath("/mnt"),
            timeout_s=timeout_s,
            log=self.folder / "agent.log",
        )

    def log(self) -> bytes:
        """What programs have written so far."""
        return (self.folder / "agent.log").read_bytes()


@contextlib.asynccontextmanager
async def opened(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """Start it, and leave nothing of it."""
    await sandbox.start()
    try:
        yield sandbox
    finally:
        await sandbox.kill()
        sandbox.runner.close()


@pytest.fixture(params=["dash", "busybox"])
async def sandbox(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One with each of the small shells that images have."""
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    shell = {"dash": ("dash",), "busybox": ("busybox", "sh")}[request.param]
    async with opened(Sandbox(tmp_path, shell)) as made:
        yield made


async def test_programs_run_one_after_another_with_their_exit_codes(sandbox: Sandbox) -> None:
    """Success, failure, a signal, a missing program and a missing folder are all exits."""
    assert (await sandbox.sh("exit 0")).code == 0
    assert (await sandbox.sh("exit 3")).code == 3
    assert (await sandbox.sh("exit 255")).code == 255
    assert (await sandbox.sh("kill -9 $$")).code == -signal.SIGKILL
    assert (await sandbox.sh("kill -TERM $$")).code == -signal.SIGTERM
    assert (await sandbox.run(("no-such-program",))).code == 127
    assert sandbox.runner.alive


async def test_an_end_is_believed_over_a_timer_that_is_late(sandbox: Sandbox) -> None:
    """After a stall of this process both are there, and the program had ended before."""
    timeout = PausableTimeout(0.01)
    timeout.pause()
    began, go = sandbox.folder / "began", sandbox.folder / "go"
    script = "touch /mnt/began; until test -e /mnt/go; do sleep 0.01; done"
    run = asyncio.create_task(sandbox.run(("sh", "-c", script), timeout))
    while not began.exists():  # noqa: ASYNC110 - a file
        await asyncio.sleep(0.01)
    go.touch()
    assert select.select([sandbox.runner._replies], [], [], 60.0)[0]
    timeout.resume()
    time.sleep(0.05)  # noqa: ASYNC251 - the stall
    done = await run
    assert (done.code, done.timed_out) == (0, False)


async def test_arguments_and_variables_arrive_byte_for_byte(sandbox: Sandbox) -> None:
    """Newlines, quotes, every byte but NUL, names that are no identifiers, 128 KB at once."""
    every = os.fsdecode(bytes(range(1, 256)))
    long = "x" * 131_000
    hard = "a\n'b' \"c\" $(d) `e` \\f\\ #g\r\t "
    arguments = [every, long, hard, "", "-n"]
    done = await sandbox.run(
        ("sh", "-c", 'printf "%s|" "$@" "$EVERY"', "0", *arguments), env={"EVERY": every}
    )
    assert done.code == 0
    assert sandbox.log() == b"".join(os.fsencode(word) + b"|" for word in [*arguments, every])
    await sandbox.run(("env",), env={"odd-name": "it's"})
    assert b"\nodd-name=it's\n" in b"\n" + sandbox.log().rpartition(b"|")[2]


async def test_output_comes_as_it_is_written_and_has_a_bound(sandbox: Sandbox) -> None:
    """A megabyte is kept, fifty more do not hold the program up, and the log says so."""
    running = asyncio.create_task(sandbox.sh("echo first; sleep 0.5; echo last"))
    async with asyncio.timeout(5):
        while not (sandbox.folder / "agent.log").exists() or not sandbox.log():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not running.done()
    await running
    assert sandbox.log() == b"first\nlast\n"
    done = await sandbox.sh("head -c 50000000 /dev/zero; exit 4", timeout_s=30)
    assert done.code == 4
    assert sandbox.log().endswith(b"is left out]\n")
    assert len(sandbox.log()) < (1 << 20) + 200


async def test_a_timeout_ends_the_sandbox(sandbox: Sandbox) -> None:
    """It is told as one, and the shell is gone."""
    done = await sandbox.sh("echo begun; sleep 99 & sleep 99", timeout_s=0.3)
    assert (done.code, done.timed_out) == (KILLED, True)
    assert done.seconds < 5
    assert not sandbox.runner.alive
    assert sandbox.log() == b"begun\n"


async def test_the_time_that_killing_takes_is_not_the_programs(sandbox: Sandbox) -> None:
    """On a busy node it is long, and would hide that the program waited for most of its own."""

    async def kill_slowly(_: Runner) -> None:
        await asyncio.sleep(1.0)
        await sandbox.kill()

    sandbox.runner.kill = kill_slowly
    done = await sandbox.sh("sleep 99", timeout_s=0.2)
    assert done.timed_out
    assert done.seconds < 1.0


async def test_a_sandbox_that_dies_is_noticed(sandbox: Sandbox) -> None:
    """A program's run does not wait for ever for a shell that is gone."""
    assert sandbox.process is not None
    running = asyncio.create_task(sandbox.sh("sleep 99"))
    await asyncio.sleep(0.2)
    sandbox.process.kill()
    with pytest.raises(SandboxEnded):
        await asyncio.wait_for(running, 5)


async def test_nothing_is_left_in_the_control_folder(sandbox: Sandbox) -> None:
    """A program's environment, its key included, is on the disk no longer than it runs."""
    await sandbox.sh("exit 0", SECRET="x")
    assert [path.name for path in (sandbox.folder / "control").iterdir()] == ["runner"]


async def test_a_shell_that_never_begins_is_a_fault_of_the_place(tmp_path: Path) -> None:
    """An image without a shell ends the wait at once."""
    sandbox = Sandbox(tmp_path, ("false",))
    began = time.monotonic()
    with pytest.raises(SandboxError):
        await sandbox.start()
    sandbox.runner.close()
    assert time.monotonic() - began < 5


def test_what_no_program_can_be_given_is_refused() -> None:
    """A NUL byte and a half of a surrogate pair are the caller's mistake, told as one."""
    for word in ("a\0b", "\ud800"):
        with pytest.raises(UsageError):
            program_script(("echo", word), {}, PurePosixPath("/"))
