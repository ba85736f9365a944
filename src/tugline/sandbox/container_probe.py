"""Find out by one small container what an engine really does on this machine.

Engines promise limits that they cannot keep, choose storage that copies whole images, or run in a
virtual machine whose folders are not ours. So a container without an image (this machine's own
``/bin/sh`` and libraries, read-only) is started with limits, and the kernel is asked on the host
what became of them.
"""

import asyncio
import contextlib
import os
import resource
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.errors import SandboxError
from tugline.sandbox.container_engine import Docker, DockerError, FoundEngine, bind
from tugline.sandbox.container_images import LABEL, find_image, pack
from tugline.sandbox.hardening import ProcessHardening, find_hardening, is_hardened
from tugline.sandbox.limits import Cgroup, cgroup_of

_IMAGE = "localhost/tugline/probe:1"
_DOCKERFILE = b"FROM scratch\nCOPY Dockerfile /Dockerfile\n"
_MEMORY = 256 << 20
_PROCESSES = 99
_STALE_S = 3600.0
_OPEN_FILES = 65536
_MOST_PROCESSES = 32768
_FOLDERS = tuple(map(Path, ("/bin", "/lib", "/lib64", "/usr")))
_log = log.get("sandbox")


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A container engine on this machine."""

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
    hardening: ProcessHardening | None
    """What protects the runner's shell from programs, if the engine supports it."""

    def list_weaknesses(self) -> tuple[str, ...]:
        """Return what is not isolated here, one line each."""
        who = f"{self.kind} {self.version}{', rootless' * self.rootless}, cgroup v{self.cgroup}"
        forged = (
            "a program can take over the shell that runs it, so forge its exit code and outlive"
        )
        forged += f" its end: {who} hides no memory, or no seccomp.json is in /usr/share/containers"
        slow = "slow: storage driver vfs copies the image for each container; for podman, set"
        slow += ' driver = "overlay" in storage.conf and begin with empty storage'
        rules = (
            (self.memory, f"memory has no limit: {who} sets none"),
            (self.processes, f"the number of processes has no limit: {who} sets none"),
            (self.seccomp, f"no system call is refused: {who} has no seccomp profile"),
            (self.hardening is not None, forged),
            (self.rootless, "root in a container is this machine's root with few of its rights"),
            (self.storage != "vfs", slow),
        )
        return tuple(weakness for holds, weakness in rules if not holds)


def ulimits(engine: int) -> list[dict[str, Any]]:
    """Return limits that do not exceed those of the engine's process, which it may not raise."""
    limits = []
    for name, number, most in (
        ("nofile", resource.RLIMIT_NOFILE, _OPEN_FILES),
        ("nproc", resource.RLIMIT_NPROC, _MOST_PROCESSES),
        ("core", resource.RLIMIT_CORE, 0),
    ):
        try:
            hard = resource.prlimit(engine, number)[1]
        except OSError:  # another user's
            hard = resource.getrlimit(number)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        limits.append({"Name": name, "Soft": value, "Hard": value})
    return limits


async def probe(docker: Docker, engine: FoundEngine) -> EngineInfo:
    """Run the container. Raises `DockerError` if the engine cannot run one."""
    info = await docker.system.info()
    await _remove_stale(docker)
    security = info.get("SecurityOptions") or ()
    filtered = "seccomp" in " ".join(security)
    hardening = find_hardening(engine.kind, security) if filtered else None
    (memory, processes), hardening = await _try_hardening(docker, engine, hardening)
    return EngineInfo(
        kind=engine.kind,
        version=str(info.get("ServerVersion", "?")),
        rootless=bool(info.get("Rootless")) or "rootless" in " ".join(security),
        cgroup=str(info.get("CgroupVersion", "?")),
        storage=str(info.get("Driver", "?")),
        runtime=str(info.get("DefaultRuntime", "?")),
        seccomp=filtered,
        memory=memory,
        processes=processes,
        hardening=hardening,
    )


async def _try_hardening(
    docker: Docker, engine: FoundEngine, hardening: ProcessHardening | None
) -> tuple[tuple[bool, bool], ProcessHardening | None]:
    """Return which limits are in force, and the hardening if the engine applies it."""
    await _ensure_image(docker)
    if hardening is not None:
        try:
            return await _check_limits(docker, engine, hardening), hardening
        except DockerError as error:
            _log.warning("container not hardened", error=str(error.message)[-600:])
    return await _check_limits(docker, engine, None), None


async def _check_limits(
    docker: Docker, engine: FoundEngine, hardening: ProcessHardening | None
) -> tuple[bool, bool]:
    """Return whether a container that asks for limits of memory and of processes has them."""
    mounts = [bind(folder, folder, read_only=True) for folder in _FOLDERS if folder.exists()]
    config: dict[str, Any] = {
        "Image": _IMAGE,
        "Cmd": ["/bin/sh", "-c", "sleep 60"],
        "Labels": {LABEL: "probe"},
        "HostConfig": {
            "NetworkMode": "none",
            "Mounts": mounts,
            "Memory": _MEMORY,
            "MemorySwap": _MEMORY,
            "PidsLimit": _PROCESSES,
            "Ulimits": ulimits(engine.process),
            **(await asyncio.to_thread(hardening.host_config) if hardening else {}),
        },
    }
    container = await docker.containers.create(config, name=f"tugline-probe-{secrets.token_hex(6)}")
    try:
        await container.start()
        state = (await container.show())["State"]
        if hardening and not is_hardened(state["Pid"]):
            raise DockerError(500, "the engine has left out the hardening that was requested")
        cgroup = cgroup_of(state["Pid"])
        if cgroup == Cgroup():
            msg = "its containers are not processes of this machine: is it in a virtual machine?"
            raise SandboxError(msg)
        # A process that was left in our own group is under our limits, not under its own.
        own = cgroup_of(os.getpid())
        memory, processes = cgroup.read_limits()
        return (
            memory is not None and memory <= _MEMORY and cgroup.memory != own.memory,
            processes is not None and processes <= _PROCESSES and cgroup.processes != own.processes,
        )
    finally:
        with contextlib.suppress(DockerError):
            await container.delete(force=True, v=True)


async def _ensure_image(docker: Docker) -> None:
    """Build an image with nothing in it but its Dockerfile, if there is none."""
    if await find_image(docker, _IMAGE) is None:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as context:
            (Path(folder) / "Dockerfile").write_bytes(_DOCKERFILE)
            pack(Path(folder), context)
            await docker.images.build(fileobj=context, encoding="identity", tag=_IMAGE)


async def _remove_stale(docker: Docker) -> None:
    """Remove containers that killed processes left of probing and of reading images."""
    for what in ("probe", "peek"):
        named = {"label": [f"{LABEL}={what}"]}
        for one in await docker.containers.list(all=True, filters=named):
            if time.time() - one["Created"] > _STALE_S:
                with contextlib.suppress(DockerError):
                    await one.delete(force=True, v=True)
