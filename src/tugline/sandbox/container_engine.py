"""Find a container engine, call its API, and probe what it enforces on this machine.

Docker and Podman serve the same API on a unix socket of this machine. A remote engine is refused,
because folders of this machine are mounted.

A client is used in one event loop for one operation; creating one takes under a millisecond.

Engines accept limits that they do not enforce, choose storage that copies whole images, or run in a
virtual machine with other folders. So `probe` starts a container without an image (this machine's
own ``/bin/sh`` and libraries, read-only) with limits and reads its control group on the host.
"""

import asyncio
import contextlib
import http.client
import os
import resource
import secrets
import socket
import struct
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any, TypeVar

import msgspec

from tugline import log
from tugline.errors import ConfigError, DiskFull, SandboxError
from tugline.sandbox.hardening import ProcessHardening, find_hardening, is_hardened
from tugline.sandbox.limits import Cgroup, cgroup_of
from tugline.sandbox.quotas import list_shared

try:
    from aiodocker import Docker, DockerError
    from aiohttp import ClientError
except ImportError as _error:  # reported by `check_available` if containers are used
    MISSING: str | None = f"containers need: pip install 'tugline[container]' ({_error})"
    Docker = DockerError = ClientError = Exception  # type: ignore[misc,assignment] # never raised
else:
    MISSING = None

__all__ = ["Docker", "DockerError"]

T = TypeVar("T")

CALL_S = 60.0
"""Default timeout of one request; engines are slow when many containers start at once."""
_FAILED = "the container engine failed"
_PEER = struct.Struct("3i")
"""The kernel's ``struct ucred``: process, user, group."""
_HOW = (
    "install podman and run `systemctl --user start podman.socket` (without --user as root), start"
    " docker, or name a socket with the option engine"
)
LABEL = "tugline"
"""Label of all containers and images that Tugline creates."""
_IMAGE = "localhost/tugline/probe:1"
_DOCKERFILE = b"FROM scratch\nCOPY Dockerfile /Dockerfile\n"
_MEMORY = 256 << 20
_PROCESSES = 99
_STALE_S = 3600.0
_OPEN_FILES = 65536
_MOST_PROCESSES = 32768
_FOLDERS = tuple(map(Path, ("/bin", "/lib", "/lib64", "/usr")))
_log = log.get("sandbox")


class FoundEngine(msgspec.Struct, frozen=True):
    """An engine that answers on a socket of this machine."""

    socket: str
    kind: str
    """``podman`` or ``docker``."""
    api: str
    """Newest supported version of Docker's API."""
    process: int = 0
    """Process id of the engine; 0, which means this process, if the kernel does not report it."""


class ContainerEngine:
    """Client of the engine `wanted`: ``unix://`` URL, ``podman``, ``docker`` or None for any."""

    def __init__(self, wanted: str | None) -> None:
        if wanted not in {None, "podman", "docker"} and not str(wanted).startswith("unix:///"):
            msg = (
                f"runtime 'container': engine is {wanted!r}, must be podman, docker or unix:///PATH"
            )
            raise ConfigError(msg)
        self._wanted = wanted
        self._engine: FoundEngine | None = None

    def find(self) -> FoundEngine:
        """Return the engine that answers. Blocks the first time. Raises `SandboxError`."""
        if self._engine is not None:
            return self._engine
        if MISSING is not None:
            raise SandboxError(MISSING)
        paths = [path for kind, path in _list_sockets() if self._wanted in {None, kind}]
        if self._wanted is not None and self._wanted.startswith("unix://"):
            paths = [self._wanted.removeprefix("unix://")]
        for path in paths:
            if (engine := _ping(path)) is not None:
                self._engine = engine
                return engine
        raise SandboxError(f"no container engine responds at {', '.join(paths)}; {_HOW}")

    @contextlib.asynccontextmanager
    async def client(
        self,
        what: str = _FAILED,
        limit_s: float = CALL_S,
        *,
        option: str = "",
        kind: type[SandboxError] = SandboxError,
        hint: str = "",
    ) -> AsyncIterator[Docker]:
        """Open a client for one operation, which must finish within `limit_s`.

        Raises errors as `kind` with the text "`what`: reason". `hint` is added to errors of the
        engine, the name of the `option` with the limit to timeouts.
        """
        try:
            async with asyncio.timeout(limit_s):
                info = await asyncio.to_thread(self.find)
                async with Docker(f"unix://{info.socket}", api_version=f"v{info.api}") as docker:
                    with translate_errors(what, kind, hint=hint):
                        yield docker
        except TimeoutError as error:
            named = f" (option {option})" if option else ""
            raise kind(f"{what}: not finished within {limit_s:g} s{named}") from error

    def run_blocking(
        self, work: Callable[[Docker], Awaitable[T]], what: str = _FAILED, limit_s: float = CALL_S
    ) -> T:
        """Run `work` in a client and return its result. Blocks. Raises `SandboxError`."""

        async def run() -> T:
            async with self.client(what, limit_s) as docker:
                return await work(docker)

        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop
            return thread.submit(asyncio.run, run()).result()


@contextlib.contextmanager
def translate_errors(
    what: str, kind: type[SandboxError] = SandboxError, *, hint: str = ""
) -> Iterator[None]:
    """Raise errors of the engine as `kind` or `DiskFull`, of its connection as `SandboxError`."""
    try:
        yield
    except DockerError as error:
        reason = " ".join(str(error.message).split())[-600:]
        msg = f"{what}: {reason}{hint}"
        full = "no space left" in reason.lower() or "disk quota" in reason.lower()
        raise (DiskFull if full else kind)(msg) from error
    except (ClientError, ConnectionError) as error:
        raise SandboxError(f"{what}: {type(error).__name__}: {error}") from error


async def retry(call: Callable[[], Awaitable[T]], *pauses_s: float) -> T | None:
    """Call the engine and retry after each pause; return None if it answers 404."""
    for pause_s in (*pauses_s, None):
        try:
            return await call()
        except DockerError as error:
            if error.status == 404:
                break
            if pause_s is None:
                raise
            await asyncio.sleep(pause_s)
    return None


async def remove_container(docker: Docker, name: str) -> None:
    """Kill and remove a container; it may be missing."""
    delete = partial(docker.containers.container(name).delete, force=True, v=True)
    # Podman refuses while the container is ending, Docker while another process removes it.
    await retry(delete, 0.05, 0.2, 1.0, 3.0)


def bind(source: Path | str, target: PurePath, *, read_only: bool) -> dict[str, Any]:
    """Return an entry of ``Mounts``."""
    mount = {"Type": "bind", "Source": str(source), "Target": str(target)}
    return {**mount, "ReadOnly": read_only}


def _list_sockets() -> list[tuple[str, str]]:
    """Return (kind, socket) of each candidate, in the order of trying."""
    own = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    candidates = [
        ("podman", "/run/podman/podman.sock"),
        ("podman", f"{own}/podman/podman.sock"),
        ("docker", "/var/run/docker.sock"),
        ("docker", f"{own}/docker.sock"),
    ]
    named = os.environ.get("DOCKER_HOST", "")
    if named.startswith("unix://"):
        candidates.insert(0, ("docker", named.removeprefix("unix://")))
    return candidates


def _ping(path: str) -> FoundEngine | None:
    """Return the engine that answers at a socket; None if there is none."""
    silent = contextlib.suppress(OSError, http.client.HTTPException)
    with silent, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(path)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        engine = http.client.HTTPConnection("engine")
        engine.sock = connection
        engine.request("GET", "/_ping")
        headers = engine.getresponse().headers
        if "Api-Version" in headers:
            kind = "podman" if "Libpod-Api-Version" in headers else "docker"
            return FoundEngine(path, kind, headers["Api-Version"], _PEER.unpack(peer)[0])
    return None


def pack(folder: Path, to: IO[bytes]) -> None:
    """Write a folder as a tar archive, a build context for an engine."""
    with tarfile.open(fileobj=to, mode="w") as archive:
        archive.add(folder, ".")
    to.seek(0)


# --------------------------------------------------------------------------- probing
class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Result of probing a container engine on this machine."""

    kind: str
    version: str
    rootless: bool
    cgroup: str
    storage: str
    runtime: str
    seccomp: bool
    memory: bool
    """Whether the memory limit is enforced."""
    processes: bool
    """Whether the process limit is enforced."""
    hardening: ProcessHardening | None
    """Protection of the runner's shell from programs; None if the engine does not support it."""

    def list_weaknesses(self) -> tuple[str, ...]:
        """Return the gaps of the isolation on this machine, one line each."""
        name = f"{self.kind} {self.version}{', rootless' * self.rootless}, cgroup v{self.cgroup}"
        forged = (
            "a program can take over the shell that runs it, and so forge its exit code and "
            "outlive its"
            f" end: {name} does not hide memory, or /usr/share/containers lacks seccomp.json"
        )
        slow = "slow: storage driver vfs copies the image for each container; for podman, set"
        slow += ' driver = "overlay" in storage.conf and begin with empty storage'
        rules = (
            (self.memory, f"memory is not limited: {name} does not enforce it"),
            (self.processes, f"the number of processes is not limited: {name} does not enforce it"),
            (self.seccomp, f"system calls are not filtered: {name} has no seccomp profile"),
            (self.hardening is not None, forged),
            (self.rootless, "root in a container is this machine's root with fewer rights"),
            (self.storage != "vfs", slow),
        )
        missing = [weakness for holds, weakness in rules if not holds]
        return (*missing, *list_shared(namespaces=False))


def ulimits(engine: int) -> list[dict[str, Any]]:
    """Return ulimits of containers, at most those of the engine, which may not raise its own."""
    limits = []
    for name, number, maximum in (
        ("nofile", resource.RLIMIT_NOFILE, _OPEN_FILES),
        ("nproc", resource.RLIMIT_NPROC, _MOST_PROCESSES),
        ("core", resource.RLIMIT_CORE, 0),
    ):
        try:
            hard = resource.prlimit(engine, number)[1]
        except OSError:  # the engine is another user's process
            hard = resource.getrlimit(number)[1]
        value = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        limits.append({"Name": name, "Soft": value, "Hard": value})
    return limits


async def probe(docker: Docker, engine: FoundEngine) -> EngineInfo:
    """Probe an engine with a test container. Raises `DockerError` if it cannot run one."""
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
    """Return whether memory and process limits are enforced, and `hardening` if it is applied."""
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
    """Start a container with limits; return whether those of memory and processes are enforced."""
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
            raise DockerError(500, "the engine did not apply the requested hardening")
        cgroup = cgroup_of(state["Pid"])
        if cgroup == Cgroup():
            msg = (
                "the engine's containers are not processes of this machine; it may run in a "
                "virtual machine"
            )
            raise SandboxError(msg)
        # A container in this process's group has this process's limits, not its own.
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
    """Build an image that contains only its Dockerfile, if it does not exist."""
    if await retry(partial(docker.images.inspect, _IMAGE), 0.2, 1.0) is None:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as context:
            (Path(folder) / "Dockerfile").write_bytes(_DOCKERFILE)
            pack(Path(folder), context)
            await docker.images.build(fileobj=context, encoding="identity", tag=_IMAGE)


async def _remove_stale(docker: Docker) -> None:
    """Remove old containers for probing or reading images, left by killed processes."""
    for purpose in ("probe", "peek"):
        labelled = {"label": [f"{LABEL}={purpose}"]}
        for container in await docker.containers.list(all=True, filters=labelled):
            if time.time() - container["Created"] > _STALE_S:
                with contextlib.suppress(DockerError):
                    await container.delete(force=True, v=True)
