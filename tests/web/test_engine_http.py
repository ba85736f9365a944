"""HTTP to engines: replies match their requests, and idle connections may be closed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.sockets import Peer, listen
from tugline.web.engine_http import EngineHttp, Reply


def sized(text: object) -> bytes:
    """A reply with a length."""
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(str(text))}\r\n\r\n{text}".encode()


@contextlib.asynccontextmanager
async def engine(handle: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[EngineHttp]:
    """A client of a server that handles each connection with `handle`."""
    async with listen(handle) as url, EngineHttp(url) as http:
        yield http


async def ask(http: EngineHttp) -> str:
    """The body of a reply."""
    async with asyncio.timeout(5), http.request(f"{http.url}/x") as reply:
        return (await reply.read()).decode()


@pytest.mark.parametrize("early", [True, False], ids=["before", "at the next request"])
async def test_a_closed_idle_connection_is_replaced(*, early: bool) -> None:
    """The request is sent again on a new connection, without an error."""
    closed = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.next_request()
        await peer.send(sized(peer.number))
        if not early:
            await peer.next_request()
        peer.writer.close()
        closed.set()

    async with engine(handle) as http:
        assert await ask(http) == "1"
        if early:
            await closed.wait()
        assert await ask(http) == "2"


@pytest.mark.parametrize("together", [True, False], ids=["with the reply", "later"])
async def test_unrequested_data_is_dropped(*, together: bool) -> None:
    """The connection is closed, so that the next request gets its own reply."""
    sent = asyncio.Event()

    async def handle(peer: Peer) -> None:
        await peer.next_request()
        await peer.send(sized(peer.number) + (sized("unasked") if together else b""))
        if not together:
            await asyncio.sleep(0)
            await peer.send(sized("unasked"))
        sent.set()
        assert await peer.reader.read() == b"", "nothing else is asked here"

    async with engine(handle) as http:
        assert await ask(http) == "1"
        await sent.wait()
        for _ in range(20):  # until the data has come and the client has noticed
            await asyncio.sleep(0)
        assert await ask(http) == "2"


async def test_an_incomplete_reply_is_not_retried() -> None:
    """Even on a reused connection there is no retry, since the engine may have sampled already."""

    async def handle(peer: Peer) -> None:
        await peer.next_request()
        await peer.send(sized("fine"))
        await peer.next_request()
        await peer.send(sized("only the beginning")[:-5])
        assert peer.number == 1

    async with engine(handle) as http:
        assert await ask(http) == "fine"
        with pytest.raises(OSError, match="closed the connection"):
            await ask(http)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", "to the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + sized("real"), "real"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", "ab"),
        (b"<html>busy</html>\r\n\r\n", None),
    ],
    ids=["no length", "100 first", "chunked", "no HTTP"],
)
async def test_kinds_of_replies(sent: bytes, expected: str | None) -> None:
    """Each kind of reply of HTTP/1.1 is read or is an error."""

    async def handle(peer: Peer) -> None:
        await peer.next_request()
        await peer.send(sent)

    async with engine(handle) as http:
        if expected is not None:
            assert await ask(http) == expected
        else:
            with pytest.raises(OSError, match="invalid HTTP"):
                await ask(http)


class NullTransport(asyncio.Transport):
    """A transport that drops everything."""

    def writelines(self, list_of_data: object) -> None:
        """Drop it."""

    def abort(self) -> None:
        """Nothing to end."""


@given(
    parts=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 200), max_size=12),
)
async def test_replies_arrive_in_any_pieces(parts: list[bytes], cuts: set[int]) -> None:
    """Chunks are independent of reads from the network."""
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    reply = Reply()
    reply.connection_made(NullTransport())
    sending = asyncio.ensure_future(reply.send([]))
    await asyncio.sleep(0)
    places = [0, *sorted(at for at in cuts if at < len(data)), len(data)]
    for start, end in itertools.pairwise(places):
        reply.data_received(data[start:end])
    await sending
    assert await reply.read() == b"".join(parts)
    assert reply.reusable
