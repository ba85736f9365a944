"""No log and no error response has the key or the contents of a session (I6)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from support.engine import reply_with
from support.gateway import OpenSession, open_session
from tugline import log
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.rendering import Rendering
from tugline.gateway.app import Gateway
from tugline.gateway.choice import Choice
from tugline.gateway.completion import Completion
from tugline.gateway.sampled_answer import SampledAnswer
from tugline.gateway.session import LiveSession
from tugline.recording.file import Writer
from tugline.web.engine_http import EngineHttp

SECRET = "walrus"
BUGS = [
    (Gateway, "_handle"), (LiveSession, "read_body"), (LiveSession, "prepare"),
    (LiveSession, "_parse"), (LiveSession, "complete"), (Rendering, "render"),
    (StreamParser, "feed"), (StreamParser, "finish"), (SampledAnswer, "take"), (Choice, "_finish"),
    (SampledAnswer, "begin_reply"), (Completion, "wait_until_accepted"), (Completion, "wait_done"),
    (Completion, "pieces"), (Writer, "append"), (EngineHttp, "request"),
]  # fmt: skip
"""Methods of the way from a request to its answer."""


def configure_defaults() -> None:
    """A program that imports the gateway and configures nothing."""
    structlog.reset_defaults()


def configure_libraries() -> None:
    """A program whose root logger prints everything."""
    structlog.reset_defaults()
    logging.basicConfig(level=logging.DEBUG, force=True)


def configure_stdlib() -> None:
    """A program that sends structlog's events to the standard library's loggers."""
    logging.basicConfig(level=logging.DEBUG, force=True)
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def configure_own() -> None:
    """The commands of this package."""
    log.configure(level="debug")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Loggers are as before after each test."""
    handlers = list(logging.getLogger().handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(logging.WARNING)


def fail(*args: Any, **_options: Any) -> Any:
    """An internal bug whose error holds contents, as many errors of libraries do."""
    held = args  # a local variable with the secret
    raise ValueError(f"cannot use {SECRET} of {held}")


async def ask(session: OpenSession, *, stream: bool) -> str:
    """Everything that the client gets."""
    try:
        async with session.post_openai(
            messages=[{"role": "user", "content": SECRET}], stream=stream, user=SECRET
        ) as response:
            return await response.text()
    except aiohttp.ClientError as error:
        return str(error)


@pytest.mark.parametrize(
    "configure", [configure_defaults, configure_libraries, configure_stdlib, configure_own]
)
async def test_a_bug_reveals_neither_keys_nor_contents(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    configure: Callable[[], None],
) -> None:
    """A bug at any place reveals nothing, before and after headers, however logging is set up."""
    configure()
    async with open_session(tmp_path, reply_with("Done.")) as session:
        for owner, method in BUGS:
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, fail)
                replies = [await ask(session, stream=stream) for stream in (False, True)]
            shown = "".join(capfd.readouterr())
            assert "ValueError" in shown, f"{owner.__name__}.{method} was not logged"
            for text in (shown, *replies):
                assert SECRET not in text, f"{owner.__name__}.{method}: {text[:2000]}"
                assert session.key not in text, f"{owner.__name__}.{method}: {text[:2000]}"
