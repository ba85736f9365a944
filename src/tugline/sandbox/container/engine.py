"""Find a container engine, and speak with it.

Docker and Podman answer the same API on a unix socket of this machine; a remote engine is refused,
for folders of this machine are mounted. Where nothing listens and the ``podman`` program is there,
it is told to listen at its usual place for as long as somebody asks (`_IDLE_S`), so a Podman
without a daemon needs no set-up either.

A client belongs to one event loop and one piece of work; making one costs less than a
millisecond, and nothing of it is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from tugline.errors import ConfigError, DiskFull, SandboxError

try:
    from aiodocker import Docker, DockerError
    from aiohttp import ClientError
except ImportError as _error:  # said by `unavailable`, on the machine that is to run something
    MISSING: str | None = f"containers need: pip install 'tugline[container]' ({_error})"
    Docker = DockerError = ClientError = Exception  # type: ignore[misc,assignment] # never met
else:
    MISSING = None

__all__ = [
    "CALL_S",
    "MISSING",
    "Docker",
    "DockerError",
    "Engine",
    "Found",
    "faults",
    "service",
    "stream",
]

T = TypeVar("T")

CALL_S = 60.0
"""The engine's time for one request; it is slow when many containers start at once."""
_IDLE_S = 300
_START_S = 20.0
_PING = b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n"
_HOW = "install podman (or start docker), or name a socket with the option engine"


class Found(msgspec.Struct, frozen=True):
    """An engine that answers."""

    socket: str
    kind: str
    """``podman`` or ``docker``."""
    api: str
    """The newest version of Docker's API that it speaks."""


class Engine:
    """The engine `wanted`: a ``unix://`` URL, ``podman``, ``docker``, or None for what there is."""

    def __init__(self, wanted: str | None) -> None:
        if wanted not in {None, "podman", "docker"} and not str(wanted).startswith("unix:///"):
            msg = (
                f"runtime 'container': engine is {wanted!r}, must be 'podman', 'docker' or a"
                " unix:///PATH of this machine"
            )
            raise ConfigError(msg)
        self._wanted = wanted
        self._lock = threading.Lock()
        self._last: Found | None = None

    def find(self) -> Found:
        """The one that answers, started if need be. Blocks. Raises `SandboxError`."""
        if MISSING is not None:
            raise SandboxError(MISSING)
        with self._lock:
            last = self._last
            if last is not None and (last := _ask(last.socket)) is not None:
                return last
            self._last = self._search()
            return self._last

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Docker]:
        """A client for one piece of work; what goes wrong with it is a `SandboxError`."""
        found = await asyncio.to_thread(self.find)
        async with Docker(f"unix://{found.socket}", api_version=f"v{found.api}") as docker:
            with faults("the container engine failed"):
                yield docker

    @contextlib.asynccontextmanager
    async def call(self, limit_s: float = CALL_S) -> AsyncIterator[Docker]:
        """A client for work that must be done in time. Raises `SandboxError`."""
        try:
            async with asyncio.timeout(limit_s), self.client() as docker:
                yield docker
        except TimeoutError as error:
            msg = f"the container engine did not answer within {limit_s:.0f} s"
            raise SandboxError(msg) from error

    def blocking(self, work: Callable[[Docker], Awaitable[T]], limit_s: float = CALL_S) -> T:
        """What `work` returns, for callers that may block. Raises `SandboxError`."""

        async def run() -> T:
            async with self.call(limit_s) as docker:
                return await work(docker)

        with ThreadPoolExecutor(1) as thread:  # the caller's may have a loop already
            return thread.submit(asyncio.run, run()).result()

    def _search(self) -> Found:
        places = [place for place in _places() if self._wanted in {None, place[0]}]
        if self._wanted is not None and self._wanted.startswith("unix://"):
            places = [("", self._wanted.removeprefix("unix://"))]
        for _kind, path in places:
            if (found := _ask(path)) is not None:
                return found
        ours = self._wanted in {None, "podman", f"unix://{_own_place()}"}
        if ours and shutil.which("podman"):
            return _start(_own_place())
        tried = ", ".join(path for _kind, path in places)
        msg = f"no container engine answers at {tried}; {_HOW}"
        raise SandboxError(msg)


@contextlib.contextmanager
def faults(what: str, kind: type[SandboxError] = SandboxError, *, hint: str = "") -> Iterator[None]:
    """What the engine says, and that it does not answer, as an error of ours."""
    try:
        yield
    except DockerError as error:
        said = " ".join(str(error.message).split())[-600:]
        msg = f"{what}: {said}{hint}"
        full = "no space left" in said.lower() or "disk quota" in said.lower()
        raise (DiskFull if full else kind)(msg) from error
    except (ClientError, ConnectionError) as error:
        msg = f"{what}: {type(error).__name__}: {error}"
        raise SandboxError(msg) from error


async def stream(
    docker: Docker, path: str, params: Mapping[str, str], data: IO[bytes] | None = None
) -> AsyncGenerator[str, None]:
    """What a long request says while it goes on; close it to give up. Raises `DockerError`."""
    url = f"unix://localhost/{docker.api_version}/{path}"
    tar = {"Content-Type": "application/x-tar"}
    async with docker.session.post(url, params=params, data=data, headers=tar) as reply:
        rest = b""
        async for part in reply.content.iter_any():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield _told(line, reply.status)
        if rest or reply.status >= 400:
            yield _told(rest or b"{}", reply.status)


def _told(line: bytes, status: int) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        said = msgspec.json.decode(line, type=dict[str, Any])
        if status >= 400 or "error" in said:
            raise DockerError(status, str(said.get("message") or said.get("error") or said))
        return str(said.get("stream", ""))
    if status >= 400:
        raise DockerError(status, line.decode(errors="replace"))
    return ""


def _places() -> list[tuple[str, str]]:
    """Kind and socket, in the order of trying."""
    own = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    places = [
        ("podman", "/run/podman/podman.sock"),
        ("podman", str(_own_place())),
        ("docker", "/var/run/docker.sock"),
        ("docker", f"{own}/docker.sock"),
    ]
    named = os.environ.get("DOCKER_HOST", "")
    if named.startswith("unix://"):
        places.insert(0, ("docker", named.removeprefix("unix://")))
    return places


def _ask(path: str) -> Found | None:
    """Who answers at a socket; None if nobody does."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(10.0)
        asked.connect(path)
        asked.sendall(_PING)
        reply = b""
        while b"\r\n\r\n" not in reply and (part := asked.recv(4096)):
            reply += part
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        headers = {name.lower(): value.strip() for name, _, value in lines}
        if "api-version" in headers:
            kind = "podman" if "libpod-api-version" in headers else "docker"
            return Found(path, kind, headers["api-version"])
    return None


def _own_place() -> Path:
    """Where Podman listens by custom, or in a folder of this user."""
    own = os.environ.get("XDG_RUNTIME_DIR") if os.geteuid() else "/run"
    return Path(own or f"/tmp/tugline-{os.geteuid()}") / "podman" / "podman.sock"  # noqa: S108


def _start(path: Path) -> Found:
    """Have Podman listen; it stops by itself when nobody has asked for a while."""
    log = path.with_name("tugline.log")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            msg = f"{path.parent} is another user's; set XDG_RUNTIME_DIR to a folder of your own"
            raise SandboxError(msg)
        with log.open("wb") as said:
            # By way of setsid, so that it is nobody's child and outlives who asked first.
            subprocess.run(
                ("setsid", "-f", *service(path), f"--time={_IDLE_S}"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=path.parent,  # where conmon leaves a file for each container out of memory
                check=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        msg = f"podman cannot be started: {error}"
        raise SandboxError(msg) from error
    until = time.monotonic() + _START_S
    while time.monotonic() < until and b"Error:" not in log.read_bytes():
        if (found := _ask(str(path))) is not None:
            return found
        time.sleep(0.05)
    words = log.read_text(errors="replace").strip()[-600:]
    msg = f"podman system service does not answer at {path}: {words or 'it says nothing'}"
    raise SandboxError(msg)


def service(path: Path) -> tuple[str, ...]:
    """The command that makes Podman listen at `path`."""
    # crun refuses a mixture of cgroup versions.
    mixed = not Path("/sys/fs/cgroup/cgroup.controllers").exists()
    runtime = ("--runtime", "runc") if mixed and shutil.which("runc") else ()
    return ("podman", *runtime, "system", "service", f"unix://{path}")
