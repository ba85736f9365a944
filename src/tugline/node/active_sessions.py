"""Sessions that a node holds, and the transfer of their agents' logs to the server."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tugline import log
from tugline.errors import ServerError, StoreError
from tugline.protocol import Dispatcher, Work
from tugline.rollout.stages import StageSlots
from tugline.types import Call, Status, Trajectory

STARTED = frozenset({Status.RUN, Status.BUILD, Status.EVAL})
CHUNK = 64 << 10
"""Bytes per request, and the maximum sent of output from before a log was followed."""
_FOLLOW_INTERVAL_S = 0.5
_SEND_TIMEOUT_S = 5.0
_log = log.get("node.logs")


class StopReason(Enum):
    """Reason why a rollout was cancelled without a result."""

    DROP = "dropped"
    """The node does not hold the session any more, or has it with a newer epoch."""
    STALE = "stale"
    """The session's weights are too old."""
    DRAIN = "drained"
    """The node stops before the session could end."""


@dataclass(slots=True, eq=False)
class ActiveSession:
    """A session that this node holds."""

    work: Work
    slots: StageSlots
    directory: Path
    stages: list[tuple[Status, float]] = field(default_factory=list)
    """Stages so far, each with its start (Unix seconds)."""
    calls: Sequence[Call] = ()
    """Recorded calls of the rollout, if they are traced."""
    stop_reason: StopReason | None = None
    rollout: asyncio.Task[Trajectory] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session has ended on this node."""
    log_start: int = 0
    """Bytes at the start of the log that are not sent."""
    log_sent: int = 0
    """Bytes of the log after `log_start` that the server has."""
    log_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """The session's id."""
        return self.work.session.id

    @property
    def epoch(self) -> int:
        """Epoch of the session's lease."""
        return self.work.session.epoch

    @property
    def status(self) -> Status:
        """Current stage."""
        return self.stages[-1][0] if self.stages else Status.INIT

    def stop(self, reason: StopReason) -> None:
        """Cancel the rollout, unless it has its trajectory already."""
        if self.rollout is None or not self.rollout.done():
            self.stop_reason = self.stop_reason or reason
            if self.rollout is not None:
                self.rollout.cancel()


class LogSender:
    """Sends logs of active sessions: followed logs as they grow, of others only the end."""

    def __init__(self, server: Dispatcher, sessions: Mapping[str, ActiveSession]) -> None:
        self._server = server
        self._sessions = sessions
        self._followed: frozenset[str] = frozenset()
        self._following = asyncio.Event()

    def follow(self, sessions: Collection[str]) -> None:
        """Follow the logs of these sessions and of no others."""
        self._followed = frozenset(sessions)
        (self._following.set if sessions else self._following.clear)()

    async def run(self) -> None:
        """Send new output, twice a second while any log is followed."""
        while True:
            await self._following.wait()
            for session in [each for each in self._sessions.values() if each.id in self._followed]:
                await self.send(session)
            await asyncio.sleep(_FOLLOW_INTERVAL_S)

    async def send(self, session: ActiveSession) -> None:
        """Send new output; the first time, at most the last 64 KiB.

        Errors, and a timeout of 5 s, are only logged, so that a result does not wait for its log.
        """
        if session.slots.agent_log is None:
            return
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S), session.log_lock:
                await self._send(session, session.slots.agent_log)
        except (ServerError, StoreError, OSError, TimeoutError) as error:
            _log.info("log not sent", session=session.id, error=str(error))

    async def _send(self, session: ActiveSession, path: Path) -> None:
        while True:
            if not session.log_sent:
                session.log_start = max(0, await asyncio.to_thread(_size_of, path) - CHUNK)
            chunk = await asyncio.to_thread(_read, path, session.log_start + session.log_sent)
            if not chunk:
                return
            length = await self._server.log(session.id, session.epoch, session.log_sent, chunk)
            if length <= session.log_sent:
                return  # the server accepts no more
            session.log_sent = length


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, start: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(CHUNK)
