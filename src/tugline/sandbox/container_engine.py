"""Find a container engine and call its API.

Docker and Podman answer the same API on a unix socket of this machine; a remote engine is refused,
because folders of this machine are mounted. Where nothing listens and the ``podman`` program is
installed, it is started as a service that ends after `_IDLE_S` without requests, so a Podman
without a daemon needs no set-up either.

A client belongs to one event loop and one piece of work; creating one takes under a millisecond.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import IO, Any, TypeVar

import msgspec
from filelock import FileLock

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
_IDLE_S = 300
_START_S = 20.0
_PING = b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n"
_PEER = struct.Struct("3i")
"""The kernel's ``struct ucred``: process, user, group."""
_HOW = "install podman (or start docker), or name a socket with the option engine"


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
        self._lock = threading.Lock()
        self._last: FoundEngine | None = None

    def find(self) -> FoundEngine:
        """Return the engine that answers, started if need be. Blocks. Raises `SandboxError`."""
        if MISSING is not None:
            raise SandboxError(MISSING)
        with self._lock:
            last = self._last
            if last is not None and (last := _ping(last.socket)) is not None:
                return last
            self._last = self._search()
            return self._last

    @property
    def process(self) -> int:
        """The engine that answered last; 0 before one did."""
        return self._last.process if self._last else 0

    @contextlib.asynccontextmanager
    async def client(
        self,
        what: str = "the container engine failed",
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

    def run_blocking(self, work: Callable[[Docker], Awaitable[T]], limit_s: float = CALL_S) -> T:
        """Run `work` and return its result. Blocks. Raises `SandboxError`."""

        async def run() -> T:
            async with self.client(limit_s=limit_s) as docker:
                return await work(docker)

        with ThreadPoolExecutor(1) as thread:  # the caller's may have a loop already
            return thread.submit(asyncio.run, run()).result()

    def _search(self) -> FoundEngine:
        places = [place for place in _list_sockets() if self._wanted in {None, place[0]}]
        if self._wanted is not None and self._wanted.startswith("unix://"):
            places = [("", self._wanted.removeprefix("unix://"))]
        for _kind, path in places:
            if (found := _ping(path)) is not None:
                return found
        ours = self._wanted in {None, "podman", f"unix://{_own_socket()}"}
        if ours and shutil.which("podman"):
            return _start(_own_socket())
        tried = ", ".join(path for _kind, path in places)
        raise SandboxError(f"no container engine answers at {tried}; {_HOW}")


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


async def stream(
    docker: Docker, path: str, params: Mapping[str, str], data: IO[bytes] | None = None
) -> AsyncGenerator[str, None]:
    """Yield the progress of a long request; close it to give up. Raises `DockerError`."""
    url = f"unix://localhost/{docker.api_version}/{path}"
    tar = {"Content-Type": "application/x-tar"}
    async with docker.session.post(url, params=params, data=data, headers=tar) as response:
        rest = b""
        async for part in response.content.iter_any():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield _progress(line, response.status)
        if rest or response.status >= 400:
            yield _progress(rest or b"{}", response.status)


async def remove_container(docker: Docker, name: str) -> None:
    """Kill and remove a container, which may be missing."""
    for wait_s in (0.05, 0.2, 1.0, 3.0, None):
        try:
            return await docker.containers.container(name).delete(force=True, v=True)
        except DockerError as error:
            if error.status == 404:
                return None
            if wait_s is None:
                raise
        # Podman refuses while it is just ending, Docker while another process removes it.
        await asyncio.sleep(wait_s)
    return None


def bind(source: Path | str, target: PurePath, *, read_only: bool) -> dict[str, Any]:
    """Return an entry of ``Mounts``."""
    what = {"Type": "bind", "Source": str(source), "Target": str(target)}
    return {**what, "ReadOnly": read_only}


def _progress(line: bytes, status: int) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        event = msgspec.json.decode(line, type=dict[str, Any])
        if status >= 400 or "error" in event:
            message = event.get("message") or event.get("error") or event
            raise DockerError(status, str(message))
        return str(event.get("stream", ""))
    if status >= 400:
        raise DockerError(status, line.decode(errors="replace"))
    return ""


def _list_sockets() -> list[tuple[str, str]]:
    """Kind and socket of each candidate, in the order of trying."""
    own = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    places = [
        ("podman", "/run/podman/podman.sock"),
        ("podman", str(_own_socket())),
        ("docker", "/var/run/docker.sock"),
        ("docker", f"{own}/docker.sock"),
    ]
    named = os.environ.get("DOCKER_HOST", "")
    if named.startswith("unix://"):
        places.insert(0, ("docker", named.removeprefix("unix://")))
    return places


def _ping(path: str) -> FoundEngine | None:
    """Return the engine that answers at a socket, if one does."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(path)
        connection.sendall(_PING)
        reply = b""
        while b"\r\n\r\n" not in reply and (part := connection.recv(4096)):
            reply += part
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        headers = {name.lower(): value.strip() for name, _, value in lines}
        if "api-version" in headers:
            kind = "podman" if "libpod-api-version" in headers else "docker"
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            return FoundEngine(path, kind, headers["api-version"], _PEER.unpack(peer)[0])
    return None


def _own_socket() -> Path:
    """Where Podman usually listens, or in a folder of this user."""
    own = os.environ.get("XDG_RUNTIME_DIR") if os.geteuid() else "/run"
    return Path(own or f"/tmp/tugline-{os.geteuid()}") / "podman" / "podman.sock"  # noqa: S108


def _start(path: Path) -> FoundEngine:
    """Start the service of Podman, which ends by itself after a while without requests.

    Of several processes that find none, one starts it and the others wait for that.
    """
    log = path.with_name("tugline.log")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            msg = f"{path.parent} is another user's; set XDG_RUNTIME_DIR to a folder of your own"
            raise SandboxError(msg)
        with FileLock(path.with_name("tugline.lock"), timeout=2 * _START_S):
            return _ping(str(path)) or _start_alone(path, log)
    except (OSError, subprocess.CalledProcessError) as error:  # a lock's timeout, too
        raise SandboxError(f"podman cannot be started: {error}") from error


def _start_alone(path: Path, log: Path) -> FoundEngine:
    with log.open("wb") as output:
        # With setsid it is nobody's child and outlives the process that asked first.
        subprocess.run(
            ("setsid", "-f", *service_command(path), f"--time={_IDLE_S}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            cwd=path.parent,  # where conmon leaves a file for each container out of memory
            check=True,
        )
    until = time.monotonic() + _START_S
    while time.monotonic() < until and b"Error:" not in log.read_bytes():
        if (found := _ping(str(path))) is not None:
            return found
        time.sleep(0.05)
    output_text = log.read_text(errors="replace").strip()[-600:]
    msg = f"podman system service does not answer at {path}: {output_text or 'no output'}"
    raise SandboxError(msg)


def service_command(path: Path) -> tuple[str, ...]:
    """Return the command that makes Podman listen at `path`."""
    # crun refuses a mixture of cgroup versions.
    mixed = not Path("/sys/fs/cgroup/cgroup.controllers").exists()
    runtime = ("--runtime", "runc") if mixed and shutil.which("runc") else ()
    return ("podman", *runtime, "system", "service", f"unix://{path}")
