"""Watch the sessions of a node: how long their stages take, and their traces when they are over.

It is told of what happens anyway and measures nothing by itself. A trace is made and sent in a
thread once its session has ended, so that no session waits for it and none can fail by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tugline import log
from tugline.errors import TuglineError
from tugline.histogram import Distribution
from tugline.protocol import Work
from tugline.tracing.spans import Rollout
from tugline.tracing.tracer import Tracer
from tugline.types import Call, Status, Trajectory

_MOST = 4096
"""Sessions whose stages are remembered: some end on other nodes, and nobody says so here."""
_QUEUE = 256
"""Sessions that wait for their trace to be made; what comes beyond that has none."""
_log = log.get("node.watch")

Calls = Callable[[str], Sequence[Call]]
"""What a session recorded."""


class Telemetry:
    """An `Observer`; without a tracer it only measures."""

    def __init__(
        self, *, node: str, model: str, calls: Calls, tracer: Tracer | None = None
    ) -> None:
        """`node` and `model` are as traces name them; `calls` is asked in a thread."""
        self.stage_s = {
            status: Distribution()
            for status in (Status.INIT, Status.READY, Status.RUN, Status.BUILD, Status.EVAL)
        }
        """Seconds in each stage, without the wait for a place there."""
        self.untold = 0
        """Sessions without a trace because it could not be made or there were too many."""
        self._node, self._model, self._calls, self._tracer = node, model, calls, tracer
        self._began: dict[tuple[str, int], list[tuple[Status, float]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tugline-traces")
        self._room = threading.BoundedSemaphore(_QUEUE)

    def stage(self, work: Work, status: Status) -> None:
        """A stage begins."""
        key = (work.session.id, work.session.epoch)
        self._began.setdefault(key, []).append((status, time.time()))
        if len(self._began) > _MOST:
            del self._began[next(iter(self._began))]

    def ended(self, work: Work, trajectory: Trajectory) -> None:
        """A rollout has its trajectory."""
        for status, spread in self.stage_s.items():
            if status.value in trajectory.seconds:
                spread.add(trajectory.seconds[status.value])
        began = self._began.pop((work.session.id, work.session.epoch), [])
        if self._tracer is None or not began:
            return
        if not self._room.acquire(blocking=False):
            self.untold += 1
            return
        job = self._thread.submit(self._tell, self._tracer, work, trajectory, began, time.time())
        job.add_done_callback(self._told)

    async def close(self) -> None:
        """Send what is left, for a bounded time."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _tell(
        self,
        tracer: Tracer,
        work: Work,
        trajectory: Trajectory,
        began: Sequence[tuple[Status, float]],
        ended: float,
    ) -> None:
        calls: Sequence[Call] = ()
        with contextlib.suppress(KeyError):  # its gateway never opened it
            calls = self._calls(work.session.id)
        tracer.tell(
            Rollout(
                task=work.task,
                session=work.session,
                trajectory=trajectory,
                began=began,
                ended=ended,
                calls=calls,
                node=self._node,
                model=self._model,
            )
        )

    def _told(self, job: Future[None]) -> None:
        self._room.release()
        error = job.exception()
        if error is not None:
            self.untold += 1
            known = isinstance(error, TuglineError)
            _log.warning("no trace", error=str(error) if known else repr(error))
