"""A failed publication leaves no replicas with different weights behind that are sampled from."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.server import make_control
from tugline.errors import EngineError
from tugline.protocol import Barrier, PauseMode
from tugline.server.control import ControlPlane
from tugline.trainers.proof import Probe
from tugline.trainers.publish import Publisher, VllmWeightUpdater
from tugline.web.serve import serve

IDS = np.arange(5, 13, dtype=np.int32)
LOGPROBS = {name: np.linspace(-1, -2 - n, 7, dtype=np.float32) for n, name in enumerate("abc")}
"""Log probabilities of `IDS[1:]` under three sets of weights, which are folders' names."""


@dataclass
class Replica:
    """A server with the control routes of vLLM, and faults."""

    weights: str = "a"
    version: str = "0"
    refuses: set[str] = field(default_factory=set)
    """Folders that it refuses to load."""
    ignores: set[str] = field(default_factory=set)
    """Folders that it claims to have loaded, keeping its weights."""

    async def control(self, request: Request) -> Response:
        """Load weights, set the version, or do nothing."""
        body = await request.json()
        if request.url.path == "/collective_rpc":
            name = Path(body["kwargs"]["weights_path"]).name
            if name in self.refuses:
                return JSONResponse({"message": "out of memory"}, 500)
            self.weights = self.weights if name in self.ignores else name
        if request.url.path == "/update_weight_version":
            self.version = body["new_version"]
        if request.url.path == "/v1/completions":
            pairs = zip(body["prompt"][1:], LOGPROBS[self.weights].tolist(), strict=True)
            scored = [None, *({str(i): {"logprob": value}} for i, value in pairs)]
            return JSONResponse({"choices": [{"prompt_logprobs": scored}]})
        return JSONResponse({"success": True})

    async def describe(self, request: Request) -> Response:
        """The model, or the version of its weights."""
        if request.url.path == "/weight_info":
            return JSONResponse({"weight_version": self.version})
        return JSONResponse({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 100}]})


@dataclass
class Weights:
    """A control plane, and its state after the last call."""

    control: ControlPlane
    state: Barrier | None = None

    async def pause(self, mode: PauseMode, *, within_s: float) -> Barrier:
        """Hold model calls."""
        self.state = await self.control.pause(mode, within_s=within_s)
        return self.state

    async def announce(self, version: int) -> Barrier:
        """Announce a version."""
        self.state = await self.control.announce(version)
        return self.state

    async def resume(self) -> Barrier:
        """Release model calls."""
        self.state = await self.control.resume()
        return self.state


@dataclass
class Bench:
    """Two replicas and their publisher."""

    replicas: list[Replica]
    publisher: Publisher
    weights: Weights
    folder: Path

    async def publish(self, name: str, version: int, before: str = "a") -> None:
        """Publish a folder's weights, with a probe."""
        probe = Probe(IDS, LOGPROBS[before], LOGPROBS[name])
        await self.publisher.publish(self.folder / name, version, probe)

    @property
    def served(self) -> set[tuple[str, str]]:
        """Weights and versions of the replicas."""
        return {(replica.weights, replica.version) for replica in self.replicas}

    @property
    def held(self) -> bool:
        """Whether model calls are held."""
        assert self.weights.state is not None
        return self.weights.state.paused is not None


@contextlib.asynccontextmanager
async def open_bench(folder: Path) -> AsyncIterator[Bench]:
    """Two replicas behind a server without nodes."""
    for name in LOGPROBS:
        (folder / name).mkdir()
    replicas = [Replica(), Replica()]
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(
            make_control(f"sqlite:{folder / 'server.db'}", folder)
        )
        updaters = {}
        for replica in replicas:
            routes = [
                Route("/{path:path}", replica.control, methods=["POST"]),
                Route("/{path:path}", replica.describe, methods=["GET"]),
            ]
            url = await stack.enter_async_context(serve(Starlette(routes=routes)))
            updater = await stack.enter_async_context(VllmWeightUpdater(url))
            updaters[url] = updater.update
        weights = Weights(control)
        publisher = Publisher(weights, updaters, PauseMode.WAIT, 5.0)  # type: ignore[arg-type]
        yield Bench(replicas, publisher, weights, folder)


FAULTS = pytest.mark.parametrize("fault", ["refuses", "ignores"], ids=["load", "proof"])


@FAULTS
@pytest.mark.parametrize("faulty", [0, 1])
async def test_a_failed_publication_restores_the_version_before(
    tmp_path: Path, fault: str, faulty: int
) -> None:
    """Every replica has the same weights, whose version is announced, and calls are released."""
    async with open_bench(tmp_path) as bench:
        await bench.publish("b", 1)
        getattr(bench.replicas[faulty], fault).add("c")
        with pytest.raises(EngineError, match=list(bench.publisher.updaters)[faulty]):
            await bench.publish("c", 2, before="b")
        assert bench.served == {("b", "1")}
        assert not bench.held
        assert bench.weights.state.version == 1
        getattr(bench.replicas[faulty], fault).clear()
        await bench.publish("c", 2, before="b")
        assert bench.served == {("c", "2")}
        assert not bench.held


@FAULTS
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
async def test_calls_stay_held_while_weights_differ(
    tmp_path: Path,
    fault: str,
    first: bool,  # noqa: FBT001
) -> None:
    """If no earlier version can be restored, calls stay held until a publication succeeds."""
    async with open_bench(tmp_path) as bench:
        if not first:
            await bench.publish("b", 1)
        before = "a" if first else "b"
        getattr(bench.replicas[1], fault).update("bc")
        bench.replicas[0].refuses.update("b")
        with pytest.raises(EngineError, match="model calls stay paused"):
            await bench.publish("c", 2, before=before)
        assert bench.held
        for replica in bench.replicas:
            replica.refuses.clear()
            replica.ignores.clear()
        await bench.publish("c", 2, before=before)
        assert bench.served == {("c", "2")}
        assert not bench.held


async def test_calls_are_released_if_nodes_did_not_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was loaded, so all replicas have the weights that they had."""
    async with open_bench(tmp_path) as bench:
        pause = bench.weights.pause

        async def incomplete(mode: PauseMode, *, within_s: float) -> Barrier:
            state = await pause(mode, within_s=within_s)
            return replace(state, missing=("node",))

        monkeypatch.setattr(bench.weights, "pause", incomplete)
        with pytest.raises(EngineError, match="nodes not paused"):
            await bench.publish("b", 1)
        assert bench.served == {("a", "0")}
        assert not bench.held
