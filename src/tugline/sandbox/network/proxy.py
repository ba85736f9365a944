"""An HTTP proxy for the named hosts that a sandbox may reach beside its gateway.

Programs find it by ``HTTP_PROXY`` and ``HTTPS_PROXY``. CONNECT is relayed as it is, so TLS is
between the program and its host; a plain request has its first line rewritten. The name must be on
the list and the address must be a public one: a name on the list that leads to loopback, to a
private network or to a cloud's metadata service is refused, unless the list has that address, too.
A connection goes to the address that was checked. Refusals are a 403 with a sentence.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from tugline.errors import ConfigError
from tugline.sandbox.network.relay import RelayClient, join

_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_PATTERN = re.compile(
    rf"(?P<host>\*|(\*\.)?{_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\]):(?P<port>[0-9]{{1,5}}|\*)",
    re.IGNORECASE,
)
_TUNNELS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))
"""Ranges of IPv6 behind which an IPv4 address of any kind may be."""
_RESOLVE_S = 5.0
_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="tugline-resolve")
"""Threads of their own, so that slow name servers delay nothing else."""
_HOP_HEADERS = (b"proxy-", b"connection:", b"keep-alive:", b"host:")
"""Headers between a program and its proxy, which are not passed on."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _ProxyRequest(NamedTuple):
    """Where a program wants to connect to."""

    host: str
    port: int
    hello: bytes
    """Written to the program once it is connected."""
    first: bytes
    """Written to the host first."""


class _Refused(Exception):
    """A request that is refused; its text is the response."""

    def __init__(self, reason: str, status: str = "403 Forbidden") -> None:
        super().__init__(reason)
        self.status = status


class AllowList:
    """Hosts that may be reached: ``example.com:443``, ``*.example.net:80``, ``[2001:db8::1]:80``.

    ``*.name`` is every name below it, ``*`` any name or port. Raises `ConfigError`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(_parse_pattern(pattern) for pattern in patterns)

    def matches(self, host: str, port: int) -> bool:
        """Return whether a name or address, or a pattern for it, is on the list."""
        return any(
            (there in {host, "*"} or (there.startswith("*.") and host.endswith(there[1:])))
            and at in {port, None}
            for there, at in self.patterns
        )

    def permits(self, address: Address, port: int) -> bool:
        """Return whether an address is public, or on the list itself."""
        mapped = getattr(address, "ipv4_mapped", None) or address
        if any((str(one), at) in self.patterns for one in (address, mapped) for at in (port, None)):
            return True
        tunnel = any(mapped in network for network in _TUNNELS if network.version == mapped.version)
        return mapped.is_global and not mapped.is_multicast and not tunnel


def _parse_pattern(pattern: str) -> tuple[str, int | None]:
    found = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    port = found["port"] if found else ""
    if found is None or (port != "*" and not 0 < int(port) < 1 << 16):
        msg = (
            f"option allow: {pattern!r} must be a host and its port, such as 'example.com:443' or "
            "'*.example.net:80'"
        )
        raise ConfigError(msg)
    host = found["host"].lower()
    try:
        host = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if host.startswith("["):
            msg = f"option allow: {pattern!r} has no IPv6 address in its brackets"
            raise ConfigError(msg) from None
    return host, None if port == "*" else int(port)


class Proxy:
    """Connects callers with the hosts that they request, as far as the list allows."""

    def __init__(self, allow: AllowList) -> None:
        self._allow = allow

    async def dial(self, caller: RelayClient) -> None:
        """Read the request and connect it, or refuse it with a reason."""
        try:
            request = _parse_request(await caller.read_until(b"\r\n\r\n"))
            address = await self._resolve(request)
            try:
                await join(caller, address, request.port, hello=request.hello, first=request.first)
            except OSError as error:
                reason = f"{request.host}:{request.port} does not answer: {error.strerror or error}"
                raise _Refused(reason, "502 Bad Gateway") from error
        except _Refused as refused:
            caller.transport.write(_refusal(refused))
            caller.transport.close()

    async def _resolve(self, request: _ProxyRequest) -> str:
        """Return an address of the host that may be reached."""
        host, port = request.host, request.port
        if not self._allow.matches(host, port):
            msg = f"{host}:{port} is not on this sandbox's allow-list"
            raise _Refused(msg)
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await asyncio.get_running_loop().run_in_executor(
                    _RESOLVERS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
                )
        except TimeoutError as error:
            msg = f"{host} has no address: no answer within {_RESOLVE_S:.0f} s"
            raise _Refused(msg, "502 Bad Gateway") from error
        except (OSError, UnicodeError) as error:
            msg = f"{host} has no address: {error}"
            raise _Refused(msg, "502 Bad Gateway") from error
        addresses = [str(address[0]).partition("%")[0] for *_, address in found]
        for address in addresses:
            if self._allow.permits(ipaddress.ip_address(address), port):
                return address
        msg = f"{host} leads to {addresses[0]}, which is no public address and not on the list"
        raise _Refused(msg)


def _parse_request(head: bytes) -> _ProxyRequest:
    line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
        if method == "CONNECT":
            parts, port = urlsplit(f"//{target}"), None
        else:
            parts, port = urlsplit(target), 80
        host, port = parts.hostname, parts.port or port
        plain = method != "CONNECT" and parts.scheme == "http"
    except ValueError:
        host, port, plain = None, None, False
    if host is None or port is None or not (plain or method == "CONNECT"):
        msg = "this proxy takes CONNECT host:port and http:// URLs only"
        raise _Refused(msg, "400 Bad Request")
    host = host.rstrip(".")
    if not plain:
        return _ProxyRequest(host, port, b"HTTP/1.1 200 Connection established\r\n\r\n", b"")
    kept = [one for one in headers if not one.lower().startswith(_HOP_HEADERS)]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    named = parts.netloc.rpartition("@")[2]
    first = [f"{method} {path} {version}".encode(), f"Host: {named}".encode(), *kept]
    # One request a connection: the next one may be for another host.
    return _ProxyRequest(
        host, port, b"", b"\r\n".join([*first, b"Connection: close"]) + b"\r\n\r\n"
    )


def _refusal(refused: _Refused) -> bytes:
    body = f"{refused}\n".encode()
    head = (
        f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
