"""The embedded engine: a thread that owns a Hugging Face model, used from an event loop.

Requests, aborts and weight swaps are sent to the thread through one queue and take effect between
two steps. Sampled tokens are returned in one call per step, for any number of requests.

Invariants: I1 (see `tugline.inference.batch`), I3 (if the thread fails, every request fails with
its error; no wait is unbounded).
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import torch
from transformers import PreTrainedModel

from tugline.errors import EngineError, UsageError
from tugline.inference.base import EngineStats, GenerateRequest, SampledChunk, check
from tugline.inference.batch import Batch
from tugline.inference.sampling import score
from tugline.inference.sequence import ChunkReader
from tugline.inference.sequence import Sequence as Sampled
from tugline.protocol import PauseMode
from tugline.types import Ids, Logprobs

T = TypeVar("T")
CLOSE_S = 30.0
"""Maximum seconds to wait for the thread's current step when closing."""


class Engine:
    """Batched generation with KV reuse; see `tugline.inference.base.GenerationEngine`.

    Use as ``async with Engine(model, ...) as engine``. The engine takes ownership of the model: it
    stays on its device, is put in evaluation mode and is only changed by `swap`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: Iterable[int],
        max_model_len: int,
        max_running: int = 32,
        max_parked: int = 64,
        threads: int | None = None,
    ) -> None:
        """`threads` is the number of torch's CPU threads; None: unchanged (1 suits tiny models)."""
        self.max_model_len = max_model_len
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.eos_ids = frozenset(eos_ids)
        self._threads = threads
        self._model = model.train(mode=False)
        self._batch = Batch(
            self._model, max_model_len=max_model_len, max_running=max_running, max_parked=max_parked
        )
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeups: dict[Sampled, asyncio.Event] = {}
        self._when_drained: list[Callable[[], None]] = []
        """Actions to run once no row is running; used by the thread only."""
        self._pending: set[Future[Any]] = set()
        self._failure: Exception | None = None

    # ----------------------------------------------------------------- start and stop
    async def __aenter__(self) -> Self:
        """Start the thread; requests are answered on the current event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="tugline-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """End every request with finish ``abort`` and stop the thread."""
        if self._thread is None:
            return
        if not self.down:
            await self.abort([])
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self._thread = None

    # ----------------------------------------------------------------- for callers
    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._batch.version

    @property
    def down(self) -> bool:
        """Whether the thread has failed or was stopped."""
        return self._failure is not None or self._thread is None

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        return self._batch.stats()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[SampledChunk, None]:
        """Sample an answer. Closing the iterator aborts the request within one step.

        Raises `RequestError` before the first chunk, `EngineError` when the engine is down.
        """
        check(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        stops = frozenset(request.stop_ids) | (frozenset() if request.ignore_eos else self.eos_ids)
        window_left = self.max_model_len - len(request.prompt_ids)
        sampled = Sampled(request, limit=min(request.max_tokens, window_left), stops=stops)
        wakeup = self._wakeups[sampled] = asyncio.Event()
        reader = ChunkReader(sampled)
        try:
            self._submit(lambda: self._batch.waiting.append(sampled))
            while True:
                await wakeup.wait()
                wakeup.clear()
                self._raise_if_down()
                for chunk in reader.take():
                    yield chunk
                    if chunk.finish:
                        return
        finally:
            del self._wakeups[sampled]
            if sampled.finish is None:
                self._commands.put(lambda: self._batch.cancel([sampled]))

    async def score(self, ids: Ids, temperature: float) -> Logprobs:
        """Return the log probability of each id but the first, shape ``(n - 1,)``.

        It is computed between two steps; no other request makes progress during that time.
        """
        return await self._run_in_thread(lambda: score(self._model, ids, temperature))

    async def swap(
        self, weights: Mapping[str, torch.Tensor], version: int, mode: PauseMode = PauseMode.WAIT
    ) -> None:
        """Replace the weights between two steps, and return when they are in use.

        New requests are held meanwhile. Running requests finish first (``wait``), end with the
        tokens sampled so far (``abort``) or continue (``keep``): their context is recomputed under
        the new weights, and their answer gets a new version span. All cached KV is dropped. Raises
        `UsageError`, with the old weights in place, if names or shapes do not match.
        """
        await self._run_in_thread(lambda: self._batch.swap(weights, version), mode)

    async def abort(self, ids: Sequence[str]) -> int:
        """Abort requests by id, or all if `ids` is empty, and return their number."""

        def abort() -> int:
            pending = (*self._batch.running, *self._batch.waiting)
            matching = [each for each in pending if not ids or each.request.id in ids]
            self._batch.cancel(matching)
            return len(matching)

        return await self._run_in_thread(abort)

    # ----------------------------------------------------------------- commands for the thread
    def _raise_if_down(self) -> None:
        if self._failure is not None:
            msg = f"the engine has failed: {type(self._failure).__name__}: {self._failure}"
            raise EngineError(msg, status=500) from self._failure
        if self._thread is None:
            raise EngineError("the engine is not running: enter it with 'async with'", status=503)

    def _submit(self, command: Callable[[], None]) -> None:
        self._raise_if_down()
        self._commands.put(command)

    async def _run_in_thread(self, action: Callable[[], T], mode: PauseMode = PauseMode.KEEP) -> T:
        """Run `action` in the thread and wait for it; `mode` is for running requests."""
        done = Future[T]()
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)

        def act() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(action())
            except UsageError as error:
                done.set_exception(error)

        def command() -> None:
            if mode == PauseMode.WAIT:
                self._when_drained.append(act)
                return
            if mode == PauseMode.ABORT:
                self._batch.cancel(list(self._batch.running))
            act()

        self._submit(command)
        return await asyncio.wrap_future(done)

    # ----------------------------------------------------------------- in the thread
    def _work(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while self._take_commands():
                self._batch.step()
                self._publish()
        except Exception as error:  # noqa: BLE001 - every waiting request must fail with this error
            self._call_on_loop(self._fail, error)

    def _take_commands(self) -> bool:
        """Run queued commands, blocking while the batch is idle; False to stop."""
        while True:
            if not self._batch.running:
                for act in self._when_drained:
                    act()
                self._when_drained.clear()
            self._batch.admission_paused = bool(self._when_drained)
            self._publish()
            try:
                command = self._commands.get(block=self._batch.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _publish(self) -> None:
        updated = [s for s in self._batch.take_updates() if s.finish or s.is_due]
        if updated:
            self._call_on_loop(self._wake, updated)

    def _call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    # ----------------------------------------------------------------- back on the loop
    def _wake(self, updated: list[Sampled]) -> None:
        for sequence in updated:
            if wakeup := self._wakeups.get(sequence):
                wakeup.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for wakeup in self._wakeups.values():
            wakeup.set()
        for future in [*self._pending]:
            future.set_exception(error)
