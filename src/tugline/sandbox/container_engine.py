"""Find a container engine and call its API.

Docker and Podman answer the same API on a unix socket of this machine; a remote engine is refused,
because folders of this machine are mounted.

A client belongs to one event loop and one piece of work; creating one takes under a millisecond.
"""

import asyncio
import contextlib
import http.client
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from tugline.errors import ConfigError, DiskFull, SandboxError

try:
    from aiodocker import Docker, DockerError
    from aiohttp import ClientError
except ImportError as _error:  # reported by `check_available`, where containers are to run
    MISSING: str | None = f"containers need: pip install 'tugline[container]' ({_error})"
    Docker = DockerError = ClientError = Exception  # type: ignore[misc,assignment] # never raised
else:
    MISSING = None

__all__ = ["Docker", "DockerError"]

T = TypeVar("T")

CALL_S = 60.0
"""The engine's time for one request; it is slow when many containers start at once."""
_FAILED = "the container engine failed"
_PEER = struct.Struct("3i")
"""The kernel's ``struct ucred``: process, user, group."""
_HOW = (
    "install podman and run `systemctl --user start podman.socket` (without --user as root), start"
    " docker, or name a socket with the option engine"
)


class FoundEngine(msgspec.Struct, frozen=True):
    """An engine that answers."""

    socket: str
    kind: str
    """``podman`` or ``docker``."""
    api: str
    """The newest version of Docker's API that it speaks."""
    process: int = 0
    """Who listens at the socket; 0, this process, where the kernel does not say."""


class ContainerEngine:
    """The engine `wanted`: a ``unix://`` URL, ``podman``, ``docker``, or None for any."""

    def __init__(self, wanted: str | None) -> None:
        if wanted not in {None, "podman", "docker"} and not str(wanted).startswith("unix:///"):
            msg = f"runtime 'container': engine is {wanted!r}, not podman, docker or unix:///PATH"
            raise ConfigError(msg)
        self._wanted = wanted
        self._engine: FoundEngine | None = None

    def find(self) -> FoundEngine:
        """Return the engine that answers. Blocks the first time. Raises `SandboxError`."""
        if self._engine is not None:
            return self._engine
        if MISSING is not None:
            raise SandboxError(MISSING)
        places = [path for kind, path in _list_sockets() if self._wanted in {None, kind}]
        if self._wanted is not None and self._wanted.startswith("unix://"):
            places = [self._wanted.removeprefix("unix://")]
        for path in places:
            if (found := _ping(path)) is not None:
                self._engine = found
                return found
        raise SandboxError(f"no container engine answers at {', '.join(places)}; {_HOW}")

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
        """Open a client for one piece of work, which must be done within `limit_s`.

        Errors become ours, of `kind`: "`what`: the reason", with `hint` if it is the engine's own
        and the name of the `option` that is the limit.
        """
        try:
            async with asyncio.timeout(limit_s):
                found = await asyncio.to_thread(self.find)
                async with Docker(f"unix://{found.socket}", api_version=f"v{found.api}") as docker:
                    with translate_errors(what, kind, hint=hint):
                        yield docker
        except TimeoutError as error:
            named = f" (option {option})" if option else ""
            raise kind(f"{what}: not done within {limit_s:g} s{named}") from error

    def run_blocking(
        self, work: Callable[[Docker], Awaitable[T]], what: str = _FAILED, limit_s: float = CALL_S
    ) -> T:
        """Run `work` in a client and return its result. Blocks. Raises `SandboxError`."""

        async def run() -> T:
            async with self.client(what, limit_s) as docker:
                return await work(docker)

        with ThreadPoolExecutor(1) as thread:  # the caller's may have a loop already
            return thread.submit(asyncio.run, run()).result()


@contextlib.contextmanager
def translate_errors(
    what: str, kind: type[SandboxError] = SandboxError, *, hint: str = ""
) -> Iterator[None]:
    """Raise errors of the engine, or of its connection, as ours."""
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
    """Call the engine, again after each pause if it fails; None for what is missing."""
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
    """Kill and remove a container, which may be missing."""
    delete = partial(docker.containers.container(name).delete, force=True, v=True)
    # Podman refuses while it is just ending, Docker while another process removes it.
    await retry(delete, 0.05, 0.2, 1.0, 3.0)


def bind(source: Path | str, target: PurePath, *, read_only: bool) -> dict[str, Any]:
    """Return an entry of ``Mounts``."""
    what = {"Type": "bind", "Source": str(source), "Target": str(target)}
    return {**what, "ReadOnly": read_only}


def _list_sockets() -> list[tuple[str, str]]:
    """Kind and socket of each candidate, in the order of trying."""
    own = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    places = [
        ("podman", "/run/podman/podman.sock"),
        ("podman", f"{own}/podman/podman.sock"),
        ("docker", "/var/run/docker.sock"),
        ("docker", f"{own}/docker.sock"),
    ]
    named = os.environ.get("DOCKER_HOST", "")
    if named.startswith("unix://"):
        places.insert(0, ("docker", named.removeprefix("unix://")))
    return places


def _ping(path: str) -> FoundEngine | None:
    """Return the engine that answers at a socket, if one does."""
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
