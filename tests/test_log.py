from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from msgspec.structs import replace

from observed import CALL, observed, task
from tugline import log
from tugline.server.store import sessions
from tugline.web.serve import serve

AGENT = f"""{CALL}
for key, body in (os.environ['OPENAI_API_KEY'], b'{{}}'), ('wrong', body):
    try:
        r.urlopen(r.Request(url, body, {{'authorization': 'Bearer ' + key}}))
    except OSError:
        pass
"""
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    """Reads what is logged from here on."""
    path = tmp_path / "log.jsonl"
    log.configure(level="info", path=path)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    structlog.get_config()["logger_factory"]._file.close()
    structlog.reset_defaults()
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, log._LibraryHandler):
            logging.getLogger().removeHandler(handler)


async def test_events_of_a_session_have_its_ids(lines: Lines, tmp_path: Path) -> None:
    """Node, task, session and epoch, in events of the node, its rollout and the gateway."""
    async with observed(tmp_path) as rig:
        await rig.run(replace(task("t", AGENT), files={}))
        epoch = (await rig.control.database.read(sessions.get, "t-0")).epoch
    log.get("test").info("after")
    found = lines()
    after = found.pop()
    assert after["event"] == "after"
    assert not {"task", "session", "node"} & after.keys()
    assert [line["event"] for line in found].count("refused") == 2, "the second opens nothing"
    expected = ["refused", "evaluation repeated", "stage failed", "ended"]
    ours = [
        line for line in found if line["event"] in expected and line.get("error") != "Unauthorized"
    ]
    assert [line["event"] for line in ours] == expected
    for line in ours:
        named = (line["task"], line["session"], line["epoch"], line["node"])
        assert named == ("t", "t-0", epoch, "here"), line


async def test_bound_ids_reach_tasks_and_threads(lines: Lines) -> None:
    """Those started inside the block have the ids; later events do not."""
    say = log.get("test").info

    async def task() -> None:
        say("task")

    with log.about(session="s"):
        inside = asyncio.create_task(task())
        await asyncio.to_thread(say, "thread")
    await inside
    say("outside")
    found = {line["event"]: line.get("session") for line in lines()}
    assert found == {"thread": "s", "task": "s", "outside": None}


async def test_server_exceptions_are_logged(lines: Lines) -> None:
    """The traceback of an unexpected exception is in the log, not on the terminal."""

    async def app(_scope: dict[str, Any], _receive: Any, _send: Any) -> None:
        _divide()

    async with serve(app) as url, aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 500
    (line,) = lines()
    assert (line["part"], line["level"]) == ("uvicorn.error", "error")
    assert "ZeroDivisionError" in line["exception"]


def test_records_of_libraries_are_converted(lines: Lines) -> None:
    """A library's warning, with its traceback, is a line of JSON."""
    try:
        _divide()
    except ZeroDivisionError:
        logging.getLogger("other.part").warning("it %s", "broke", exc_info=True)
    (line,) = lines()
    assert (line["part"], line["level"], line["event"]) == ("other.part", "warning", "it broke")
    assert "ZeroDivisionError" in line["exception"]


def _divide() -> float:
    return len(threading.enumerate()) / 0


def test_colours_need_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file or a pipe behind stderr gets no escape sequences."""
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        log.configure()
        log.get("x").warning("plain", key="value")
    text = (tmp_path / "err").read_text()
    assert "plain" in text
    assert "\x1b" not in text


def test_events_go_to_the_current_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was stderr before and is closed now breaks nothing."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.configure()
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    log.get("test").warning("told")
    assert "told" in second.getvalue()
