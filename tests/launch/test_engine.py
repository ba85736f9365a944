"""Connecting to an engine: waiting for it, and checking its tokenizer and template."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from chaos.fleet import free_ports
from launch.engine import create_engine
from support.tokenizer import make_tokenizer
from tugline.errors import EngineError, UsageError
from tugline.launch.engine import open_engine
from tugline.launch.settings import EngineSettings
from tugline.types import Mode
from tugline.web.serve import serve


async def test_an_engine_that_still_loads_is_waited_for(tmp_path: Path) -> None:
    """An engine that starts after its node is used in exact mode with the configured template."""
    (tmp_path / "tokenizer.json").write_text(make_tokenizer().to_json())
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    settings = EngineSettings(urls=(url,), tokenizer=tmp_path, renderer="qwen3", wait_s=30)
    async with asyncio.timeout(60):
        connecting = asyncio.create_task(open_engine(settings, slots=1).__aenter__())
        await asyncio.sleep(0.5)
        assert not connecting.done()
        async with serve(create_engine("m"), port=port):
            connection = await connecting
            unknown = replace(settings, renderer=None)
            with pytest.raises(UsageError, match=r"template is known for 'm'.* qwen3"):
                await open_engine(unknown, slots=1).__aenter__()
    assert connection.upstream.wire.mode is Mode.EXACT
    assert connection.rendering.name == "qwen3"


async def test_exact_mode_needs_a_tokenizer() -> None:
    """The error names the setting, before any request to the engine."""
    settings = EngineSettings(urls=("http://127.0.0.1:9",), mode=Mode.EXACT)
    with pytest.raises(UsageError, match=r"needs engine\.tokenizer, the model's tokenizer\.json"):
        await open_engine(settings, slots=1).__aenter__()


async def test_an_engine_that_never_answers_is_an_error() -> None:
    """The error comes after `wait_s`, with the engine's address."""
    settings = EngineSettings(urls=(f"http://127.0.0.1:{free_ports(1)[0]}",), wait_s=0)
    with pytest.raises(EngineError, match="cannot reach the engine at"):
        async with open_engine(settings, slots=1):
            pass
