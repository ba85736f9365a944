"""Load new weights into a running engine: pause, load, resume.

Running answers are kept, aborted with the tokens they have, or waited for. On vLLM and SGLang a
kept answer continues under the new weights over a recomputed context, and its tokens carry both
versions, so a later forward pass finds the same numbers (I1). No engine drops cached context by
itself, so it is always requested: an answer over another policy's cache is off by nats.
No torch here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import aiohttp
import msgspec

from tugline.errors import EngineError

Running = Literal["keep", "abort", "wait"]
"""How answers that are being sampled are treated."""
_TIMEOUT_S = 600.0


class WeightUpdater(Protocol):
    """Changes the weights of one engine."""

    async def pause(self, running: Running = "keep") -> None:
        """Hold new requests; returns once nothing is sampled any more."""
        ...

    async def load(self, folder: Path, version: int) -> None:
        """Serve the model in `folder`, which the engine can read, as `version`."""
        ...

    async def resume(self) -> None:
        """Admit requests again."""
        ...


class _RemoteWeightUpdater:
    """Control routes of an engine behind HTTP; use it in an ``async with``."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _post(self, path: str, body: object = None) -> dict[str, Any]:
        """Post to a route and return its reply. Raises `EngineError` unless it reports success."""
        if self._client is None:
            msg = "the engine's connection is not open; enter it with `async with`"
            raise EngineError(msg)
        data = msgspec.json.encode({} if body is None else body)
        headers = {"content-type": "application/json"}
        try:
            async with self._client.post(self.url + path, data=data, headers=headers) as response:
                status, text = response.status, await response.read()
            reply = msgspec.json.decode(text) if text.startswith(b"{") else {}
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            msg = f"the engine at {self.url} did not answer {path}: {error or type(error).__name__}"
            raise EngineError(msg) from error
        if status != 200 or reply.get("success") is False:
            detail = text[:200].decode("utf-8", "replace")
            msg = f"the engine at {self.url} answered {path} with {status}: {detail}"
            raise EngineError(msg, status=status)
        return dict(reply)


class VllmWeightUpdater(_RemoteWeightUpdater):
    """A vLLM server, started with ``VLLM_SERVER_DEV_MODE=1``."""

    async def pause(self, running: Running = "keep") -> None:
        """Hold new requests; running ones freeze, end or finish."""
        await self._post(f"/pause?mode={running}")

    async def load(self, folder: Path, version: int) -> None:
        """Reload, recompute running contexts, and set the version."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post("/collective_rpc", reload)
        await self._post("/reset_prefix_cache?reset_running_requests=true")
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> None:
        """Admit requests again."""
        await self._post("/resume")


class SglangWeightUpdater(_RemoteWeightUpdater):
    """An SGLang server."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._waits = False

    async def pause(self, running: Running = "keep") -> None:
        """Hold new requests; running ones go back to the queue, or end.

        With ``wait``, `load` itself waits until nothing runs.
        """
        self._waits = running == "wait"
        if not self._waits:
            mode = "retract" if running == "keep" else "abort"
            await self._post("/pause_generation", {"mode": mode})

    async def load(self, folder: Path, version: int) -> None:
        """Reload, drop every cached context, and set the version."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        await self._post("/update_weights_from_disk", body)

    async def resume(self) -> None:
        """Admit requests again."""
        if not self._waits:
            await self._post("/continue_generation")


class EmbeddedWeightUpdater:
    """The embedded engine, which lives in the trainer's own process."""

    def __init__(self, swap: Callable[[Path, int, Running], Awaitable[None]]) -> None:
        """`swap` reads a folder and hands it to `Engine.swap`, which pauses and resumes itself."""
        self._swap = swap
        self._running: Running = "keep"

    async def pause(self, running: Running = "keep") -> None:
        """Store the mode for `load`; the engine pauses between two steps."""
        self._running = running

    async def load(self, folder: Path, version: int) -> None:
        """Swap the weights between two steps; older cached contexts are dropped."""
        await self._swap(folder, version, self._running)

    async def resume(self) -> None:
        """Do nothing: `pause` held nothing."""
