"""Sandboxes in real containers: isolation, cleanup and failures of the engine."""

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

from support.containers import BUSYBOX, DEBIAN, list_leftovers, remove_images, run_podman
from support.sandbox import read_log, run_shell
from tugline.errors import ImageError, SandboxError, UsageError
from tugline.sandbox import overlay
from tugline.sandbox.base import SandboxSpec
from tugline.sandbox.container import Container
from tugline.sandbox.container_engine import ContainerEngine
from tugline.sandbox.container_images import build_name
from tugline.types import Workspace

pytestmark = pytest.mark.podman


async def test_a_forged_record_removes_no_container(container: Container, tmp_path: Path) -> None:
    """`reap` removes only containers that belong to the folder of their record."""
    async with container.open(tmp_path / "a" / "agent") as sandbox:
        record = (tmp_path / "a" / "agent" / "container.json").read_bytes()
        forged = tmp_path / "b" / "agent"
        forged.mkdir(parents=True)
        (forged / "container.json").write_bytes(record)
        assert await asyncio.to_thread(container.reap, tmp_path / "b") == 0
        assert (await sandbox.run(["true"], env={}, timeout_s=20)).code == 0


async def test_programs_have_few_capabilities_and_no_network(
    container: Container, tmp_path: Path
) -> None:
    """Programs have no raw sockets, devices, mounts or new privileges, and only loopback."""
    script = "grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; ls /sys/class/net"
    async with container.open(tmp_path / "sandbox") as sandbox:
        await run_shell(sandbox, script)
        output = read_log(sandbox).split()
    assert output == ["CapBnd:", "00000000000004fb", "NoNewPrivs:", "1", "Seccomp:", "2", "lo"]


async def test_diff_kills_all_processes(container: Container, tmp_path: Path) -> None:
    """A process that outlived its run is killed; the next program starts the container again."""
    async with container.open(tmp_path / "sandbox") as sandbox:
        inside = ("nsenter", f"--target={sandbox._pid}", "--pid", "--mount", "sleep", "300")
        left_over = await asyncio.create_subprocess_exec(*inside)
        await asyncio.sleep(0.1)
        assert left_over.returncode is None
        await sandbox.diff()
        await asyncio.wait_for(left_over.wait(), 5)
        assert (await sandbox.run(["true"], env={}, timeout_s=20)).code == 0


async def test_a_killed_container_restarts_once(container: Container, tmp_path: Path) -> None:
    """Concurrent programs and an exposed URL share the one restart."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server, container.open(tmp_path / "sandbox") as sandbox:
        assert (await sandbox.run(["sleep", "60"], env={}, timeout_s=0.1)).timed_out
        runs = (
            sandbox.run(["sh", "-c", f"exit {n}"], env={}, timeout_s=20, log_name=f"{n}")
            for n in range(2)
        )
        port = server.sockets[0].getsockname()[1]
        *ends, url = await asyncio.gather(*runs, sandbox.expose(f"http://127.0.0.1:{port}"))
        assert [getattr(end, "code", None) for end in ends] == [0, 1]
        assert url == "http://127.0.0.1:10040"
        assert (await sandbox.run(["sleep", "60"], env={}, timeout_s=0.1)).timed_out
        assert await sandbox.expose(f"http://127.0.0.1:{port}") == url


async def test_cancelling_during_a_mount(
    container: Container, podman: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that completes after its session was cancelled is undone."""
    real, mounting = overlay.mount_overlay, threading.Event()

    def slow(*args: Any) -> Any:
        mounting.set()
        time.sleep(0.3)
        return real(*args)

    monkeypatch.setattr(overlay, "mount_overlay", slow)
    (tmp_path / "base").mkdir()
    spec = SandboxSpec(workspace=Workspace(folder=str(tmp_path / "base")))

    async def session() -> None:
        async with container.open(tmp_path / "sandbox", spec):
            pass

    task = asyncio.create_task(session())
    assert await asyncio.to_thread(mounting.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.5)
    assert list_leftovers(podman, tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [{"user": "1234:1234"}, {"user": "nobody"}, {"read_only": True}],
    ids=["a number", "a name", "a read-only image"],
)
async def test_own_folders_are_writable(
    podman: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Workdir, home and /tmp are writable for any user and with a read-only image."""
    runtime = Container(engine=podman, image=DEBIAN, **options)
    async with runtime.open(tmp_path / "sandbox", SandboxSpec(files={"a": "1"})) as sandbox:
        script = "touch b ~/c /tmp/d && echo ok; touch /usr/e 2>/dev/null || echo kept; id -u"
        await run_shell(sandbox, script)
        *output, user = read_log(sandbox).split()
        assert output == ["ok", "kept"]
        assert (user == "0") is ("user" not in options)
        assert set((await sandbox.diff()).files) == {"b"}


async def test_an_image_without_shell_is_an_error(podman: str, tmp_path: Path) -> None:
    """The error leaves no container and no mount."""
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    runtime = Container(engine=podman)
    spec = SandboxSpec(workspace=Workspace(build=str(context)))
    try:
        with pytest.raises(ImageError, match=r"has no /bin/sh"):
            async with runtime.open(tmp_path / "sandbox", spec):
                pass
    finally:
        remove_images(podman, build_name(context))
    assert list_leftovers(podman, tmp_path) == []


async def test_a_missing_image_name_is_an_error(podman: str, tmp_path: Path) -> None:
    """The task or the runtime must name an image."""
    with pytest.raises(UsageError, match="in the task's workspace or in the runtime's options"):
        async with Container(engine=podman).open(tmp_path):
            pass


async def test_a_missing_engine_is_an_error(tmp_path: Path) -> None:
    """The reason has the command that starts one; a session fails with `SandboxError`."""
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
async def test_an_engine_with_lower_limits_than_the_node(tmp_path: Path) -> None:
    """Containers run within the limits of the service."""
    folder = tmp_path / "podman"
    folder.mkdir()
    with run_podman(folder, "prlimit", "--nofile=900:900", "--nproc=7000:7000") as engine:
        async with Container(engine=engine, image=BUSYBOX).open(tmp_path / "agent") as sandbox:
            ran = await run_shell(sandbox, "ulimit -Hn")
    assert ran.code == 0
    assert int(read_log(sandbox)) == 900


async def test_weaknesses_match_the_kernel(container: Container) -> None:
    """Missing memory limits and missing hardening are listed, enforced ones are not."""
    info = await asyncio.to_thread(container.inspect)
    lines = await asyncio.to_thread(container.list_weaknesses)
    assert info.seccomp
    assert info.hardening is not None
    unhardened = msgspec.structs.replace(info, hardening=None).list_weaknesses()
    assert any("take over the shell" in line for line in {*unhardened} - {*lines})
    assert info.rootless is (os.geteuid() != 0)
    assert any("memory is not limited" in line for line in lines) is not info.memory


@pytest.mark.usefixtures("podman")
async def test_an_engine_that_stops_before_the_end(tmp_path: Path) -> None:
    """The session ends without an error, and `reap` removes its container later."""
    folder = tmp_path / "podman"
    folder.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        with run_podman(folder) as engine:
            runtime = Container(engine=engine, image=BUSYBOX)
            sandbox = await stack.enter_async_context(runtime.open(tmp_path / "s" / "agent"))
        assert (await sandbox.run(["true"], env={}, timeout_s=20)).code == 0
    assert (tmp_path / "s" / "agent" / "container.json").exists()
    with run_podman(folder):
        assert await asyncio.to_thread(runtime.reap, tmp_path / "s") == 1
        assert list_leftovers(engine, tmp_path) == []


async def test_a_hanging_engine_does_not_block_reap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that accepts connections but never answers does not block a node's start."""
    monkeypatch.setattr(ContainerEngine.run_blocking, "__defaults__", ("it failed", 0.5))
    ping = b"HTTP/1.0 200 OK\r\nApi-Version: 1.41\r\nLibpod-Api-Version: 4.3.1\r\n\r\nOK"
    writers = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"_ping" in await reader.readuntil(b"\r\n\r\n"):
            writer.write(ping)
            writer.close()
        else:
            writers.append(writer)

    socket = tmp_path / "hung"
    async with await asyncio.start_unix_server(answer, socket):
        (tmp_path / "container.json").write_bytes(msgspec.json.encode(("x", str(socket))))
        began = time.monotonic()
        assert await asyncio.to_thread(Container().reap, tmp_path) == 0
        assert time.monotonic() - began < 5
        for writer in writers:
            writer.close()
    assert writers
    assert (tmp_path / "container.json").exists()
