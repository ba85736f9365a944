"""What belongs to other sessions and to the node: files, environments, processes, keys."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from attacked import Arena, python, running, shell, token
from tugline.sandbox.base import Sandbox

READ = """
import os, pathlib, sys
secret, folder = sys.argv[1:3]
pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
def paths():
    for top in (folder, *(f"/proc/{pid}/root{folder}" for pid in pids)):
        for where, _, files in os.walk(top):
            yield from (pathlib.Path(where, name) for name in files)
    yield from (pathlib.Path("/proc", pid, "cwd/answer.txt") for pid in pids)
def found():
    for path in paths():
        try:
            if secret in path.read_text(errors="replace"): return True
        except OSError: continue
print("found" if found() else "nothing")
"""


@contextlib.asynccontextmanager
async def victim(arena: Arena, secret: str) -> AsyncIterator[tuple[Sandbox, Path]]:
    """Another session with a secret in its files, its environment and its command line."""
    folder = arena.folder / "victim"
    async with arena.box("victim", files={"answer.txt": secret}) as sandbox:
        await sandbox.put(sandbox.home, {"settings.json": secret})
        mark = token()
        program = ("sh", "-c", "sleep 60; true", mark, f"--key={secret}")
        going = asyncio.create_task(sandbox.run(program, env={"KEY": secret}, timeout_s=60))
        async with asyncio.timeout(10):
            while not running(mark):  # noqa: ASYNC110 - it has no other way to say so
                await asyncio.sleep(0.02)
        try:
            yield sandbox, folder
        finally:
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)


async def test_read_another_sessions_files(anywhere: Arena) -> None:
    """By the path they have on the node, and by /proc of whatever runs."""
    secret = token()
    async with victim(anywhere, secret) as (_, folder), anywhere.box() as sandbox:
        got = await python(sandbox, READ, secret, folder)
    assert got.text == ("nothing\n" if anywhere.isolated else "found\n")


ENVIRONMENTS = """
import os, sys
mine = str(os.getpid())
for pid in os.listdir("/proc"):
    for name in ("environ", "cmdline"):
        try: text = open(f"/proc/{pid}/{name}").read()
        except OSError: continue
        if sys.argv[1][::-1] in text and pid != mine: print("found", pid, name)
"""


async def test_read_another_sessions_environment(anywhere: Arena) -> None:
    """Keys that another agent was given in its environment or command line."""
    secret = token()
    async with victim(anywhere, secret), anywhere.box() as sandbox:
        got = await python(sandbox, ENVIRONMENTS, secret[::-1])
    assert got.exit.code == 0, got.text
    found = {line.split()[-1] for line in got.text.splitlines()}
    assert found == (set() if anywhere.isolated else {"environ", "cmdline"})


async def test_read_the_nodes_files(anywhere: Arena) -> None:
    """Its configuration with tokens, what it keeps of sessions, and what its user has at home."""
    secret = token()
    (anywhere.folder / "node").mkdir()
    (anywhere.folder / "node" / "token").write_text(secret)
    async with anywhere.box() as sandbox:
        got = await shell(
            sandbox, 'cat "$1"; ls -A "$2"', anywhere.folder / "node/token", Path.home()
        )
    assert (secret in got.text) is not anywhere.isolated
    if anywhere.isolated:
        # A Python that is installed there is the one that sandboxes have, too.
        given = {Path(sys.prefix), Path(sys.base_prefix)}
        ways = {
            way.relative_to(Path.home()).parts[0] for way in given if Path.home() in way.parents
        }
        mine = {entry.name for entry in Path.home().iterdir()} - {".bashrc", ".profile"}
        assert not (mine - ways) & set(got.text.split())


@pytest.fixture
def outsider() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that minds its own business."""
    wait = "import sys, time; secret = sys.argv[1] * 2; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", wait, token()]) as process:
        yield process
        process.kill()


async def test_see_processes_of_the_host(
    anywhere: Arena, outsider: subprocess.Popen[bytes]
) -> None:
    """Neither those of the node nor anybody's."""
    mark = str(outsider.args[-1])  # type: ignore[index]
    async with anywhere.box() as sandbox:
        got = await shell(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert (mark in got.text) is not anywhere.isolated


async def test_signal_processes_of_the_host(
    anywhere: Arena, outsider: subprocess.Popen[bytes]
) -> None:
    """A process that is not in the sandbox cannot be ended."""
    async with anywhere.box() as sandbox:
        await python(sandbox, "import os, sys; os.kill(int(sys.argv[1]), 9)", outsider.pid)
    await asyncio.sleep(0.05)
    assert (outsider.poll() is None) is anywhere.isolated


ATTACH = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
failed = libc.ptrace(16, int(sys.argv[1]), 0, 0)
print(os.strerror(ctypes.get_errno()) if failed else "attached")
"""


async def test_attach_to_processes_of_the_host(
    anywhere: Arena, outsider: subprocess.Popen[bytes]
) -> None:
    """Nor can it be debugged."""
    async with anywhere.box() as sandbox:
        got = await python(sandbox, ATTACH, outsider.pid)
    if not anywhere.isolated and "attached" not in got.text:
        pytest.skip("this machine lets nobody debug another's child")
    assert ("attached" in got.text) is not anywhere.isolated, got.text


KEYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
ADD, CTL = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
name = sys.argv[1].encode()
where = {"session": -3, "user": -4, "user session": -5}
if sys.argv[2] == "leave":
    for number in where.values(): libc.syscall(ADD, b"user", name, name, len(name), number)
for known, number in where.items():
    key = libc.syscall(CTL, 10, number, b"user", name, 0)
    if key > 0: print("found", known)
"""
FILES = """
import os, sys
for path in ("/dev/shm/" + sys.argv[1], "/tmp/" + sys.argv[1]):
    if sys.argv[2] == "leave": open(path, "w").write("x")
    if os.path.exists(path): print("found", path)
    if sys.argv[2] == "remove": os.remove(path)
"""
SYSTEM_V = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
key = int(sys.argv[1][-6:], 16)
found = libc.shmget(key, 4096, (0o1000 if sys.argv[2] == "leave" else 0) | 0o666)
if found >= 0: print("found")
if sys.argv[2] == "remove": libc.shmctl(found, 0, 0)
"""


def find_on_the_node(name: str) -> list[Path]:
    """Files of this machine with a name."""
    return [path for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob(name)]  # noqa: S108


@pytest.mark.parametrize("channel", [KEYS, FILES, SYSTEM_V], ids=["keys", "files", "System V"])
async def test_leave_something_for_another_session(anywhere: Arena, channel: str) -> None:
    """Keyrings of the kernel, temporary files and shared memory are no channel, nor to the node."""
    name = token()
    async with anywhere.box("first") as one, anywhere.box("second") as two:
        mine = await python(one, channel, name, "leave")
        got = await python(two, channel, name, "look")
        on_the_node = await asyncio.to_thread(find_on_the_node, name)
        await python(one, channel, name, "remove")
    assert got.exit.code == 0, got.text
    if channel == KEYS and not anywhere.isolated and "found" not in mine.text:
        pytest.skip("this kernel has no keyrings")
    assert "found" in mine.text or channel == KEYS
    assert ("found" in got.text) is not anywhere.isolated, got.text
    assert not (on_the_node and anywhere.isolated)
