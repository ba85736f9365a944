"""What a node and a trainer do with a gateway, whether it has one process or several."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tugline.gateway.engine import Traffic
from tugline.protocol import PauseMode
from tugline.recording import file as recordings
from tugline.recording.folder import file_name
from tugline.recording.records import RecordedResult
from tugline.types import Call, Failure, Session, SpentLimit, Task
from tugline.web.engine_http import ModelCard


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What a harness and its sandbox tell a gateway of a session."""

    spent_status: int = 400
    """HTTP status of a spent budget: the one that the harness stops on."""
    offers_tools: bool = False
    """Whether its calls declare tools, so that one without is a side call."""
    workdir: str = ""
    """Its working folder and its home, recorded for a replay."""
    home: str = ""
    key: str = ""
    """The key of an earlier process that died: the session goes on from its recording."""


DEFAULT_TERMS = SessionTerms()
"""Of a harness that is not known."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Address and key of an open session."""

    base_url: str
    """Without ``/v1``: each harness appends what its CLI wants."""
    key: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A live session as it is, or a closed one as it ended."""

    path: Path
    """Of its recording."""
    failure: Failure | None = None
    """Why its last call got no answer, if that was the engine or its window.

    A session that outgrows the window later has answers to be judged by.
    """
    spent: SpentLimit | None = None
    """The budget that refused a call or cut off the last answer."""


class ModelGateway(AbstractAsyncContextManager[Any]):
    """Takes the model calls of sessions and records them in `folder`, one file per session."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        """Where it listens, once it is entered."""
        self._folder = folder

    @property
    @abstractmethod
    def card(self) -> ModelCard:
        """The model that the engine serves."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Counters over all model calls."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no model call is under way in this process."""

    @abstractmethod
    def open(
        self,
        session: Session,
        task: Task,
        terms: SessionTerms = DEFAULT_TERMS,
        *,
        on_hang: Callable[[float], None] = lambda _seconds: None,
    ) -> AbstractAsyncContextManager[Opened]:
        """Take the model calls of one attempt at a session while the block lasts.

        `on_hang` gets the seconds that a hanging engine took.
        """

    @abstractmethod
    def describe(self, session: str) -> SessionState:
        """The state of a live or recently closed session. Raises `KeyError`."""

    @abstractmethod
    async def pause(self, mode: PauseMode = PauseMode.WAIT, *, within_s: float = 600.0) -> None:
        """Hold new calls; those in flight finish, are ended where they are, or go on, by `mode`.

        Raises `EngineError` when they are not over in time; the gateway then stays paused.
        """

    @abstractmethod
    async def resume(self) -> None:
        """Let held calls go on."""

    @abstractmethod
    async def set_weights_version(self, version: int) -> None:
        """Announce what the engine now serves, for engines that do not report it with tokens."""

    def recording_path(self, session: Session) -> Path:
        """Where an attempt's calls are recorded."""
        return self._folder / file_name(session)

    def read_calls(self, session: str) -> tuple[Call, ...]:
        """Calls of the session's last attempt. Raises `KeyError`."""
        return recordings.read(self.describe(session).path).calls

    async def write_result(self, session: str, result: RecordedResult) -> None:
        """Record the outcome of a session that has been closed. Raises `CaptureError`."""
        await asyncio.to_thread(recordings.write_result, self.describe(session).path, result)
