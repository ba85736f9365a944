"""Callbacks on their way: what the outbox has is sent until it arrives or is given up (I3).

A callback is a row that was committed together with what it tells of, so no crash loses one; it may
come more than once, with the same ``webhook-id``, and in any order. Each host has a sender of its
own: one that does not answer holds up nobody else, and is asked less and less often. What is given
up stays in the outbox as DEAD, with an event, until somebody sends it again by hand.

Whoever submits a task chooses where the server sends to. `hosts` restricts that; redirects are
never followed, and no answer is read beyond its headers.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import random
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Self

import msgspec

from tugline import log
from tugline.errors import Invalid, Missing, StoreError
from tugline.protocol import Delivery, EventKind, WebhookBody
from tugline.server.hub import Subscription
from tugline.server.store import outbox, results
from tugline.server.store.base import Tx
from tugline.server.store.database import Database
from tugline.server.store.tasks import view as view_of
from tugline.signing import sign
from tugline.types import Task

LOOK_S = 30.0
"""The outbox is looked through that often even if nobody says that there is something new."""
TRIM_S = 10.0
REST_S = 30.0
"""The longest that a host is left alone after failures."""
RETRY_AFTER_S = 3600.0
"""The longest that a receiver may ask us to wait."""
_log = log.get("deliveries")


class WebhookRetries(NamedTuple):
    """How long a receiver is waited for; as it stands, a callback is given up after 3 hours."""

    tries: int = 32
    first_s: float = 1.0
    """Before the second try; each further pause is twice as long, less a random part."""
    longest_s: float = 600.0
    timeout_s: float = 15.0
    at_once: int = 16
    """Callbacks to one host at the same time."""

    def pause(self, failures: int) -> float:
        """Seconds after that many failures."""
        longest = min(self.first_s * 2.0 ** min(failures - 1, 30), self.longest_s)
        return longest * random.uniform(0.5, 1.0)


PATIENCE = WebhookRetries()


class _Fate(NamedTuple):
    """What became of one try."""

    delivery: Delivery
    error: str = ""
    final: bool = False
    """Trying again cannot help."""
    after_s: float = 0.0
    """It asked us to wait that long."""

    @property
    def settled(self) -> bool:
        """It need not be tried again."""
        return self.final or not self.error


class Deliveries:
    """Sends what is due while it is open. Without a `secret` nothing is signed.

    `hosts` names those that may be sent to, with their port if it matters; None allows all.
    """

    def __init__(
        self,
        database: Database,
        secret: bytes = b"",
        *,
        hosts: frozenset[str] | None = None,
        patience: WebhookRetries = PATIENCE,
    ) -> None:
        self._database, self._secret = database, secret
        self._hosts, self._patience = hosts, patience
        self._name = hashlib.sha256(secret).hexdigest()[:12]
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._poster: Any = None
        """A `tugline.server.webhook_sender.Poster`, imported when it is needed first."""

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        tasks = [self._watching, *self._senders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._poster is not None:
            await self._poster.close()

    def check(self, task: Task) -> None:
        """Raises `Invalid` for a task whose callback would never be sent."""
        if task.callback is not None and not may_send(task.callback.url, self._hosts):
            known = ", ".join(sorted(self._hosts or ()))
            msg = f"callback.url is {task.callback.url!r}, must go to one of: {known}"
            raise Invalid(msg, field="callback.url")

    # ------------------------------------------------------------------ when
    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        trimmed = -TRIM_S
        with self._database.hub.listen("outbox") as bell:
            while True:
                pause = 1.0
                try:
                    if loop.time() - trimmed > TRIM_S:
                        await self._database.write(outbox.trim, durable=False)
                        trimmed = loop.time()
                    waiting = await self._database.read(outbox.hosts)
                    pause = self._start(waiting, bell)
                except StoreError as error:
                    _log.warning("outbox cannot be read", error=str(error))
                await bell.heard(loop.time() + pause)

    def _start(self, waiting: dict[str, float], bell: Subscription) -> float:
        """A sender for each host with something due; returns when to look again, in seconds."""
        now = time.time()
        free = {host: at for host, at in waiting.items() if host not in self._senders}
        for host in [host for host, at in free.items() if at <= now]:
            sender = asyncio.create_task(self._serve(host))
            self._senders[host] = sender
            sender.add_done_callback(partial(self._ended, host, bell))
            del free[host]
        return min(LOOK_S, max(min(free.values(), default=now + LOOK_S) - now, 0.01))

    def _ended(self, host: str, bell: Subscription, sender: asyncio.Task[None]) -> None:
        del self._senders[host]
        bell.ring()  # something may have fallen due while it was about to end
        if not sender.cancelled() and (error := sender.exception()) is not None:
            _log.error("sender failed", host=host, exc_info=error)

    # ------------------------------------------------------------------ one host
    async def _serve(self, host: str) -> None:
        """Send what is due at a host, a few at a time, until there is nothing more."""
        failures = 0
        posting = await asyncio.to_thread(import_module, "tugline.server.webhook_sender")
        self._poster = self._poster or posting.Poster(self._patience.timeout_s)
        try:
            while claimed := await self._claim(host):
                fates = await asyncio.gather(*map(self._send, claimed))
                await self._database.write(partial(_settle, fates, self._patience))
                failures = 0 if any(fate.settled for fate in fates) else failures + 1
                if failures:  # a long list must not become a storm
                    _log.info("receiver fails", host=host, error=fates[0].error)
                    await asyncio.sleep(min(self._patience.pause(failures), REST_S))
        except StoreError as error:
            _log.warning("outbox cannot be used", host=host, error=str(error))
            await asyncio.sleep(1.0)

    async def _claim(self, host: str) -> list[Delivery]:
        now = time.time()
        until = now + self._patience.timeout_s + 5.0
        some = partial(outbox.claim, host=host, now=now, until=until, limit=self._patience.at_once)
        return await self._database.write(some, durable=False)

    async def _send(self, delivery: Delivery) -> _Fate:
        """One try, which is over in `timeout_s`."""
        name, now = f"{self._name}_{delivery.id}", int(time.time())
        if not may_send(delivery.url, self._hosts):
            return _Fate(delivery, "its host is not among callback_hosts", final=True)
        try:
            body = await self._database.read(partial(_body, delivery=delivery, name=name))
        except Missing as error:
            return _Fate(delivery, str(error), final=True)
        headers = {"webhook-id": name, "webhook-timestamp": str(now)}
        if self._secret:
            headers["webhook-signature"] = sign(self._secret, name, now, body)
        answer = await self._poster.post(delivery.url, body, headers)
        if answer.error:
            return _Fate(delivery, answer.error)
        return _judged(delivery, answer.status, answer.retry_after)


def may_send(url: str, hosts: frozenset[str] | None) -> bool:
    """Whether `hosts` has the host of this URL, as ``name`` or as ``name:port``."""
    if hosts is None:
        return True
    host = outbox.host_of(url)
    return host in hosts or host.rpartition(":")[0] in hosts


def _body(tx: Tx, delivery: Delivery, name: str) -> bytes:
    notice = WebhookBody(id=name, delivery=delivery.id, kind=delivery.kind, task=delivery.task)
    if delivery.kind is EventKind.RELEASED:
        notice = msgspec.structs.replace(notice, group=view_of(tx, delivery.task))
    else:
        result = results.at(tx, delivery.id)
        if result is None:
            msg = f"no result at position {delivery.id}"
            raise Missing(msg)
        notice = msgspec.structs.replace(notice, result=result)
    return msgspec.json.encode(notice)


def _judged(delivery: Delivery, status: int, retry_after: str) -> _Fate:
    if 200 <= status < 300:
        return _Fate(delivery)
    if status == 410:
        return _Fate(delivery, "410: the receiver wants no more of it", final=True)
    error = f"answered {status}"
    if 300 <= status < 400:
        error += ", and redirects are not followed"
    return _Fate(delivery, error, after_s=_seconds(retry_after))


def _seconds(retry_after: str) -> float:
    """The header, which is a number of seconds or a date; 0 if it is neither."""
    try:
        wait = float(retry_after)
    except ValueError:
        try:
            wait = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(wait, 0.0), RETRY_AFTER_S)


def _settle(fates: Sequence[_Fate], patience: WebhookRetries, tx: Tx) -> None:
    """Write down what became of some tries."""
    for fate in fates:
        tries = fate.delivery.tries + 1
        if not fate.error:
            outbox.delivered(tx, fate.delivery.id)
        elif fate.final or tries >= patience.tries:
            outbox.dead(tx, fate.delivery.id, fate.error)
        else:
            pause = max(patience.pause(tries), fate.after_s)
            outbox.failed(tx, fate.delivery.id, fate.error, time.time() + pause)
