"""Connect to an engine: its replicas, and the chat template for exact mode.

Engines take minutes to load and are restarted under running nodes, so nodes wait for an engine that
does not answer. An engine that lacks a required feature is an error at once, with the flag to add
(I1).
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tugline import log
from tugline.chat.templates.base import CONFIGS
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import EngineError, UsageError
from tugline.gateway.policy import CallSettings
from tugline.gateway.probe import connect
from tugline.gateway.replicas import Upstream
from tugline.inference.base import GenerationEngine
from tugline.inference.load import load
from tugline.inference.server import create_app
from tugline.launch.settings import EngineSettings
from tugline.recording.folder import tokenizer_name
from tugline.recording.tokenizer_file import save_tokenizer
from tugline.types import Mode
from tugline.web.serve import serve

NAME = "tugline-embedded"
_RETRY_S = 2.0
_log = log.get("launch.engine")


@dataclass(frozen=True, slots=True)
class EngineConnection:
    """Connection to an engine with all required features."""

    urls: tuple[str, ...]
    upstream: Upstream
    rendering: Rendering | None
    """Renderer of prompts in exact mode; None in other modes."""


@contextlib.asynccontextmanager
async def open_engine(settings: EngineSettings, *, slots: int) -> AsyncIterator[EngineConnection]:
    """Connect to the engine at `settings.urls`, or start one in this process for `slots` agents.

    Raises `UsageError` for an unusable engine, `EngineError` if it does not answer in time.
    """
    if settings.urls:
        yield await _connect(settings)
        return
    if settings.model is None:
        msg = "no engine is configured; give its URL with --engine, or a model folder with --model"
        raise UsageError(msg)
    model, tokenizer, eos_ids = await asyncio.to_thread(load, settings.model)
    from tugline.inference.engine import Engine  # noqa: PLC0415 - needs torch, checked by `load`

    config = model.config.get_text_config()
    rendering = make_rendering(settings, tokenizer, str(config.model_type))
    window = int(config.max_position_embeddings)
    model = model.float()  # type: ignore[no-untyped-call]
    async with (
        Engine(
            model, eos_ids=eos_ids, max_model_len=window, max_running=2 * slots, threads=1
        ) as generator,
        serve_engine(generator, rendering) as connection,
    ):
        yield connection


@contextlib.asynccontextmanager
async def serve_engine(
    generator: GenerationEngine, rendering: Rendering, *, name: str = NAME
) -> AsyncIterator[EngineConnection]:
    """Serve an engine of this process at its own URL, in exact mode."""
    async with serve(create_app(generator, model_name=name)) as url:
        yield EngineConnection((url,), await connect([url], mode=Mode.EXACT), rendering)


def share_engine(
    connection: EngineConnection, settings: EngineSettings, folder: Path
) -> EngineSettings:
    """Return settings by which other processes connect to the same engine in the same way.

    The tokenizer's file is written to `folder`.
    """
    tokenizer = renderer = None
    if connection.rendering is not None:
        renderer = connection.rendering.name
        tokenizer = folder / tokenizer_name(save_tokenizer(connection.rendering.tokenizer, folder))
    return replace(
        settings,
        urls=connection.urls,
        model=None,
        served_name=connection.upstream.name,
        mode=connection.upstream.wire.mode,
        tokenizer=tokenizer,
        renderer=renderer,
    )


async def _connect(settings: EngineSettings) -> EngineConnection:
    mode = settings.mode or (Mode.OBSERVED if settings.tokenizer is None else Mode.EXACT)
    if mode is Mode.EXACT and settings.tokenizer is None:
        msg = "engine.mode is 'exact', which needs engine.tokenizer, the model's tokenizer.json"
        raise UsageError(msg)
    upstream = await _wait_for_replicas(settings, mode)
    rendering = None
    if mode is Mode.EXACT and settings.tokenizer is not None:
        tokenizer = await asyncio.to_thread(Tokenizer.load, settings.tokenizer)
        rendering = make_rendering(settings, tokenizer, upstream.name or "")
    return EngineConnection(settings.urls, upstream, rendering)


async def _wait_for_replicas(settings: EngineSettings, mode: Mode) -> Upstream:
    """Connect to the replicas once all of them answer."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.wait_s
    key = read_api_key(settings)
    retried = False
    while True:
        try:
            calls = CallSettings(silent_s=settings.silent_s)
            return await connect(
                settings.urls, mode=mode, model=settings.served_name, settings=calls, key=key
            )
        except UsageError as error:
            if retried:
                raise
            retried = True  # an engine that is restarting may also look unusable
            _log.warning("connecting to the engine again", error=str(error))
        except EngineError as error:
            if error.status is not None or loop.time() > deadline:
                raise
            _log.warning("waiting for the engine", error=str(error))
        await asyncio.sleep(_RETRY_S)


def read_api_key(settings: EngineSettings) -> str:
    """Read the engine's API key from the environment; empty if it needs none.

    Raises `UsageError`.
    """
    name = settings.api_key_env
    key = os.environ.get(name, "").strip() if name else ""
    if name and not key:
        msg = f"engine.api_key_env (--api-key-env): the environment variable {name} is not set"
        raise UsageError(msg)
    return key


def make_rendering(settings: EngineSettings, tokenizer: Tokenizer, model: str) -> Rendering:
    """Create the rendering with the configured template, or with the known template of `model`."""
    options = {
        "thinking_retention": settings.thinking_retention,
        "special_tokens_in_contents": settings.special_tokens_in_contents,
    }
    name = settings.renderer or (model if model in CONFIGS else None)
    if name is not None:
        return Rendering(tokenizer, name, **options)
    known = Rendering.for_model(tokenizer, model, **options)
    if known is None:
        raise UsageError(
            f"no chat template is known for {model!r}: set engine.renderer"
            f" (--renderer) to one of {', '.join(sorted(CONFIGS))}"
        )
    return known
