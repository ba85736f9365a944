"""Network access of a sandbox: ports forwarded to servers, and a proxy for an allow-list of hosts.

A sandbox's network has only a loopback device. A forwarded port is a socket that listens there
(`netns`) and is served by this process, which relays each connection to one address: the gateway's.
No helper runs inside, any image works, and there is no route to anything else (I6). Port numbers
are the same in every sandbox, so that all samples of a task see the same addresses.

An allow-list adds a port with an HTTP proxy, which programs find by ``HTTP_PROXY`` and
``HTTPS_PROXY``. CONNECT is relayed unchanged, so TLS is between the program and the host; of a
plain request, the first line is rewritten. The name must be on the list and must resolve to a
public address: an address of loopback, of a private network or of a cloud's metadata service must
be on the list itself. The connection goes to the address that was checked. A refusal is a 403 with
the reason as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

from tugline.addresses import Address, is_public
from tugline.aio import finish, run_together
from tugline.errors import ConfigError, SandboxNetworkError
from tugline.sandbox import netns

PORT = 10040
"""Port of the first server; further servers get the next numbers."""
PROXY_PORT = 10030
MAX_CONNECTIONS = 256
"""Maximum open connections of a port; further ones are reset."""
MAX_HEAD = 32 << 10
"""Maximum bytes of a request head that a program sends to the proxy."""
DIAL_S = 10.0
"""Timeout in seconds for a program to send its request head and for the target to accept."""
_PROBE_S = 5.0
_CHUNK = 1 << 16
_OWN = "127.0.0.1,localhost"
_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_PATTERN = re.compile(
    rf"(?P<host>\*|(\*\.)?{_LABEL}(\.{_LABEL})*|\[[0-9a-f:.]+\]):(?P<port>[0-9]{{1,5}}|\*)",
    re.IGNORECASE,
)
_RESOLVE_S = 5.0
_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="tugline-resolve")
"""Separate threads, so that slow name servers delay nothing else."""
_HOP_HEADERS = (b"proxy-", b"connection:", b"keep-alive:", b"host:")
"""Prefixes of headers that the proxy does not forward."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Streams]]
"""Connects a program to a target: takes its streams, returns the target's, or raises `_Refused`."""


class _Refused(Exception):
    """Refusal of a request; its text is the response body."""

    def __init__(self, reason: str, status: str = "403 Forbidden") -> None:
        super().__init__(reason)
        self.status = status


class _Gone(Exception):
    """One side of a connection is gone."""


class PortForwards:
    """The forwarded ports of one sandbox. The proxy is opened with the first server."""

    def __init__(self, allow: AllowList | None = None) -> None:
        self._allow = allow if allow is not None and allow.patterns else None
        self._ports: dict[tuple[str, int], int] = {}
        self._relays: dict[int, Relay] = {}

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables of the proxy; empty without one."""
        if PROXY_PORT not in self._relays:
            return {}
        proxy = f"http://127.0.0.1:{PROXY_PORT}"
        proxied = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        return {**dict.fromkeys(proxied, proxy), "NO_PROXY": _OWN, "no_proxy": _OWN}

    async def add(self, pid: int, url: str) -> str:
        """Forward a port in `pid`'s network to the HTTP server at `url`; return the URL there.

        The same server gets the same port. Raises `SandboxNetworkError`.
        """
        target = await _check_reachable(url)
        port = self._ports.setdefault(target, PORT + len(self._ports))
        await self._listen(pid)
        return urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl()

    async def move(self, pid: int) -> None:
        """Forward the same ports in the network of `pid`, after the sandbox was restarted."""
        await self.aclose()
        if self._ports:
            await self._listen(pid)

    async def aclose(self) -> None:
        """Close all ports and their connections; the servers are remembered for `move`."""
        relays = self._relays
        self._relays = {}
        for relay in relays.values():
            await relay.aclose()

    async def _listen(self, pid: int) -> None:
        """Listen on the ports that have no listener yet."""
        wanted = {port: dial_to(*target) for target, port in self._ports.items()}
        if self._allow is not None:
            wanted[PROXY_PORT] = partial(dial_allowed, self._allow)
        for port in wanted.keys() - self._relays.keys():
            await finish(self._open(pid, port, wanted[port]))

    async def _open(self, pid: int, port: int, dial: Dial) -> None:
        try:
            listener = await asyncio.to_thread(netns.listen, pid, port)
        except OSError as error:
            msg = f"no socket can be created in the sandbox's network (port {port}): {error}"
            raise SandboxNetworkError(msg) from error
        relay = Relay(dial)
        await relay.serve(listener)
        self._relays[port] = relay


async def _check_reachable(url: str) -> tuple[str, int]:
    """Return host and port of `url` after connecting to it; else raise `SandboxNetworkError`."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port or 80
    except ValueError:
        host = None
        port = 0
    if not url.startswith("http://") or host is None:
        msg = f"{url!r} cannot be reached from a sandbox: it must have the form 'http://host:port/path'"
        raise SandboxNetworkError(msg)
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        reason = str(error) or f"no answer within {_PROBE_S:.0f} s"
        msg = f"{host}:{port}, which sandboxes must reach, does not accept connections: {reason}"
        raise SandboxNetworkError(msg) from error
    writer.close()
    return host, port


def dial_to(host: str, port: int) -> Dial:
    """Return a `Dial` that connects every program to one address."""
    return lambda _reader, _writer: asyncio.open_connection(host, port)


class Relay:
    """Relays bytes between the connections of a listening socket, which it closes, and targets.

    Connections and buffers are bounded: a side that does not read makes the other side wait.
    Half-closed connections work: the end of one side is passed on, and data of the other side is
    still relayed.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Begin to accept connections."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_HEAD)

    async def aclose(self) -> None:
        """Accept no more connections and drop the open ones."""
        server = self._server
        self._server = None  # it refers to this object
        if server is not None:
            server.close()
        for connection in (connections := list(self._connections)):
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets in the next iteration

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as aborting:
            aborting.callback(writer.transport.abort)
            try:
                async with asyncio.timeout(DIAL_S):
                    target_reader, target_writer = await self._dial(reader, writer)
            except _Refused as refused:
                _write(writer, _refusal(refused))
                writer.close()
                aborting.pop_all()
                return
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:  # also a timeout
                error.__traceback__ = None  # see `_copy`
                return
            aborting.callback(target_writer.transport.abort)
            with contextlib.suppress(_Gone):  # the other side still gets all data sent to it
                await run_together(_copy(reader, target_writer), _copy(target_reader, writer))
            target_writer.close()
            writer.close()
            aborting.pop_all()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy data until end-of-file, then close the writing direction. Raises `_Gone`."""
    try:
        while (data := await reader.read(_CHUNK)) and not writer.is_closing():
            writer.write(data)
            await writer.drain()
        if not writer.is_closing():
            writer.write_eof()
    except OSError as error:
        error.__traceback__ = None  # streams keep their error, and its frames refer to the streams
        raise _Gone from None


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write, unless the connection is closed, for which uvloop raises `RuntimeError`."""
    if not writer.is_closing():
        writer.write(data)


class AllowList:
    """Hosts that may be reached: ``example.com:443``, ``*.example.net:80``, ``[2001:db8::1]:80``.

    ``*.name`` matches all names below ``name``; ``*`` any name or port. Raises `ConfigError`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(_parse_pattern(pattern) for pattern in patterns)

    def matches(self, host: str, port: int) -> bool:
        """Return whether a name or address, or a pattern for it, is on the list."""
        return any(
            (name in {host, "*"} or (name.startswith("*.") and host.endswith(name[1:])))
            and number in {port, None}
            for name, number in self.patterns
        )

    def permits(self, address: Address, port: int) -> bool:
        """Return whether an address is public or on the list."""
        mapped = getattr(address, "ipv4_mapped", None) or address
        if any((str(ip), at) in self.patterns for ip in (address, mapped) for at in (port, None)):
            return True
        return is_public(address)


def _parse_pattern(pattern: str) -> tuple[str, int | None]:
    match = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    port = match["port"] if match else ""
    if match is None or (port != "*" and not 0 < int(port) < 1 << 16):
        msg = f"option allow: {pattern!r} must be HOST:PORT, such as '*.example.net:443'"
        raise ConfigError(msg)
    host = match["host"].lower()
    try:
        host = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if host.startswith("["):
            msg = f"option allow: the brackets of {pattern!r} must contain an IPv6 address"
            raise ConfigError(msg) from None
    return host, None if port == "*" else int(port)


async def dial_allowed(
    allow: AllowList, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Streams:
    """Connect a program to the host that it requests, if the list allows the host."""
    host, port, response, request = _parse_request(await reader.readuntil(b"\r\n\r\n"))
    address = await _resolve(allow, host, port)
    try:
        target = await asyncio.open_connection(address, port)
    except OSError as error:
        reason = f"cannot connect to {host}:{port}: {error.strerror or error}"
        raise _Refused(reason, "502 Bad Gateway") from error
    _write(target[1], request)
    _write(writer, response)
    return target


async def _resolve(allow: AllowList, host: str, port: int) -> str:
    """Return a permitted address of the host. Raises `_Refused`."""
    if not allow.matches(host, port):
        raise _Refused(f"{host}:{port} is not on this sandbox's allow-list")
    try:
        async with asyncio.timeout(_RESOLVE_S):
            answers = await asyncio.get_running_loop().run_in_executor(
                _RESOLVERS, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            )
    except TimeoutError as error:
        msg = f"{host} cannot be resolved: no answer within {_RESOLVE_S:.0f} s"
        raise _Refused(msg, "502 Bad Gateway") from error
    except (OSError, UnicodeError) as error:
        raise _Refused(f"{host} cannot be resolved: {error}", "502 Bad Gateway") from error
    addresses = [str(address[0]).partition("%")[0] for *_, address in answers]
    for address in addresses:
        if allow.permits(ipaddress.ip_address(address), port):
            return address
    msg = f"{host} resolves to {addresses[0]}, which is neither public nor on the allow-list"
    raise _Refused(msg)


def _parse_request(head: bytes) -> tuple[str, int, bytes, bytes]:
    """Parse a request head; return host, port, response and request.

    After connecting, the response is sent to the program and the request to the host.
    """
    line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    try:
        method, target, version = line.decode("ascii").split(" ")
        if method == "CONNECT":
            parts = urlsplit(f"//{target}")
            port = None
        else:
            parts = urlsplit(target)
            port = 80
        host = parts.hostname
        port = parts.port or port
        plain = method != "CONNECT" and parts.scheme == "http"
    except ValueError:
        host = None
        port = None
        plain = False
    if host is None or port is None or not (plain or method == "CONNECT"):
        msg = "this proxy accepts only CONNECT host:port and http:// URLs"
        raise _Refused(msg, "400 Bad Request")
    host = host.rstrip(".")
    if not plain:
        return host, port, b"HTTP/1.1 200 Connection established\r\n\r\n", b""
    forwarded = [header for header in headers if not header.lower().startswith(_HOP_HEADERS)]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    named = parts.netloc.rpartition("@")[2]
    lines = [f"{method} {path} {version}".encode(), f"Host: {named}".encode(), *forwarded]
    # One request per connection: the next request may be for another host.
    return host, port, b"", b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


def _refusal(refused: _Refused) -> bytes:
    body = f"{refused}\n".encode()
    head = (
        f"HTTP/1.1 {refused.status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
