"""Requests that update an engine's weights, their order, and their errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tugline.errors import EngineError
from tugline.trainers.publish import SglangWeightUpdater, VllmWeightUpdater
from tugline.web.serve import serve

FOLDER = Path("model")
REQUESTS = json.loads(Path(__file__).with_name("requests.json").read_text())
"""Paths and bodies, in order: for vLLM, its adapters, and each way of pausing SGLang."""


@asynccontextmanager
async def engine(
    *, fails: str = "", message: str = "cache is held"
) -> AsyncIterator[tuple[str, list[list[Any]]]]:
    """The address of a server, and its requests; that of the path `fails` has no success."""
    seen: list[list[Any]] = []

    async def control(request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        seen.append([path, await request.json()])
        return JSONResponse({"success": path != fails, "message": message})

    app = Starlette(routes=[Route("/{path:path}", control, methods=["POST"])])
    async with serve(app) as url:
        yield url, seen


async def test_vllm_requests_reset_its_caches() -> None:
    """In a pause vLLM reloads, resets prefix cache and running requests, and sets the version."""
    async with engine() as (url, seen), VllmWeightUpdater(url) as weights:
        await weights.pause()
        await weights.load(FOLDER, 7)
        await weights.resume()
    assert seen == REQUESTS["vllm"]


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an adapter."""
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir()
    (FOLDER / "adapter_config.json").touch()
    return FOLDER


async def test_vllm_replaces_an_adapter(adapter: Path) -> None:
    """The previous adapter is unloaded, if there is one."""
    not_loaded = "/v1/unload_lora_adapter"
    async with engine(fails=not_loaded) as (url, seen), VllmWeightUpdater(url) as weights:
        await weights.load(adapter, 7)
    assert seen == REQUESTS["adapter"]
    async with engine(fails="/v1/load_lora_adapter") as (url, _), VllmWeightUpdater(url) as weights:
        with pytest.raises(EngineError, match=r"start it with .*--enable-lora"):
            await weights.load(adapter, 7)


async def test_sglang_requests() -> None:
    """Running requests are retracted, aborted, or awaited, which needs no pause."""
    async with engine() as (url, seen), SglangWeightUpdater(url) as weights:
        for running in ("keep", "abort", "wait"):
            await weights.pause(running)
            await weights.load(FOLDER, 7)
            await weights.resume()
    assert seen == REQUESTS["sglang"]


async def test_failed_requests_are_errors() -> None:
    """A cache that is not reset, and an engine that does not answer, raise an error."""
    fails = "/reset_prefix_cache?reset_running_requests=true"
    async with engine(fails=fails) as (url, _), VllmWeightUpdater(url) as weights:
        with pytest.raises(EngineError, match="cache is held"):
            await weights.load(FOLDER, 7)
    async with SglangWeightUpdater("http://127.0.0.1:9") as weights:
        with pytest.raises(EngineError, match="did not answer /update_weights_from_disk"):
            await weights.load(FOLDER, 7)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("There is no parameter named 'model.b.weight'", "it refused model.b.weight of"),
        ("unknown names", "has 2 tensors: a.weight, model.b.weight"),
    ],
)
async def test_a_refused_model_is_an_error_that_names_its_tensors(
    tmp_path: Path, message: str, named: str
) -> None:
    """The error has the tensors that the engine mentions, or the first ones."""
    tensors = {name: torch.zeros(1) for name in ("a.weight", "model.b.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    for updater, path in (
        (VllmWeightUpdater, "/collective_rpc"),
        (SglangWeightUpdater, "/update_weights_from_disk"),
    ):
        async with engine(fails=path, message=message) as (url, _), updater(url) as weights:
            with pytest.raises(EngineError, match=f"{message}.*{named}"):
                await weights.load(tmp_path, 7)


async def test_a_failed_update_resumes_the_engine() -> None:
    """A failed update resumes the engine and raises EngineError."""
    async with engine(fails="/collective_rpc") as (url, seen), VllmWeightUpdater(url) as weights:
        with pytest.raises(EngineError, match="cache is held"):
            await weights.update(FOLDER, 7, "abort")
    assert [path for path, _ in seen][:2] == ["/pause?mode=abort", "/collective_rpc"]
    assert seen[-1] == ["/resume", {}]
