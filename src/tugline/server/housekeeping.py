"""What nobody needs any more is forgotten: old tasks, events and nodes, blobs without a result."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

from tugline import log
from tugline.errors import StoreError
from tugline.server.blobs import Blobs, sweep
from tugline.server.store import events, nodes
from tugline.server.store.database import Database
from tugline.server.store.retention import forget

EVERY_S = 3600.0
_GONE_S = 86_400.0
_log = log.get("server")


class Housekeeping:
    """Cleans up at the start and every hour; an async context manager."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        *,
        keep_events_s: float,
        keep_tasks_s: float = math.inf,
    ) -> None:
        self._database, self._blobs = database, blobs
        self._keep_events_s, self._keep_tasks_s = keep_events_s, keep_tasks_s

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._often())

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _often(self) -> None:
        while True:
            try:
                await self._once(time.time())
            except StoreError as error:
                _log.warning("not cleaned up", error=str(error))
            await asyncio.sleep(EVERY_S)

    async def _once(self, now: float) -> None:
        if self._keep_tasks_s < math.inf:
            over = now - self._keep_tasks_s
            while await self._database.write(partial(forget, before=over), durable=False):
                pass
        await sweep(self._blobs, self._database)
        before = now - self._keep_events_s
        while await self._database.write(partial(events.trim, before=before), durable=False):
            pass
        await self._database.write(partial(nodes.trim, before=now - _GONE_S), durable=False)
