"""The embedded engine: one thread owns a Hugging Face model, an event loop talks to it.

Requests, aborts and weight swaps reach the thread through one queue and take effect between two
steps. What a step sampled goes back in one call per step, however many requests it served.

Invariants: I1 (see `tugline.inference.batch`), I3 in the small: when the thread dies, every
request fails with its reason; nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel

from tugline.errors import EngineError, UsageError
from tugline.inference.base import Chunk, GenerateRequest, Mode, Stats, check
from tugline.inference.batch import Batch
from tugline.inference.batch import Sequence as Sampled
from tugline.inference.scoring import score
from tugline.types import Ids, Logprobs, VersionSpan

CLOSE_S = 30.0
"""Longest time to wait for the thread's current step when closing."""


class Engine:
    """Batched generation with KV reuse; see `tugline.inference.base.GenerationEngine`.

    Use as ``async with Engine(model, ...) as engine``. The model belongs to the engine from then
    on: it is moved to `device`, put in evaluation mode and only changed by `swap`.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Iterable[int],
        max_model_len: int,
        max_running: int = 32,
        max_parked: int = 64,
        device: str | torch.device | None = None,
        version: int = 0,
        threads: int | None = None,
    ) -> None:
        """`threads` is for torch on a CPU; None leaves it as it is (1 is best for tiny models)."""
        self.max_model_len = max_model_len
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.eos_ids = frozenset(eos_ids)
        self._threads = threads
        self._model = model.train(mode=False)
        if device is not None:
            self._model.to(device)
        self._batch = Batch(
            self._model,
            max_model_len=max_model_len,
            max_running=max_running,
            max_parked=max_parked,
            version=version,
        )
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrivals: dict[Sampled, asyncio.Event] = {}
        self._drained: list[Callable[[], None]] = []
        """What to do once no row runs; only the thread touches it."""
        self._promises: set[asyncio.Future[None]] = set()
        self._paused = False
        self._failure: Exception | None = None

    # ----------------------------------------------------------------- life
    async def start(self) -> None:
        """Start the thread; requests are answered on the loop that called this."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="tugline-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End every request with finish ``abort`` and stop the thread; may be called twice."""
        if self._thread is None:
            return
        if not self.down:
            await self.abort([])
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self._thread = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ----------------------------------------------------------------- for callers
    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._batch.version

    @property
    def down(self) -> bool:
        """Whether the thread has failed or was stopped."""
        return self._failure is not None or self._thread is None

    @property
    def paused(self) -> bool:
        """Whether new requests are held until `resume`."""
        return self._paused

    def stats(self) -> Stats:
        """A snapshot of the counters."""
        return self._batch.stats()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Sample an answer. Closing the iterator aborts the request within one step.

        Raises `RequestError` before the first chunk, `EngineError` when the engine is down.
        """
        check(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        stops = frozenset(request.stop_ids) | (frozenset() if request.ignore_eos else self.eos_ids)
        room = self.max_model_len - len(request.prompt_ids)
        one = Sampled(request, limit=min(request.max_tokens, room), stops=stops)
        arrival = self._arrivals[one] = asyncio.Event()
        told = 0
        try:
            self._order(lambda: self._batch.add(one))
            while True:
                await arrival.wait()
                arrival.clear()
                self._raise_if_down()
                chunk = _chunk_since(one, told)
                told += len(chunk.ids)
                yield chunk
                if chunk.finish:
                    return
        finally:
            del self._arrivals[one]
            if one.finish is None:
                self._orders.put(lambda: self._batch.cancel([one]))

    async def score(self, ids: Ids, temperature: float) -> Logprobs:
        """How likely each id is after those before it, without the first; shape ``(n - 1,)``.

        Computed between two steps, while nobody else is served.
        """
        found: list[Logprobs] = []
        await self._do(lambda: found.append(score(self._model, ids, temperature)))
        return found[0]

    async def swap(
        self, weights: Mapping[str, torch.Tensor], version: int, mode: Mode = "wait"
    ) -> None:
        """Put new weights in between two steps; returns when they are in use.

        All cached KV is forgotten. Rows that run on (``keep``) keep their own old KV, as real
        engines do, and their answer gets a new version span. Raises `UsageError`, with the old
        weights in place, when names or shapes do not fit, or when ``wait`` would wait for ever.
        """
        if mode == "wait" and self._batch.frozen:
            msg = (
                "swap(mode='wait') while paused with 'keep' would never end: use 'keep' or 'abort'"
            )
            raise UsageError(msg)
        await self._do(lambda: self._batch.swap(weights, version), mode)

    async def pause(self, mode: Mode = "keep") -> None:
        """Stop, and hold new requests until `resume`; ``wait`` returns when all have finished."""

        def pause() -> None:
            self._paused = True
            self._batch.frozen = mode == "keep"

        await self._do(pause, mode)

    async def resume(self) -> None:
        """Go on after `pause`."""

        def resume() -> None:
            self._paused = self._batch.frozen = False

        await self._do(resume)

    async def abort(self, ids: Sequence[str]) -> int:
        """End requests by id, all when `ids` is empty; returns how many there were."""
        found: list[int] = []

        def abort() -> None:
            known = (*self._batch.running, *self._batch.waiting)
            doomed = [one for one in known if not ids or one.request.id in ids]
            found.append(len(doomed))
            self._batch.cancel(doomed)

        await self._do(abort)
        return found[0]

    # ----------------------------------------------------------------- orders to the thread
    def _raise_if_down(self) -> None:
        if self._failure is not None:
            msg = f"the engine is down: {type(self._failure).__name__}: {self._failure}"
            raise EngineError(msg, status=500) from self._failure
        if self._thread is None:
            msg = "the engine is not running: call start() or use 'async with'"
            raise EngineError(msg, status=503)

    def _order(self, order: Callable[[], None]) -> None:
        self._raise_if_down()
        self._orders.put(order)

    async def _do(self, action: Callable[[], None], mode: Mode = "keep") -> None:
        """Let the thread do `action` and wait for it: now, once drained, or after an abort."""
        done = asyncio.get_running_loop().create_future()
        self._promises.add(done)
        done.add_done_callback(self._promises.discard)

        def act() -> None:
            try:
                action()
            except UsageError as error:
                self._tell(_reject, done, error)
            else:
                self._tell(_resolve, done)

        def order() -> None:
            if mode == "wait":
                self._drained.append(act)
                return
            if mode == "abort":
                self._batch.cancel(list(self._batch.running))
            act()

        self._order(order)
        await done

    # ----------------------------------------------------------------- in the thread
    def _work(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while self._take_orders():
                self._batch.step()
                self._post()
        except Exception as error:  # noqa: BLE001 - whoever waits must hear that the thread died
            self._tell(self._fail, error)

    def _take_orders(self) -> bool:
        """Do what was ordered, waiting while there is nothing else to do; False to stop."""
        while True:
            if not self._batch.running:
                for act in self._drained:
                    act()
                self._drained.clear()
            self._batch.held = self._paused or bool(self._drained)
            self._post()
            try:
                order = self._orders.get(block=self._batch.idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _post(self) -> None:
        told = [one for one in self._batch.take_news() if one.request.stream or one.finish]
        if told:
            self._tell(self._arrive, told)

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # ----------------------------------------------------------------- back on the loop
    def _arrive(self, told: list[Sampled]) -> None:
        for one in told:
            if arrival := self._arrivals.get(one):
                arrival.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for arrival in self._arrivals.values():
            arrival.set()
        for promise in [*self._promises]:
            _reject(promise, error)


def _resolve(promise: asyncio.Future[None]) -> None:
    if not promise.done():
        promise.set_result(None)


def _reject(promise: asyncio.Future[None], error: Exception) -> None:
    if not promise.done():
        promise.set_exception(error)


def _chunk_since(one: Sampled, start: int) -> Chunk:
    """What was sampled from `start` on. The arrays are views: their part is never written again."""
    finish = one.finish  # before the count: once there is a finish, the count is final
    end = one.count
    bounds = [*one.versions, (end, 0)]
    spans = tuple(
        VersionSpan(version, max(begin, start), min(bounds[index + 1][0], end))
        for index, (begin, version) in enumerate(bounds[:-1])
        if begin < end and bounds[index + 1][0] > start
    )
    return Chunk(
        ids=one.ids[one.prompt_len + start : one.prompt_len + end],
        logprobs=one.logprobs[start:end],
        versions=spans,
        finish=finish,
        stop_id=one.stop_id if finish else None,
    )
