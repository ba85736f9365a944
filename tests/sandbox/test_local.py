from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tugline.errors import SandboxError
from tugline.sandbox.base import Mount, SandboxSpec
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.processes import MARK, ProgramRecord, end_program, start_time


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to no sandbox."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@LINUX
def test_a_recycled_pid_is_not_killed(bystander: subprocess.Popen[bytes]) -> None:
    """A process that only has the pid of an old one is left alone."""
    started = start_time(bystander.pid)
    assert end_program(ProgramRecord(bystander.pid, started - 1, "m" * 32)) == 0
    assert bystander.poll() is None
    assert end_program(ProgramRecord(bystander.pid, started, "m" * 32)) == 1


@LINUX
def test_a_daemon_during_exec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without environment, and so without mark, is checked again."""
    daemon = subprocess.Popen(["sleep", "60"], start_new_session=True, env={MARK: "m" * 32})
    environ, cmdline = psutil.Process.environ, psutil.Process.cmdline
    reads: list[int] = []

    def empty_at_first(process: psutil.Process) -> dict[str, str]:
        if process.pid != daemon.pid or len(reads) > 3:
            return dict(environ(process))
        reads.append(process.pid)
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
    assert len(reads) == 4


async def test_a_folder_that_cannot_be_made_is_a_sandbox_error(tmp_path: Path) -> None:
    """The error names the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxError, match="cannot make"):
        async with LocalRuntime().open(tmp_path / "file" / "sandbox"):
            pass


def test_a_forged_record_is_ignored(bystander: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """An agent cannot have another process killed by a record in a folder of its own."""
    record = ProgramRecord(bystander.pid, start_time(bystander.pid), "m" * 32)
    for folder in ("work", "home", "logs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.started").write_bytes(msgspec.json.encode(record))
    assert LocalRuntime().reap(tmp_path) == 0
    assert bystander.poll() is None


async def test_mounts_without_effect_are_accepted(tmp_path: Path) -> None:
    """A mount may have its own path as source, or be optional where the path exists."""
    tool = str(tmp_path)
    mounts = (Mount(tool, tool), Mount("/bin/sh", tool, optional=True))
    async with LocalRuntime().open(tmp_path / "sandbox", SandboxSpec(mounts=mounts)) as sandbox:
        assert await sandbox.get(sandbox.home / "nothing") is None
