from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import msgspec
import pytest

from sandboxes import mount_table, read_log, run_shell, running, unique_sleep
from tugline.errors import SandboxError, UsageError, WorkspaceError
from tugline.sandbox.base import Mount, Sandbox, SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.sandbox.bubblewrap_view import python_folders
from tugline.sandbox.limits import find_cgroup_parent
from tugline.types import Cause, Workspace

SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.fixture(scope="module")
def runtime() -> Bubblewrap:
    """The runtime with what it is by itself, where it can be had."""
    made = Bubblewrap()
    reason = made.check_available()
    if reason is not None:
        pytest.skip(reason)
    return made


@pytest.fixture
async def sandbox(runtime: Bubblewrap, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox with two files."""
    place = SandboxSpec(files={"a/b.txt": "one\r\ntwo", "c": "x"})
    async with runtime.open(tmp_path / "sandbox", place) as opened:
        yield opened


def handles() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def names(folder: Path, pattern: str = "*") -> set[str]:
    """What is in a folder."""
    return {path.name for path in folder.glob(pattern)}


# --------------------------------------------------------------------------- what a program sees
async def test_a_program_sees_only_what_it_is_given(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files as given, an environment of its own, no process, user or folder of the machine's."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    await run_shell(
        sandbox, "pwd; id -un; hostname; wc -c <a/b.txt; cat; set -- /proc/[0-9]*; echo $#"
    )
    assert read_log(sandbox).split() == ["/workspace", "agent", "sandbox", "8", "2"]
    await run_shell(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '", GIVEN="x")
    seen = set(read_log(sandbox).splitlines()[-1].split()) - {"PWD", "SHLVL", "_"}
    assert seen == {"PATH", "LANG", "HOME", "TMPDIR", "GIVEN"}
    hidden = "/home/* /var/* /run/* /tmp/* /mnt /media /srv /boot /sys /etc/shadow"
    await run_shell(sandbox, f"echo ===; ls -d {hidden} 2>/dev/null")
    ours = {
        str(up) for one in python_folders() for up in (Path(one), *Path(one).parents)
    }  # anywhere
    there = [one for one in read_log(sandbox).rpartition("===")[2].split() if one not in ours]
    assert there == ["/home/agent", "/run/tugline", "/var/tmp"]  # noqa: S108
    done = await run_shell(
        sandbox, "touch /x /usr/x /etc/x /dev/x /run/tugline/x 2>&1 | grep -c Read-only"
    )
    assert (done.code, read_log(sandbox).splitlines()[-1]) == (0, "5")


async def test_python_and_the_systems_programs_are_there(sandbox: Sandbox) -> None:
    """`python3` is one with pytest; git works; TLS has its certificates."""
    script = "python3 -m pytest --version && git init -q . && ls /etc/ssl/certs/ca-certificates.crt"
    assert (await run_shell(sandbox, script)).code == 0, read_log(sandbox)


async def test_the_kernels_side_doors_are_shut(sandbox: Sandbox) -> None:
    """No new user namespace, no keyring, no hand on the keeper, no look at it."""
    script = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def refused(result): assert result == -1, result; print(ctypes.get_errno())
        refused(libc.ptrace(16, 1, 0, 0))
        refused(libc.unshare(0x10000000))
        refused(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
        refused(libc.syscall(250, 0, 0, 0) if os.uname().machine == "x86_64" else -1)
        print(os.listdir("/proc/1"))
        """
    done = await sandbox.run(("python3", "-c", textwrap.dedent(script)), env={}, timeout_s=10)
    assert done.code == 0, read_log(sandbox)
    assert read_log(sandbox).splitlines()[-1] == "[]"


# --------------------------------------------------------------------------- programs
async def test_a_sandbox_that_cannot_be_ended_leaves_no_files(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sandbox had of the disk is given back all the same, and the fault is told."""
    ended = sandbox.aclose  # type: ignore[attr-defined]

    async def hangs() -> None:
        msg = "hangs in the kernel"
        raise SandboxError(msg)

    (sandbox.logs.parent / "tmp" / "x").write_text("x")
    with monkeypatch.context() as patched:
        patched.setattr(sandbox, "_stop", hangs)
        with pytest.raises(SandboxError, match="hangs"):
            await ended()
    assert not (sandbox.logs.parent / "tmp").exists()


# --------------------------------------------------------------------------- limits
@pytest.mark.usefixtures("runtime")
async def test_memory_is_bounded(tmp_path: Path) -> None:
    """What takes too much is ended and told; the sandbox goes on. Small programs go on."""
    if find_cgroup_parent().memory is None:
        pytest.skip("no memory control group can be made here")
    async with Bubblewrap(memory_mb=64).open(tmp_path) as sandbox:
        eat = ("python3", "-c", "x = b'x' * (300 << 20); print(len(x))")
        done = await sandbox.run(eat, env={}, timeout_s=20)
        assert (done.code, done.cause) == (-signal.SIGKILL, Cause.AGENT_MEMORY)
        fill = "head -c 200000000 /dev/zero >/dev/shm/x"
        for _ in range(2):  # what the last one filled is gone
            assert (await run_shell(sandbox, fill)).cause is Cause.AGENT_MEMORY
            done = await run_shell(sandbox, "test ! -e /dev/shm/x && exit 4")
            assert (done.code, done.cause) == (4, None)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    "where",
    ["exec 3>x; rm x; cat /dev/zero >&3", "mkdir m; cd m; while :; do : >$i; i=$((i+1)); done"],
    ids=["deleted", "many"],
)
async def test_the_disk_is_watched(tmp_path: Path, where: str) -> None:
    """Who takes more than its share is ended, wherever it puts it."""
    async with Bubblewrap(disk_mb=8, file_mb=300).open(tmp_path) as sandbox:
        done = await run_shell(sandbox, f"i=0; {where}; sleep 20", 30)
        assert done.cause is Cause.AGENT_DISK
        assert done.seconds < 15


@pytest.mark.usefixtures("runtime")
async def test_processor_time_and_the_size_of_a_file_are_bounded(tmp_path: Path) -> None:
    """A loop and a file without end are stopped."""
    async with Bubblewrap(cpu_s=1, file_mb=1, output_mb=1).open(tmp_path) as sandbox:
        await run_shell(sandbox, "head -c 3000000 /dev/zero >big; wc -c <big")
        assert int(read_log(sandbox).split()[-1]) <= 1 << 20
        assert (await run_shell(sandbox, "while :; do :; done")).code in (
            -signal.SIGXCPU,
            -signal.SIGKILL,
        )
        assert (
            await run_shell(sandbox, "head -c 9000000 /dev/zero; ulimit -c; ulimit -n")
        ).code == 0
        assert (sandbox.logs / "agent.log").stat().st_size < (1 << 20) + 400


# --------------------------------------------------------------------------- nothing is left
async def test_a_hundred_sessions_leave_nothing(runtime: Bubblewrap, tmp_path: Path) -> None:
    """Eight at a time, with daemons and timeouts among them: no process, group, mount, handle."""
    sleep = unique_sleep()
    room = asyncio.Semaphore(8)

    async def session(number: int) -> int:
        async with room, runtime.open(tmp_path / str(number)) as sandbox:
            await run_shell(sandbox, f"(setsid {sleep} >/dev/null 2>&1 &)")
            if number % 20 == 0:
                assert (await run_shell(sandbox, "sleep 20", 0.1)).timed_out
            return (await run_shell(sandbox, f"exit {number % 100}")).code

    await session(1000)
    open_before = handles()
    codes = await asyncio.gather(*map(session, range(100)))
    assert codes == [number % 100 for number in range(100)]
    assert not running(sleep)
    assert not running(str(tmp_path))
    assert handles() <= open_before + 1
    assert str(tmp_path) not in mount_table()
    assert not names(tmp_path, "**/*.groups")
    assert names(tmp_path / "7") == {"home", "logs", "work"}


async def test_a_start_that_is_given_up_leaves_nothing(runtime: Bubblewrap, tmp_path: Path) -> None:
    """At whatever moment it is cancelled: no process, no handle."""

    async def session(number: int) -> None:
        async with runtime.open(tmp_path / str(number)) as sandbox:
            await run_shell(sandbox, "sleep 9")

    await asyncio.gather(*[given_up(session(1000 + number), 0.02) for number in range(4)])
    open_before = handles()
    for number in range(60):
        await given_up(session(number), number / 2000)
    assert not running(str(tmp_path))
    assert not keepers(tmp_path)
    assert handles() <= open_before


async def given_up(session: Coroutine[None, None, None], after_s: float) -> None:
    """Cancel it after some time."""
    task = asyncio.create_task(session)
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.wait([task])


def keepers(folder: Path) -> list[int]:
    """Processes that have something of `folder` mounted in a file system of their own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in (entry / "mountinfo").read_text():
                found.append(int(entry.name))
    return found


def test_parents_killed_at_the_start_leave_nothing(runtime: Bubblewrap, tmp_path: Path) -> None:
    """A sandbox that was being made when its parent died finds nobody at home, and ends."""
    parent = textwrap.dedent(f"""
        import asyncio, pathlib
        from tugline.sandbox.bubblewrap import Bubblewrap
        async def session(runtime, number):
            async with runtime.open(pathlib.Path({str(tmp_path)!r}) / str(number)) as sandbox:
                await sandbox.run(("sleep", "99"), env={{}}, timeout_s=99)
        async def main():
            runtime = Bubblewrap()
            runtime.list_weaknesses()
            print("go", flush=True)
            await asyncio.gather(*(session(runtime, number) for number in range(20)))
        asyncio.run(main())
    """)
    for wait_s in (0.02, 0.06, 0.12):
        with subprocess.Popen(
            [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            time.sleep(wait_s)
            process.kill()
        time.sleep(0.2)
        runtime.reap(tmp_path)  # bwrap's child may miss that its parent has died
        deadline = time.monotonic() + 10
        while keepers(tmp_path) or running(str(tmp_path)):
            assert time.monotonic() < deadline, (keepers(tmp_path), running(str(tmp_path)))
            time.sleep(0.05)
        assert runtime.reap(tmp_path) == 0
        shutil.rmtree(tmp_path)


def test_a_killed_parent_leaves_nothing(runtime: Bubblewrap, tmp_path: Path) -> None:
    """After kill -9 the sandboxes are gone by themselves, and `reap` takes the groups away."""
    sleep = unique_sleep()
    (tmp_path / "base").mkdir()
    parent = textwrap.dedent(f"""
        import asyncio, pathlib
        from tugline.sandbox.base import SandboxSpec
        from tugline.sandbox.bubblewrap import Bubblewrap
        from tugline.types import Workspace
        async def main():
            place = SandboxSpec(workspace=Workspace(folder={str(tmp_path / "base")!r}))
            async with Bubblewrap().open(pathlib.Path({str(tmp_path / "sandbox")!r}), place) as one:
                await one.run(("sh", "-c", "setsid {sleep} & echo x; {sleep}"), env={{}},
                    timeout_s=300)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        try:
            deadline = time.monotonic() + 20
            while len(running(sleep)) < 4:  # itself, sh and two
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
    deadline = time.monotonic() + 5
    while running(sleep):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    records = list((tmp_path / "sandbox").glob("*.groups"))
    forged = tmp_path / "sandbox" / "work" / "x.groups"
    forged.parent.mkdir(exist_ok=True)
    forged.write_text('["/sys/fs/cgroup/tugline-x"]')
    where = find_cgroup_parent()
    assert len(records) == (1 if where.memory or where.processes else 0)
    groups = [path for path in msgspec.structs.astuple(where) if path]
    assert runtime.reap(tmp_path) == len(set(groups))
    assert runtime.reap(tmp_path) == 0
    assert not [one for path in groups for one in path.glob(f"{records[0].stem}*")]
    assert forged.exists()


@pytest.mark.usefixtures("runtime")
def test_a_user_without_rights_can_do_it_all() -> None:
    """A base, a door, a limit, a timeout: as a user who is not root."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = [SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    if not SYSTEM_PYTHON.exists() or subprocess.check_output(asked, text=True).strip() != here:
        pytest.skip(f"no Python {here} that every user can read")
    packages = os.pathsep.join(path for path in sys.path if path)
    place = Path("/var/tmp") / f"tugline-{secrets.token_hex(6)}"  # noqa: S108 - others can read it
    script = place / "as_user.py"
    try:
        (place / "base").mkdir(parents=True)
        (place / "base" / "b").write_text("base")
        script.write_text(AS_USER)
        subprocess.run(["chown", "-R", "65534:65534", str(place)], check=True)
        user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs")
        done = subprocess.run(
            [*user, str(SYSTEM_PYTHON), str(script), str(place)],
            env={"PYTHONPATH": packages, "PATH": os.environ["PATH"], "TUGLINE_CACHE": f"{place}/c"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "all of it"
    finally:
        shutil.rmtree(place)


AS_USER = """
import asyncio, pathlib, sys
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.bubblewrap import Bubblewrap
from tugline.types import Cause, Workspace

async def main(here):
    runtime = Bubblewrap(processes=60)
    assert runtime.check_available() is None, runtime.check_available()
    print(runtime.list_weaknesses())
    async def serve(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.write(b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\ncontent-length: 2\\r\\n\\r\\nok")
        await writer.drain()
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    place = SandboxSpec(workspace=Workspace(folder=str(here / "base")), files={"f": "1"})
    async with server, runtime.open(here / "sandbox", place) as sandbox:
        async def sh(script, timeout_s=20):
            return await sandbox.run(("sh", "-c", script), env={}, timeout_s=timeout_s)
        async def ok(script):
            assert (await sh(script)).code == 0, (sandbox.logs / "agent.log").read_text()
        await ok("cat b f; id; echo 2 >b; echo 3 >n; ! touch /usr/x")
        inside = await sandbox.expose(url)
        fetch = "import sys,urllib.request as u; print(u.urlopen(sys.argv[1],timeout=5).read())"
        await ok(f"python3 -c '{fetch}' {inside}")
        assert (await sh("sleep 9 & sleep 9", 0.3)).timed_out
        bomb = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); sleep 3 & done"
        await sh(bomb)
        await ok("cat n")
        await sandbox.put(sandbox.workdir, {"p": "4"})
        await ok("cat p")
        changed = (await sandbox.diff()).files
        assert set(changed) == {"b", "n", "p"}, changed
    plain = here / "plain"
    async with runtime.open(plain, SandboxSpec(files={"f": "1"})) as sandbox:
        assert (await sandbox.run(("cat", "f"), env={}, timeout_s=5)).code == 0
    async with Bubblewrap(disk_mb=8).open(here / "hidden") as sandbox:
        hide = "mkdir -p d/e; head -c 20000000 /dev/zero >d/e/x; chmod 0 d/e d; sleep 20"
        done = await sandbox.run(("sh", "-c", hide), env={}, timeout_s=30)
        assert done.cause is Cause.AGENT_DISK, done
    print("all of it")

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


# --------------------------------------------------------------------------- what is refused
async def test_what_it_cannot_give_is_refused(runtime: Bubblewrap, tmp_path: Path) -> None:
    """Images, a place that is taken and a folder that is not there, each by its name."""
    wrong = [
        (Workspace(image="debian:12"), UsageError, "workspace.image"),
        (Workspace(build="."), UsageError, "workspace.build"),
        (Workspace(path="here"), UsageError, "workspace.path is 'here'"),
        (Workspace(path="/usr/src"), UsageError, "workspace.path is '/usr/src'"),
        (Workspace(path="/home"), UsageError, "an absolute folder, not /home/agent"),
        (Workspace(path="/home/agent"), UsageError, "an absolute folder, not /home/agent"),
        (Workspace(folder="/no/such"), WorkspaceError, "'/no/such'"),
    ]
    for workspace, error, said in wrong:
        with pytest.raises(error, match=said):
            async with runtime.open(tmp_path / "sandbox", SandboxSpec(workspace=workspace)):
                pass
    mount = Mount("/tool", "/no/such/tool")
    with pytest.raises(SandboxError, match="/no/such/tool"):
        async with runtime.open(tmp_path / "sandbox", SandboxSpec(mounts=(mount,))):
            pass


@pytest.mark.usefixtures("runtime")
async def test_what_is_shown_may_lie_below_folders_for_passing_files(tmp_path: Path) -> None:
    """A checkout in /var/tmp, say; otherwise that is the sandbox's own /tmp by another name."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        await asyncio.to_thread(Path(folder, "x").write_text, "shown\n")
        async with Bubblewrap(readable=[folder]).open(tmp_path / "a") as sandbox:
            done = await run_shell(
                sandbox, f"cat {folder}/x; ls /var/tmp; echo > /var/tmp/own && exit 4"
            )
            assert (done.code, read_log(sandbox)) == (4, f"shown\n{Path(folder).name}\n")
    async with Bubblewrap().open(tmp_path / "b") as sandbox:
        done = await run_shell(sandbox, "echo > /var/tmp/own && test -e /tmp/own && exit 4")
        assert done.code == 4
