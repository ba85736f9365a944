"""Load new weights into running engines: pause, load, resume, verify, announce.

Running answers are kept, aborted with the tokens sampled so far, or waited for. On vLLM and SGLang
a kept answer continues under the new weights over a recomputed context, and its tokens carry both
versions, so a later forward pass gives the same log probabilities (I1). Engines do not drop cached
context by themselves, so it is always requested: log probabilities over another policy's cache are
wrong by nats.

`Publisher` does this for all replicas behind the gateways of a server. Each step has a deadline,
and errors name the replica (I3). If a step fails, every replica loads the previous version again;
if that fails as well, model calls stay held, so that nothing is sampled from different weights
(I1). This module does not import torch.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from tugline.chat.dialects.decoding import decode_object
from tugline.errors import EngineError, TuglineError, UsageError
from tugline.protocol import Barrier, PauseMode
from tugline.recording.verify.engine import Scorer, connect_scorer
from tugline.trainers.proof import Probe, Proof, measure_precision, prove
from tugline.trainers.tensor_files import read_places
from tugline.web.engine_http import EngineHttp

T = TypeVar("T")
_TIMEOUT_S = 600.0
_DETAIL = 500
"""Maximum bytes of an engine's reply in an error."""
ADAPTER = "tugline-adapter"
"""Model name of an adapter that is published alone."""

Update = Callable[[Path, int, PauseMode], Awaitable[None]]
"""Function that loads a model, or on vLLM an adapter, from a folder that the engine can read."""


class RemoteWeightUpdater(EngineHttp, ABC):
    """Client of an engine's HTTP control routes; use it with ``async with``."""

    @abstractmethod
    async def pause(self, running: PauseMode = PauseMode.KEEP) -> None:
        """Hold new requests, and return once no request is being sampled."""

    @abstractmethod
    async def load(self, folder: Path, version: int) -> None:
        """Serve the weights in `folder` as `version`."""

    @abstractmethod
    async def resume(self) -> None:
        """Admit requests again."""

    async def update(self, folder: Path, version: int, running: PauseMode) -> None:
        """Pause, load new weights, and resume."""
        await self.pause(running)
        try:
            await self.load(folder, version)
        finally:
            await self.resume()

    async def _post(self, path: str, body: object = None) -> dict[str, Any]:
        """Post to a route and return its reply. Raises `EngineError` unless it reports success."""
        data = msgspec.json.encode({} if body is None else body)
        status, text = await self.post(path, data, _TIMEOUT_S)
        reply = decode_object(text.decode("utf-8", "replace")) or {}
        if status != 200 or reply.get("success") is False:
            detail = text[:_DETAIL].decode("utf-8", "replace")
            msg = f"the engine at {self.url} answered {path} with {status}: {detail}"
            raise EngineError(msg, status=status)
        return reply

    async def _reload(self, path: str, body: object, folder: Path) -> None:
        """Make the engine load `folder`; if it refuses, the error names tensors of the folder."""
        try:
            await self._post(path, body)
        except EngineError as error:
            if error.status is None:
                raise
            msg = f"{error}{_name_tensors(folder, str(error))}"
            raise EngineError(msg, status=error.status) from error


class VllmWeightUpdater(RemoteWeightUpdater):
    """A vLLM server, started with ``VLLM_SERVER_DEV_MODE=1``."""

    async def pause(self, running: PauseMode = PauseMode.KEEP) -> None:
        """Hold new requests; running requests are frozen, aborted or finished."""
        await self._post(f"/pause?mode={running}")

    async def load(self, folder: Path, version: int) -> None:
        """Reload the weights, recompute running contexts, and set the version."""
        if (folder / "adapter_config.json").exists():
            await self._load_adapter(folder)
        else:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._reload("/collective_rpc", reload, folder)
        await self._post("/reset_prefix_cache?reset_running_requests=true")
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def _load_adapter(self, folder: Path) -> None:
        """Replace the adapter; running requests would continue with the old one."""
        with contextlib.suppress(EngineError):  # none is loaded, such as after a start
            await self._post("/v1/unload_lora_adapter", {"lora_name": ADAPTER})
        try:
            body = {"lora_name": ADAPTER, "lora_path": str(folder)}
            await self._post("/v1/load_lora_adapter", body)
        except EngineError as error:
            msg = f"{error}; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and a"
            msg += " --max-lora-rank of at least lora.rank"
            raise EngineError(msg, status=error.status) from error

    async def resume(self) -> None:
        """Admit requests again."""
        await self._post("/resume")


class SglangWeightUpdater(RemoteWeightUpdater):
    """An SGLang server."""

    _waits = False

    async def pause(self, running: PauseMode = PauseMode.KEEP) -> None:
        """Hold new requests; running requests are queued again, or aborted.

        With ``wait``, `load` itself waits until no request is running.
        """
        self._waits = running == PauseMode.WAIT
        if not self._waits:
            mode = "retract" if running == PauseMode.KEEP else "abort"
            await self._post("/pause_generation", {"mode": mode})

    async def load(self, folder: Path, version: int) -> None:
        """Reload the weights, drop all cached context, and set the version."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        await self._reload("/update_weights_from_disk", body, folder)

    async def resume(self) -> None:
        """Admit requests again."""
        if not self._waits:
            await self._post("/continue_generation")


def _name_tensors(folder: Path, reply: str) -> str:
    """Return the tensors of `folder` that a reply mentions, by default the first ones."""
    try:
        known = sorted(read_places(folder))
    except (OSError, ValueError):  # what is wrong with the folder is in the reply
        return ""
    mentioned = [name for name in known if name in reply]
    if mentioned:
        return f"; it refused {', '.join(mentioned)} of {folder}"
    return f"; {folder} has {len(known)} tensors: {', '.join(known[:3])} ..."


_REMOTE = {"vllm": VllmWeightUpdater, "sglang": SglangWeightUpdater}


async def make_updater(url: str, key: str = "") -> RemoteWeightUpdater:
    """Return the updater of the engine at `url`. Raises `EngineError` unless vLLM or SGLang."""
    async with EngineHttp(url, key) as engine:
        owner = (await engine.card(None)).owned_by
    if owner not in _REMOTE:
        msg = f"the engine at {url} is {owner!r}, but only vLLM and SGLang accept new weights"
        raise EngineError(msg)
    return _REMOTE[owner](url, key)


# --------------------------------------------------------------------------- all replicas
class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Report of publishing a version."""

    version: int
    seconds: float
    """Seconds from the pause to the resumption of model calls."""
    max_abs_dlogprob: float | None = None
    """Largest difference of the probe's log probabilities between trainer and any replica, nats."""
    moved: float | None = None
    """Largest change of the probe's log probabilities by the update, computed by the trainer."""
    arrived: float | None = None
    """Smallest share of that change in any replica: 1 for the new weights, 0 for the old; None if
    the change is smaller than the difference between engine and trainer."""


class WeightControl(Protocol):
    """Holds and resumes the model calls of all gateways of a server, and announces weights."""

    async def pause(self, mode: PauseMode, *, within_s: float) -> Barrier:
        """Pause model calls; returns when they are paused, or after `within_s`."""

    async def announce(self, version: int) -> Barrier:
        """Announce new weights; returns when the nodes have confirmed."""

    async def resume(self) -> object:
        """Resume model calls."""


@dataclass(eq=False)
class Publisher:
    """Publishes versions to every replica of a server."""

    weights: WeightControl
    updaters: Mapping[str, Update]
    """Update function of each replica, by URL."""
    mode: PauseMode
    within_s: float
    """Timeout in seconds of the pause, and of each replica's load and verification."""
    connect: Callable[[str], AbstractAsyncContextManager[Scorer]] = connect_scorer
    """Connects to the replica at a URL, to score with the published weights."""

    def __post_init__(self) -> None:
        self._alike = True
        """Whether all replicas are known to serve the same weights."""
        self._published: tuple[Path, int] | None = None
        """Folder and version that every replica loaded last."""
        self._precision: dict[str, float] = {}
        """Newest result of `measure_precision` for each replica."""

    async def publish(self, folder: Path, version: int, probe: Probe | None = None) -> Publication:
        """Load `folder` into every replica as `version`; model calls are held meanwhile.

        Raises an `EngineError` that names the replica, or the nodes that did not pause in time.
        Model calls stay held if the replicas may then have different weights, until a later
        publication succeeds.
        """
        began = time.monotonic()
        try:
            barrier = await self.weights.pause(self.mode, within_s=self.within_s)
            _raise_if_incomplete(barrier, "paused", self.within_s)
            if probe is not None and self._alike:
                await _finish_all([self._measure(url, probe) for url in self.updaters])
            try:
                proofs = await self._replace(folder, version, probe)
            except TuglineError as error:
                await self._roll_back(probe, error)
                raise
        finally:
            if self._alike:
                await self.weights.resume()
        shares = [proof.share for proof in proofs if proof.share is not None]
        return Publication(
            version=version,
            seconds=time.monotonic() - began,
            max_abs_dlogprob=max((proof.max_abs for proof in proofs), default=None),
            moved=float(np.abs(probe.after - probe.before).max()) if probe else None,
            arrived=min(shares, default=None),
        )

    async def _replace(self, folder: Path, version: int, probe: Probe | None) -> list[Proof]:
        """Load a version into every replica, prove and announce it; return any proofs."""
        self._alike = False
        await _finish_all([self._load(url, folder, version) for url in self.updaters])
        proofs = await _finish_all([self._prove(url, version, probe) for url in self.updaters])
        _raise_if_incomplete(await self.weights.announce(version), "informed", 60)
        self._published = (folder, version)
        self._alike = True
        return [proof for proof in proofs if proof is not None]

    async def _roll_back(self, probe: Probe | None, error: TuglineError) -> None:
        """Load the previous version into every replica. Raises `EngineError` if this fails."""
        held = "the replicas may have different weights, so model calls stay paused"
        status = error.status if isinstance(error, EngineError) else None
        if self._published is None or not self._published[0].is_dir():  # none, or not from a folder
            raise EngineError(f"{error}; {held}", status=status) from error
        try:
            await self._replace(*self._published, probe and probe.swap())
        except TuglineError as again:
            msg = f"{error}; the previous version cannot be restored ({again}): {held}"
            raise EngineError(msg, status=status) from error

    async def find_outdated(self, version: int) -> list[str]:
        """Return the URLs of replicas with another version, such as after a restart.

        Raises `EngineError` if a replica does not answer.
        """
        versions: dict[str, int | None] = {}
        for url in self.updaters:
            try:
                async with self.connect(url) as scorer:
                    versions[url] = scorer.version
            except UsageError:  # no adapter is loaded, so there is no version
                versions[url] = -1
        return [url for url, other in versions.items() if other not in {None, version}]

    async def _load(self, url: str, folder: Path, version: int) -> None:
        try:
            async with asyncio.timeout(self.within_s):
                await self.updaters[url](folder, version, self.mode)
        except TimeoutError as error:
            msg = f"the replica {url} did not load version {version} within {self.within_s:g} s"
            raise EngineError(msg) from error

    async def _measure(self, url: str, probe: Probe) -> None:
        """Measure how close a replica is to the trainer, unless it was restarted."""
        with contextlib.suppress(TimeoutError, TuglineError):  # loading will report it
            async with asyncio.timeout(self.within_s), self.connect(url) as scorer:
                if self._published is None or scorer.version in {None, self._published[1]}:
                    self._precision[url] = await measure_precision(scorer, probe)

    async def _prove(self, url: str, version: int, probe: Probe | None) -> Proof | None:
        """Prove that a replica serves a version; without a probe, that it reports it."""
        try:
            async with asyncio.timeout(self.within_s), self.connect(url) as scorer:
                if scorer.version not in {None, version}:
                    msg = f"the replica {url} has version {scorer.version}, must have {version}"
                    raise EngineError(msg)
                if probe is None:
                    return None
                return await prove(scorer, version, probe, self._precision.get(url))
        except TimeoutError as error:
            msg = f"the replica {url} did not score a probe within {self.within_s:g} s"
            raise EngineError(msg) from error


async def _finish_all(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run steps at the same time, and wait for all of them before the first error is raised."""
    done = await asyncio.gather(*steps, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]


def _raise_if_incomplete(barrier: Barrier, state: str, within_s: float) -> None:
    if barrier.missing:
        raise EngineError(f"nodes not {state} within {within_s:g} s: {', '.join(barrier.missing)}")
