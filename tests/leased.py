"""Tasks, results and a node that does no work, for tests of the control plane."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import zstandard

from tugline.protocol import (
    Commit,
    HeldSession,
    LeaseRequest,
    LeaseResponse,
    NodeRegistration,
    Renewal,
    Work,
)
from tugline.server.control import ControlPlane
from tugline.types import (
    HANDLING,
    Boundary,
    Cause,
    Failure,
    Ledger,
    PluginSpec,
    Reward,
    Session,
    Status,
    Task,
    Trajectory,
    encode,
)

Open = Callable[..., AbstractAsyncContextManager[ControlPlane]]
"""Opens a control plane on the same store and folder, as often as it is called."""


def a_task(name: str, samples: int = 1, **fields: Any) -> Task:
    """A task that nobody runs."""
    parts = {"harness": PluginSpec("shell"), "evaluator": PluginSpec("tests")}
    return Task(id=name, instruction="Mend it", samples=samples, **parts, **fields)


def result(session: Session, *, reward: float | None = 1.0, failure: Boundary | Cause | None = None,
           status: Status = Status.COMPLETED) -> bytes:  # fmt: skip
    """What a node would commit."""
    cause = failure if isinstance(failure, Cause) else None
    boundary = HANDLING[cause].boundary if cause else failure
    trajectory = Trajectory(
        session=session.id,
        task=session.task,
        sample=session.sample,
        status=Status.FAILED if failure else status,
        traces=(),
        ledger=Ledger(),
        reward=None if reward is None or failure else Reward(reward),
        failure=Failure(Boundary(boundary), "it broke", cause) if boundary else None,
    )
    return zstandard.ZstdCompressor().compress(encode(trajectory))


class Idler:
    """A node that holds what it is given, until it is told to do something with it."""

    def __init__(self, control: ControlPlane, node: str, room: int) -> None:
        self.control, self.node, self.room = control, node, room
        self.held: dict[str, Session] = {}
        self.applied = 0

    @classmethod
    async def join(cls, control: ControlPlane, name: str = "node", *, room: int = 8) -> Idler:
        """A new node."""
        welcome = await control.dispatcher.register(
            NodeRegistration(name=name, slots=room, capacity=room)
        )
        return cls(control, welcome.node, room)

    async def ask(self, *, wait_s: float = 5.0, room: int | None = None) -> LeaseResponse:
        """One question; the work of its answer is held from then on."""
        left = self.room - len(self.held) if room is None else room
        ask = LeaseRequest(capacity=left, held=self._holding(), applied=self.applied, wait_s=wait_s)
        orders = await self.control.dispatcher.lease(self.node, ask)
        self.held |= {work.session.id: work.session for work in orders.work}
        return orders

    async def renew(self) -> LeaseResponse:
        """Tell what is held."""
        return await self.control.dispatcher.renew(
            self.node, Renewal(held=self._holding(), applied=self.applied)
        )

    async def commit(self, session: str, **outcome: Any) -> Commit:
        """A result of something that is held."""
        leased = self.held.pop(session)
        return await self.control.dispatcher.commit(
            session, leased.epoch, result(leased, **outcome)
        )

    def _holding(self) -> tuple[HeldSession, ...]:
        return tuple(HeldSession(one.id, one.epoch, Status.RUN) for one in self.held.values())


def names(work: tuple[Work, ...]) -> list[str]:
    """The sessions."""
    return [one.session.id for one in work]
