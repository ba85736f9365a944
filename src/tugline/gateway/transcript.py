"""What was said in one session: its recording on disk and the tree of turns in memory."""

from __future__ import annotations

import asyncio
import time

from tugline import log
from tugline.errors import CaptureError
from tugline.gateway.engine import EngineContext
from tugline.gateway.prefix import CallTree
from tugline.recording.file import Writer
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.types import Call

_log = log.get("gateway.transcript")


class Transcript:
    """Calls and events of one session."""

    def __init__(self, session_id: str, engine: EngineContext, writer: Writer) -> None:
        self.session_id = session_id
        self.turns = CallTree(engine.rendering)
        self.writer = writer
        self.sampled_tokens = 0
        self.declares_tools = False
        """Whether any request declared tools, or its harness is known to."""
        self._traffic = engine.traffic
        self._lock = asyncio.Lock()
        """Calls of parallel agents are written one after the other."""
        self._pending: list[RecordedEvent] = []
        """Events that are written with the next call."""

    async def append(self, call: Call) -> None:
        """Write a call, and flush it if the writer is synchronous, even when cancelled.

        Without a flush it is a copy into the page cache, which is quicker than asking a thread.
        """
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        if self.writer.sync:
            await self._append_in_thread(call)
        else:
            self.writer.append(call)
        self._traffic.add(call)

    async def _append_in_thread(self, call: Call) -> None:
        writing = asyncio.ensure_future(self._append_locked(call))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    async def _append_locked(self, call: Call) -> None:
        def write() -> None:
            self._write_events()
            self.writer.append(call)

        async with self._lock:
            await asyncio.to_thread(write)

    def note(
        self,
        kind: RecordedEventKind,
        detail: str = "",
        *,
        call: int | None = None,
        data: bytes = b"",
    ) -> None:
        """Record an event; never fails and never waits for the disk.

        With a synchronous writer it is written with the next call or at the end.
        """
        self._pending.append(RecordedEvent(kind, time.time(), call, detail, data))
        if not self.writer.sync:
            self._write_events()

    async def close(self) -> None:
        """Write pending events and close the recording."""
        await asyncio.to_thread(self._write_events)
        await asyncio.to_thread(self.writer.close)

    def _write_events(self) -> None:
        pending, self._pending = self._pending, []
        try:
            for event in () if self.writer.closed else pending:
                self.writer.append_record(event)
        except CaptureError as error:  # the session's next call reports it to its harness
            _log.error("event not written", path=str(self.writer.path), error=str(error))
