from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from sandboxes import mount_table, read_log, run_shell
from tugline.errors import SandboxError, UsageError
from tugline.sandbox.base import Mount, SandboxSpec
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.sandbox.processes import MARK, ProgramRecord, end_program, start_time
from tugline.types import Workspace

LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_limits_hold(tmp_path: Path) -> None:
    """A program that fills the disk or a log, or burns the processor, is stopped."""
    async with LocalRuntime(cpu_s=1, file_mb=1, output_mb=1).open(tmp_path) as sandbox:
        done = await run_shell(sandbox, "head -c 3000000 /dev/zero > big; wc -c < big")
        assert int(read_log(sandbox).split()[-1]) <= 1 << 20
        done = await run_shell(sandbox, "while :; do :; done")
        assert done.code in (-signal.SIGXCPU, -signal.SIGKILL)
        assert not done.timed_out
        done = await run_shell(sandbox, "head -c 30000000 /dev/zero; exit 3")
        assert done.code == 3
        assert (sandbox.logs / "agent.log").stat().st_size < (1 << 20) + 400


@LINUX
def test_orphans_of_a_killed_parent_are_reaped(tmp_path: Path) -> None:
    """After kill -9 of the process that ran sandboxes, the next one ends what is still running."""
    parent = textwrap.dedent(f"""
        import asyncio, pathlib
        from tugline.sandbox.local import LocalRuntime
        async def main():
            async with LocalRuntime().open(pathlib.Path({str(tmp_path)!r})) as sandbox:
                await sandbox.run(
                    ("sh", "-c", "setsid sleep 300 & echo $!; echo $$; sleep 300"),
                    env={{}}, timeout_s=300)
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", parent])
    out = tmp_path / "logs" / "agent.log"
    deadline = time.monotonic() + 20
    while not (out.exists() and len(out.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = [int(pid) for pid in out.read_text().split()]
    process.kill()
    process.wait()
    assert all(alive(pid) for pid in pids)
    assert LocalRuntime().reap(tmp_path) >= 2
    assert not any(alive(pid) for pid in pids)
    assert LocalRuntime().reap(tmp_path) == 0


@LINUX
def test_a_recycled_pid_is_not_hit() -> None:
    """A process that merely has the number of an old one is left alone."""
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        started = start_time(bystander.pid)
        assert started is not None
        assert end_program(ProgramRecord(bystander.pid, started - 1, "m" * 32)) == 0
        assert alive(bystander.pid)
        assert end_program(ProgramRecord(bystander.pid, started, "m" * 32)) == 1
    finally:
        bystander.kill()
        bystander.wait()


@LINUX
def test_a_daemon_in_the_middle_of_exec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment it has no environment, and so no mark to be known by: it is looked at again."""
    daemon = subprocess.Popen(["sleep", "60"], start_new_session=True, env={MARK: "m" * 32})
    environ, cmdline = psutil.Process.environ, psutil.Process.cmdline
    looks: list[int] = []

    def empty_at_first(process: psutil.Process) -> dict[str, str]:
        if process.pid != daemon.pid or len(looks) > 3:
            return dict(environ(process))
        looks.append(process.pid)
        return {}

    def always_empty(process: psutil.Process) -> list[str]:
        return [] if process.pid == daemon.pid else list(cmdline(process))

    monkeypatch.setattr(psutil.Process, "environ", empty_at_first)
    monkeypatch.setattr(psutil.Process, "cmdline", always_empty)
    try:
        assert end_program(ProgramRecord(0, None, "m" * 32)) == 1
    finally:
        daemon.kill()
        assert daemon.wait() == -signal.SIGKILL
    assert len(looks) == 4


async def test_a_refusing_disk_is_a_fault_of_the_place(tmp_path: Path) -> None:
    """An impossible folder is one line that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxError, match="cannot make"):
        async with LocalRuntime().open(tmp_path / "file" / "sandbox"):
            pass


def test_what_a_killed_parent_mounted_is_unmounted(tmp_path: Path) -> None:
    """A view of a base outlives its process, but not the next start."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a").write_text("1")
    workspace = OverlayWorkspace(tmp_path / "sandbox", tmp_path / "base", {})
    workspace.make()
    workspace.mount()
    if str(tmp_path) not in mount_table():
        pytest.skip("no overlay can be mounted here: workspaces are copied")
    assert LocalRuntime().reap(tmp_path) == 1
    assert str(tmp_path) not in mount_table()
    assert (tmp_path / "base" / "a").read_text() == "1"


async def test_what_only_a_sandbox_can_give_is_refused(tmp_path: Path) -> None:
    """Images, other paths and mounts, each by its name; a folder that is where it is will do."""
    tool = str(tmp_path)
    wrong = [
        (SandboxSpec(workspace=Workspace(image="debian")), r"workspace.image \('debian'\)"),
        (SandboxSpec(workspace=Workspace(build="d")), "workspace.build"),
        (SandboxSpec(workspace=Workspace(path="/testbed")), "workspace.path"),
        (SandboxSpec(mounts=(Mount("/logs"),)), "at /logs"),
        (SandboxSpec(mounts=(Mount("/tool", tool),)), "at /tool"),
    ]
    for place, said in wrong:
        with pytest.raises(UsageError, match=said):
            async with LocalRuntime().open(tmp_path / "sandbox", place):
                pass
    mounts = (Mount(tool, tool), Mount("/bin/sh", tool, optional=True))
    async with LocalRuntime().open(tmp_path / "sandbox", SandboxSpec(mounts=mounts)) as sandbox:
        assert await sandbox.get(sandbox.home / "nothing") is None
        with pytest.raises(UsageError, match="is not below"):
            await sandbox.get(Path("/etc/passwd"))


def test_a_forged_record_is_no_record(tmp_path: Path) -> None:
    """An agent cannot have another process ended by writing one into its folder."""
    for folder in ("work", "home", "logs"):
        (tmp_path / folder).mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as bystander:
        try:
            started = ProgramRecord(bystander.pid, start_time(bystander.pid), "m" * 32)
            (tmp_path / "work" / "x.started").write_bytes(msgspec.json.encode(started))
            (tmp_path / "home" / "x.started").write_bytes(msgspec.json.encode(started))
            assert LocalRuntime().reap(tmp_path) == 0
            assert alive(bystander.pid)
        finally:
            bystander.kill()
