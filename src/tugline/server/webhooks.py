"""Webhook sender: retries deliveries from the outbox until they succeed or are given up (I3).

A delivery is a row committed together with its event, so no crash loses one; it may be sent more
than once, with the same ``webhook-id``, and in any order. Each host has its own sender: a host that
does not answer does not delay others, and is tried less and less often. A delivery that is given up
stays in the outbox as DEAD, with an event, until it is retried manually.

Task authors choose the URLs, so requests go only to public addresses or, if `hosts` is set, only to
those hosts, at any address. Redirects are not followed; only the headers of a response are read.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import ipaddress
import random
import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from tugline import log
from tugline.addresses import is_public
from tugline.errors import Invalid, Missing, StoreError
from tugline.protocol import Delivery, DeliveryState, EventKind, WebhookBody
from tugline.server.store import events, results, tasks
from tugline.server.store.base import Tx
from tugline.server.store.database import Database, Subscription
from tugline.signing import sign
from tugline.types import Task

_log = log.get("webhooks")
_MUST_BE_PUBLIC = "must have a public address or be listed in server.callback_hosts"


class WebhookRetries(NamedTuple):
    """Retry schedule; the defaults give up a delivery after 3 hours."""

    tries: int = 32
    first_s: float = 1.0
    """Pause before the second try; each further pause doubles, less random jitter."""
    longest_s: float = 600.0
    timeout_s: float = 15.0
    at_once: int = 16
    """Concurrent deliveries to one host."""
    rest_s: float = 30.0
    """Maximum pause of a host's sender after failures."""
    retry_after_s: float = 3600.0
    """Maximum pause that a receiver can request."""
    look_s: float = 30.0
    """Interval of checks of the outbox without a notification."""

    def pause(self, failures: int) -> float:
        """Return the seconds to pause after that many failures."""
        longest = min(self.first_s * 2.0 ** min(failures - 1, 30), self.longest_s)
        return longest * random.uniform(0.5, 1.0)


class _Try(NamedTuple):
    """Outcome of one try."""

    delivery: Delivery
    error: str = ""
    final: bool = False
    """True if a retry cannot succeed."""
    after_s: float = 0.0
    """Pause requested by the receiver."""


@dataclass(eq=False, repr=False)
class WebhookSender:
    """Sender of due deliveries while `run` runs. Without a `secret`, requests are not signed.

    `hosts` lists allowed receivers as ``name`` or ``name:port``, `"*"` for all; None allows
    receivers at a public address.
    """

    database: Database
    secret: bytes = b""
    hosts: Collection[str] | None = None
    retries: WebhookRetries = WebhookRetries()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        self._name = hashlib.sha256(self.secret).hexdigest()[:12]
        self._senders: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Send deliveries until cancelled."""
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.retries.timeout_s),
            connector=aiohttp.TCPConnector(limit=0, resolver=_Resolver(self.hosts is None)),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "tugline", "Content-Type": "application/json"},
        ) as self._client:
            try:
                await self._watch()
            finally:
                for sender in self._senders.values():
                    sender.cancel()
                await asyncio.gather(*self._senders.values(), return_exceptions=True)

    def check(self, task: Task) -> None:
        """Check the callback of a task. Raises `Invalid` if it would never be sent."""
        if task.callback is not None and not is_allowed(task.callback.url, self.hosts):
            known = ", ".join(sorted(self.hosts or ()))
            must = f"must have one of the hosts {known}" if known else _MUST_BE_PUBLIC
            raise Invalid(f"callback.url is {task.callback.url!r}, {must}", field="callback.url")

    # ------------------------------------------------------------------ scheduling
    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        with self.database.hub.subscribe("outbox") as subscription:
            while True:
                pause = 1.0
                try:
                    pause = self._start(await self.database.read(events.next_tries), subscription)
                except StoreError as error:
                    _log.warning("outbox cannot be read", error=str(error))
                await subscription.wait(loop.time() + pause)

    def _start(self, waiting: dict[str, float], subscription: Subscription) -> float:
        """Start a sender for each host with due deliveries; return seconds until the next check."""
        now = self.database.clock()
        idle = {host: at for host, at in waiting.items() if host not in self._senders}
        for host in [host for host, at in idle.items() if at <= now]:
            sender = log.start_task(self._send_all(host), "send-webhooks")
            self._senders[host] = sender
            sender.add_done_callback(partial(self._end, host, subscription))
            del idle[host]
        look_s = self.retries.look_s
        return min(look_s, max(min(idle.values(), default=now + look_s) - now, 0.01))

    def _end(self, host: str, subscription: Subscription, sender: asyncio.Task[None]) -> None:
        del self._senders[host]
        subscription.notify()  # a delivery may have become due while the sender was ending
        if not sender.cancelled() and (error := sender.exception()) is not None:
            _log.error("sender failed", host=host, traceback=log.describe_error(error))

    # ------------------------------------------------------------------ one host
    async def _send_all(self, host: str) -> None:
        """Send the due deliveries of a host, in batches of `at_once`, until none is left."""
        failures = 0
        for_s = self.retries.timeout_s + 5.0
        limit = self.retries.at_once
        try:
            while claimed := await self.database.write_relaxed(
                events.claim_deliveries, host, for_s=for_s, limit=limit
            ):
                tries = await asyncio.gather(*map(self._send, claimed))
                await self.database.write(_record, tries, self.retries)
                answered = any(each.final or not each.error for each in tries)
                failures = 0 if answered else failures + 1
                if failures:  # do not flood the host with a long outbox
                    _log.info("receiver fails", host=host, error=tries[0].error)
                    await asyncio.sleep(min(self.retries.pause(failures), self.retries.rest_s))
        except StoreError as error:
            _log.warning("outbox cannot be used", host=host, error=str(error))
            await asyncio.sleep(1.0)

    async def _send(self, delivery: Delivery) -> _Try:
        """Try once, within `timeout_s`; of the response only status and headers are read."""
        name = f"{self._name}_{delivery.id}"
        now = int(time.time())
        if not is_allowed(delivery.url, self.hosts):
            return _Try(delivery, "its host is not in server.callback_hosts", final=True)
        try:
            body = await self.database.read(_encode_body, delivery, name)
        except Missing as error:
            return _Try(delivery, str(error), final=True)
        headers = {"webhook-id": name, "webhook-timestamp": str(now)}
        if self.secret:
            headers["webhook-signature"] = sign(self.secret, name, now, body)
        try:
            async with self._client.post(
                delivery.url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return self._read_answer(delivery, answer)
        except TimeoutError:
            return _Try(delivery, f"no answer within {self.retries.timeout_s:g} s")
        except (aiohttp.ClientError, ValueError) as error:  # the latter for an invalid URL
            return _Try(delivery, str(error) or type(error).__name__)

    def _read_answer(self, delivery: Delivery, answer: aiohttp.ClientResponse) -> _Try:
        status = answer.status
        retry_after = answer.headers.get("Retry-After", "")
        if 200 <= status < 300:
            return _Try(delivery)
        if status == 410:
            return _Try(delivery, "410: the receiver refuses further deliveries", final=True)
        error = f"the receiver answered {status}"
        if 300 <= status < 400:
            error += ", and redirects are not followed"
        asked_s = float(retry_after) if retry_after.isdigit() else 0.0
        after_s = min(asked_s, self.retries.retry_after_s)
        return _Try(delivery, error, after_s=after_s)


def is_allowed(url: str, hosts: Collection[str] | None) -> bool:
    """Whether `hosts` contains the host of this URL, as ``name`` or ``name:port``.

    Without `hosts`: whether the host is a public address or a name, which is checked when resolved.
    """
    if hosts is None:
        host = urlsplit(url).hostname or ""
        return host != "localhost" and _may_be_public(host)
    host = events.host_of(url)
    return "*" in hosts or host in hosts or host.rpartition(":")[0] in hosts


def _may_be_public(host: str) -> bool:
    """Whether `host` is a name, or a public address."""
    try:
        return is_public(ipaddress.ip_address(host))
    except ValueError:
        return True


def _encode_body(tx: Tx, delivery: Delivery, name: str) -> bytes:
    body = WebhookBody(id=name, delivery=delivery.id, kind=delivery.kind, task=delivery.task)
    if delivery.kind is EventKind.RELEASED:
        body = msgspec.structs.replace(body, group=tasks.view(tx, delivery.task))
    else:
        body = msgspec.structs.replace(body, result=results.get_at(tx, delivery.id))
    return msgspec.json.encode(body)


def _record(tx: Tx, tries: Sequence[_Try], retries: WebhookRetries) -> None:
    """Record the outcomes of tries."""
    for each in tries:
        count = each.delivery.tries + 1
        if not each.error:
            state = DeliveryState.DELIVERED
        elif each.final or count >= retries.tries:
            state = DeliveryState.DEAD
        else:
            state = DeliveryState.PENDING
        pause_s = max(retries.pause(count), each.after_s)
        events.settle(tx, each.delivery.id, state, each.error, pause_s)


# --------------------------------------------------------------------------- HTTP
class _Resolver(AbstractResolver):
    """Resolver with its own threads, so that a slow name server does not block other work."""

    def __init__(self, public_only: bool) -> None:  # noqa: FBT001 - only argument
        self._public_only = public_only
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="tugline-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of `host`. Raises `OSError`."""
        resolve = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        infos = await asyncio.get_running_loop().run_in_executor(self._pool, resolve)
        if self._public_only and not all(_may_be_public(str(info[4][0])) for info in infos):
            raise OSError(
                errno.EACCES, f"{host!r} resolves to a private address; it {_MUST_BE_PUBLIC}"
            )
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            {
                "hostname": host,
                "host": str(address[0]),
                "port": int(address[1]),
                "family": kind,
                "proto": proto,
                "flags": flags,
            }
            for kind, _, proto, _, address in infos
        ]

    async def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
