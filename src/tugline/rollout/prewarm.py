"""A box for the evaluator that is opened while the agent still runs.

It is opened empty and gets its files when it is asked for. Where runtimes do not keep sessions
apart, an agent could have put something into it meanwhile; a box that is not as it was when it was
opened is left alone, and the evaluator gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from tugline import log
from tugline.errors import SandboxError
from tugline.sandbox.base import Content, Sandbox

OpenBox = Callable[[], AbstractAsyncContextManager[Sandbox]]
_log = log.get("node")


class PrewarmedSandbox:
    """One box ahead; every further one is opened when it is asked for."""

    def __init__(self, open_box: OpenBox) -> None:
        self._open_box = open_box
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[tuple[Sandbox, object]] | None = None
        self._leave = asyncio.Event()

    def prepare(self, places: asyncio.Semaphore | None) -> None:
        """Begin to open it, unless all `places` for such boxes are taken."""
        if places is not None and places.locked():
            return
        self._ready = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(self._ready, places))

    @contextlib.asynccontextmanager
    async def open(self, files: Mapping[str, Content]) -> AsyncIterator[Sandbox]:
        """The box that was prepared, the first time and if it is still clean; else a new one."""
        box = await self._taken()
        try:
            if box is not None:
                await box.put(box.workdir, files)
                yield box
                return
        finally:
            if box is not None:
                await self.aclose()
        async with self._open_box() as box:
            await box.put(box.workdir, files)
            yield box

    async def aclose(self) -> None:
        """Close it, used or not."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._leave.set()
        if self._ready is not None and not self._ready.done():
            holder.cancel()
        await asyncio.wait({holder})
        if self._ready is not None and self._ready.done():
            self._ready.exception()  # nobody asked for it

    async def _taken(self) -> Sandbox | None:
        if self._holder is None or self._ready is None:
            return None
        ready, self._ready = self._ready, None
        try:
            box, as_opened = await ready
        except (SandboxError, OSError, TimeoutError) as error:
            _log.info("no warm box", error=str(error))
            return None
        if await asyncio.to_thread(_look, box) != as_opened:
            _log.warning("a box was touched before its use", workdir=str(box.workdir))
            return None
        return box

    async def _hold(
        self, ready: asyncio.Future[tuple[Sandbox, object]], places: asyncio.Semaphore | None
    ) -> None:
        # Entered and left by one task, as asynchronous context managers want it.
        async with places or contextlib.nullcontext():
            try:
                async with self._open_box() as box:
                    ready.set_result((box, await asyncio.to_thread(_look, box)))
                    await self._leave.wait()
            except Exception as error:  # noqa: BLE001 - told to whoever asks for the box
                if ready.done():
                    _log.warning("a box was not closed well", error=str(error))
                else:
                    ready.set_exception(error)


def _look(box: Sandbox) -> object:
    """How its folders are, where a box can tell; in others nobody can touch them."""
    look: Callable[[], object] | None = getattr(box, "look", None)
    return look() if look is not None else None
