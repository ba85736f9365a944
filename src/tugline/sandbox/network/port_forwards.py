"""Forward ports of a sandbox's network to servers outside: its only way out.

A sandbox has a network of its own with nothing in it but loopback. A forwarded port is a listening
socket in there (`netns`), served by this process, which relays each connection to one address: the
gateway's. Nothing runs inside, any image will do, and there is no route to anything else (I6).
An allow-list adds one more port: a proxy for named hosts (`proxy`).

Ports are the same in every sandbox, so that all samples of a task see the same addresses.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from tugline.errors import SandboxNetworkError
from tugline.sandbox.network import netns
from tugline.sandbox.network.proxy import AllowList, Proxy
from tugline.sandbox.network.relay import Dial, Relay, RelayClient, join

PORT = 10040
"""Of the first server; the next ones follow."""
PROXY_PORT = 10030
_PROBE_S = 5.0
_OWN = "127.0.0.1,localhost"


class PortForwards:
    """The forwarded ports of one sandbox: none, also no proxy, before the first server is added."""

    def __init__(self, allow: AllowList | None = None) -> None:
        self._allow = allow if allow is not None and allow.patterns else None
        self._ports: dict[tuple[str, int], int] = {}
        self._relays: dict[int, Relay] = {}

    @property
    def env(self) -> Mapping[str, str]:
        """Environment by which programs find the proxy, if there is one."""
        if PROXY_PORT not in self._relays:
            return {}
        proxy = f"http://127.0.0.1:{PROXY_PORT}"
        proxied = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        return {**dict.fromkeys(proxied, proxy), "NO_PROXY": _OWN, "no_proxy": _OWN}

    async def add(self, pid: int, url: str) -> str:
        """Forward a port of `pid`'s network to the HTTP server at `url`; return the URL inside.

        A server that has a port keeps it. Raises `SandboxNetworkError`.
        """
        target = await _check_reachable(url)
        port = self._ports.setdefault(target, PORT + len(self._ports))
        await self._listen(pid)
        return urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl()

    async def move(self, pid: int) -> None:
        """Forward the same ports in the network of `pid`: the sandbox was started again."""
        await self.aclose()
        if self._ports:
            await self._listen(pid)

    async def aclose(self) -> None:
        """Close all ports and their connections; the servers are remembered for `move`."""
        relays, self._relays = self._relays, {}
        for relay in relays.values():
            await relay.aclose()

    async def _listen(self, pid: int) -> None:
        """Listen on the ports that have no listener yet."""
        wanted: dict[int, Dial] = {port: _dial_to(*target) for target, port in self._ports.items()}
        if self._allow is not None:
            wanted[PROXY_PORT] = Proxy(self._allow).dial
        for port in wanted.keys() - self._relays.keys():
            try:
                listener = await _create_listener(pid, port)
            except OSError as error:
                msg = f"no socket can be made in the sandbox's network (port {port}): {error}"
                raise SandboxNetworkError(msg) from error
            self._relays[port] = await Relay(wanted[port]).serve(listener)


async def _create_listener(pid: int, port: int) -> socket.socket:
    """Create a socket in a thread; if the caller is cancelled, close it when it is there."""
    creating = asyncio.create_task(asyncio.to_thread(netns.listen, pid, port))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        creating.add_done_callback(_close)
        raise


def _close(created: asyncio.Task[socket.socket]) -> None:
    if not created.cancelled() and created.exception() is None:
        created.result().close()


def _dial_to(host: str, port: int) -> Dial:
    async def dial(caller: RelayClient) -> None:
        await join(caller, host, port)

    return dial


async def _check_reachable(url: str) -> tuple[str, int]:
    """Return host and port of a server that answers."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not url.startswith("http://") or host is None:
        msg = f"{url!r} cannot be reached from a sandbox: it must be like 'http://host:port/path'"
        raise SandboxNetworkError(msg)
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {_PROBE_S:.0f} s"
        msg = f"nothing answers at {host}:{port}, which a sandbox is to reach: {reason}"
        raise SandboxNetworkError(msg) from error
    writer.close()
    return host, port
