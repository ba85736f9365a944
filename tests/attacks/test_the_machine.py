"""Memory, disk, processes and kernel of the machine, and what sessions share."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from support.attacks import Arena, python, shell, token
from support.sandbox import running
from tugline.sandbox.base import Mount, Sandbox
from tugline.sandbox.limits import find_cgroup_parent
from tugline.types import Cause, Workspace

LOOP = "import os, sys; sys.argv[1]\nwhile True:\n    try: os.fork()\n    except OSError: pass"


async def check_usable(sandbox: Sandbox) -> None:
    """Check that the next program in the sandbox runs."""
    assert (await shell(sandbox, "echo well")).text == "well\n"


async def test_fork_bomb(arena: Arena) -> None:
    """The host stays responsive, and the time limit ends every forked process."""
    mark = token()
    async with arena.open(options={"processes": 32}) as sandbox:
        bomb = asyncio.create_task(python(sandbox, LOOP, mark, timeout_s=1))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        other = await asyncio.create_subprocess_exec("true")
        await other.wait()
        assert time.monotonic() - began < 1
        assert len(running(mark)) <= 34
        assert (await bomb).exit.timed_out
        assert not running(mark)
        await check_usable(sandbox)


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


async def test_take_the_processors_from_another_session(arena: Arena) -> None:
    """150 busy loops get no larger share than the few of another session."""
    if arena.name == "bubblewrap" and find_cgroup_parent().cpu is None:
        pytest.skip("no control groups of the processor can be made here")
    few = os.cpu_count() or 1
    async with arena.open("many") as one, arena.open("few") as two:
        many, own = await asyncio.gather(
            python(one, BUSY, 150, 5, timeout_s=60), python(two, BUSY, few, 3, timeout_s=60)
        )
    # The 150 loops run without the others for a part of their time.
    assert float(own.text) > float(many.text) / 5, (own.text, many.text)


FILL = """
for n in $(seq 100); do
  dd if=/dev/zero of="$1/big$n" bs=1M count=20 || exit 3
  sleep 0.1
done
"""


@pytest.mark.parametrize("where", ["work", "home", "tmp", "shm"])
async def test_fill_the_disk(arena: Arena, where: str) -> None:
    """One sandbox can fill neither the node's disk nor its memory with files."""
    async with arena.open(options={"disk_mb": 64, "memory_mb": 256}) as sandbox:
        folders = {"work": sandbox.workdir, "home": sandbox.home, "tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108
        result = await shell(sandbox, FILL, folders[where])
        used = sum(
            entry.stat(follow_symlinks=False).st_blocks * 512
            for entry in arena.folder.rglob("*")
            if entry.is_file() and not entry.is_symlink()
        )
        assert used < 500 << 20, result.text
        stopped = result.exit.cause in {Cause.AGENT_DISK, Cause.AGENT_MEMORY}
        assert stopped or result.exit.code == 3, result
    async with arena.open("next") as sandbox:
        await check_usable(sandbox)


async def test_eat_memory(arena: Arena) -> None:
    """A program over the limit ends with a known cause; the sandbox stays usable."""
    eat = "held = []\nwhile True: held.append(b'x' * (1 << 24))"
    async with arena.open(options={"memory_mb": 256}) as sandbox:
        result = await python(sandbox, eat)
        assert result.exit.cause is Cause.AGENT_MEMORY or "MemoryError" in result.text, result
        assert result.exit.code != 0
        await check_usable(sandbox)


async def test_eat_memory_with_many_processes(arena: Arena) -> None:
    """The limit holds for the sum of all processes, not for each of them."""
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
    async with arena.open(options={"memory_mb": 256}) as sandbox:
        if any("memory" in line for line in await asyncio.to_thread(arena.runtime.list_weaknesses)):
            pytest.skip("the runtime cannot limit the memory of a whole sandbox here, and says so")
        result = await python(sandbox, eat)
        if result.exit.cause is not Cause.AGENT_MEMORY:
            assert int(result.text.split()[-1]) <= 4, result
        await check_usable(sandbox)


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
async def test_leave_a_daemon(arena: Arena, how: str) -> None:
    """Every process that a program leaves behind is dead when the run is over."""
    mark = token()
    async with arena.open() as sandbox:
        result = await shell(sandbox, f'{DAEMONS[how]} sleep 0.1; echo "$1"', mark)
        assert (result.exit.code, result.text) == (0, f"{mark}\n")
        assert not running(mark)
        await check_usable(sandbox)


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
def checked(number, *args):
    if call(number, *args) < 0: raise OSError(ctypes.get_errno(), "refused")
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
    "attributes": lambda: checked(sched_setattr, 1, attributes, 0),
    "disk": lambda: checked(ioprio_set, 1, 1, 3 << 13),
    "disk of the group": lambda: checked(ioprio_set, 2, 0, 3 << 13),
    "disk of the user": lambda: checked(ioprio_set, 3, os.getuid(), 3 << 13),
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
words = b"".join(b"%s %d 0\\n" % (word, n) for word in (b"ended", b"clean") for n in range(9))
for path in glob.glob("/proc/1/fd/*") + glob.glob("/run/tugline/*") + ["/proc/1/mem"]:
    for how in (os.O_WRONLY, os.O_RDONLY):
        try: pipe = os.open(path, how | os.O_NONBLOCK)
        except OSError: continue
        try:
            if how == os.O_WRONLY: os.write(pipe, words)
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
pipes = {n: (opened(n, os.O_RDONLY), opened(n, os.O_WRONLY)) for n in (3, 4)}
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        for n in (3, 4):
            if pipes[n][0] is not None: os.set_blocking(pipes[n][0], True)
        while pipes[4][0] is not None:
            words = os.read(pipes[4][0], 4096).split()
            if len(words) > 1: print("key", words, flush=True)
            if len(words) > 3: os.write(pipes[4][1], b"ended %s 0 %s\\n" % (words[1], words[3]))
        os._exit(0)
for number, (_, pipe) in pipes.items():
    try:
        for _ in range(1 << 16 if pipe is not None else 0): os.write(pipe, b"x")
    except OSError: pass
os._exit(7)
"""


PIPES = {"forge": (FORGE, 2), "read": (LISTEN, 12)}
"""Attacks on the messages in the runner's pipes, and how often each is tried."""


@pytest.mark.parametrize("attack", PIPES)
async def test_forge_or_read_messages_of_the_runner(arena: Arena, attack: str) -> None:
    """A program can neither forge its exit code nor start or block another program.

    Daemons that read the pipes see no key, and a pipe full of partial lines breaks nothing. Root in
    a container can open the pipes of process 1 in `/proc`.
    """
    script, times = PIPES[attack]
    async with arena.open() as sandbox:
        for _ in range(times):
            result = await python(sandbox, script, timeout_s=60)
            assert (result.exit.code, result.exit.timed_out) == (7, False)
            assert not {"wrote", "removed", "key"} & set(result.text.split()), result.text
        await check_usable(sandbox)


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
    # Neither memory nor descriptors of the runner; a program's own children can be debugged.
    "take over the runner": (TAKE_OVER, "a child can be debugged\n"),
    # Process 1 keeps its limits and its priority: without open files it would end, as a fault of
    # the node. A program may change its own limits.
    "starve the runner by limits": (STARVE, "own\n"),
    # No device of the machine's disks or memory can be opened.
    "make devices": (MAKE_DEVICES, "[]\n"),
}


@pytest.mark.parametrize("attack", OUT_OF_REACH)
async def test_reach_process_1_or_a_device(arena: Arena, attack: str) -> None:
    """An attack on process 1 or a device has only harmless output; the sandbox stays usable."""
    script, harmless = OUT_OF_REACH[attack]
    async with arena.open() as sandbox:
        assert (await python(sandbox, script)).text == harmless
        await check_usable(sandbox)


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
    """Whether this process, and so an engine that it starts, has CAP_SYS_RESOURCE."""
    rights = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    return bool(int(rights, 16) & 1 << 24)


def read_priority(sandbox: Sandbox) -> list[str]:
    """The scores and the scheduling group of process 1, read from outside."""
    folder = Path(f"/proc/{sandbox._pid}")  # type: ignore[attr-defined]
    paths = [folder / name for name in ("oom_score_adj", "oom_adj", "autogroup")]
    return [path.read_text() for path in paths if path.exists()]


async def test_raise_the_own_priority(arena: Arena) -> None:
    """Process 1 keeps its OOM score; programs are killed first and cannot lower theirs below it."""
    async with arena.open() as sandbox:
        await check_usable(sandbox)
        before = read_priority(sandbox)
        result = await python(sandbox, FAVOUR)
        assert read_priority(sandbox) == before
        began, lowest, *nice = map(int, result.text.split())
        assert (began, before[0]) == (1000, "500\n")
        assert lowest >= 500 or not may_lower_scores()
        assert len(nice) == 2
        assert min(nice) >= 0
        await check_usable(sandbox)


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
        # Some that are not writable can be opened; an alarm of /proc/pressure is harmless.
        if not stat.S_ISREG(mode) or not mode & 0o222 or "/pressure/" in path: continue
        os.close(os.open(path, os.O_WRONLY)); print("open", path)
    except OSError: pass
"""


async def test_tune_the_kernel(any_arena: Arena) -> None:
    """No file of /proc, /sys or the cgroups, where escapes usually begin, opens for writing."""
    async with any_arena.open() as sandbox:
        result = await python(sandbox, TUNE)
    if not any_arena.isolated and not result.text:
        pytest.skip("not root: the kernel refuses already")
    assert (result.text == "") is any_arena.isolated, result.text[:2000]
    assert result.exit.code == 0


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


async def test_remount_read_only_folders_for_writing(arena: Arena, tmp_path: Path) -> None:
    """Not even capabilities of a new user namespace make a read-only folder writable."""
    tools, name = tmp_path / "toolbox", token()
    tools.mkdir()
    mounts = (Mount("/opt/toolbox", str(tools)),)
    async with arena.open(mounts=mounts) as sandbox:
        result = await python(sandbox, MOUNT, "/opt/toolbox", name)
    assert result.exit.code == 0, result.text
    assert "wrote /opt" not in result.text
    assert "remount toolbox" not in result.text
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


async def test_change_the_installed_programs(arena: Arena, tmp_path: Path) -> None:
    """A session cannot change the programs of harnesses, which all sessions share."""
    tools = tmp_path / "toolbox"
    tools.mkdir()
    (tools / "tool").write_text("sound")
    async with arena.open(mounts=(Mount("/opt/toolbox", str(tools)),)) as sandbox:
        assert (await shell(sandbox, "cat /opt/toolbox/tool")).text == "sound"
        result = await python(sandbox, POISON, "/opt/toolbox", sandbox.home)
    assert (result.exit.code, result.text) == (0, "")
    assert (tools / "tool").read_text() == "sound"


async def test_change_the_base_of_a_task(arena: Arena, tmp_path: Path) -> None:
    """A session changes its own copy of the files; the next one starts with the originals."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "tool").write_text("sound")
    workspace = Workspace(image=arena.workspace.image, folder=str(base))
    async with arena.open("first", workspace=workspace) as sandbox:
        result = await python(sandbox, POISON, sandbox.workdir, sandbox.home)
        assert "did" in result.text
    async with arena.open("second", workspace=workspace) as sandbox:
        assert (await shell(sandbox, "cat tool; ls -A")).text == "soundtool\n"
    assert (base / "tool").read_text() == "sound"
    assert [entry.name for entry in base.iterdir()] == ["tool"]


async def test_become_another_user(arena: Arena) -> None:
    """Setuid programs give no privileges, and the host's shadow file is not readable."""
    look = "grep -h NoNewPrivs /proc/self/status; cat /etc/shadow 2>/dev/null | wc -l"
    async with arena.open() as sandbox:
        result = (await shell(sandbox, look)).text.split()
    assert result[1] == "1"
    if arena.name == "bubblewrap":
        assert result[2] == "0"
