"""A network namespace with a loopback interface and a recording name server.

``unshare`` starts the worker in fresh user, network and mount namespaces. The worker brings the
loopback interface up and replaces the machine's resolver by one that answers NXDOMAIN and records
the names. A harness that tries to reach a foreign host cannot, and is identified by the name.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tugline.errors import SandboxError
from tugline.sandbox import netns

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")
_RESOLVER = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"


def unavailable() -> str | None:
    """Return why the machine allows no namespaces; None if it does."""
    try:
        _replace_resolver("/proc/self/status", *UNSHARE)
    except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
        return f"no network namespace: {error}"
    return None


@contextlib.asynccontextmanager
async def set_up(folder: Path) -> AsyncIterator[list[str]]:
    """Set up the namespaces that this process was started in; yield the names looked up."""
    netns._loopback_up()
    resolver = folder / "resolv.conf"
    await asyncio.to_thread(resolver.write_text, _RESOLVER)
    await asyncio.to_thread(_replace_resolver, str(resolver))
    names: list[str] = []
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _Recorder(names), local_addr=("127.0.0.1", 53)
    )
    try:
        yield names
    finally:
        transport.close()


def _replace_resolver(source: str, *wrapper: str) -> None:
    command = [*wrapper, "mount", "--bind", source, "/etc/resolv.conf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        msg = f"cannot replace the name server: {' '.join(done.stderr.split())}"
        raise SandboxError(msg)


class _Recorder(asyncio.DatagramProtocol):
    def __init__(self, names: list[str]) -> None:
        self._names = names

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, end = _question(data)
        if name not in {"localhost", *self._names}:
            self._names.append(name)
        flags = b"\x81\x83"  # a response: no such name
        answer = data[:2] + flags + b"\0\1\0\0\0\0\0\0" + data[12:end]
        self._transport.sendto(answer, addr)


def _question(data: bytes) -> tuple[str, int]:
    """Return the name in a DNS query and the offset after its question."""
    labels: list[str] = []
    at = 12
    while at < len(data) and data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
        at += 1 + data[at]
    return ".".join(labels), at + 5
