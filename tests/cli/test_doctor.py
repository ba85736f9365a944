"""``tugline doctor`` without an engine: problems of the server and of this machine."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.conftest import Shell
from support.commands import TUGLINE, run_command, run_program
from support.server import TOKENS
from support.tasks import make_task
from tugline.cli import machine
from tugline.client.nodes import NodeClient
from tugline.protocol import NodeRegistration


async def test_reasons_why_no_session_runs(shell: Shell) -> None:
    """No node, paused weights and no server are reported, with exit code 1."""
    await shell.live.control.submit([make_task("a", samples=3)])
    alone = await shell.run("doctor", "--json")
    reports = {report["component"]: report for report in json.loads(alone.stdout)}
    assert alone.returncode == 1
    assert reports["server"]["healthy"]
    assert reports["nodes"]["detail"].startswith("3 sessions are queued and no node is live")
    async with NodeClient(shell.live.url, TOKENS.join) as node:
        await node.register(NodeRegistration(name="n", slots=2, capacity=2))
    sound = await shell.run("doctor")
    assert sound.returncode == 0, sound.stdout
    assert "n is live, 0 sessions, 2 slots" in sound.stdout
    await shell.live.control.pause(within_s=0.1)
    paused = await shell.run("doctor")
    assert (paused.returncode, "model calls are paused" in paused.stdout) == (1, True)
    await shell.live.stop()
    gone = await shell.run("doctor", "--json")
    report, *machine = json.loads(gone.stdout)["checks"]
    assert (gone.returncode, report["component"], report["healthy"]) == (1, "server", False)
    assert shell.live.url in report["detail"]
    assert "sandbox" in {each["component"] for each in machine}
    named = await shell.run("doctor", "--json", "--server", shell.live.url)
    assert [each["component"] for each in json.loads(named.stdout)] == ["server"]


def test_a_low_limit_of_open_files_is_reported() -> None:
    """The advice has the number of agents for which a limit of open files is enough."""
    limited = f"ulimit -n 999; exec {TUGLINE} doctor --runtimes --json"
    done = run_program("sh", "-c", limited, check=True)
    (advice,) = json.loads(done.stdout)["open files"]["weaknesses"]
    assert advice.startswith("999 are enough for about 62 agents")


def test_this_machine_is_checked_where_no_server_is_known(tmp_path: Path) -> None:
    """Sandbox, memory, disk and port have a row each, and the next command is printed."""
    done = run_command("doctor", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    checks = {each["component"]: each for each in report["checks"]}
    assert {"sandbox", "user", "memory", "processors", "disk", "port"} <= set(checks)
    assert done.returncode == int(not all(each["healthy"] for each in report["checks"]))
    assert report["next"].startswith(("tugline ", "pip install "))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another program has it
            taken.bind(("127.0.0.1", 7700))
            taken.listen()
        text = run_command("doctor", cwd=tmp_path)
    assert (text.returncode, "7700 is in use" in text.stdout) == (1, True)
    assert "next: " in text.stdout


def test_a_full_machine_is_unhealthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little free memory, a full disk and a broken driver are reported with their figures."""
    small = SimpleNamespace(available=1 << 30, total=4 << 30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: small)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 30))
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 14377'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    checks = {check.component: check for check in machine.check_machine(tmp_path / "new")}
    assert (checks["memory"].healthy, checks["disk"].healthy) == (False, False)
    assert "1.0 of 4.0 GB" in checks["memory"].detail
    assert checks["GPU"].detail == "NVIDIA H200: 14 of 140 GiB are in use"
    driver.write_text("#!/bin/sh\necho 'NVIDIA GB10, [N/A], [N/A]'\n")
    assert "NVIDIA GB10" in [check.detail for check in machine.check_machine(tmp_path)]
    driver.write_text("#!/bin/sh\nexit 9\n")
    checks = {check.component: check for check in machine.check_machine(tmp_path)}
    assert (checks["GPUs"].healthy, "nvidia-smi fails" in checks["GPUs"].detail) == (False, True)
