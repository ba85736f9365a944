"""What an engine really does on this machine, found out once by one small container.

Engines promise limits that they cannot keep, choose storage that copies whole images, or run in a
virtual machine whose folders are not ours. So a container without an image (this machine's own
``/bin/sh`` and libraries, read-only) is started with limits, and the kernel is asked on the host
what became of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import resource
import secrets
import tarfile
import time
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.errors import SandboxError
from tugline.sandbox.container import cgroups, hardening
from tugline.sandbox.container.engine import Docker, DockerError, faults, stream
from tugline.sandbox.container.hardening import Hardening
from tugline.sandbox.container.images import LABEL, find

_IMAGE = "localhost/tugline/probe:1"
_DOCKERFILE = b"FROM scratch\nCOPY Dockerfile /Dockerfile\n"
_MEMORY = 256 << 20
_PROCESSES = 99
_PROBE_S = 60.0
_STALE_S = 3600.0
_OPEN_FILES = 65536
_MOST_PROCESSES = 32768
_FOLDERS = tuple(map(Path, ("/bin", "/lib", "/lib64", "/usr")))
_COPYING = {"vfs"}
_log = log.get("runtimes")


class _Unguarded(Exception):
    """The engine took the guard and did not do it."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """An engine on this machine."""

    kind: str
    version: str
    rootless: bool
    cgroup: str
    storage: str
    runtime: str
    seccomp: bool
    memory: bool
    """Whether a limit of memory is in force."""
    processes: bool
    """Whether a limit of processes is in force."""
    guard: Hardening | None
    """What keeps programs from the shell that runs them, if the engine can be asked for it."""

    def list_weaknesses(self) -> tuple[str, ...]:
        """What is not kept apart here, a line each."""
        who = f"{self.kind} {self.version}{', rootless' * self.rootless}, cgroup v{self.cgroup}"
        found = []
        if not self.memory:
            found.append(f"memory has no bound: {who} sets none")
        if not self.processes:
            found.append(f"the number of processes has no bound: {who} sets none")
        if not self.seccomp:
            found.append(f"no system call is refused: {who} has no seccomp profile")
        if self.guard is None:
            found.append(
                "a program can take over the shell that runs it, so forge its exit code and outlive"
                f" its end: {who} hides no memory, or no seccomp.json is in /usr/share/containers"
            )
        if not self.rootless:
            found.append("root in a container is this machine's root with few of its rights")
        if self.storage in _COPYING:
            found.append(
                f"slow: storage driver {self.storage} copies the image for each container; for"
                ' podman, set driver = "overlay" in storage.conf and begin with empty storage'
            )
        return tuple(found)


def ulimits() -> list[dict[str, Any]]:
    """No more than this process has: an engine cannot raise them everywhere, and fails then."""
    limits = []
    for name, number, most in (
        ("nofile", resource.RLIMIT_NOFILE, _OPEN_FILES),
        ("nproc", resource.RLIMIT_NPROC, _MOST_PROCESSES),
        ("core", resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(number)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        limits.append({"Name": name, "Soft": value, "Hard": value})
    return limits


async def probe(docker: Docker, kind: str) -> Facts:
    """Find out. Raises `SandboxError` with the engine's words when it cannot run anything."""
    try:
        async with asyncio.timeout(_PROBE_S):
            with faults(f"{kind} cannot run a container"):
                info = await docker.system.info()
                await _tidy(docker)
                security = info.get("SecurityOptions") or ()
                narrow = (
                    hardening.found(kind, security) if "seccomp" in " ".join(security) else None
                )
                (memory, processes), narrow = await _guarded(docker, narrow)
    except TimeoutError as error:
        msg = f"{kind} did not run a container within {_PROBE_S:.0f} s"
        raise SandboxError(msg) from error
    return Facts(
        kind=kind,
        version=str(info.get("ServerVersion", "?")),
        rootless=bool(info.get("Rootless")) or "rootless" in " ".join(security),
        cgroup=str(info.get("CgroupVersion", "?")),
        storage=str(info.get("Driver", "?")),
        runtime=str(info.get("DefaultRuntime", "?")),
        seccomp="seccomp" in " ".join(security),
        memory=memory,
        processes=processes,
        guard=narrow,
    )


async def _guarded(
    docker: Docker, narrow: Hardening | None
) -> tuple[tuple[bool, bool], Hardening | None]:
    """What is in force, and the guard if the engine has taken it."""
    await _have_image(docker)
    if narrow is not None:
        try:
            return await _in_force(docker, narrow), narrow
        except DockerError as error:
            _log.warning("container not guarded", error=str(error.message)[-600:])
        except _Unguarded as error:
            _log.warning("container not guarded", error=str(error))
    return await _in_force(docker, None), None


async def _in_force(docker: Docker, narrow: Hardening | None) -> tuple[bool, bool]:
    """Whether a container that asks for limits of memory and of processes has them."""
    mounts = [_bind(folder) for folder in _FOLDERS if folder.exists()]
    asked: dict[str, Any] = {
        "Image": _IMAGE,
        "Cmd": ["/bin/sh", "-c", "sleep 60"],
        "Labels": {LABEL: "probe"},
        "HostConfig": {
            "NetworkMode": "none",
            "Mounts": mounts,
            "Memory": _MEMORY,
            "MemorySwap": _MEMORY,
            "PidsLimit": _PROCESSES,
            "Ulimits": ulimits(),
            **(await asyncio.to_thread(narrow.asked) if narrow else {}),
        },
    }
    container = await docker.containers.create(asked, name=f"tugline-probe-{secrets.token_hex(6)}")
    try:
        await container.start()
        state = (await container.show())["State"]
        if narrow and not hardening.holds(state["Pid"]):
            msg = "its engine has left out what was asked for"
            raise _Unguarded(msg)
        cgroup = cgroups.of(state["Pid"])
        if cgroup == cgroups.Cgroup(None, None):
            msg = "its containers are not processes of this machine: is it in a virtual machine?"
            raise SandboxError(msg)
        # A process that was left in our own group is under our limits, not under its own.
        own = cgroups.of(os.getpid())
        memory, processes = cgroup.memory_limit, cgroup.process_limit
        return (
            memory is not None and memory <= _MEMORY and cgroup.memory != own.memory,
            processes is not None and processes <= _PROCESSES and cgroup.processes != own.processes,
        )
    finally:
        with contextlib.suppress(DockerError):
            await container.delete(force=True, v=True)


async def _have_image(docker: Docker) -> None:
    """An image with nothing in it but what it was made of."""
    if await find(docker, _IMAGE) is not None:
        return
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        file = tarfile.TarInfo("Dockerfile")
        file.size = len(_DOCKERFILE)
        archive.addfile(file, io.BytesIO(_DOCKERFILE))
    context.seek(0)
    async with contextlib.aclosing(stream(docker, "build", {"t": _IMAGE}, context)) as words:
        async for _ in words:
            pass


async def _tidy(docker: Docker) -> None:
    """Remove what probes and looks into images left behind when they were killed."""
    for what in ("probe", "peek"):
        named = {"label": [f"{LABEL}={what}"]}
        for one in await docker.containers.list(all=True, filters=named):
            if time.time() - one["Created"] > _STALE_S:
                with contextlib.suppress(DockerError):
                    await one.delete(force=True, v=True)


def _bind(folder: Path) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(folder), "Target": str(folder), "ReadOnly": True}
