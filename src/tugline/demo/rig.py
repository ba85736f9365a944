"""Everything that must be up while sessions run: engine, gateway, store and node, in one process.

The parts meet through their own interfaces over loopback HTTP, as they would on many machines; the
rig only starts them in order and takes them down again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tugline.capture import segments
from tugline.cluster.local import Local, OnDone
from tugline.errors import EngineError, UsageError
from tugline.gateway.app import Gateway
from tugline.gateway.doctor.connect import connect
from tugline.gateway.words.rendering import Rendering
from tugline.inference.base import GenerationEngine
from tugline.inference.server import create_app
from tugline.node.parts import Parts
from tugline.server.store import Store
from tugline.serving import serve, settle
from tugline.tokenizer import Tokenizer
from tugline.types import Call, Mode, Status, Task, Trajectory

MODEL = "tugline-demo"
MAX_ATTEMPTS = 20
"""A session that was cut off by a killed run is tried again; each kill costs it one attempt."""


@dataclass(frozen=True, slots=True)
class Rig:
    """The running system."""

    gateway: Gateway
    cluster: Local
    store: Store
    parts: Parts

    async def run(self, tasks: list[Task], on_done: OnDone) -> list[Trajectory]:
        """Roll out `tasks`. Raises `EngineError` when not one session got through."""
        results = await self.cluster.run(tasks, on_done)
        failures = [one.failure for one in results if one.failure is not None]
        if results and len(failures) == len(results):
            first = failures[0]
            msg = (
                f"no session got through; the first failed in the {first.boundary}: {first.message}"
            )
            raise EngineError(msg)
        return results

    def recorded(self, task_ids: list[str]) -> dict[str, tuple[Call, ...]]:
        """The calls of every session of these tasks that made any, from its segment."""
        sessions = [one for task in task_ids for one in self.store.sessions(task)]
        paths = {one.id: self.gateway.segment(one) for one in sessions}
        return {one: segments.read(path).calls for one, path in paths.items() if path.exists()}


def rendering(tokenizer: Tokenizer) -> Rendering:
    """The demo model's template: Qwen3's, with reasoning kept in context."""
    return Rendering(tokenizer, "qwen3", thinking_retention="all")


@contextlib.asynccontextmanager
async def rig(
    engine: GenerationEngine, tokenizer: Tokenizer, folder: Path, *, slots: int, port: int = 0
) -> AsyncIterator[Rig]:
    """Everything up, in `folder`; what a killed run left there is taken back first."""
    parts = Parts()
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(Store(folder / "sessions.db", max_attempts=MAX_ATTEMPTS))
        engine_url = await stack.enter_async_context(
            serve(create_app(engine, model_name=MODEL, tokenizer=tokenizer))
        )
        gateway = await stack.enter_async_context(
            Gateway(
                await connect([engine_url], mode=Mode.EXACT),
                rendering(tokenizer),
                folder / "segments",
                port=port,
            )
        )
        cluster = Local(store, gateway, parts, folder / "sessions", slots=slots)
        cluster.recover()
        settle()
        yield Rig(gateway, cluster, store, parts)


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. Raises `UsageError` if one is in there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        msg = f"cannot write in {folder}: {error.strerror}; choose another --out"
        raise UsageError(msg) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        msg = f"another process is running in {folder}; wait for it or choose another --out"
        raise UsageError(msg) from error
    try:
        yield
    finally:
        os.close(lock)


def sampled(trajectories: Sequence[Trajectory]) -> int:
    """Tokens that these sessions sampled."""
    return sum(one.ledger.sampled for one in trajectories)


def failed(trajectories: Sequence[Trajectory]) -> int:
    """Sessions that ended for a reason that is not the policy's."""
    return sum(one.status is Status.FAILED for one in trajectories)
