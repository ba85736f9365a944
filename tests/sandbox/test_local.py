from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import msgspec
import psutil
import pytest

from tugline.errors import SandboxError
from tugline.sandbox.base import Mount, SandboxSpec
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.processes import MARK, ProgramRecord, end_program, start_time

LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@LINUX
def test_a_recycled_pid_is_not_hit() -> None:
    """A process that merely has the number of an old one is left alone."""
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        started = start_time(bystander.pid)
        assert end_program(ProgramRecord(bystander.pid, started - 1, "m" * 32)) == 0
        assert bystander.poll() is None
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
            assert bystander.poll() is None
        finally:
            bystander.kill()


async def test_a_mount_that_is_where_it_is_will_do(tmp_path: Path) -> None:
    """As is an optional one of what is there; a home has its own files only."""
    tool = str(tmp_path)
    mounts = (Mount(tool, tool), Mount("/bin/sh", tool, optional=True))
    async with LocalRuntime().open(tmp_path / "sandbox", SandboxSpec(mounts=mounts)) as sandbox:
        assert await sandbox.get(sandbox.home / "nothing") is None
