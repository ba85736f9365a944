"""Quotas of the kernel that are counted for a user or for the machine, not for a sandbox.

One sandbox takes all that it gets of a quota; an honest one beside it must still get what it needs,
or the runtime lists the quota as a weakness.
"""

from __future__ import annotations

import asyncio
import os
import platform

import psutil
import pytest

from support.attacks import Arena, python
from support.polling import until

_LIBC = """
import ctypes, errno, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
held = []
def check(code):
    if code < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return code
def watch(): held.append(check(libc.inotify_init1(0)))
def mark(): held.append(check(libc.fanotify_init(0x200, 0)))
def queue(): held.append(check(libc.mq_open(b"/q%d" % len(held), 0o102, 0o600, None)))
def terminal(): held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
def aio():
    context = ctypes.c_ulong(0)
    check(libc.syscall(206, 4096, ctypes.byref(context)))
    held.append(context)
def key():
    name = b"k%d" % len(held)
    check(libc.syscall(248, b"user", name, b"x" * 5000, 5000, -2))
    held.append(name)
def pipe():
    ends = os.pipe()
    held.extend(ends)
    import fcntl
    fcntl.fcntl(ends[0], 1031, 1 << 20)
    if fcntl.fcntl(ends[0], 1032) < 1 << 20: raise OSError("small")
def flight():
    a, b = socket.socketpair()
    held.append((a, b))
    for _ in range(8): socket.send_fds(a, [b"x"], [0] * 200)
def lock():
    import mmap
    area = mmap.mmap(-1, 1 << 16)
    check(libc.mlock(ctypes.byref(ctypes.c_char.from_buffer(area)), 1 << 16))
    held.append(area)
def timer():
    for _ in range(1000):
        made = ctypes.c_void_p()
        check(libc.timer_create(1, None, ctypes.byref(made)))
        held.append(made)
"""
TAKE = f"""{_LIBC}
end, taken = time.monotonic() + 30, 0
def take():
    global taken
    try:
        while time.monotonic() < end and taken < 20000:
            globals()[sys.argv[1]]()
            taken += 1
    except OSError as error: return error
    return None
error = take()
# The process's own limits are not the quota: others of the sandbox take the rest.
while taken and os.fork() == 0:
    before, held, taken = held, [], 0
    error = take() or error
    if not taken or time.monotonic() > end: break
    if len(sys.argv[2]) > 80: break
    sys.argv[2] += "x"
print("taken", error, flush=True)
time.sleep(60)
"""
NEED = f"""{_LIBC}
for _ in range(2): globals()[sys.argv[1]]()
print("got", len(held) > 0)
"""
QUOTAS = {
    "watch": "inotify",
    "mark": "fanotify",
    "queue": "POSIX queues",
    "timer": "pending signals",
    "terminal": "pseudo-terminals",
    "pipe": "pages of pipes",
    "flight": "descriptors in flight",
    "lock": "locked memory",
}
"""Ways to take a quota, and the words that name it in a weakness."""
REFUSED = {"aio": 206, "key": 248}
"""Calls whose quota is the machine's or the user's, and their numbers."""


@pytest.mark.parametrize("quota", QUOTAS)
async def test_take_all_of_a_quota(arena: Arena, quota: str) -> None:
    """A sandbox beside the taker gets what it needs, or the runtime lists the weakness."""
    async with arena.open("taker") as taker, arena.open("honest") as honest:
        alone = await python(honest, NEED, quota)
        if arena.name == "container" and quota == "mark" and "not permitted" in alone.text:
            return  # engines refuse it to all
        assert alone.text == "got True\n"
        taking = asyncio.create_task(python(taker, TAKE, quota, "m", timeout_s=60))
        read = lambda: "".join(log.read_text() for log in taker.logs.glob("run-*.log"))  # noqa: E731
        await until(lambda: "taken" in read() or taking.done(), 40)
        assert "taken [Errno" in read()
        result = await python(honest, NEED, quota)
        taking.cancel()
        await asyncio.wait([taking])
    lines = await asyncio.to_thread(arena.runtime.list_weaknesses)
    listed = any(QUOTAS[quota] in line for line in lines)
    assert result.text == "got True\n" or listed, result.text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the script has numbers of x86_64")
@pytest.mark.parametrize("call", REFUSED)
async def test_calls_with_a_quota_of_all_are_missing(arena: Arena, call: str) -> None:
    """Calls with a quota of the machine or user fail as in a kernel without these calls."""
    async with arena.open() as sandbox:
        result = await python(sandbox, NEED, call)
    assert "Function not implemented" in result.text or "not permitted" in result.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may map owners and limit terminals")
async def test_bubblewrap_has_a_kernel_user_for_each_sandbox(arena: Arena) -> None:
    """Two sandboxes have different kernel users, so none of these quotas is a weakness."""
    if arena.name != "bubblewrap":
        pytest.skip("containers have no kernel user of their own")
    async with arena.open("left") as left, arena.open("right") as right:
        await asyncio.gather(
            left.put(left.workdir, {"a/b": "x"}), right.put(right.home, {"c": "y"})
        )
        users = [psutil.Process(box._pid).uids().real for box in (left, right)]
        seen = await python(left, "import os; print(os.getuid(), *os.stat('a/b')[4:6])")
        written = (left._directory / "work/a/b", right._directory / "home/c")
        stored = [path.stat().st_uid for path in written]
    assert 0 not in users
    assert users[0] != users[1]
    assert seen.text == "1000 1000 1000\n"
    assert stored == [0, 0]
    lines = await asyncio.to_thread(arena.runtime.list_weaknesses)
    assert not [name for name in QUOTAS.values() for line in lines if name in line]
