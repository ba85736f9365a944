"""Boxes that are real containers: what programs see, how they end, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from containers import BUSYBOX, DEBIAN, left, serving, unbuilt
from sandboxes import read_log, run_shell
from tugline.errors import ImageError, SandboxError, UsageError
from tugline.sandbox import overlay
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.container import Container
from tugline.sandbox.container_engine import ContainerEngine
from tugline.sandbox.container_images import build_name
from tugline.types import Workspace

pytestmark = pytest.mark.podman


async def test_record_of_another_container_removes_nothing(
    container: Container, tmp_path: Path
) -> None:
    """A record names a container of its own folder, or none: it is no way to remove others."""
    async with container.open(tmp_path / "a" / "agent") as sandbox:
        record = (tmp_path / "a" / "agent" / "container.json").read_bytes()
        forged = tmp_path / "b" / "agent"
        forged.mkdir(parents=True)
        (forged / "container.json").write_bytes(record)
        assert await asyncio.to_thread(container.reap, tmp_path / "b") == 0
        assert (await sandbox.run(["true"], env={}, timeout_s=20)).code == 0


async def test_programs_have_few_rights_and_no_network(
    container: Container, tmp_path: Path
) -> None:
    """No raw sockets, devices or mounts, no more rights by setuid, nothing but loopback."""
    script = "grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; ls /sys/class/net"
    async with container.open(tmp_path / "sandbox") as sandbox:
        await run_shell(sandbox, script)
        words = read_log(sandbox).split()
    assert words == ["CapBnd:", "00000000000004fb", "NoNewPrivs:", "1", "Seccomp:", "2", "lo"]


async def test_all_is_dead_when_work_is_looked_at(container: Container, tmp_path: Path) -> None:
    """Also what outlived its run, by whatever means; the next program starts it again."""
    async with container.open(tmp_path / "sandbox") as sandbox:
        inside = ("nsenter", f"--target={sandbox._pid}", "--pid", "--mount", "sleep", "300")
        left_over = await asyncio.create_subprocess_exec(*inside)
        await asyncio.sleep(0.1)
        assert left_over.returncode is None
        await sandbox.diff()
        await asyncio.wait_for(left_over.wait(), 5)
        assert (await sandbox.run(["true"], env={}, timeout_s=20)).code == 0


async def test_two_at_once_in_a_killed_container(container: Container, tmp_path: Path) -> None:
    """It is started again once, for whoever comes, also for a door."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server, container.open(tmp_path / "sandbox") as sandbox:
        assert (await sandbox.run(["sleep", "60"], env={}, timeout_s=0.1)).timed_out
        asked = (
            sandbox.run(["sh", "-c", f"exit {n}"], env={}, timeout_s=20, log_name=f"{n}")
            for n in range(2)
        )
        port = server.sockets[0].getsockname()[1]
        *ends, url = await asyncio.gather(*asked, sandbox.expose(f"http://127.0.0.1:{port}"))
        assert [getattr(end, "code", None) for end in ends] == [0, 1]
        assert url == "http://127.0.0.1:10040"
        assert (await sandbox.run(["sleep", "60"], env={}, timeout_s=0.1)).timed_out
        assert await sandbox.expose(f"http://127.0.0.1:{port}") == url


async def test_cancelled_while_mounting(
    container: Container, podman: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that comes after its session was given up is undone."""
    real, mounting = overlay.mount_overlay, threading.Event()

    def slow(*given: Any) -> Any:
        mounting.set()
        time.sleep(0.3)
        return real(*given)

    monkeypatch.setattr(overlay, "mount_overlay", slow)
    (tmp_path / "base").mkdir()
    place = SandboxSpec(workspace=Workspace(folder=str(tmp_path / "base")))

    async def session() -> None:
        async with container.open(tmp_path / "sandbox", place):
            pass

    task = asyncio.create_task(session())
    assert await asyncio.to_thread(mounting.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.5)
    assert left(podman, tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [{"user": "1234:1234"}, {"user": "nobody"}, {"read_only": True}],
    ids=["a number", "a name", "a read-only image"],
)
async def test_what_an_agent_must_write_can_be_written(
    podman: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Programs that are not root, or whose image is read-only, have workdir, home and /tmp."""
    runtime = Container(engine=podman, image=DEBIAN, **options)
    async with runtime.open(tmp_path / "sandbox", SandboxSpec(files={"a": "1"})) as sandbox:
        script = "touch b ~/c /tmp/d && echo ok; touch /usr/e 2>/dev/null || echo kept; id -u"
        await run_shell(sandbox, script)
        *words, user = read_log(sandbox).split()
        assert words == ["ok", "kept"]
        assert (user == "0") is ("user" not in options)
        assert set((await sandbox.diff()).files) == {"b"}


async def test_no_shell_is_said(podman: str, tmp_path: Path) -> None:
    """An image that cannot run a program is named, and nothing is left of it."""
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    runtime = Container(engine=podman)
    place = SandboxSpec(workspace=Workspace(build=str(context)))
    try:
        with pytest.raises(ImageError, match=r"has no /bin/sh"):
            async with runtime.open(tmp_path / "sandbox", place):
                pass
    finally:
        unbuilt(podman, build_name(context))
    assert left(podman, tmp_path) == []


async def test_a_task_without_an_image_is_told(podman: str, tmp_path: Path) -> None:
    """Neither it nor the runtime names one."""
    with pytest.raises(UsageError, match="nor the runtime has an image"):
        async with Container(engine=podman).open(tmp_path):
            pass


async def test_engine_that_is_not_there(tmp_path: Path) -> None:
    """Without an engine the runtime says what to do, and a session is the place's failure."""
    runtime = Container(engine=f"unix://{tmp_path}/none.sock", image=DEBIAN)
    reason = await asyncio.to_thread(runtime.check_available)
    assert "none.sock" in reason
    assert "systemctl --user start podman.socket" in reason
    with pytest.raises(SandboxError, match=r"none\.sock"):
        await asyncio.to_thread(runtime.list_weaknesses)
    with pytest.raises(SandboxError, match=r"none\.sock"):
        async with runtime.open(tmp_path / "sandbox"):
            pass


@pytest.mark.usefixtures("podman")
async def test_engine_that_may_do_less_than_the_node(tmp_path: Path) -> None:
    """A service that was started with lower limits than ours runs containers within its own."""
    folder = tmp_path / "podman"
    folder.mkdir()
    with serving(folder, "prlimit", "--nofile=900:900", "--nproc=7000:7000") as engine:
        async with Container(engine=engine, image=BUSYBOX).open(tmp_path / "agent") as sandbox:
            ran = await run_shell(sandbox, "ulimit -Hn")
    assert ran.code == 0
    assert int(read_log(sandbox)) == 900


async def test_weaknesses_are_what_the_kernel_says(container: Container) -> None:
    """As root with control groups, memory and processes are bounded, and nothing says otherwise."""
    info = await asyncio.to_thread(container.inspect)
    lines = await asyncio.to_thread(container.list_weaknesses)
    assert info.seccomp
    assert info.hardening is not None
    unguarded = msgspec.structs.replace(info, hardening=None).list_weaknesses()
    assert any("take over the shell" in line for line in {*unguarded} - {*lines})
    assert info.rootless is (os.geteuid() != 0)
    assert any("memory has no limit" in line for line in lines) is not info.memory


@pytest.mark.usefixtures("podman")
async def test_engine_that_is_gone_at_the_end(tmp_path: Path) -> None:
    """A session's outcome stands when its container cannot be removed; `reap` does it later."""
    folder = tmp_path / "podman"
    folder.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        with serving(folder) as engine:
            runtime = Container(engine=engine, image=BUSYBOX)
            sandbox = await stack.enter_async_context(runtime.open(tmp_path / "s" / "agent"))
        assert (await sandbox.run(["true"], env={}, timeout_s=20)).code == 0
    assert (tmp_path / "s" / "agent" / "container.json").exists()
    with serving(folder):
        assert await asyncio.to_thread(runtime.reap, tmp_path / "s") == 1
        assert left(engine, tmp_path) == []


async def test_engine_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes a connection and says nothing does not hold up a node's start."""
    monkeypatch.setattr(ContainerEngine.run_blocking, "__defaults__", ("it failed", 0.5))
    hello = b"HTTP/1.0 200 OK\r\nApi-Version: 1.41\r\nLibpod-Api-Version: 4.3.1\r\n\r\nOK"
    held = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"_ping" in await reader.readuntil(b"\r\n\r\n"):
            writer.write(hello)
            writer.close()
        else:
            held.append(writer)

    socket = tmp_path / "hung"
    async with await asyncio.start_unix_server(answer, socket):
        (tmp_path / "container.json").write_bytes(msgspec.json.encode(("x", str(socket))))
        began = time.monotonic()
        assert await asyncio.to_thread(Container().reap, tmp_path) == 0
        assert time.monotonic() - began < 5
        for writer in held:
            writer.close()
    assert held
    assert (tmp_path / "container.json").exists()
