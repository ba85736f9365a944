"""The machine itself: its memory, disks, processes and kernel, and what is shared by sessions."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from attacked import Arena, python, running, shell, token
from tugline.sandbox.base import Mount, Sandbox
from tugline.sandbox.limits import find_cgroup_parent
from tugline.types import Cause, Workspace

LOOP = "import os, sys; sys.argv[1]\nwhile True:\n    try: os.fork()\n    except OSError: pass"


async def still_works(box: Sandbox) -> None:
    """The next program of the same box runs as if nothing had been."""
    assert (await shell(box, "echo well")).text == "well\n"


async def test_fork_bomb(sandbox: Arena) -> None:
    """The host stays quick, the box ends in time with all that was forked, and can be used."""
    mark = token()
    async with sandbox.box(options={"processes": 32}) as box:
        bomb = asyncio.create_task(python(box, LOOP, mark, timeout_s=1))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        other = await asyncio.create_subprocess_exec("true")
        await other.wait()
        assert time.monotonic() - began < 1
        assert len(running(mark)) <= 34
        assert (await bomb).exit.timed_out
        assert not running(mark)
        await still_works(box)


BUSY = """
import os, sys, time
began = time.monotonic()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        while time.monotonic() < began + float(sys.argv[2]): pass
        os._exit(0)
try:
    while True: os.wait()
except ChildProcessError: pass
used = os.times()
print((used.children_user + used.children_system) / (time.monotonic() - began))
"""


async def test_take_the_processors_from_another_session(sandbox: Arena) -> None:
    """A hundred and fifty busy loops have no more of them than a neighbour's few."""
    if sandbox.name == "bubblewrap" and find_cgroup_parent().cpu is None:
        pytest.skip("no control groups of the processor can be made here")
    few = os.cpu_count() or 1
    async with sandbox.box("many") as one, sandbox.box("few") as two:
        many, own = await asyncio.gather(
            python(one, BUSY, 150, 5, timeout_s=60), python(two, BUSY, few, 3, timeout_s=60)
        )
    # The many are alone for a part of their time.
    assert float(own.text) > float(many.text) / 5, (own.text, many.text)


FILL = """
for n in $(seq 100); do
  dd if=/dev/zero of="$1/big$n" bs=1M count=20 || exit 3
  sleep 0.1
done
"""


@pytest.mark.parametrize("where", ["work", "home", "tmp", "shm"])
async def test_fill_the_disk(sandbox: Arena, where: str) -> None:
    """One box cannot take the node's disk, nor its memory by files that are held there."""
    async with sandbox.box(options={"disk_mb": 64, "memory_mb": 256}) as box:
        folders = {"work": box.workdir, "home": box.home, "tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108
        got = await shell(box, FILL, folders[where])
        held = sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in sandbox.folder.rglob("*")
            if entry.is_file() and not entry.is_symlink()
        )
        assert held < 500 << 20, got.text
        stopped = got.exit.cause in {Cause.AGENT_DISK, Cause.AGENT_MEMORY}
        assert stopped or got.exit.code == 3, got
    async with sandbox.box("next") as box:
        await still_works(box)


async def test_eat_memory(sandbox: Arena) -> None:
    """The program that takes too much ends, and it is known why; nobody else's does."""
    eat = "held = []\nwhile True: held.append(b'x' * (1 << 24))"
    async with sandbox.box(options={"memory_mb": 256}) as box:
        got = await python(box, eat)
        assert got.exit.cause is Cause.AGENT_MEMORY or "MemoryError" in got.text, got
        assert got.exit.code != 0
        await still_works(box)


async def test_eat_memory_with_many_processes(sandbox: Arena) -> None:
    """A bound that each process has for itself would be none: there is no room for all of them."""
    eat = (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0: held = b'x' * (64 << 20); time.sleep(30); os._exit(0)\n"
        "dead, until = 0, time.time() + 12\n"
        "while dead < 16 and time.time() < until:\n"
        "    time.sleep(0.05)\n"
        "    dead += os.waitpid(-1, os.WNOHANG)[0] > 0\n"
        "print('living', 20 - dead)"
    )
    async with sandbox.box(options={"memory_mb": 256}) as box:
        if any(
            "memory" in line for line in await asyncio.to_thread(sandbox.runtime.list_weaknesses)
        ):
            pytest.skip("this machine bounds no memory of a whole box, and the runtime says so")
        got = await python(box, eat)
        if got.exit.cause is not Cause.AGENT_MEMORY:
            assert int(got.text.split()[-1]) <= 4, got
        await still_works(box)


DAEMONS = {
    "nohup": 'nohup sleep 300 "$1" >/dev/null 2>&1 &',
    "setsid": 'setsid sh -c "sleep 300; true" "$1" >/dev/null 2>&1 &',
    "double fork": '(setsid sh -c "(sleep 300; true) & " "$1" &) >/dev/null 2>&1 &',
    "empty environment": 'env -i setsid sh -c "sleep 300; true" "$1" </dev/null >/dev/null 2>&1 &',
    "deaf": 'setsid sh -c "trap \'\' TERM HUP INT; sleep 300; true" "$1" >/dev/null 2>&1 &',
    "holds its output": 'setsid sh -c "sleep 300; true" "$1" &',
    "restarts itself": 'setsid sh -c "while :; do sleep 0.01; done" "$1" >/dev/null 2>&1 &',
}


@pytest.mark.parametrize("how", DAEMONS)
async def test_leave_a_daemon(sandbox: Arena, how: str) -> None:
    """Whatever a program leaves behind is dead when its run is over."""
    mark = token()
    async with sandbox.box() as box:
        got = await shell(box, f'{DAEMONS[how]} sleep 0.1; echo "$1"', mark)
        assert (got.exit.code, got.text) == (0, f"{mark}\n")
        assert not running(mark)
        await still_works(box)


KILL = """
import os, signal
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
    try: os.kill(1, number)
    except OSError: pass
print("lives")
"""
STARVE = """
import ctypes, os, platform, resource
NUMBERS = {"x86_64": (251, 314), "aarch64": (30, 274)}
ioprio_set, sched_setattr = NUMBERS[platform.machine()]
call = ctypes.CDLL(None, use_errno=True).syscall
def told(number, *given):
    if call(number, *given) < 0: raise OSError(ctypes.get_errno(), "refused")
attributes = (ctypes.c_uint32 * 12)(48, 5)
only = {min(os.sched_getaffinity(0))}
acts = {
    "limit": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "priority of the group": lambda: os.setpriority(os.PRIO_PGRP, 0, 19),
    "priority of the user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "processors": lambda: os.sched_setaffinity(1, only),
    "scheduler": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "parameters": lambda: os.sched_setparam(1, os.sched_param(0)),
    "attributes": lambda: told(sched_setattr, 1, attributes, 0),
    "disk": lambda: told(ioprio_set, 1, 1, 3 << 13),
    "disk of the group": lambda: told(ioprio_set, 2, 0, 3 << 13),
    "disk of the user": lambda: told(ioprio_set, 3, os.getuid(), 3 << 13),
}
for name, act in acts.items():
    try: act()
    except OSError: continue
    print("did", name)
resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (100, 100))
os.setpriority(os.PRIO_PROCESS, 0, 19); os.sched_setaffinity(0, only)
print("own")
"""


FORGE = """
import glob, os
said = b"".join(b"%s %d 0\\n" % (word, n) for word in (b"ended", b"clean") for n in range(9))
for path in glob.glob("/proc/1/fd/*") + glob.glob("/run/tugline/*") + ["/proc/1/mem"]:
    for how in (os.O_WRONLY, os.O_RDONLY):
        try: pipe = os.open(path, how | os.O_NONBLOCK)
        except OSError: continue
        try:
            if how == os.O_WRONLY: os.write(pipe, said)
            elif b"key" not in path.encode(): os.read(pipe, 100)
        except OSError: pass
for path in glob.glob("/run/tugline/*"):
    try: open(path, "w").write("x"); print("wrote", path)
    except OSError: pass
    try: os.unlink(path); print("removed", path)
    except OSError: pass
os._exit(7)
"""
LISTEN = """
import os, sys
def opened(number, how):
    try: return os.open(f"/proc/1/fd/{number}", how | os.O_NONBLOCK)
    except OSError: return None
held = {n: (opened(n, os.O_RDONLY), opened(n, os.O_WRONLY)) for n in (3, 4)}
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        for n in (3, 4):
            if held[n][0] is not None: os.set_blocking(held[n][0], True)
        while held[4][0] is not None:
            heard = os.read(held[4][0], 4096).split()
            if len(heard) > 1: print("heard", heard, flush=True)
            if len(heard) > 3: os.write(held[4][1], b"ended %s 0 %s\\n" % (heard[1], heard[3]))
        os._exit(0)
for number, (_, pipe) in held.items():
    try:
        for _ in range(1 << 16 if pipe is not None else 0): os.write(pipe, b"x")
    except OSError: pass
os._exit(7)
"""


WORDS = {"forge": (FORGE, 2), "take": (LISTEN, 12)}
"""What is done to the words at the runner's pipes, and how often it is tried."""


@pytest.mark.parametrize("attack", WORDS)
async def test_forge_or_take_the_runners_words(sandbox: Arena, attack: str) -> None:
    """A program cannot say how it ended, order another one, or stop the next.

    Daemons that wait at its pipes hear no key, and a pipe full of halves of lines ends nothing.
    Root in a container can open the pipes of process 1 in `/proc`.
    """
    script, times = WORDS[attack]
    async with sandbox.box() as box:
        for _ in range(times):
            got = await python(box, script, timeout_s=60)
            assert (got.exit.code, got.exit.timed_out) == (7, False)
            assert not {"wrote", "removed", "heard"} & set(got.text.split()), got.text
        await still_works(box)


TAKE_OVER = """
import ctypes, os, re
libc = ctypes.CDLL(None, use_errno=True)
calls = {"x86_64": (101, 302, 310, 311, 438), "aarch64": (117, 261, 270, 271, 438)}
ptrace, prlimit, readv, writev, getfd = calls[os.uname().machine]
space = ctypes.create_string_buffer(4096)
def call(name, *given):
    if libc.syscall(*(ctypes.c_ulong(one) for one in given)) >= 0: print("did", name)
try: at = int(open("/proc/1/maps").readline().split("-")[0], 16)
except OSError: at = 4096
ours = (ctypes.c_ulong * 2)(ctypes.addressof(space), 4096)
theirs = (ctypes.c_ulong * 2)(at, 4096)
for one in (1, 1 << 32 | 1):
    for request in (0x4206, 16):  # seize, attach
        call("ptrace", ptrace, request, one, 0, 0)
    call("read", readv, one, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)
    call("write", writev, one, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0)
    call("prlimit", prlimit, one, 7, 0, ctypes.addressof(space))
if hasattr(os, "pidfd_open"):
    call("getfd", getfd, os.pidfd_open(1), 0, 0)
for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
    try:
        with open(path, "rb", buffering=0) as memory:
            for line in open("/proc/1/maps"):
                low, high = (int(word, 16) for word in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(low)
                    if re.search(rb"[0-9a-f]{32}", memory.read(high - low)): print("key in", path)
    except OSError: pass
child = os.fork()
if child == 0: os.read(os.pipe()[0], 1)
if libc.ptrace(0x4206, child, 0, 0) == 0: print("a child can be debugged")
os.kill(child, 9)
"""


MAKE_DEVICES = """
import os, stat
block = [(stat.S_IFBLK, major, 0) for major in (7, 8, 253, 254, 259)]
for kind, major, minor in ((stat.S_IFCHR, 1, 1), *block):
    try:
        os.mknod("device", kind | 0o666, os.makedev(major, minor))
        os.open("device", os.O_RDONLY); print("opened", major, minor)
    except OSError: pass
    if os.path.lexists("device"): os.unlink("device")
print(sorted(name for name in os.listdir("/dev") if stat.S_ISBLK(os.lstat("/dev/" + name).st_mode)))
"""
OUT_OF_REACH = {
    "end the first process": (KILL, "lives\n"),
    # Its memory and its descriptors; other processes can be debugged.
    "take over the runner": (TAKE_OVER, "a child can be debugged\n"),
    # Process 1 keeps its limits and its place in the queue: a limit of no open files would end it,
    # as a fault of the node's. A program's own limits are its own.
    "bind the runner by limits": (STARVE, "own\n"),
    # The disks and the memory of the machine stay closed.
    "make devices": (MAKE_DEVICES, "[]\n"),
}


@pytest.mark.parametrize("attack", OUT_OF_REACH)
async def test_reach_for_the_first_process_or_a_device(sandbox: Arena, attack: str) -> None:
    """The program prints what it can do, which is harmless, and the box goes on."""
    script, harmless = OUT_OF_REACH[attack]
    async with sandbox.box() as box:
        assert (await python(box, script)).text == harmless
        await still_works(box)


FAVOUR = """
import os
def write(path, value):
    try:
        with open(path, "w") as file: file.write(value)
    except OSError: pass
def read(name): return open("/proc/self/" + name).read().split()
for task in ("1", "1/task/1"):
    for value in ("1000", "-1000", "0"):
        write(f"/proc/{task}/oom_score_adj", value)
    write(f"/proc/{task}/oom_adj", "15")
    write(f"/proc/{task}/autogroup", "19")
print(*read("oom_score_adj"))
for value in range(1000, -1001, -50):
    write("/proc/self/oom_score_adj", str(value))
write("/proc/self/oom_adj", "-17")
print(*read("oom_score_adj"))
for value in ("-20", "-1"):
    write("/proc/self/autogroup", value)
print(read("autogroup")[-1] if os.path.exists("/proc/self/autogroup") else 0)
try: os.setpriority(os.PRIO_PROCESS, 0, -1)
except OSError: pass
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def may_lower_scores() -> bool:
    """Whether this process has CAP_SYS_RESOURCE, and an engine that it starts."""
    rights = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    return bool(int(rights, 16) & 1 << 24)


def place_of(box: Sandbox) -> list[str]:
    """What the kernel knows of process 1, who reads it from outside."""
    folder = Path(f"/proc/{box._pid}")  # type: ignore[attr-defined]
    paths = [folder / name for name in ("oom_score_adj", "oom_adj", "autogroup")]
    return [path.read_text() for path in paths if path.exists()]


async def test_be_spared_when_memory_or_processors_are_short(sandbox: Arena) -> None:
    """Process 1 keeps its place; programs come first, and how far they can go back is bounded."""
    async with sandbox.box() as box:
        await still_works(box)
        before = place_of(box)
        got = await python(box, FAVOUR)
        assert place_of(box) == before
        began, lowest, *nice = map(int, got.text.split())
        assert (began, before[0]) == (1000, "500\n")
        assert lowest >= 500 or not may_lower_scores()
        assert len(nice) == 2
        assert min(nice) >= 0
        await still_works(box)


TUNE = """
import glob, os, stat
paths = ["/dev/kmsg", "/dev/mem", *glob.glob("/sys/kernel/**", recursive=True)]
paths += glob.glob("/sys/fs/cgroup/**", recursive=True)
for where, folders, files in os.walk("/proc"):
    folders[:] = [name for name in folders if not name.isdigit() and not name.endswith("self")]
    paths += [os.path.join(where, name) for name in files]
for path in paths:
    try:
        mode = os.stat(path).st_mode
        # Some that nobody can write to can be opened; an alarm of /proc/pressure harms nobody.
        if not stat.S_ISREG(mode) or not mode & 0o222 or "/pressure/" in path: continue
        os.close(os.open(path, os.O_WRONLY)); print("open", path)
    except OSError: pass
"""


async def test_tune_the_kernel(anywhere: Arena) -> None:
    """Nothing of it can be opened for writing, where a container's escape usually begins."""
    async with anywhere.box() as sandbox:
        got = await python(sandbox, TUNE)
    if not anywhere.isolated and not got.text:
        pytest.skip("not root: the kernel refuses already")
    assert (got.text == "") is anywhere.isolated, got.text[:2000]
    assert got.exit.code == 0


MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *call):
    if libc.mount(*call) == 0: print("mounted", name)
def all_of_them():
    attempt("remount", None, b"/", None, 32 | 4096, None)
    attempt("remount usr", None, b"/usr", None, 32 | 4096, None)
    attempt("remount toolbox", None, sys.argv[1].encode(), None, 32 | 4096, None)
    for path in ("/usr/" + sys.argv[2], "/etc/" + sys.argv[2], sys.argv[1] + "/new"):
        try: open(path, "w").write("x"); print("wrote", path)
        except OSError: pass
all_of_them()
if libc.unshare(0x10000000 | 0x20000) == 0:
    all_of_them()
"""


async def test_mount_what_is_read_only_for_writing(sandbox: Arena, tmp_path: Path) -> None:
    """Nor with the rights that a user namespace of its own gives: what is shared stays as it is."""
    tools, name = tmp_path / "toolbox", token()
    tools.mkdir()
    mounts = (Mount("/opt/toolbox", str(tools)),)
    async with sandbox.box(mounts=mounts) as box:
        got = await python(box, MOUNT, "/opt/toolbox", name)
    assert got.exit.code == 0, got.text
    assert "wrote /opt" not in got.text
    assert "remount toolbox" not in got.text
    assert not list(tools.iterdir())
    assert not any(map(os.path.exists, (f"/usr/{name}", f"/etc/{name}")))


POISON = """
import os, pathlib, sys
top = pathlib.Path(sys.argv[1])
for act in (lambda p: p.write_text("poison"), lambda p: p.chmod(0o777), lambda p: p.unlink(),
            lambda p: p.rename(p.with_name("other")), lambda p: os.utime(p, (0, 0)),
            lambda p: os.truncate(p, 0), lambda p: os.setxattr(p, "user.x", b"x")):
    for path in (top / "tool", top):
        try: act(path); print("did", path)
        except OSError: pass
try: (top / "new").write_text("x"); print("did new")
except OSError: pass
try:
    os.link(top / "tool", sys.argv[2] + "/linked")
    open(sys.argv[2] + "/linked", "w").write("x"); print("did link")
except OSError: pass
"""


async def test_poison_the_toolbox(sandbox: Arena, tmp_path: Path) -> None:
    """The programs of harnesses are shared by all sessions, and nobody can change them."""
    tools = tmp_path / "toolbox"
    tools.mkdir()
    (tools / "tool").write_text("sound")
    async with sandbox.box(mounts=(Mount("/opt/toolbox", str(tools)),)) as box:
        assert (await shell(box, "cat /opt/toolbox/tool")).text == "sound"
        got = await python(box, POISON, "/opt/toolbox", box.home)
    assert (got.exit.code, got.text) == (0, "")
    assert (tools / "tool").read_text() == "sound"


async def test_poison_what_a_task_begins_with(sandbox: Arena, tmp_path: Path) -> None:
    """A session changes its own view of the files; the next one begins with what was there."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "tool").write_text("sound")
    workspace = Workspace(image=sandbox.workspace.image, folder=str(base))
    async with sandbox.box("first", workspace=workspace) as box:
        got = await python(box, POISON, box.workdir, box.home)
        assert "did" in got.text
    async with sandbox.box("second", workspace=workspace) as box:
        assert (await shell(box, "cat tool; ls -A")).text == "soundtool\n"
    assert (base / "tool").read_text() == "sound"
    assert [entry.name for entry in base.iterdir()] == ["tool"]


async def test_become_another_user(sandbox: Arena) -> None:
    """Setuid programs give nothing, and what rights there are say nothing outside."""
    look = "grep -h NoNewPrivs /proc/self/status; cat /etc/shadow 2>/dev/null | wc -l"
    async with sandbox.box() as box:
        got = (await shell(box, look)).text.split()
    assert got[1] == "1"
    if sandbox.name == "bubblewrap":
        assert got[2] == "0"
