"""A runtime of your own: boxes on another machine, behind a command that runs a shell line there.

With ``connect: [ssh, -o, BatchMode=yes, worker-1]`` that machine is worker-1; the default is this
one, to try it. Replace `call` and the command in `run` by your provider's. To use it, put this
folder on the node's PYTHONPATH and write ``runtime: {name: "remote_runtime:Remote"}`` in the task,
or make it an entry point of a package, in the group ``tugline.runtime``.

Files travel as tar archives, what was done is the difference of two of them, output comes while it
is written, a program is ended with all its group, and what a killed node left is found by a note.
Left out, because a provider has its own: keeping boxes apart, a bound for logs, a way to the model
(`reach`) where the other machine does not reach this one, such as ``ssh -R``.
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

from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import (
    MAX_READ_BYTES,
    Content,
    Exit,
    PausableTimeout,
    Runtime,
    Sandbox,
    SandboxSpec,
    enforce_timeout,
)
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.types import Workspace

KILL = "test ! -e {0}/pid || kill -s KILL -- -$(cat {0}/pid) 2>/dev/null || true"


class Remote(Runtime):
    """Boxes below `folder` of the machine that `connect` leads to."""

    def __init__(self, *, connect: Sequence[str] = ("sh", "-c"), folder: str = "/var/lib") -> None:
        self.connect, self.folder = tuple(connect), folder

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[RemoteSandbox]:
        """Folders there; only logs and a note are here."""
        spec = spec or SandboxSpec()
        if spec.mounts or spec.workspace != Workspace():
            msg = "runtime 'remote' takes files only: no workspace or mounts"
            raise UsageError(msg)
        box = RemoteSandbox(
            self.connect, f"{self.folder}/{secrets.token_hex(8)}", directory / "logs"
        )
        box.logs.mkdir(parents=True)
        (directory / "remote.txt").write_text(box.root)  # before there is anything to be found
        try:
            await box.call(f"mkdir -p {box.workdir} {box.home}")
            await box.put(box.workdir, spec.files)
            box.before = await box.call(f"tar -c -C {box.workdir} .")
            yield box
        finally:
            await asyncio.shield(asyncio.to_thread(self.reap, directory))

    def reap(self, directory: Path) -> int:
        """End and remove what the notes below `directory` tell of."""
        notes = list(directory.rglob("remote.txt"))
        for note in notes:
            end = f"{KILL}; rm -rf {{0}}".format(note.read_text())
            subprocess.run([*self.connect, end], check=True, timeout=60)
            note.unlink()
        return len(notes)

    def check_available(self) -> str | None:
        """Whether the machine answers and has what is needed."""
        look = [*self.connect, "command -v tar && command -v setsid"]
        done = subprocess.run(look, capture_output=True, check=False, timeout=60)
        return f"no tar or setsid by {self.connect}: {done.stderr!r}" if done.returncode else None

    def list_weaknesses(self) -> Sequence[str]:
        """What the other machine must see to."""
        return ("boxes on the other machine are not kept apart",)


class RemoteSandbox(Sandbox):
    """See `tugline.sandbox.base.Sandbox`."""

    def __init__(self, connect: Sequence[str], root: str, logs: Path) -> None:
        self.connect, self.root, self.logs, self.before = connect, root, logs, b""
        self.workdir, self.home = PurePosixPath(root, "work"), PurePosixPath(root, "home")

    async def call(self, line: str, data: bytes = b"") -> bytes:
        """What a shell line says there."""
        argv = [*self.connect, line]
        done = await asyncio.to_thread(subprocess.run, argv, input=data, capture_output=True)
        if done.returncode:
            msg = f"{self.connect[0]}: {done.stderr.decode(errors='replace')[-300:]}"
            raise SandboxError(msg)
        return done.stdout

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Remove what is in the way, unpack an archive."""
        archive = pack_files(files)
        await self.call(f"cd {root} && rm -rf -- {shlex.join(files)} && tar -x", archive)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """An empty line, and then the file."""
        at = shlex.quote(str(path))
        head = f"echo; head -c {max_bytes + 1} {at}"
        data = await self.call(f"if test -f {at} && test ! -L {at}; then {head}; fi")
        return data[1:] if 0 < len(data) <= max_bytes + 1 else None

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """The difference of two archives."""
        before = io.BytesIO(self.before)
        now = io.BytesIO(await self.call(f"tar -c -C {self.workdir} ."))
        return await asyncio.to_thread(diff_archives, before, now, limits)

    async def expose(self, url: str) -> str:
        """The same, where that machine reaches this one."""
        return url

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """In a session of its own, which is ended whatever happens."""
        began, timed_out = time.monotonic(), False
        around = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.home), **env}
        words = shlex.join(["env", "-i", *(f"{k}={v}" for k, v in around.items()), *argv])
        start = 'echo $$ >"$0/pid"; exec "$@" 2>&1'
        line = f"cd {self.workdir} && setsid -w sh -c '{start}' {self.root} {words} </dev/null"
        with (self.logs / f"{log_name}.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(*self.connect, line, stdout=log)
        try:
            async with enforce_timeout(timeout_s):
                await child.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await asyncio.shield(self.call(KILL.format(self.root)))
        code = await child.wait()
        return Exit(128 - code if code > 128 else code, timed_out, time.monotonic() - began)
