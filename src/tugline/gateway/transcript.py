"""The calls and events of one session, as they are recorded."""

import asyncio
import time
from collections.abc import Sequence

from tugline import log
from tugline.chat.dialects.decoding import ParseCache
from tugline.chat.tokens import TokenSequence
from tugline.errors import CaptureError
from tugline.gateway.context import EngineContext
from tugline.gateway.model_call import Prompt
from tugline.gateway.prefix import CallTree, can_be_extended
from tugline.recording.file import Writer
from tugline.recording.records import RecordedEvent, RecordedEventKind
from tugline.types import Call

_log = log.get("gateway.transcript")


class Transcript:
    """Calls and events of one session."""

    def __init__(self, session_id: str, engine: EngineContext, writer: Writer) -> None:
        self.session_id = session_id
        self.turns = CallTree(engine.rendering)
        self.parse_cache = ParseCache()
        self.writer = writer
        self.several = asyncio.Semaphore(engine.settings.several_sampled)
        """Held by each answer of a request with ``n`` > 1 while it is sampled."""
        self.calls = 0
        """Number of recorded calls."""
        self.sampled_tokens = 0
        self.declares_tools = False
        """Whether a request declared tools, or the harness is known to declare them."""
        self._traffic = engine.traffic
        self._max_recording = engine.settings.max_recording

    @property
    def full(self) -> bool:
        """Whether the recording has reached its size limit."""
        return self.writer.size > self._max_recording

    def restore(self, calls: Sequence[Call]) -> None:
        """Continue after calls that another process recorded."""
        self.calls = len(calls)
        self.sampled_tokens = sum(len(c.sampled_ids) + c.unreported_tokens for c in calls)
        self.declares_tools = self.declares_tools or any(call.tools for call in calls)
        self.turns.restore(calls)

    def append(self, call: Call, tokens: TokenSequence, prompt: Prompt) -> None:
        """Write a call; later calls can extend it, unless it broke off or is a side call.

        `tokens` are the ids of prompt and answer. Writing copies into the page cache, which is
        faster than using a thread.
        """
        self.writer.append(call, tokens)
        self.calls += 1
        self.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
        self._traffic.add(call, len(tokens) - len(call.sampled_ids))
        if call.answer is not None and can_be_extended(call):
            self.turns.add(prompt, call.number, tokens, call.answer)

    def note(self, kind: RecordedEventKind, detail: str = "", *, call: int | None = None) -> None:
        """Record an event; never fails and never waits for the disk."""
        if self.writer.closed or self.full:
            return
        try:
            self.writer.append_record(RecordedEvent(kind, time.time(), call, detail))
        except CaptureError as error:  # the session's next call reports it to its harness
            _log.error("event not written", path=str(self.writer.path), error=str(error))
