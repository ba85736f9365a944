"""A custom runtime: sandboxes on another machine, through a command that runs a shell line there.

With ``connect: [ssh, -o, BatchMode=yes, worker-1]`` that machine is worker-1; the default is this
machine, for a test. Replace `call` and the command in `run` by those of your provider. To use it,
add this folder to the node's PYTHONPATH and write ``runtime: {name: "remote_runtime:Remote"}`` in
the task, or make it an entry point of a package, in the group ``tugline.runtime``.

Files are transferred as tar archives, and the patch is the difference of two archives. Output is
logged as it is written. A program is killed with its process group. After a crash of the node, a
note on disk has what to clean up. Not included, because providers have their own: isolation between
sandboxes, a limit for logs, and a route to the model (`expose`) if the other machine does not reach
this one, such as ``ssh -R``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import shlex
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from archive_diff import diff_archives, pack_files

from tugline.aio import PausableTimeout, enforce_timeout
from tugline.errors import SandboxError, UsageError
from tugline.patch import Patch
from tugline.sandbox.base import MAX_READ_BYTES, Content, Exit, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.patch import PatchLimits
from tugline.types import Workspace

KILL = "test ! -e {0}/pid || kill -s KILL -- -$(cat {0}/pid) 2>/dev/null || true"


class Remote(Runtime):
    """Sandboxes below `folder` on the machine that `connect` reaches."""

    def __init__(self, *, connect: Sequence[str] = ("sh", "-c"), folder: str = "/var/lib") -> None:
        self.connect, self.folder = tuple(connect), folder

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[RemoteSandbox]:
        """Make the folders there; only logs and a note are on this machine."""
        spec = spec or SandboxSpec()
        if spec.mounts or spec.workspace != Workspace():
            msg = "runtime 'remote' takes files only: no workspace or mounts"
            raise UsageError(msg)
        sandbox = RemoteSandbox(
            self.connect, f"{self.folder}/{secrets.token_hex(8)}", directory / "logs"
        )
        sandbox.logs.mkdir(parents=True)
        (directory / "remote.txt").write_text(sandbox.root)  # before anything is created there
        try:
            await sandbox.call(f"mkdir -p {sandbox.workdir} {sandbox.home}")
            await sandbox.put(sandbox.workdir, spec.files)
            sandbox.before = await sandbox.call(f"tar -c -C {sandbox.workdir} .")
            yield sandbox
        finally:
            await asyncio.shield(asyncio.to_thread(self.reap, directory))

    def reap(self, directory: Path) -> int:
        """Kill and remove the sandboxes whose notes are below `directory`."""
        notes = list(directory.rglob("remote.txt"))
        for note in notes:
            end = f"{KILL}; rm -rf {{0}}".format(note.read_text())
            subprocess.run([*self.connect, end], check=True, timeout=60)
            note.unlink()
        return len(notes)

    def check_available(self) -> str | None:
        """Check that the machine answers, and has the needed programs."""
        check = [*self.connect, "command -v tar && command -v setsid"]
        done = subprocess.run(check, capture_output=True, check=False, timeout=60)
        return f"no tar or setsid at {self.connect}: {done.stderr!r}" if done.returncode else None

    def list_weaknesses(self) -> Sequence[str]:
        """List what the other machine has to isolate."""
        return ("sandboxes on the other machine are not isolated from each other",)


class RemoteSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    def __init__(self, connect: Sequence[str], root: str, logs: Path) -> None:
        self.connect, self.root, self.logs, self.before = connect, root, logs, b""
        self.workdir, self.home = PurePosixPath(root, "work"), PurePosixPath(root, "home")

    async def call(self, line: str, data: bytes = b"") -> bytes:
        """Run a shell line there; return its output."""
        argv = [*self.connect, line]
        done = await asyncio.to_thread(subprocess.run, argv, input=data, capture_output=True)
        if done.returncode:
            msg = f"{self.connect[0]}: {done.stderr.decode(errors='replace')[-300:]}"
            raise SandboxError(msg)
        return done.stdout

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Remove existing files, and unpack an archive."""
        archive = pack_files(files)
        await self.call(f"cd {root} && rm -rf -- {shlex.join(files)} && tar -x", archive)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Read a file; the output begins with an empty line if it exists."""
        at = shlex.quote(str(path))
        head = f"echo; head -c {max_bytes + 1} {at}"
        data = await self.call(f"if test -f {at} && test ! -L {at}; then {head}; fi")
        return data[1:] if 0 < len(data) <= max_bytes + 1 else None

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Compare two archives of the workdir."""
        before = io.BytesIO(self.before)
        now = io.BytesIO(await self.call(f"tar -c -C {self.workdir} ."))
        return await asyncio.to_thread(diff_archives, before, now, limits)

    async def expose(self, url: str) -> str:
        """Return the URL unchanged: the other machine must reach this one."""
        return url

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Run a program in its own session, which is killed in any case."""
        began, timed_out = time.monotonic(), False
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), **env}
        command = shlex.join(["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *argv])
        start = 'echo $$ >"$0/pid"; exec "$@" 2>&1'
        line = f"cd {self.workdir} && setsid -w sh -c '{start}' {self.root} {command} </dev/null"
        with log.open("ab") as output:
            child = await asyncio.create_subprocess_exec(*self.connect, line, stdout=output)
        try:
            async with enforce_timeout(timeout_s):
                await child.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await asyncio.shield(self.call(KILL.format(self.root)))
        code = await child.wait()
        return Exit(128 - code if code > 128 else code, timed_out, time.monotonic() - began)
