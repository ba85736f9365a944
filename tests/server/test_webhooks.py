from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from support.control_plane import finish, submit
from support.tasks import make_task
from tugline.aio import run_beside
from tugline.errors import Invalid
from tugline.protocol import Delivery, DeliveryQuery, DeliveryState, EventKind, WebhookBody
from tugline.server.store import events, stats
from tugline.server.store.base import Tx
from tugline.server.store.database import Database, open_database
from tugline.server.webhooks import WebhookRetries, WebhookSender, is_allowed
from tugline.signing import key_of, new_secret, verify
from tugline.types import Callback, Task

SECRET = new_secret()
SOON = WebhookRetries(tries=4, first_s=0.02, longest_s=0.1, timeout_s=0.5, at_once=2)
EXAMPLE = Path(__file__).parents[2] / "examples" / "callback_receiver.py"


class Receiver:
    """Keeps requests and responds with `answer`, after a delay."""

    url: str

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[int], web.StreamResponse] = lambda _count: web.Response()
        self.delay_s = 0.0

    async def take(self, request: web.Request) -> web.StreamResponse:
        """One callback."""
        self.got.append((dict(request.headers), await request.read()))
        number = len(self.got)
        await asyncio.sleep(self.delay_s)
        return self.answer(number)

    @property
    def ids(self) -> Counter[str]:
        """How often each callback came."""
        return Counter(headers["webhook-id"] for headers, _ in self.got)


@contextlib.asynccontextmanager
async def receive() -> AsyncIterator[Receiver]:
    """A receiver on a real HTTP server."""
    receiver, app = Receiver(), web.Application()
    app.router.add_route("*", "/{rest:.*}", receiver.take)
    async with TestServer(app) as server:
        receiver.url = str(server.make_url("/hook"))
        yield receiver


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver that accepts everything."""
    async with receive() as receiver:
        yield receiver


def _task(name: str, url: str, samples: int = 1) -> Task:
    return make_task(name, samples, callback=Callback(url))


async def _run_task(database: Database, name: str, url: str, samples: int = 1) -> None:
    """Run a task to its end: one callback for each sample, and one for its release."""

    def op(tx: Tx) -> None:
        submit(tx, _task(name, url, samples))
        for n in range(samples):
            finish(tx, f"{name}-{n}", float(n))

    await database.write(op)


async def _list_all(database: Database, state: DeliveryState | None = None) -> list[Delivery]:
    return await database.read(events.list_deliveries, DeliveryQuery(state=state, limit=1000))


async def _wait_for(database: Database, state: DeliveryState, count: int) -> list[Delivery]:
    """Wait until this many callbacks are in this state."""
    async with asyncio.timeout(30):
        while len(deliveries := await _list_all(database, state)) < count:  # noqa: ASYNC110 - asks the rows
            await asyncio.sleep(0.01)
    assert len(deliveries) == count
    return deliveries


def _sender(
    database: Database, retries: WebhookRetries = SOON, secret: str = SECRET
) -> AbstractAsyncContextManager[None]:
    hosts = frozenset({"*"})
    return run_beside(WebhookSender(database, key_of(secret), hosts=hosts, retries=retries).run())


async def _deliver(
    database: Database, receiver: Receiver, count: int, *, samples: int = 1, **retries: float
) -> list[Delivery]:
    """Callbacks of a task, once this many were delivered."""
    async with _sender(database, SOON._replace(**retries)):
        await _run_task(database, "t", receiver.url.replace("127.0.0.1", "localhost"), samples)
        return await _wait_for(database, DeliveryState.DELIVERED, count)


# --------------------------------------------------------------------------- what is sent
async def test_results_and_releases_are_sent(database: Database, receiver: Receiver) -> None:
    """Each result and the group have a callback, which is signed and has its own id."""
    sent = await _deliver(database, receiver, 3, samples=2)
    bodies = [msgspec.json.decode(body, type=WebhookBody) for _, body in receiver.got]
    assert [verify(SECRET, *got) for got in receiver.got] == [body.id for body in bodies]
    assert {headers["Content-Type"] for headers, _ in receiver.got} == {"application/json"}
    assert {(one.id, one.kind) for one in sent} == {(one.delivery, one.kind) for one in bodies}
    assert len(receiver.ids) == 3
    rewards = {one.result.session: one.result.reward for one in bodies if one.result}
    assert rewards == {"t-0": 0.0, "t-1": 1.0}
    [group] = [body.group for body in bodies if body.group]
    assert (group.id, group.usable, group.missing) == ("t", 2, ())


async def test_the_outbox_is_sent_at_start(database: Database, receiver: Receiver) -> None:
    """Callbacks that were claimed but not delivered before a kill are sent, too."""
    await _run_task(database, "t", receiver.url)
    host = events.host_of(receiver.url)
    assert len(await database.write(events.claim_deliveries, host, for_s=1.0, limit=9)) == 2
    assert await database.read(events.next_tries) == {host: pytest.approx(time.time() + 1, abs=1)}
    async with _sender(database):
        await _wait_for(database, DeliveryState.DELIVERED, 2)


async def test_servers_share_the_outbox(postgres_url: str, receiver: Receiver) -> None:
    """Two servers on one PostgreSQL send each callback once, whichever server wrote it."""
    async with (
        open_database(postgres_url) as one,
        open_database(postgres_url) as other,
        _sender(one),
        _sender(other),
    ):
        tasks = [_run_task((one, other)[n % 2], f"t{n}", receiver.url, samples=4) for n in range(8)]
        await asyncio.gather(*tasks)
        await _wait_for(one, DeliveryState.DELIVERED, 40)
    assert len(receiver.ids) == len(receiver.got) == 40


# --------------------------------------------------------------------------- what goes wrong
async def test_failed_callbacks_are_retried(database: Database, receiver: Receiver) -> None:
    """The receiver gets the same callback again, with the same id."""
    receiver.answer = lambda count: web.Response(status=503 if count < 5 else 204)
    await _deliver(database, receiver, 2)
    assert sorted(receiver.ids.values()) in ([3, 3], [2, 4])
    bodies = {body for _headers, body in receiver.got}
    assert len(bodies) == 2


@pytest.mark.parametrize(
    ("status", "tries", "error"),
    [
        (302, 4, "the receiver answered 302"),
        (500, 4, "the receiver answered 500"),
        (410, 1, "410: the receiver refuses"),
    ],
)
async def test_a_callback_is_dead_after_its_last_try(
    database: Database, receiver: Receiver, status: int, tries: int, error: str
) -> None:
    """An event records the dead callback, which can be retried by hand."""
    headers = {"Location": receiver.url}
    receiver.answer = lambda _count: web.Response(status=status, headers=headers)
    async with _sender(database):
        await _run_task(database, "t", receiver.url)
        dead = await _wait_for(database, DeliveryState.DEAD, 2)
        assert [(one.tries, one.error.startswith(error)) for one in dead] == [(tries, True)] * 2
        assert set(receiver.ids.values()) == {tries}
        assert (await database.read(stats.counts)).dead_deliveries == 2
        recorded = await database.read(events.page, 0, 100, "t")
        reported = {one.detail["delivery"] for one in recorded if one.kind is EventKind.DEAD}
        assert reported == {one.id for one in dead}
        receiver.answer = lambda _count: web.Response()
        again = await database.write(events.retry_delivery, dead[0].id)
        assert (again.state, again.tries) == (DeliveryState.PENDING, 0)
        [sent] = await _wait_for(database, DeliveryState.DELIVERED, 1)
        assert sent.id == dead[0].id


async def test_unreachable_receivers(database: Database) -> None:
    """A refused connection, an unknown host and a bad address are errors of the callback only."""
    async with _sender(database):
        for name, url in {"a": "127.0.0.1:9", "b": "nowhere.invalid", "c": ":1"}.items():
            await _run_task(database, name, f"http://{url}/x")
        dead = await _wait_for(database, DeliveryState.DEAD, 6)
    assert all(one.error for one in dead)


async def test_retry_after_is_honoured(database: Database, receiver: Receiver) -> None:
    """The header delays the next try."""
    receiver.answer = lambda _count: web.Response(status=429, headers={"Retry-After": "120"})
    async with _sender(database):
        await _run_task(database, "t", receiver.url)
        async with asyncio.timeout(20):
            while not all(one.tries for one in await _list_all(database)):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.01)
    for one in await _list_all(database):
        assert 100 < one.next_try - time.time() < 121


async def test_a_hanging_host_does_not_delay_others(database: Database, receiver: Receiver) -> None:
    """Other hosts get callbacks at once; connections to the hanging one are bounded."""
    async with receive() as hanging:
        hanging.delay_s = 60.0
        async with _sender(database, SOON._replace(timeout_s=60.0)):
            await _run_task(database, "h", hanging.url, samples=20)
            for n in range(5):
                await _run_task(database, f"t{n}", receiver.url, samples=3)
            await _wait_for(database, DeliveryState.DELIVERED, 20)
    assert len(hanging.got) == SOON.at_once


async def test_requests_to_a_failing_host_are_limited(
    database: Database, receiver: Receiver
) -> None:
    """A long outbox for one host is tried a few at a time, with growing pauses."""
    receiver.answer = lambda _count: web.Response(status=404)
    async with _sender(database, SOON._replace(first_s=0.1, longest_s=60.0)):
        await _run_task(database, "t", receiver.url, samples=50)
        await asyncio.sleep(0.8)
        assert 2 <= len(receiver.got) <= 5 * SOON.at_once


async def test_an_endless_response_body_is_not_read(database: Database, receiver: Receiver) -> None:
    """Only the status of a response decides about its callback."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0.01)

    receiver.answer = lambda _count: web.Response(body=endless())
    await _deliver(database, receiver, 2)


async def test_only_allowed_hosts_are_sent_to(database: Database, receiver: Receiver) -> None:
    """A task with another host is refused; callbacks to it in the outbox are dead."""
    hosts = frozenset({"trainer.example"})
    sender = WebhookSender(database, key_of(SECRET), hosts=hosts, retries=SOON)
    async with run_beside(sender.run()):
        with pytest.raises(
            Invalid, match=r"callback.url is .*must have one of the hosts trainer.example"
        ):
            sender.check(_task("t", receiver.url))
        sender.check(_task("t", "https://trainer.example:8443/x"))
        await _run_task(database, "t", receiver.url)
        dead = await _wait_for(database, DeliveryState.DEAD, 2)
    assert {one.error for one in dead} == {"its host is not in server.callback_hosts"}
    assert receiver.got == []


def test_allowed_hosts_match_exactly() -> None:
    """A name without a port allows all ports; without a list, all public names are allowed."""
    named = frozenset({"trainer", "other:8443"})
    listed = ("http://trainer/x", "http://trainer:9000/x", "http://TRAINER/x", "https://other:8443")
    others = ("https://other", "http://trainer.evil.example/x")
    hidden = ("http://trainer@evil.example/x", "http://evil.example/@trainer")
    for url in (*listed, *others, *hidden):
        assert is_allowed(url, named) is (url in listed), url
        assert is_allowed(url, None), url
        assert is_allowed(url, frozenset({"*"})), url


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "[::1]", "[fe80::1]", "[::ffff:127.0.0.1]",
     "localhost", "0.0.0.1", "[64:ff9b::7f00:1]", "100.64.0.1"],
)  # fmt: skip
async def test_private_addresses_must_be_listed(database: Database, host: str) -> None:
    """A task cannot make the server call addresses that only the server reaches."""
    task = _task("t", f"http://{host}:9000/x")
    with pytest.raises(Invalid, match="must have a public address or be listed in"):
        WebhookSender(database).check(task)
    WebhookSender(database, hosts=frozenset({f"{host}:9000"})).check(task)
    WebhookSender(database).check(_task("t", "https://8.8.8.8/x"))


async def test_names_of_private_addresses_are_refused(
    database: Database, receiver: Receiver
) -> None:
    """The resolved address counts, in every notation."""
    async with run_beside(WebhookSender(database, retries=SOON).run()):
        await _run_task(database, "t", receiver.url.replace("127.0.0.1", "0x7f.1"))
        dead = await _wait_for(database, DeliveryState.DEAD, 2)
    assert all("resolves to a private address" in one.error for one in dead)
    assert receiver.got == []


async def test_delivered_callbacks_are_trimmed_with_their_events(
    database: Database, receiver: Receiver
) -> None:
    """Dead callbacks stay in the outbox, unlike delivered ones."""
    receiver.answer = lambda count: web.Response(status=410 if count == 1 else 200)
    await _deliver(database, receiver, 3, samples=3, at_once=1)
    assert await database.write(events.trim_deliveries) == 0
    await database.write(events.trim, time.time() + 1)
    await database.write(lambda tx: events.add(tx, EventKind.JOINED, events.Note(node="n")))
    assert await database.write(events.trim_deliveries) == 3
    assert [one.state for one in await _list_all(database)] == [DeliveryState.DEAD]


# --------------------------------------------------------------------------- the example
async def test_the_example_receiver_verifies_callbacks(database: Database, tmp_path: Path) -> None:
    """The receiver prints each genuine callback once, without any library."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", str(EXAMPLE), "0"),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=dict(os.environ, TUGLINE_CALLBACK_SECRET=SECRET),
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).split()[-1].decode()
    async with _sender(database):
        await _run_task(database, "t", url, samples=2)
        for delivery in await _wait_for(database, DeliveryState.DELIVERED, 3):
            await database.write(events.retry_delivery, delivery.id)
        await _wait_for(database, DeliveryState.DELIVERED, 3)
    async with _sender(database, secret=new_secret()):
        await _run_task(database, "u", url)
        dead = await _wait_for(database, DeliveryState.DEAD, 2)
    process.terminate()
    output, _ = await process.communicate()
    assert {one.error for one in dead} == {"the receiver answered 401"}
    kinds = sorted(line.split()[0].decode() for line in output.splitlines()[:3])
    assert kinds == ["session.result", "session.result", "task.released"]
