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
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificate
from sandboxes import open_files, page, serve
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
def place() -> Iterator[int]:
    """A process in a network namespace of its own, owned by a user namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], check=False).returncode:
        pytest.skip("user and network namespaces are not allowed here")
    with subprocess.Popen([unshare, "-rn", "sleep", "60"]) as process:
        until = time.monotonic() + WITHIN
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < until
            time.sleep(0.005)
        yield process.pid
        process.kill()


async def run_there(pid: int, *argv: str, **env: str) -> str:
    """Run a program there; what it said."""
    enter = ("nsenter", "-U", "--preserve-credentials", "-n", "-t", str(pid))
    program = await asyncio.create_subprocess_exec(
        *(*enter, *argv),
        env={"PATH": os.environ["PATH"], **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(program.communicate(), WITHIN)
    return output.decode()


@contextlib.asynccontextmanager
async def doors(*allow: str) -> AsyncIterator[PortForwards]:
    """Doors that are closed in the end."""
    made = PortForwards(AllowList(allow))
    try:
        yield made
    finally:
        await made.aclose()


@contextlib.asynccontextmanager
async def relay(dial: Dial) -> AsyncIterator[tuple[Relay, Any]]:
    """A relay on this machine, and its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    made = Relay(dial)
    await made.serve(listener)
    try:
        yield made, listener.getsockname()
    finally:
        await made.aclose()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says everything again, once it has heard the end."""
    heard = await reader.read()
    writer.write(heard)
    await writer.drain()


async def test_a_door_is_made_once(place: int) -> None:
    """The same server has the same port again, another the next one; closing leaves no socket."""
    before = open_files()
    async with serve(page) as one, serve(page) as two, doors() as made:
        ports = [await made.add(place, f"http://127.0.0.1:{port}") for port in (one, two, one)]
        assert ports == [f"http://127.0.0.1:{PORT + n}" for n in (0, 1, 0)]
        await made.aclose()
    await asyncio.sleep(0.05)
    assert open_files() <= before


async def test_an_end_is_passed_on_and_the_answer_still_comes() -> None:
    """Ten megabytes come back after the sender has ended: nothing is lost at a half-close."""
    async with serve(echo) as port, relay(dial_to("127.0.0.1", port)) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x" * (10 << 20))
        writer.write_eof()
        assert len(await asyncio.wait_for(reader.read(), WITHIN)) == 10 << 20
        writer.close()


async def test_a_reader_that_does_not_read_holds_the_sender() -> None:
    """Buffers are bounded: most of 100 MB stays with a server whose client does not read."""
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


async def test_sockets_without_end_do_not_take_the_nodes() -> None:
    """A program that opens more connections than are held gets the further ones reset."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        await reader.read()

    async with serve(hold) as port, relay(dial_to("127.0.0.1", port)) as (_, address):
        opened = [await asyncio.open_connection(*address) for _ in range(MAX_CONNECTIONS + 50)]
        reading = (asyncio.wait_for(reader.read(1), WITHIN) for reader, _ in opened)
        heard = await asyncio.gather(*reading, return_exceptions=True)
        assert heard.count(b"!") == MAX_CONNECTIONS
        assert all(one == b"" or isinstance(one, OSError) for one in heard if one != b"!")
        for _, writer in opened:
            writer.close()


async def test_what_is_open_ends_with_its_relay() -> None:
    """Closing ends connections in use; nobody can connect any more, and no socket is left."""
    before, inside = open_files(), asyncio.Event()

    async def hears(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            inside.set()
            await reader.read()

    async with serve(hears) as port, relay(dial_to("127.0.0.1", port)) as (made, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x")
        await asyncio.wait_for(inside.wait(), WITHIN)
        await made.aclose()
        assert await asyncio.wait_for(reader.read(), WITHIN) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        writer.close()
    await asyncio.sleep(0.05)
    assert open_files() <= before


async def test_rude_ends_leave_nothing() -> None:
    """Whoever hangs up, in the middle of whatever, ends both sides and breaks nothing."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: problems.append(what))
    turns = itertools.count()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        how = next(turns) % 3
        if how == 0:
            writer.transport.abort()
        elif how == 1:
            writer.write(b"x" * 2_000_000)
            await writer.drain()

    async def asks(address: Any, how: int) -> None:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            writer.write(b"a" * (1, 2_000_000)[how % 2])
            if how % 3 == 0:
                writer.transport.abort()
            elif how % 3 == 1:
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 5)

    async with serve(answers) as port, relay(dial_to("127.0.0.1", port)) as (made, address):
        await asyncio.gather(*(asks(address, how) for how in range(60)))
        async with asyncio.timeout(WITHIN):
            while made._connections:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
    assert problems == []


async def test_names_without_an_answer_hold_up_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have threads and a deadline of their own; programs are told."""
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
    ("url", "says"),
    [
        ("https://example.org/", "must be like 'http://host:port/path'"),
        ("http://127.0.0.1:99999/", "must be like"),
        ("http:///x", "must be like"),
        ("http://127.0.0.1:9/s/a", "nothing answers at 127.0.0.1:9"),
    ],
)
async def test_what_cannot_be_reached_is_told(place: int, url: str, says: str) -> None:
    """The way is at fault, and the message says which."""
    async with doors() as made:
        with pytest.raises(SandboxNetworkError, match=says):
            await made.add(place, url)


async def test_a_sandbox_that_is_gone_is_told() -> None:
    """No namespace can be entered for a process that has ended."""
    async with serve(page) as port, doors() as made:
        with pytest.raises(SandboxNetworkError, match="no socket can be created"):
            await made.add(2**22 + 1, f"http://127.0.0.1:{port}")


# --------------------------------------------------------------------------- the allow-list
async def test_an_allowed_address_is_reached_by_plain_http() -> None:
    """The request arrives as its server expects it, and nothing meant for the proxy does."""
    async with serve(page) as port:
        request = f"GET http://127.0.0.1:{port}/a?b=c HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        request += "X-Mine: 1\r\nProxy-Connection: Keep-Alive\r\n\r\n"
        (said,) = await ask_proxy([request.encode()], f"127.0.0.1:{port}")
    body = said.partition("\r\n\r\n")[2]
    lines = ["GET /a?b=c HTTP/1.1", f"Host: 127.0.0.1:{port}", "X-Mine: 1", "Connection: close"]
    assert body.split("\r\n") == [*lines, "", ""]


async def test_tls_goes_through_to_its_host(place: int, tmp_path: Path) -> None:
    """CONNECT: the certificate that the program sees is the host's own."""
    certificate, key = await asyncio.to_thread(make_certificate, tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with (
        serve(page, context) as port,
        serve(page) as gateway,
        doors(f"localhost:{port}", f"127.0.0.1:{port}") as made,
    ):
        await made.add(place, f"http://127.0.0.1:{gateway}")
        # curl does not send loopback to a proxy that NO_PROXY spares
        curl = ("-sS", "-m", "8", "--noproxy", "", "--cacert", str(certificate))
        said = await run_there(place, "curl", *curl, f"https://localhost:{port}/x", **made.env)
    assert said.startswith("GET /x HTTP/1.1"), said


async def ask_proxy(requests: Sequence[bytes], *allow: str) -> list[str]:
    """What a proxy with that list answers, one connection each."""

    async def ask(address: Any, request: bytes) -> str:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer), contextlib.suppress(ConnectionResetError):
            writer.write(request)
            return (await asyncio.wait_for(reader.read(), WITHIN)).decode()
        return "reset"

    async with relay(partial(network.dial_allowed, AllowList(allow))) as (_, address):
        return await asyncio.gather(*(ask(address, request) for request in requests))


@pytest.mark.parametrize(
    ("allow", "url", "says"),
    [
        ("example.com:443", "http://example.org/", "example.org:80 is not on this sandbox's"),
        ("example.com:443", "http://example.com/", "example.com:80 is not on"),
        ("*.example.com:80", "http://example.com/", "example.com:80 is not on"),
        ("localhost:*", "http://localhost:8080/", "localhost leads to .*, which is no public"),
        ("*:*", "http://127.1:8080/", "leads to 127.0.0.1, which is no public address"),
        ("*:*", "http://2130706433:8080/", "leads to 127.0.0.1"),
        ("*:*", "http://169.254.169.254/latest/meta-data", "leads to 169.254.169.254"),
        ("*:*", "http://10.0.0.1/", "leads to 10.0.0.1"),
        ("*:*", "http://[::1]/", "leads to ::1"),
        ("*:*", "http://[::ffff:127.0.0.1]/", "leads to ::ffff"),
        ("*:*", "http://[64:ff9b::7f00:1]/", "leads to 64:ff9b::7f00:1"),
        ("*:*", "http://[2002:7f00:1::]/", "leads to 2002:7f00:1::"),
        ("*:*", "http://0.0.0.0/", "leads to 0.0.0.0"),
        ("*:*", "http://224.0.0.1/", "leads to 224.0.0.1"),
        ("*:*", "http://nonesuch.invalid/", "nonesuch.invalid has no address"),
        ("*:*", "http://../", "502|400|has no address"),
    ],
)
async def test_what_is_not_allowed_is_refused_with_a_sentence(
    allow: str, url: str, says: str
) -> None:
    """By name, by port and by the address behind the name, however it is written."""
    tunnel = url.removeprefix("http://").strip("/").partition("/")[0]
    requests = (f"GET {url} HTTP/1.1\r\n\r\n", f"CONNECT {tunnel}:443 HTTP/1.1\r\n\r\n")
    plain, secret = await ask_proxy([request.encode() for request in requests], allow)
    assert re.search(says, plain), plain
    assert re.match("HTTP/1.1 (403|502|400) ", plain)
    assert re.match("HTTP/1.1 (403|502|400) ", secret)


async def test_what_is_no_request_to_a_proxy_ends() -> None:
    """Garbage is answered or cut off; the next caller is served."""
    garbage = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01 \xff\r\n\r\n", b"CONNECT x\r\n\r\n")
    allowed = b"GET http://example.org HTTP/1.1\r\n\r\n"
    *answers, endless, last = await ask_proxy([*garbage, b"x" * 99_999, allowed], "example.com:443")
    assert all("400 Bad Request" in answer for answer in answers)
    assert endless in {"", "reset"}
    assert "403 Forbidden" in last


async def test_without_an_allow_list_there_is_no_proxy(place: int) -> None:
    """No variable tells of one; with a list they do as soon as the sandbox reaches its gateway."""
    async with serve(page) as port, doors() as without, doors("example.com:443") as made:
        await without.add(place, f"http://127.0.0.1:{port}")
        assert without.env == {}
        assert made.env == {}
    async with serve(page) as port, doors("example.com:443") as made:
        await made.add(place, f"http://127.0.0.1:{port}")
        assert made.env["HTTPS_PROXY"] == f"http://127.0.0.1:{PROXY_PORT}"
        assert made.env["NO_PROXY"].split(",") == ["127.0.0.1", "localhost"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("example.com", "example.com:", "example.com:0", "example.com:65536", ""),
        *("example.com:443/x", "https://example.com:443", "*example.com:443", "a.*:1", "a b:1"),
        *("::1:80", "[example.com]:80", "[12::g]:80"),
    ],
)
def test_a_pattern_that_is_none_is_told(pattern: str) -> None:
    """It names the option, the value and what would be right."""
    with pytest.raises(ConfigError, match=re.escape(f"option allow: {pattern!r}")):
        AllowList((pattern,))
