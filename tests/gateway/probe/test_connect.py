"""A node asks its engines what they can do before it takes a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig import RENDERING, says
from tugline.errors import EngineError, UsageError
from tugline.gateway.app import Gateway
from tugline.gateway.probe.connect import connect
from tugline.inference.server import create_app
from tugline.testing.scripted_engine import ScriptedEngine
from tugline.types import Mode
from tugline.web.serve import serve


def engine(window: int = 4096) -> ScriptedEngine:
    """One that answers anything."""
    play = says("word " * 60, delay_s=0.002)
    return ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size, max_model_len=window)


async def test_a_sound_engine_is_connected_in_its_best_mode(tmp_path: Path) -> None:
    """What the probe found is what the gateway then uses."""
    app = create_app(engine(), model_name="scripted")
    async with serve(app) as one, serve(create_app(engine(), model_name="scripted")) as other:
        upstream = await connect([one, other])
        assert upstream.wire.mode is Mode.EXACT
        async with Gateway(upstream, RENDERING, tmp_path) as gateway:
            assert gateway.card.id == "scripted"


async def test_replicas_that_differ_are_refused() -> None:
    """A conversation must be able to go on on another replica."""
    apps = [create_app(engine(window), model_name="scripted") for window in (4096, 2048)]
    async with serve(apps[0]) as one, serve(apps[1]) as other:
        with pytest.raises(UsageError, match=r"window is 4096 at .* and 2048 at "):
            await connect([one, other])


async def test_a_wanted_mode_that_is_not_sound_is_refused() -> None:
    """An engine without a tokenizer cannot render."""
    async with serve(create_app(engine(), model_name="scripted")) as url:
        with pytest.raises(UsageError, match="no sound observed mode"):
            await connect([url], mode=Mode.OBSERVED)


async def test_no_engine_is_an_error_at_once() -> None:
    """The address is named."""
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await connect(["http://127.0.0.1:9"])
    with pytest.raises(UsageError, match="at least one address"):
        await connect([])
