"""What every call of a gateway is answered with: engine, template, and the gate before both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from tugline.gateway.rendering import Rendering
from tugline.gateway.upstream import ModelCard, Upstream
from tugline.types import Mode


class InFlight(Protocol):
    """An answer that is being sampled."""

    @property
    def sending(self) -> bool:
        """Whether the engine has been asked and has not finished."""
        ...

    async def abort(self) -> None:
        """Ask the engine to end it where it is."""
        ...


@dataclass(slots=True)
class Backend:
    """What answers are made with, and whether they may be made now."""

    upstream: Upstream
    card: ModelCard
    rendering: Rendering | None
    version: int = 0
    """Of the weights, as announced; for engines that do not say it themselves."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[InFlight] = field(default_factory=set)

    @property
    def mode(self) -> Mode:
        """Who makes the prompt's ids."""
        return self.upstream.wire.mode
