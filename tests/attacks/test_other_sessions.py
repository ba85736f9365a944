"""Data of other sessions and of the node: files, environments, processes, keys."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.attacks import Arena, python, shell, token
from support.sandbox import wait_until_running
from tugline.aio import run_beside

READ = """
import os, pathlib, sys
secret, folder = sys.argv[1:3]
pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
def paths():
    for top in (folder, *(f"/proc/{pid}/root{folder}" for pid in pids)):
        for where, _, files in os.walk(top):
            yield from (pathlib.Path(where, name) for name in files)
    yield from (pathlib.Path("/proc", pid, "cwd/answer.txt") for pid in pids)
def matches():
    for path in paths():
        try:
            if secret in path.read_text(errors="replace"): return True
        except OSError: continue
print("match" if matches() else "nothing")
"""


@contextlib.asynccontextmanager
async def victim(arena: Arena, secret: str) -> AsyncIterator[Path]:
    """Another session with a secret in its files, environment and command line; its folder."""
    folder = arena.folder / "victim"
    async with arena.open("victim", files={"answer.txt": secret}) as sandbox:
        await sandbox.put(sandbox.home, {"settings.json": secret})
        mark = token()
        program = ("sh", "-c", "sleep 60; true", mark, f"--key={secret}")
        async with run_beside(sandbox.run(program, env={"KEY": secret}, timeout_s=60)):
            await wait_until_running(mark)
            yield folder


async def test_read_another_sessions_files(any_arena: Arena) -> None:
    """Files of another session cannot be read by their path on the node or through /proc."""
    secret = token()
    async with victim(any_arena, secret) as folder, any_arena.open() as sandbox:
        result = await python(sandbox, READ, secret, folder)
    assert result.text == ("nothing\n" if any_arena.isolated else "match\n")


ENVIRONMENTS = """
import os, sys
mine = str(os.getpid())
for pid in os.listdir("/proc"):
    for name in ("environ", "cmdline"):
        try: text = open(f"/proc/{pid}/{name}").read()
        except OSError: continue
        if sys.argv[1][::-1] in text and pid != mine: print("found", pid, name)
"""


async def test_read_another_sessions_environment(any_arena: Arena) -> None:
    """No environment or command line of another agent, which may hold keys, is readable."""
    secret = token()
    async with victim(any_arena, secret), any_arena.open() as sandbox:
        result = await python(sandbox, ENVIRONMENTS, secret[::-1])
    assert result.exit.code == 0, result.text
    found = {line.split()[-1] for line in result.text.splitlines()}
    assert found == (set() if any_arena.isolated else {"environ", "cmdline"})


async def test_read_the_nodes_files(any_arena: Arena) -> None:
    """Neither the node's tokens nor its user's home is readable."""
    secret = token()
    (any_arena.folder / "node").mkdir()
    (any_arena.folder / "node" / "token").write_text(secret)
    async with any_arena.open() as sandbox:
        result = await shell(
            sandbox, 'cat "$1"; ls -A "$2"', any_arena.folder / "node/token", Path.home()
        )
    assert (secret in result.text) is not any_arena.isolated
    if any_arena.isolated:
        # A Python that is installed in the home is mounted into sandboxes.
        given = {Path(sys.prefix), Path(sys.base_prefix)}
        shared = {
            path.relative_to(Path.home()).parts[0] for path in given if Path.home() in path.parents
        }
        mine = {entry.name for entry in Path.home().iterdir()} - {".bashrc", ".profile"}
        assert not (mine - shared) & set(result.text.split())


@pytest.fixture
def outsider() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host, outside of every sandbox."""
    wait = "import sys, time; secret = sys.argv[1] * 2; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", wait, token()]) as process:
        yield process
        process.kill()


async def test_see_processes_of_the_host(
    any_arena: Arena, outsider: subprocess.Popen[bytes]
) -> None:
    """No process of the host is visible in /proc."""
    mark = str(outsider.args[-1])  # type: ignore[index]
    async with any_arena.open() as sandbox:
        result = await shell(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert (mark in result.text) is not any_arena.isolated


async def test_signal_processes_of_the_host(
    any_arena: Arena, outsider: subprocess.Popen[bytes]
) -> None:
    """No signal reaches a process outside of the sandbox."""
    async with any_arena.open() as sandbox:
        await python(sandbox, "import os, sys; os.kill(int(sys.argv[1]), 9)", outsider.pid)
    await asyncio.sleep(0.05)
    assert (outsider.poll() is None) is any_arena.isolated


ATTACH = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
failed = libc.ptrace(16, int(sys.argv[1]), 0, 0)
print(os.strerror(ctypes.get_errno()) if failed else "attached")
"""


async def test_attach_to_processes_of_the_host(
    any_arena: Arena, outsider: subprocess.Popen[bytes]
) -> None:
    """No process outside of the sandbox can be debugged."""
    async with any_arena.open() as sandbox:
        result = await python(sandbox, ATTACH, outsider.pid)
    if not any_arena.isolated and "attached" not in result.text:
        pytest.skip("this machine does not allow debugging of another process's child")
    assert ("attached" in result.text) is not any_arena.isolated, result.text


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
    """Temporary files of the host with this name."""
    return [path for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob(name)]  # noqa: S108


@pytest.mark.parametrize("channel", [KEYS, FILES, SYSTEM_V], ids=["keys", "files", "System V"])
async def test_leave_something_for_another_session(any_arena: Arena, channel: str) -> None:
    """Sessions share no kernel keyrings, temporary files or shared memory with each other."""
    name = token()
    async with any_arena.open("first") as one, any_arena.open("second") as two:
        mine = await python(one, channel, name, "leave")
        result = await python(two, channel, name, "look")
        on_the_node = await asyncio.to_thread(find_on_the_node, name)
        await python(one, channel, name, "remove")
    assert result.exit.code == 0, result.text
    if channel == KEYS and not any_arena.isolated and "found" not in mine.text:
        pytest.skip("this kernel has no keyrings")
    assert "found" in mine.text or channel == KEYS
    assert ("found" in result.text) is not any_arena.isolated, result.text
    assert not (on_the_node and any_arena.isolated)
