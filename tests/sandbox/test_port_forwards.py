from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos.fleet import until as wait_until
from support.certificates import make_certificate
from support.polling import until
from support.sandbox import open_files, page
from support.sockets import serve
from tugline.errors import ConfigError, SandboxNetworkError
from tugline.sandbox import network
from tugline.sandbox.network import (
    MAX_CONNECTIONS,
    PORT,
    PROXY_PORT,
    AllowList,
    Dial,
    PortForwards,
    Relay,
    dial_to,
)

WITHIN = 10.0


@pytest.fixture
def namespace() -> Iterator[int]:
    """A process with its own network and user namespaces."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], check=False).returncode:
        pytest.skip("user and network namespaces are not allowed here")
    with subprocess.Popen([unshare, "-rn", "sleep", "60"]) as process:
        name = Path(f"/proc/{process.pid}/comm")
        wait_until(lambda: name.read_text() == "sleep\n", "the namespaces", WITHIN)
        yield process.pid
        process.kill()


async def run_in(pid: int, *argv: str, **env: str) -> str:
    """Run a program in the namespaces of a process; returns its output."""
    enter = ("nsenter", "-U", "--preserve-credentials", "-n", "-t", str(pid))
    program = await asyncio.create_subprocess_exec(
        *(*enter, *argv),
        env={"PATH": os.environ["PATH"], **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(program.communicate(), WITHIN)
    return output.decode()


def open_forwards(*allow: str) -> contextlib.aclosing[PortForwards]:
    """Port forwards that are closed at the end of the block."""
    return contextlib.aclosing(PortForwards(AllowList(allow)))


@contextlib.asynccontextmanager
async def relay(dial: Dial) -> AsyncIterator[tuple[Relay, Any]]:
    """A relay on this machine, and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with contextlib.aclosing(Relay(dial)) as opened:
        await opened.serve(listener)
        yield opened, listener.getsockname()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send everything back at the end of the input."""
    writer.write(await reader.read())
    await writer.drain()


async def test_each_server_gets_one_port(namespace: int) -> None:
    """The same server keeps its port, another one gets the next; closing leaves no socket."""
    before = open_files()
    async with serve(page) as first, serve(page) as second, open_forwards() as forwards:
        urls = [f"http://127.0.0.1:{port}" for port in (first, second, first)]
        ports = [await forwards.add(namespace, url) for url in urls]
        assert ports == [f"http://127.0.0.1:{PORT + n}" for n in (0, 1, 0)]
        await forwards.aclose()
    await asyncio.sleep(0.05)
    assert open_files() <= before


async def test_half_closed_connections_lose_nothing() -> None:
    """Ten megabytes come back after the sender's end of file."""
    async with serve(echo) as port, relay(dial_to("127.0.0.1", port)) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x" * (10 << 20))
        writer.write_eof()
        assert len(await asyncio.wait_for(reader.read(), WITHIN)) == 10 << 20
        writer.close()


async def test_a_slow_reader_blocks_the_sender() -> None:
    """Buffers are limited: a server cannot send 100 MB to a client that does not read."""
    sent = 0

    async def pour(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(100):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    async with serve(pour) as port, relay(dial_to("127.0.0.1", port)) as (_, address):
        _, writer = await asyncio.open_connection(*address)
        await asyncio.sleep(1)
        writer.close()
        assert 0 < sent < 30


async def test_the_number_of_connections_is_limited() -> None:
    """Connections over the limit are reset."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        await reader.read()

    async with serve(hold) as port, relay(dial_to("127.0.0.1", port)) as (_, address):
        opened = [await asyncio.open_connection(*address) for _ in range(MAX_CONNECTIONS + 50)]
        reading = (asyncio.wait_for(reader.read(1), WITHIN) for reader, _ in opened)
        replies = await asyncio.gather(*reading, return_exceptions=True)
        assert replies.count(b"!") == MAX_CONNECTIONS
        assert all(reply in {b"!", b""} or isinstance(reply, OSError) for reply in replies)
        for _, writer in opened:
            writer.close()


async def test_closing_a_relay_closes_connections() -> None:
    """Open connections end, new ones are refused, and no socket is left."""
    before, inside = open_files(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            inside.set()
            await reader.read()

    async with serve(hold) as port, relay(dial_to("127.0.0.1", port)) as (opened, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x")
        await asyncio.wait_for(inside.wait(), WITHIN)
        await opened.aclose()
        assert await asyncio.wait_for(reader.read(), WITHIN) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        writer.close()
    await asyncio.sleep(0.05)
    assert open_files() <= before


async def test_aborted_connections_leave_nothing() -> None:
    """Whichever side hangs up, and when, both sides end without errors."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: problems.append(what))
    turns = itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        how = next(turns) % 3
        if how == 0:
            writer.transport.abort()
        elif how == 1:
            writer.write(b"x" * 2_000_000)
            await writer.drain()

    async def ask(address: Any, how: int) -> None:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            writer.write(b"a" * (1, 2_000_000)[how % 2])
            if how % 3 == 0:
                writer.transport.abort()
            elif how % 3 == 1:
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 5)

    async with serve(answer) as port, relay(dial_to("127.0.0.1", port)) as (opened, address):
        await asyncio.gather(*(ask(address, how) for how in range(60)))
        await until(lambda: not opened._connections, WITHIN)
    assert problems == []


async def test_slow_name_resolution_blocks_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups have their own threads and a timeout, which the answer reports."""
    release, real = threading.Event(), socket.getaddrinfo

    def slow(host: str, *given: Any, **options: Any) -> list[Any]:
        if not host.endswith(".test"):
            return real(host, *given, **options)
        release.wait(10)
        raise socket.gaierror(-3, "temporary failure")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(network, "_RESOLVE_S", 0.5)
    requests = [b"GET http://h%d.test/ HTTP/1.1\r\n\r\n" % number for number in range(40)]
    asking = asyncio.create_task(ask_proxy(requests, "*.test:80"))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(int)
    assert not asking.done()
    assert all("no answer within" in answer for answer in await asking)
    release.set()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/", "must have the form 'http://host:port/path'"),
        ("http://127.0.0.1:99999/", "must have the form"),
        ("http:///x", "must have the form"),
        (
            "http://127.0.0.1:9/s/a",
            "127.0.0.1:9, which sandboxes must reach, does not accept connections",
        ),
    ],
)
async def test_unreachable_urls_are_reported(namespace: int, url: str, message: str) -> None:
    """The error names what is wrong with the URL."""
    async with open_forwards() as forwards:
        with pytest.raises(SandboxNetworkError, match=message):
            await forwards.add(namespace, url)


async def test_a_dead_sandbox_is_an_error() -> None:
    """The namespaces of a process that has ended cannot be entered."""
    async with serve(page) as port, open_forwards() as forwards:
        with pytest.raises(SandboxNetworkError, match="no socket can be created"):
            await forwards.add(2**22 + 1, f"http://127.0.0.1:{port}")


# --------------------------------------------------------------------------- the allow-list
async def test_plain_http_through_the_proxy() -> None:
    """The server gets a request in origin form, without headers for the proxy."""
    async with serve(page) as port:
        request = f"GET http://127.0.0.1:{port}/a?b=c HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        request += "X-Mine: 1\r\nProxy-Connection: Keep-Alive\r\n\r\n"
        (response,) = await ask_proxy([request.encode()], f"127.0.0.1:{port}")
    body = response.partition("\r\n\r\n")[2]
    lines = ["GET /a?b=c HTTP/1.1", f"Host: 127.0.0.1:{port}", "X-Mine: 1", "Connection: close"]
    assert body.split("\r\n") == [*lines, "", ""]


async def test_tls_through_the_proxy(namespace: int, tmp_path: Path) -> None:
    """A program that sends CONNECT sees the certificate of the host."""
    certificate, key = await asyncio.to_thread(make_certificate, tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with (
        serve(page, context) as port,
        serve(page) as gateway,
        open_forwards(f"localhost:{port}", f"127.0.0.1:{port}") as forwards,
    ):
        await forwards.add(namespace, f"http://127.0.0.1:{gateway}")
        # Without --noproxy curl would connect to loopback itself.
        curl = ("-sS", "-m", "8", "--noproxy", "", "--cacert", str(certificate))
        output = await run_in(
            namespace, "curl", *curl, f"https://localhost:{port}/x", **forwards.env
        )
    assert output.startswith("GET /x HTTP/1.1"), output


async def ask_proxy(requests: Sequence[bytes], *allow: str) -> list[str]:
    """The answers of a proxy with this allow-list, one connection each."""

    async def ask(address: Any, request: bytes) -> str:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):
            writer.write(request)
            return (await asyncio.wait_for(reader.read(), WITHIN)).decode()
        return "reset"

    async with relay(partial(network.dial_allowed, AllowList(allow))) as (_, address):
        return await asyncio.gather(*(ask(address, request) for request in requests))


@pytest.mark.parametrize(
    ("allow", "url", "message"),
    [
        ("example.com:443", "http://example.org/", "example.org:80 is not on this sandbox's"),
        ("example.com:443", "http://example.com/", "example.com:80 is not on"),
        ("*.example.com:80", "http://example.com/", "example.com:80 is not on"),
        (
            "localhost:*",
            "http://localhost:8080/",
            "localhost resolves to .*, which is neither public",
        ),
        ("*:*", "http://127.1:8080/", "resolves to 127.0.0.1, which is neither public"),
        ("*:*", "http://2130706433:8080/", "resolves to 127.0.0.1"),
        ("*:*", "http://169.254.169.254/latest/meta-data", "resolves to 169.254.169.254"),
        ("*:*", "http://10.0.0.1/", "resolves to 10.0.0.1"),
        ("*:*", "http://[::1]/", "resolves to ::1"),
        ("*:*", "http://[::ffff:127.0.0.1]/", "resolves to ::ffff"),
        ("*:*", "http://[64:ff9b::7f00:1]/", "resolves to 64:ff9b::7f00:1"),
        ("*:*", "http://[2002:7f00:1::]/", "resolves to 2002:7f00:1::"),
        ("*:*", "http://0.0.0.0/", "resolves to 0.0.0.0"),
        ("*:*", "http://224.0.0.1/", "resolves to 224.0.0.1"),
        ("*:*", "http://nonesuch.invalid/", "nonesuch.invalid cannot be resolved"),
        ("*:*", "http://../", "502|400|cannot be resolved"),
    ],
)
async def test_addresses_that_are_not_allowed_are_refused(
    allow: str, url: str, message: str
) -> None:
    """Name, port and resolved address are checked, in any notation."""
    tunnel = url.removeprefix("http://").strip("/").partition("/")[0]
    requests = (f"GET {url} HTTP/1.1\r\n\r\n", f"CONNECT {tunnel}:443 HTTP/1.1\r\n\r\n")
    plain, connect = await ask_proxy([request.encode() for request in requests], allow)
    assert re.search(message, plain), plain
    assert re.match("HTTP/1.1 (403|502|400) ", plain)
    assert re.match("HTTP/1.1 (403|502|400) ", connect)


async def test_invalid_proxy_requests() -> None:
    """An invalid request gets 400 or a reset, and the next client is served."""
    garbage = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01 \xff\r\n\r\n", b"CONNECT x\r\n\r\n")
    allowed = b"GET http://example.org HTTP/1.1\r\n\r\n"
    *answers, endless, last = await ask_proxy([*garbage, b"x" * 99_999, allowed], "example.com:443")
    assert all("400 Bad Request" in answer for answer in answers)
    assert endless in {"", "reset"}
    assert "403 Forbidden" in last


@pytest.mark.parametrize("allow", [(), ("example.com:443",)])
async def test_proxy_variables(namespace: int, allow: tuple[str, ...]) -> None:
    """The variables are set with an allow-list, as soon as the sandbox has an exposed URL."""
    variables = {"HTTPS_PROXY": f"http://127.0.0.1:{PROXY_PORT}", "NO_PROXY": "127.0.0.1,localhost"}
    async with serve(page) as port, open_forwards(*allow) as forwards:
        assert forwards.env == {}
        await forwards.add(namespace, f"http://127.0.0.1:{port}")
        assert forwards.env.items() >= (variables if allow else {}).items()
        assert bool(forwards.env) is bool(allow)


@pytest.mark.parametrize(
    "pattern",
    [
        *("example.com", "example.com:", "example.com:0", "example.com:65536", ""),
        *("example.com:443/x", "https://example.com:443", "*example.com:443", "a.*:1", "a b:1"),
        *("::1:80", "[example.com]:80", "[12::g]:80"),
    ],
)
def test_invalid_patterns_are_reported(pattern: str) -> None:
    """The error has the option, the value and what would be right."""
    with pytest.raises(ConfigError, match=re.escape(f"option allow: {pattern!r}")):
        AllowList((pattern,))
