"""What a rollout needs of the gateway: a place for a session's calls, and what was said there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tugline.recording.records import Result
from tugline.types import Call, Failure, Session, Task


class Endpoint(Protocol):
    """Where a session's model is."""

    @property
    def base_url(self) -> str:
        """Such as ``http://127.0.0.1:40123/s/<session>``, without ``/v1``."""
        ...

    @property
    def key(self) -> str:
        """The session's secret."""
        ...


class Gateway(Protocol):
    """What a rollout needs of the gateway."""

    def open(
        self,
        session: Session,
        task: Task,
        *,
        spent_status: int = 400,
        offers_tools: bool = False,
        workdir: str = "",
        home: str = "",
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Take calls of this session; when left, no further call is taken and none is in flight.

        `spent_status` is the HTTP status that tells its harness of a spent budget, `offers_tools`
        whether a call of it without tools is beside the task; `workdir` and `home` are its folders.
        """
        ...

    def calls(self, session: str) -> Sequence[Call]:
        """What was recorded of a session that has been left."""
        ...

    async def conclude(self, session: str, result: Result) -> None:
        """Write down what became of a session that has been left, with its calls."""
        ...

    def failure(self, session: str) -> Failure | None:
        """Why its last call got no answer, if the engine's side is to blame; None otherwise."""
        ...
