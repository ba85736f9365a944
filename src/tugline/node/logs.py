"""What agents print, told to the server: while somebody reads it, and its end in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

from tugline import log
from tugline.errors import ServerError, StoreError
from tugline.node.active_sessions import ActiveSession
from tugline.protocol import Dispatcher

CHUNK = 64 << 10
"""Bytes told at once, and how much is told of what was printed before anybody read it."""
EVERY_S = 0.5
_END_S = 5.0
_log = log.get("node.logs")


class LogSender:
    """Sends the logs of live sessions."""

    def __init__(self, server: Dispatcher, live: Mapping[str, ActiveSession]) -> None:
        self._server, self._live = server, live
        self._followed: frozenset[str] = frozenset()
        self._wanted = asyncio.Event()

    def follow(self, sessions: Collection[str]) -> None:
        """Send these from now on, and no others."""
        self._followed = frozenset(sessions)
        (self._wanted.set if sessions else self._wanted.clear)()

    async def run(self) -> None:
        """Send what is new, twice a second while anything is followed."""
        while True:
            await self._wanted.wait()
            for live in [one for name, one in self._live.items() if name in self._followed]:
                await self._try(live)
            await asyncio.sleep(EVERY_S)

    async def finish(self, live: ActiveSession) -> None:
        """Send the end: all that is new of a log that was followed, else the last 64 KiB."""
        if live.slots.agent_log is not None:
            await self._try(live)

    async def _try(self, live: ActiveSession) -> None:
        try:
            async with asyncio.timeout(_END_S), live.logging:
                await self._send(live)
        except (ServerError, StoreError, OSError, TimeoutError) as error:
            # A result is never late for its log.
            _log.info("log not sent", session=live.id, error=str(error))

    async def _send(self, live: ActiveSession) -> None:
        path = live.slots.agent_log
        while path is not None:
            if not live.sent:
                live.skipped = max(0, await asyncio.to_thread(_size, path) - CHUNK)
            chunk = await asyncio.to_thread(_read, path, live.skipped + live.sent)
            if not chunk:
                return
            length = await self._server.log(live.id, live.epoch, live.sent, chunk)
            if length <= live.sent:
                return  # it takes no more
            live.sent = length


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, start: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(CHUNK)
